# SPDX-License-Identifier: Apache-2.0
"""Hostile directories: what is put in the place of a target or a source after it was judged."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import spec.durable
from reference_gym.participant import ProtocolError
from reference_gym.participant.directories import confine, hold
from tests.gym.participant.kit import Gym


class Meddler:
    """Durable steps before one of which somebody else changes the directory."""

    def __init__(self, before: str) -> None:
        self.before = before
        self.meddle: Callable[[], None] | None = None

    def _reach(self, name: str) -> None:
        if self.meddle is not None and name == self.before:
            meddle, self.meddle = self.meddle, None
            meddle()

    def write_file(self, path: Path, data: bytes | Iterable[bytes]) -> int:
        """Write."""
        self._reach(path.name)
        return spec.durable.write_file(path, data)

    def sync_dir(self, path: Path) -> None:
        """Sync."""
        spec.durable.sync_dir(path)

    def publish_file(self, path: Path, data: bytes, unnamed: Callable[[], None]) -> None:
        """Publish."""
        self._reach(path.name)
        spec.durable.publish_file(path, data, unnamed)


def names(directory: Path) -> list[str]:
    """What is in a directory."""
    return sorted(entry.name for entry in directory.iterdir())


async def refusal_of(call: object) -> ProtocolError:
    """The refusal of a call."""
    with pytest.raises(ProtocolError) as raised:
        await call  # type: ignore[misc]  # whatever the kit's verbs return
    return raised.value


@pytest.mark.parametrize("before", ["state.jsonl", "rollouts.jsonl", "manifest.json"])
@pytest.mark.parametrize("how", ["link", "directory", "nothing"])
async def test_a_target_that_is_replaced_while_it_is_written_fails(tmp_path: Path, before: str, how: str) -> None:
    """C45, CKPT-SEC-011: nothing lands in what replaced it, nothing is durable; the same cut is written later."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    disk = Meddler(before)
    gym = Gym(root, durable=disk)
    await gym.start("a")
    await gym.waiting("a")
    await gym.prepare("1-1")
    target = root / "1-1"
    target.mkdir()

    def meddle() -> None:
        target.rename(root / "elsewhere")
        if how == "link":
            target.symlink_to(outside)
        elif how == "directory":
            target.mkdir()

    disk.meddle = meddle
    refusal = await refusal_of(gym.commit("1-1", target))
    assert ("forbidden_target", "prepared") == (refusal.code, gym.status["phase"])
    assert [] == names(outside)
    assert "manifest.json" not in names(root / "elsewhere") or before == "manifest.json"
    if how == "directory":
        assert [] == names(target)
    if how == "link":
        target.unlink()
    target.mkdir(exist_ok=True)
    reply = await gym.commit("1-1", target)
    assert reply["durable"]
    assert "manifest.json" in names(target)
    await gym.resume("1-1")


async def test_a_source_that_was_replaced_after_it_was_judged_is_refused(tmp_path: Path) -> None:
    """CKPT-SEC-011: a directory that a link replaced is not read through it, even if the bytes are right."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    gym = Gym(root)
    await gym.start("a")
    await gym.waiting("a")
    await gym.snapshot("1-1")
    source = confine(str(root / "1-1"), [root])
    shutil.copytree(root / "1-1", outside)
    shutil.rmtree(root / "1-1")
    (root / "1-1").symlink_to(outside)
    with pytest.raises(ProtocolError) as raised, hold(source):
        pass
    assert "forbidden_target" == raised.value.code
    refusal = await refusal_of(gym.restore("1-2", "1-1", "sha256:" + 64 * "0"))
    assert ("forbidden_target", "idle") == (refusal.code, gym.status["phase"])


async def test_a_linked_parent_does_not_lead_out(tmp_path: Path) -> None:
    """CKPT-SEC-011: the replaced directory may be any of the path, not only the last one."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "run" / "1-1").mkdir(parents=True)
    (outside / "1-1").mkdir(parents=True)
    judged = confine(str(root / "run" / "1-1"), [root])
    await asyncio.to_thread((root / "run").rename, root / "moved")
    (root / "run").symlink_to(outside)
    with pytest.raises(ProtocolError) as raised, hold(judged):
        pass
    assert "forbidden_target" == raised.value.code
