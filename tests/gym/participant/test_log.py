# SPDX-License-Identifier: Apache-2.0
"""The boundary log: what is read back, what is recognised as damage, and what is not believed."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import spec.durable
from reference_gym.participant import BoundaryLog, Participant, ParticipantConfig
from reference_gym.participant import log as boundary_log
from reference_gym.participant.artifacts import PLACES, STATE, Target, write_cut
from reference_gym.participant.journal import LogJournal
from reference_gym.participant.log import LogDamaged, LogFile, Recovered, disbelief, read_log
from reference_gym.participant.log_end import END_FILES
from reference_gym.participant.log_format import read_frames, segment_name, segments
from reference_gym.participant.log_state import Life
from reference_gym.participant.reading import read_source
from reference_gym.participant.records import Cut, MemoryStore, Record

LIFE = Life("gym", ("rollouts",), {"e": "1"}, "i1", "boot-1", synced=False)
CONFIG = ParticipantConfig("gym", "agent", 10)


def record(number: int, turns_done: int = 1, size: int = 100) -> Record:
    """A boundary of rollout `r<number>`; its payload begins as every payload does."""
    payload = b'{"rollout_id":"r%d","turns":%d,"x":"%s"}' % (number, turns_done, b"x" * size)
    return Record(f"r{number}", 0, turns_done, None, "e", {"e": turns_done}, (payload[:20], payload[20:]))


class Log:
    """A log that is written."""

    def __init__(self, directory: Path, *, segment_bytes: int = 10_000, sync: str = "commit") -> None:
        self.directory = directory
        claimed = LogFile.claim(directory, sync=sync, segment_bytes=segment_bytes)
        assert claimed is not None
        self.file = claimed
        self.journal = LogJournal()
        self.recovered = self.file.read(LIFE)
        self.file.open(self.journal, LIFE, self.recovered)
        self.store = MemoryStore(10**9, self.journal)


def payloads(found: Recovered | None) -> dict[str, bytes]:
    """Every payload that a log holds."""
    assert found is not None
    return {key: b"".join(entry.pieces) for key, entry in found.records.items()}


def end_files(directory: Path) -> dict[str, bytes]:
    """What the files of the acknowledged end hold."""
    return {name: (directory / name).read_bytes() for name in END_FILES}


def files(directory: Path) -> dict[str, bytes]:
    """Every file of a log."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def put_back(copy: dict[str, bytes], directory: Path) -> None:
    """Write a copy over the files themselves: each keeps its inode."""
    for name, content in copy.items():
        (directory / name).write_bytes(content)


def let_time_go_on(directory: Path) -> None:
    """Return when the file system gives another time than it does now: some count in hundredths of a second."""
    path, end = directory / "time", time.monotonic() + 10
    path.touch()
    begun = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == begun:
        assert time.monotonic() < end, "the time of the file system stands still"
        path.touch()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Where the log is."""
    return tmp_path / "log"


async def test_what_was_settled_is_read_back_through_segments_and_compaction(written: Path) -> None:
    """Puts, drops and replacements over many segments: exactly the last boundaries, and few files."""
    log = Log(written)
    expected: dict[str, bytes] = {}
    for turn in range(1, 40):
        for number in range(10):
            if number == 0 and turn > 1:
                continue
            put = record(number, turn)
            log.store.put(put)
            expected[put.rollout_id] = b"".join(put.payload)
        await log.journal.settled()
    log.store.drop("r5")
    del expected["r5"]
    await log.journal.settled()
    assert expected == payloads(read_log(written))
    assert len(segments(written)) < 6
    await log.journal.close()


async def test_a_batch_counts_whole_or_not_at_all(written: Path) -> None:
    """However much of a write that nobody was told of is there: the last acknowledged state, or a later whole one."""
    log = Log(written, segment_bytes=10**9)
    sizes = {(written / segment_name(1)).stat().st_size: 0}
    ends = [end_files(written)]
    for turn in range(1, 5):
        log.store.put(record(1, turn))
        log.store.put(record(2, turn))
        await log.journal.settled()
        sizes[(written / segment_name(1)).stat().st_size] = turn
        ends.append(end_files(written))
    await log.journal.close()
    whole = (written / segment_name(1)).read_bytes()
    for length in range(min(sizes), len(whole) + 1, 7):
        (written / segment_name(1)).write_bytes(whole[:length])
        turn = max(done for size, done in sizes.items() if size <= length)
        put_back(ends[turn], written)
        expected = {} if turn == 0 else {f"r{n}": b"".join(record(n, turn).payload) for n in (1, 2)}
        assert expected == payloads(read_log(written))


async def test_a_log_that_is_shorter_than_what_was_acknowledged_is_named(written: Path) -> None:
    """Any number of bytes cut from the end of the newest segment: refused by name, never read as a shorter log."""
    log = Log(written, segment_bytes=10**9)
    for turn in range(1, 4):
        log.store.put(record(1, turn))
        await log.journal.settled()
    await log.journal.close()
    path = written / segment_name(1)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(LogDamaged, match=r"00000001\.log"):
            read_log(written)
    path.write_bytes(whole)
    for name in END_FILES:
        told = (written / name).read_bytes()
        for damage in (b"", told[:-1], bytes(len(told))):
            (written / name).write_bytes(damage)
            with pytest.raises(LogDamaged, match=f"file {name}"):
                read_log(written)
        (written / name).write_bytes(told)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("first", ["segment", "ends"])
async def test_an_older_copy_that_was_put_back_in_place_is_not_believed(lag: int, first: str, written: Path) -> None:
    """CKPT-ID-021: the same files, inodes and boot, and the content of a moment ago, as whole or torn as a copy is."""
    log = Log(written, segment_bytes=10**9)
    seen = [files(written)]
    for turn in range(1, 7):
        log.store.put(record(1, turn))
        await log.journal.settled()
        seen.append(files(written))
    await log.journal.close()
    let_time_go_on(written.parent)
    for earlier, later in zip(seen, seen[lag:], strict=False):
        early, late = (earlier, later) if first == "segment" else (later, earlier)
        copy = {segment_name(1): early[segment_name(1)]} | {name: late[name] for name in END_FILES}
        put_back(copy, written)
        try:
            found = read_log(written)
        except LogDamaged:
            assert (lag > 0, "segment") == (True, first)
            continue
        assert found is not None
        assert "older copy" in str(disbelief(found, LIFE, written))


@pytest.mark.parametrize("lag", [1, 2, 3])
async def test_files_that_are_put_back_one_by_one_shorten_no_log_that_is_believed(lag: int, tmp_path: Path) -> None:
    """CKPT-ID-021: whoever copies may leave out what seems the same: refused, or all that was acknowledged is there."""
    names, believed = (segment_name(1), *END_FILES), 0
    for chosen in range(1, 2 ** len(names)):
        log = Log(tmp_path / str(chosen), segment_bytes=10**9)
        for turn in range(1, 7):
            log.store.put(record(1, turn))
            await log.journal.settled()
            if turn == 6 - lag:
                copy = files(log.directory)
        await log.journal.close()
        let_time_go_on(tmp_path)
        put_back({name: copy[name] for bit, name in enumerate(names) if chosen >> bit & 1}, log.directory)
        try:
            found = read_log(log.directory)
        except LogDamaged:
            continue
        assert found is not None
        if disbelief(found, LIFE, log.directory) is None:
            assert 6 == found.records["r1"].header["turns_done"]
            believed += 1
    assert believed < 2


async def test_of_what_is_written_at_once_the_last_frame_alone_names_the_end(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CKPT-ID-021: a copy that was made in the middle of a write ends with a frame that vouches for nothing."""
    log = Log(written, segment_bytes=10**9)
    writes, goes_on, real = threading.Event(), threading.Event(), os.writev

    def wait(descriptor: int, pieces: list[bytes]) -> int:
        writes.set()
        assert goes_on.wait(20)
        return real(descriptor, pieces)

    monkeypatch.setattr(os, "writev", wait)
    settling = []
    for number in range(3):
        log.store.put(record(number))
        settling.append(asyncio.ensure_future(log.journal.settled()))
        await asyncio.sleep(0)
        assert await asyncio.to_thread(writes.wait, 20)
    goes_on.set()
    await asyncio.gather(*settling)
    await log.journal.close()
    named = [found.before.number for found in read_frames(written / segment_name(1), 1)]
    assert [2, 3, 0, 4] == named


async def test_what_is_refused_is_kept_aside_with_the_reason(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged log is named, kept once, and never in the way of the new one."""
    log = Log(written)
    log.store.put(record(1))
    await log.journal.settled()
    await log.journal.close()
    whole = (written / segment_name(1)).read_bytes()
    (written / segment_name(1)).write_bytes(whole[:-1])
    assert log.file.read(LIFE) is None
    assert "00000001.log" in caplog.text
    kept = {path.name for path in (written / "refused").iterdir()}
    assert {segment_name(1), *END_FILES, "reason.txt"} == kept
    assert whole[:-1] == (written / "refused" / segment_name(1)).read_bytes()
    assert "acknowledged" in (written / "refused" / "reason.txt").read_text()
    assert log.file.read(LIFE) is None
    journal = LogJournal()
    log.file.open(journal, LIFE, None)
    await journal.close()
    assert {} == payloads(read_log(written))


async def test_a_log_of_nobody_is_not_opened(tmp_path: Path) -> None:
    """A participant that was made without the log's journal would come back as the same life with nothing of it."""
    participant = Participant(ParticipantConfig("gym", "gym", 10))
    with pytest.raises(ValueError, match=r"journal=log\.journal"):
        await BoundaryLog(tmp_path / "log").open(participant)
    assert not (tmp_path / "log").exists()


async def test_every_damaged_byte_is_named(written: Path) -> None:
    """C41: one flipped byte anywhere in a segment is refused with the segment's name, never read as something else."""
    log = Log(written, segment_bytes=10**9)
    for turn in range(1, 4):
        log.store.put(record(1, turn))
        await log.journal.settled()
    await log.journal.close()
    path = written / segment_name(1)
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(LogDamaged, match=r"00000001\.log"):
            read_log(written)


async def test_a_missing_segment_is_named(written: Path) -> None:
    """Without its newest segment, or without one that it needs, the log is refused and not read as a shorter one."""
    log = Log(written)
    log.store.put(record(99, size=6_000))
    for turn in range(1, 30):
        for number in range(8):
            log.store.put(record(number, turn))
        await log.journal.settled()
    await log.journal.close()
    whole = read_log(written)
    assert whole is not None
    needed = whole.state.records["r99"].segment
    assert needed < whole.newest
    for number in (needed, whole.newest):
        copy = written.with_name(f"without-{number}")
        shutil.copytree(written, copy)
        (copy / segment_name(number)).unlink()
        with pytest.raises(LogDamaged, match=r"\d{8}\.log"):
            read_log(copy)


async def test_a_copy_made_at_any_instant_holds_what_was_settled_before(written: Path, tmp_path: Path) -> None:
    """The directory is copied while the log is written: recovered whole, or refused by name, never silently shorter."""
    log = Log(written, segment_bytes=4_000)
    settled = 0
    copies: list[tuple[int, Path]] = []
    stop = threading.Event()

    def copy() -> None:
        for number in count():
            if stop.is_set():
                return
            before, target = settled, tmp_path / f"copy-{number}"
            try:
                shutil.copytree(written, target)
            except (shutil.Error, FileNotFoundError):
                pass  # A file that went meanwhile.
            else:
                copies.append((before, target))

    copier = threading.Thread(target=copy)
    copier.start()
    turn = 0
    deadline = time.monotonic() + 10
    while len(copies) < 25 and time.monotonic() < deadline:
        turn += 1
        log.store.put(record(turn % 7, turn))
        await log.journal.settled()
        settled = turn
        await asyncio.sleep(0.001)  # Leaves the copier some time of the interpreter.
    stop.set()
    copier.join()
    await log.journal.close()
    whole = 0
    for before, target in copies:
        try:
            found = read_log(target)
        except LogDamaged:
            continue
        assert found is not None
        newest = max((entry.header["turns_done"] for entry in found.records.values()), default=0)
        assert newest >= before
        whole += 1
    assert whole > 0


async def test_an_unbelievable_log_makes_a_new_incarnation(written: Path, tmp_path: Path) -> None:
    """CKPT-ID-020 to -023: a copy, another boot without sync, an effect begun, another participant: a reason each."""
    log = Log(written)
    log.store.put(record(1))
    await log.journal.settled()
    found = read_log(written)
    assert found is not None
    assert disbelief(found, LIFE, written) is None
    assert "machine" in str(disbelief(found, replace(LIFE, boot="boot-2"), written))
    assert "participant" in str(disbelief(found, replace(LIFE, participant="other"), written))
    shutil.copytree(written, tmp_path / "copy")
    copied = read_log(tmp_path / "copy")
    assert copied is not None
    assert "copy" in str(disbelief(copied, LIFE, tmp_path / "copy"))
    log.journal.note("begin", rollout_id="r1", request_id="r1/2/1", turn=2)
    await log.journal.settled()
    begun = read_log(written)
    assert begun is not None
    assert "r1/2/1" in str(disbelief(begun, LIFE, written))
    log.store.put(record(1, 2))
    await log.journal.settled()
    running = read_log(written)
    assert running is not None
    assert "r1/2/1" in str(disbelief(running, LIFE, written))
    log.journal.note("ran", rollout_id="r1", request_id="r1/2/1")
    log.store.put(record(1, 2))
    await log.journal.settled()
    recorded = read_log(written)
    assert recorded is not None
    assert disbelief(recorded, LIFE, written) is None
    await log.journal.close()


async def test_a_synced_log_survives_the_machine(written: Path) -> None:
    """With `sync: group` another boot is no reason against the log."""
    log = Log(written, sync="group")
    log.store.put(record(1))
    await log.journal.settled()
    await log.journal.close()
    found = read_log(written)
    assert found is not None
    assert disbelief(found, replace(LIFE, boot="boot-2"), written) is None


async def test_two_processes_cannot_write_one_log(written: Path) -> None:
    """The directory is claimed by its first writer."""
    log = Log(written)
    assert LogFile.claim(written) is None
    await log.journal.close()


async def test_a_write_that_fails_is_repeated(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C44: half a frame is written, then the disk is full, then it is not: nothing is lost, nothing is there twice."""
    log = Log(written)
    real, tries = os.writev, []

    def full(descriptor: int, pieces: list[bytes]) -> int:
        tries.append(descriptor)
        if len(tries) < 3:
            os.write(descriptor, b"".join(pieces)[:50])
            raise OSError(errno.ENOSPC, "no space left")
        return real(descriptor, pieces)

    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        log.store.put(record(1))
        await log.journal.settled()
    assert 3 == len(tries)
    log.store.put(record(2))
    await log.journal.settled()
    seal = log.journal.seal()
    assert seal is not None
    await asyncio.wrap_future(seal)
    assert {"r1", "r2"} == payloads(read_log(written)).keys()
    sealed = (await asyncio.wrap_future(seal)).segments[1]
    assert hashlib.sha256((written / segment_name(1)).read_bytes()).hexdigest() == sealed.sha256
    await log.journal.close()


async def test_an_acknowledged_end_that_cannot_be_written_is_written_again(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C44: nobody is told before it says where the log ends; afterwards the log is believed as any other."""
    log = Log(written)
    real, tries, told = os.pwrite, [], []

    def fail(descriptor: int, data: bytes, offset: int) -> int:
        tries.append(data)
        told.append(settled.done())
        if len(tries) < 3:
            raise OSError(errno.EIO, "input/output error")
        return real(descriptor, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        log.store.put(record(1))
        settled = asyncio.ensure_future(log.journal.settled())
        await settled
    assert [False] * 3 == told
    assert 1 == len(set(tries))
    log.store.put(record(2))
    await log.journal.settled()
    await log.journal.close()
    found = read_log(written)
    assert found is not None
    assert {"r1", "r2"} == payloads(found).keys()
    assert disbelief(found, LIFE, written) is None


async def test_a_segment_that_cannot_be_ended_goes_on(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C44: there is no room for the next segment: the cut is written out, boundaries go on, and later it is sealed."""
    log = Log(written)
    log.store.put(record(1))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        seal = log.journal.seal()
        assert seal is not None
        with pytest.raises(OSError, match="cannot be ended"):
            await asyncio.wrap_future(seal)
    assert [1] == segments(written)
    log.store.put(record(2))
    await log.journal.settled()
    assert {"r1", "r2"} == payloads(read_log(written)).keys()
    seal = log.journal.seal()
    assert seal is not None
    assert {1} == (await asyncio.wrap_future(seal)).segments.keys()
    assert {"r1", "r2"} == payloads(read_log(written)).keys()
    await log.journal.close()


async def test_what_is_no_json_is_named_and_costs_the_log(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An author's value that has no JSON text: nobody waits for ever, and the earlier log is kept aside."""
    log = Log(written)
    log.store.put(record(1))
    await log.journal.settled()
    log.journal.note("put", rollout_id="r2", data_refs=[object()])
    await log.journal.settled()
    assert "put of r2" in caplog.text
    assert read_log(written) is None
    assert {"r1"} == payloads(read_log(written.with_name("log.lost"))).keys()
    await log.journal.close()


async def test_a_log_that_cannot_be_written_is_never_believed_again(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C44: the disk is full: nobody waits for ever, and the next process finds no log, so a new incarnation."""
    log = Log(written)
    log.store.put(record(1))
    await log.journal.settled()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        log.store.put(record(2))
        await log.journal.settled()
    log.store.put(record(3))
    await log.journal.settled()
    assert log.journal.seal() is None
    assert read_log(written) is None
    await log.journal.close()


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is synced, in order: `directory`, or the suffix of a file's name."""
    seen: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        seen.append("directory" if path.is_dir() else path.name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


@pytest.mark.parametrize("count", [10, 1_000])
async def test_the_syncs_of_a_commit_do_not_depend_on_the_rollouts(
    count: int, written: Path, tmp_path: Path, syncs: list[str]
) -> None:
    """C48: data, directory, manifest, directory, with 10 rollouts as with 1,000; one segment has the payloads."""
    log = Log(written, segment_bytes=10**9)
    for number in range(count):
        log.store.put(record(number))
    records, restarts = log.store.cut()
    cut = Cut(records, restarts, mark=log.journal.seal())
    target = tmp_path / "target"
    target.mkdir()
    commit(cut, target)
    assert [
        "00000001.log",
        PLACES,
        "results.jsonl",
        "tombstones.jsonl",
        "rollouts.jsonl",
        "directory",
        ".manifest.json.tmp",
        "directory",
    ] == syncs
    assert (written / segment_name(1)).stat().st_ino == (target / segment_name(1)).stat().st_ino
    await log.journal.close()


def commit(cut: Cut, target: Path) -> Any:
    """Write a cut."""
    return write_cut(cut, Target(target), CONFIG, ["rollouts"], "run", "1-1", spec.durable, threading.Event())


def read(target: Path, written: Any, *wanted: str) -> dict[str, bytes]:
    """Read a cut back."""
    digest = written.manifest["digest"]
    return read_source(target, digest, CONFIG, "run", "1-1", frozenset(wanted), threading.Event()).payloads


async def test_a_cut_holds_its_instant_although_the_log_goes_on(written: Path, tmp_path: Path) -> None:
    """N20: boundaries, drops and compactions after the mark change nothing of what a later write of it links."""
    log = Log(written, segment_bytes=5_000)
    for number in range(20):
        log.store.put(record(number, 1))
    records, restarts = log.store.cut()
    cut = Cut(records, restarts, mark=log.journal.seal())
    for turn in range(2, 40):
        for number in range(20):
            log.store.put(record(number, turn))
        await log.journal.settled()
    target = tmp_path / "target"
    target.mkdir()
    done = commit(cut, target)
    assert (target / PLACES).exists()
    expected = {f"r{number}": b"".join(record(number, 1).payload) for number in (3, 19)}
    assert expected == read(target, done, "r3", "r19")
    await log.journal.close()


async def test_a_cut_is_written_out_where_links_fail(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C47: a file system without hard links gets a full copy with the same payloads."""
    log = Log(written)
    log.store.put(record(1))
    records, restarts = log.store.cut()
    cut = Cut(records, restarts, mark=log.journal.seal())
    target = tmp_path / "target"
    target.mkdir()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    done = commit(cut, target)
    assert {STATE, "results.jsonl", "tombstones.jsonl", "rollouts.jsonl", "manifest.json"} == {
        path.name for path in target.iterdir()
    }
    assert {"r1": b"".join(record(1).payload)} == read(target, done, "r1")
    await log.journal.close()


def test_the_boot_has_a_name() -> None:
    """Where the kernel tells it, it is there, and the same twice."""
    assert boundary_log.boot_id() == boundary_log.boot_id()
