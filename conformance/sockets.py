# SPDX-License-Identifier: Apache-2.0
"""Which addresses a process listens on, as Linux shows it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path

from conformance.errors import NotOffered

LISTENS = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


def listening(pids: Iterable[int]) -> set[str]:
    """Return the addresses, without ports, of the TCP sockets on which these processes listen.

    Raises:
        NotOffered: this system does not show it.
    """
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in _lines(Path("/proc/net") / table):
            words = line.split()
            if words[3] == LISTENS and words[9] in inodes:
                found.add(address(words[1].partition(":")[0]))
    if not found:
        raise NotOffered("this system does not show on which addresses a process listens")
    return found


def address(text: str) -> str:
    """Return the address that the kernel writes as words of 32 bits in the order of this machine."""
    words = [bytes.fromhex(text[place : place + 8])[::-1] for place in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def is_loopback(text: str) -> bool:
    """Say whether nobody but this machine reaches an address."""
    found = ipaddress.ip_address(text)
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _sockets(pid: int) -> set[str]:
    found = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                match = _SOCKET.fullmatch(str(link.readlink()))
            except OSError:
                continue
            if match:
                found.add(match[1])
    except OSError:
        return found
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()[1:]
    except OSError:
        return []
