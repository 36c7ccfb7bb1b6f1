# SPDX-License-Identifier: Apache-2.0
"""A participant that the system gives nothing any more: no descriptor, no room."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from reference_gym.participant import ProtocolError
from tests.gym.participant.kit import Gym, until

HTTP = {"scheme": "http"}


async def refusal_of(call: Any) -> ProtocolError:
    """The refusal of a call."""
    with pytest.raises(ProtocolError) as raised:
        await call
    return raised.value


def fail(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, part: str) -> None:
    """Make a call of the file system fail wherever its path contains a text."""
    real = getattr(owner, name)

    def failing(path: Any, *args: Any, **more: Any) -> Any:
        if part in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **more)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("ending", ["abort", "lease", "restore"])
async def test_a_gate_opens_although_staged_files_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """C22, CKPT-ABORT-001, I10: without a descriptor for the tidying, prepare, abort and the lease do what they do."""
    (tmp_path / "root").mkdir()
    gym = Gym(tmp_path / "root", staging=tmp_path / "staging")
    await gym.start("a")
    await gym.waiting("a")
    fail(monkeypatch, Path, "iterdir", errno.EMFILE, "/staging/")
    if ending == "restore":
        await gym.restore("1-1", None)
    else:
        await gym.prepare("1-1", lease_ms=100 if ending == "lease" else 60_000)
        gym.loop.reply("a", [("add", 1)])
    if ending != "lease":
        await gym.abort("1-1")
    await until(lambda: gym.status["phase"] == "idle")
    assert "open" == gym.status["gate"]
    if ending != "restore":
        await until(lambda: ["a/1/1"] == gym.world.done)


async def test_no_room_for_staging_is_insufficient_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C44, CKPT-ERR-031: also where the directory of the cut, or of the upload, is what finds no room."""
    (tmp_path / "root").mkdir()
    gym = Gym(tmp_path / "root", staging=tmp_path / "staging")
    fail(monkeypatch, Path, "mkdir", errno.ENOSPC, "/staging/")
    with pytest.raises(ProtocolError) as raised:
        gym.participant.begin_upload(gym.caller(), "1-1", "manifest.json")
    assert "insufficient_storage" == raised.value.code
    await gym.prepare("1-1")
    refusal = await refusal_of(gym.commit("1-1", target=HTTP))
    assert ("insufficient_storage", "prepared") == (refusal.code, gym.status["phase"])
    monkeypatch.undo()
    assert (await gym.commit("1-1", target=HTTP))["durable"]


async def test_no_descriptor_for_a_snapshot_is_no_damage_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CKPT-ERR-028, -032: `checkpoint_corrupt` would send the controller to an older snapshot; this one is whole."""
    gym = Gym(tmp_path)
    await gym.start("a")
    await gym.waiting("a")
    digest = (await gym.snapshot("1-1"))["manifest"]["digest"]
    fail(monkeypatch, os, "open", errno.EMFILE, "manifest.json")
    assert "internal" == (await refusal_of(gym.restore("1-2", "1-1", digest))).code
    monkeypatch.undo()
    assert "restored" == (await gym.restore("1-3", "1-1", digest, [("a", 0, 1, 0)]))["phase"]
