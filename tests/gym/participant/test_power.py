# SPDX-License-Identifier: Apache-2.0
"""The machine loses its power: what was synced is there, what was not is gone, and nothing is shorter in silence."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import spec.durable
from reference_gym.participant import ParticipantConfig
from reference_gym.participant.artifacts import MANIFEST, Target, write_cut
from reference_gym.participant.journal import LogJournal
from reference_gym.participant.log import LogDamaged, LogFile, disbelief, read_log
from reference_gym.participant.log_end import END_FILES
from reference_gym.participant.log_state import Life
from reference_gym.participant.reading import read_source
from reference_gym.participant.records import Cut, MemoryStore, Record

LIFE = Life("gym", ("rollouts",), {"e": "1"}, "i1", "boot-1", synced=False)
REBOOTED = replace(LIFE, boot="boot-2")
CONFIG = ParticipantConfig("gym", "agent", 10)


def record(number: int, turns_done: int) -> Record:
    """A boundary of rollout `r<number>`."""
    payload = b'{"rollout_id":"r%d","turns":%d,"x":"%s"}' % (number, turns_done, b"x" * 200)
    return Record(f"r{number}", 0, turns_done, None, "e", {"e": turns_done}, (payload,))


@dataclass
class Disk:
    """What would be left: the content of each file at its last sync, the names of each directory at its last sync.

    ``honest`` is asked with each sync whether it is done; a disk that says no has lied. ``syncs`` names them in order.
    """

    honest: Callable[[str], bool] = lambda _: True
    files: dict[int, bytes] = field(default_factory=dict)
    names: dict[Path, dict[str, int]] = field(default_factory=dict)
    syncs: list[str] = field(default_factory=list)
    seen: Callable[[], None] = lambda: None

    def sync(self, descriptor: int) -> None:
        """Take one sync of a file or directory."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self.syncs.append("directory" if path.is_dir() else path.name)
        if self.honest(self.syncs[-1]):
            if path.is_dir():
                self.names[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                self.files[os.fstat(descriptor).st_ino] = path.read_bytes()
        self.seen()

    def left(self, directory: Path) -> dict[str, bytes]:
        """What a power loss would leave of a directory now."""
        return {name: self.files.get(inode, b"") for name, inode in self.names.get(directory, {}).items()}

    def now(self) -> Disk:
        """Return what is on it at this instant, whatever a writer does until it has ended."""
        return Disk(files=dict(self.files), names=dict(self.names))

    def lose(self, directory: Path) -> None:
        """Make a directory, which nobody writes any more, what a power loss leaves of it; files keep their inodes."""
        there = {path.stat().st_ino: path for path in directory.iterdir()}
        for inode, path in there.items():
            path.rename(directory / f".{inode}")
        for name, inode in self.names.get(directory, {}).items():
            if inode in there:
                (directory / f".{inode}").rename(directory / name)
            (directory / name).write_bytes(self.files.get(inode, b""))
        for inode in there:
            (directory / f".{inode}").unlink(missing_ok=True)


@contextmanager
def syncs_go_to(disk: Disk) -> Iterator[None]:
    """Let every sync of this process go to the disk."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", disk.sync)
        patched.setattr(os, "fdatasync", disk.sync)
        yield


@dataclass
class Log:
    """A log that is written, and how often it was settled."""

    directory: Path
    sync: str
    segment_bytes: int = 3_000
    journal: LogJournal = field(default_factory=LogJournal)

    def open(self) -> MemoryStore:
        """Begin to write."""
        claimed = LogFile.claim(self.directory, sync=self.sync, segment_bytes=self.segment_bytes)
        assert claimed is not None
        claimed.open(self.journal, LIFE, None)
        return MemoryStore(10**9, self.journal)


@pytest.mark.parametrize("turns", [1, 2, 5, 11, 24])
async def test_with_group_syncs_a_power_loss_keeps_everything_that_was_acknowledged(turns: int, tmp_path: Path) -> None:
    """CKPT-ID-022: over segments, seals and compactions: every boundary that was settled, and the incarnation."""
    disk, log = Disk(), Log(tmp_path / "log", "group")
    with syncs_go_to(disk):
        store = log.open()
        for turn in range(1, turns + 1):
            for number in range(3):
                store.put(record(number, turn))
            await log.journal.settled()
            if turn % 4 == 0:
                log.journal.seal()
        await log.journal.settled()
        left = disk.now()
        await log.journal.close()
    left.lose(log.directory)
    found = read_log(log.directory)
    assert found is not None
    assert {f"r{number}": turns for number in range(3)} == {
        key: entry.header["turns_done"] for key, entry in found.records.items()
    }
    assert disbelief(found, REBOOTED, log.directory) is None


@pytest.mark.parametrize("honest", [True, False])
async def test_with_commit_syncs_a_power_loss_makes_a_new_incarnation(honest: bool, tmp_path: Path) -> None:
    """CKPT-ID-020: whatever the disk has of the log, it is not believed after another boot."""
    disk, log = Disk(lambda _: honest), Log(tmp_path / "log", "commit")
    with syncs_go_to(disk):
        store = log.open()
        store.put(record(1, 1))
        await log.journal.settled()
    await log.journal.close()
    for lost in (False, True):
        if lost:
            disk.lose(log.directory)
        try:
            found = read_log(log.directory)
        except LogDamaged:
            continue
        assert found is None or disbelief(found, REBOOTED, log.directory) is not None


@pytest.mark.parametrize("lies", ["everything", "data"])
async def test_with_group_syncs_a_disk_that_begins_to_lie_is_found_out(lies: str, tmp_path: Path) -> None:
    """Syncs that were dropped: there is no log, or the acknowledged end says that it is too short."""
    disk, log = Disk(), Log(tmp_path / "log", "group")
    with syncs_go_to(disk):
        if lies == "everything":
            disk.honest = lambda _: False
        store = log.open()
        disk.honest = lambda _: False
        for turn in (1, 2):
            store.put(record(1, turn))
            await log.journal.settled()
        ends = {name: (log.directory / name).read_bytes() for name in END_FILES}
        left = disk.now()
        await log.journal.close()
    left.lose(log.directory)
    if lies == "everything":
        assert read_log(log.directory) is None
        return
    for name, end in ends.items():
        (log.directory / name).write_bytes(end)  # These small pages were written back meanwhile, as pages are.
    with pytest.raises(LogDamaged, match="was acknowledged"):
        read_log(log.directory)


@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize("linked", [True, False])
async def test_a_power_loss_at_any_sync_of_a_commit_leaves_a_whole_cut_or_none(
    linked: bool, count: int, tmp_path: Path
) -> None:
    """C48: data, directory, manifest, directory: as many syncs for 300 rollouts as for 3, and no half cut after any."""
    log, target = Log(tmp_path / "log", "commit", 10**9), tmp_path / "target"
    target.mkdir()
    store = log.open()
    for number in range(count):
        store.put(record(number, 1))
    records, restarts = store.cut()
    cut = Cut(records, restarts, mark=log.journal.seal() if linked else None)
    pictures: list[dict[str, bytes]] = []
    disk = Disk()
    disk.seen = lambda: pictures.append(disk.left(target))
    with syncs_go_to(disk):
        arguments = (cut, Target(target), CONFIG, ["rollouts"], "run", "1-1", spec.durable, threading.Event())
        written = write_cut(*arguments)
    await log.journal.close()
    payload = ["00000001.log", "places.jsonl"] if linked else ["state.jsonl"]
    rest = ["results.jsonl", "tombstones.jsonl", "rollouts.jsonl", "directory", f".{MANIFEST}.tmp", "directory"]
    assert [*payload, *rest] == disk.syncs
    for number, picture in enumerate(pictures):
        left = tmp_path / f"left-{number}"
        left.mkdir()
        for name, content in picture.items():
            (left / name).write_bytes(content)
        if MANIFEST in picture:
            digest, wanted = written.manifest["digest"], frozenset({"r0"})
            source = read_source(left, digest, CONFIG, "run", "1-1", wanted, threading.Event())
            assert count == len(source.index)
            assert {"r0": record(0, 1).payload[0]} == source.payloads
    assert MANIFEST in pictures[-1]
    assert not any(MANIFEST in picture for picture in pictures[:-1])
