# SPDX-License-Identifier: Apache-2.0
"""Which addresses a process listens on, and a process that is started without a token."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

import pytest

from conformance.errors import NotOffered
from conformance.patience import Patience
from conformance.sockets import address, is_loopback, listening
from conformance.target import ProcessTarget, TargetFile

SERVER = """
import json, os, pathlib, sys, time
if "GYM_CHECKPOINT_TOKEN" not in os.environ and "--open" not in sys.argv: raise SystemExit(2)
text = json.dumps({"participants": [{"name": "gym", "url": "http://x", "pid": os.getpid()}], "bystanders": ["http://y"]})
pathlib.Path(sys.argv[1] + ".tmp").write_text(text); os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(60)
"""


def test_the_addresses_of_this_process_are_seen() -> None:
    """A socket on every address shows as such beside one on loopback; one that is closed does not show."""
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0)):  # noqa: S104 - what must be found
        assert {"127.0.0.1", "0.0.0.0"} <= listening([os.getpid()])  # noqa: S104 - as above
    with pytest.raises(NotOffered):
        listening([])


@pytest.mark.parametrize(
    ("written", "meant", "loopback"),
    [
        ("0100007F", "127.0.0.1", True),
        ("00000000", "0.0.0.0", False),  # noqa: S104 - every address
        ("00000000000000000000000001000000", "::1", True),
        ("0000000000000000FFFF00000100007F", "::ffff:127.0.0.1", True),
        ("00000000000000000000000000000000", "::", False),
    ],
)
def test_addresses_are_read_as_the_kernel_writes_them(written: str, meant: str, loopback: bool) -> None:
    """Words of 32 bits in the order of this machine."""
    assert (str(ipaddress.ip_address(meant)), loopback) == (address(written), is_loopback(address(written)))


def test_a_process_without_a_token_ends_or_listens(tmp_path: Path) -> None:
    """Told nothing it ends; told to serve anybody it announces itself, and is gone after the block."""
    file = TargetFile(start=("{python}", "{dir}/server.py", "{announce}"), files={"server.py": SERVER})
    target = ProcessTarget(file, tmp_path, "http://127.0.0.1:9", Patience())
    with target.tokenless() as found:
        assert [] == found
    with target.tokenless("--open") as found:
        assert {"http://x"} == {endpoint.url for endpoint in found}
        pid = found[0].pid
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()


def test_servers_that_own_nothing_are_announced(tmp_path: Path) -> None:
    """`bystanders` of the announcement are known to the target."""
    file = TargetFile(start=("{python}", "{dir}/server.py", "{announce}"), files={"server.py": SERVER})
    target = ProcessTarget(file, tmp_path, "http://127.0.0.1:9", Patience())
    target.start()
    assert ["http://y"] == target.bystanders
    target.close()
