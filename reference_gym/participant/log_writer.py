# SPDX-License-Identifier: Apache-2.0
"""The one thread that writes the boundary log: frames in order, segments, and what is done with dead ones.

Batches are written in the order in which they were handed over; whoever waits is told a batch's number once its write
(and, with ``synced``, its sync) has returned. A segment ends when it is large enough, or when a commit seals it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from reference_gym.participant import failpoints
from reference_gym.participant.log_format import (
    TEMPORARY,
    Entry,
    Frame,
    LogDamaged,
    Place,
    encode_frame,
    read_entry,
    segment_name,
)
from reference_gym.participant.log_state import LogState

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 * 1024 * 1024
MOSTLY_DEAD = 0.3
"""A segment is compacted when less than this part of it lives."""
MAX_SEGMENTS = 16
"""With more segments than this, small ones are compacted too: each commit ends one."""
MAX_COMPACTED_BYTES = 16 * 1024 * 1024
"""How much is copied at the end of one segment at most."""
_MAX_PIECES = 512
_END = Entry({"op": "end"})
_MAX_GROUP = 256


@dataclass(slots=True)
class Segment:
    """One segment's file: ``sha256`` is None where this process has not written it; ``durable`` once it was synced."""

    number: int
    path: Path
    size: int
    sha256: str | None = None
    durable: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """The log at a cut: the place of every rollout's last boundary, and the sealed segments in which they lie."""

    places: dict[str, Place]
    segments: dict[int, Segment]


@dataclass(slots=True)
class _Open:
    segment: Segment
    descriptor: int
    digest: Any = field(default_factory=hashlib.sha256)


Told = Callable[[int], None]
_Seal = Future[Mark]


class LogWriter:
    """Writes the log of one participant.

    Args:
        directory: of this log alone; it exists and is locked by ``lock``.
        state: what the log says so far; the thread's own from now on.
        previous: the segment with which the log ends, and the offset after its last frame; None for a new log.
        kept: earlier segments that hold live entries, by number.
        told: called on the thread with the number of the last batch that is written.
        lost: called on the thread when the log cannot be written any more.
        segment_bytes: when a segment has this size, the next one begins.
    """

    def __init__(
        self,
        directory: Path,
        state: LogState,
        previous: tuple[int, int] | None,
        kept: dict[int, Segment],
        *,
        told: Told,
        lost: Callable[[], None],
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._directory = directory
        self._state = state
        self._kept = dict(kept)
        self._told = told
        self._lost = lost
        self._segment_bytes = segment_bytes
        self._pinned: frozenset[int] = frozenset()  # A commit may still link what the last mark names.
        self._queue: SimpleQueue[tuple[int, list[Entry]] | _Seal | None] = SimpleQueue()
        self._open = self._begin(1 if previous is None else previous[0] + 1)
        if previous is not None:
            failpoints.reach("recover.based")
            self._end_earlier(*previous)
            failpoints.reach("recover.sealed")
        self._name(self._open)
        self._remove_dead()
        self._thread = threading.Thread(target=self._run, name="boundary-log", daemon=True)
        self._thread.start()

    def append(self, number: int, entries: list[Entry]) -> None:
        """Hand over a batch that counts whole or not at all; from any thread, does not wait."""
        self._queue.put((number, entries))

    def seal(self) -> Future[Mark]:
        """End the segment after everything that was handed over; the mark comes when that is done."""
        future: Future[Mark] = Future()
        self._queue.put(future)
        return future

    def close(self) -> None:
        """Write what was handed over, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        seal: _Seal | None = None
        try:
            while True:
                batches, seal, ended = self._next()
                if batches:
                    self._write([entries for _, entries in batches])
                    failpoints.reach("log.appended")
                    self._told(batches[-1][0])
                if seal is not None:
                    self._rotate()
                    mark = self._mark()
                    self._pinned = frozenset(mark.segments)
                    seal.set_result(mark)
                    seal = None
                    self._tidy()
                elif self._open.segment.size >= self._segment_bytes:
                    self._rotate()
                    self._tidy()
                if ended:
                    os.close(self._open.descriptor)
                    return
        except Exception:
            logger.exception("the boundary log cannot be written any more")
            if seal is not None:
                seal.set_exception(OSError("the boundary log is lost"))
            self._give_up()

    def _next(self) -> tuple[list[tuple[int, list[Entry]]], _Seal | None, bool]:
        """Return what is waiting: batches that are written together, and what follows them."""
        batches: list[tuple[int, list[Entry]]] = []
        item = self._queue.get()
        while True:
            if item is None or isinstance(item, Future):
                return batches, item, item is None
            batches.append(item)
            if len(batches) >= _MAX_GROUP:
                return batches, None, False
            try:
                item = self._queue.get_nowait()
            except Empty:
                return batches, None, False

    def _write(self, batches: Sequence[list[Entry]]) -> None:
        failpoints.reach("log.append")
        frames = [encode_frame(entries) for entries in batches]
        pieces = [piece for frame in frames for piece in frame.pieces]
        if failpoints.armed is not None and failpoints.armed.name == "log.half":
            whole = b"".join(pieces)
            half, pieces = whole[: len(whole) // 2], [whole[len(whole) // 2 :]]
            _write_all(self._open.descriptor, [half])
            self._open.digest.update(half)
            failpoints.reach("log.half")
        _write_all(self._open.descriptor, pieces)
        for piece in pieces:
            self._open.digest.update(piece)
        failpoints.reach("log.written")
        if self._state.life.synced:
            os.fdatasync(self._open.descriptor)
        for entries, frame in zip(batches, frames, strict=True):
            self._take(entries, frame)

    def _take(self, entries: list[Entry], frame: Frame) -> None:
        """Let the state follow what is written."""
        segment = self._open.segment
        for entry, place in zip(entries, frame.places, strict=True):
            self._state.apply(entry, place._replace(segment=segment.number, offset=segment.size + place.offset))
        segment.size += frame.size

    def _begin(self, number: int) -> _Open:
        """Write the base of a segment; it has no name yet."""
        path = self._directory / segment_name(number)
        temporary = path.with_suffix(TEMPORARY)
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        opened = _Open(Segment(number, path, 0), descriptor)
        frame = encode_frame(self._state.base(os.fstat(descriptor).st_ino))
        _write_all(descriptor, list(frame.pieces))
        for piece in frame.pieces:
            opened.digest.update(piece)
        opened.segment.size = frame.size
        if self._state.life.synced:
            os.fsync(descriptor)
        return opened

    def _name(self, opened: _Open) -> None:
        """Give a segment its name: from now on the log ends with it."""
        opened.segment.path.with_suffix(TEMPORARY).rename(opened.segment.path)
        if self._state.life.synced:
            _sync_directory(self._directory)

    def _end_earlier(self, number: int, end: int) -> None:
        """End the last segment of an earlier life where its last whole frame ends."""
        descriptor = os.open(self._directory / segment_name(number), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.ftruncate(descriptor, end)
            os.lseek(descriptor, end, os.SEEK_SET)
            frame = encode_frame([_END])
            _write_all(descriptor, list(frame.pieces))
            if self._state.life.synced:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if number in self._kept:
            self._kept[number].size = end + frame.size

    def _rotate(self) -> None:
        ended, following = self._open, self._begin(self._open.segment.number + 1)
        failpoints.reach("log.based")
        frame = encode_frame([_END])
        _write_all(ended.descriptor, list(frame.pieces))
        for piece in frame.pieces:
            ended.digest.update(piece)
        failpoints.reach("log.ended")
        if self._state.life.synced:
            os.fdatasync(ended.descriptor)
        ended.segment.size += frame.size
        ended.segment.sha256 = ended.digest.hexdigest()
        ended.segment.durable = self._state.life.synced
        os.close(ended.descriptor)
        self._kept[ended.segment.number] = ended.segment
        failpoints.reach("log.sealed")
        self._name(following)
        failpoints.reach("log.named")
        self._open = following

    def _tidy(self) -> None:
        self._compact()
        self._remove_dead()

    def _compact(self) -> None:
        """Copy what lives in mostly dead segments, as far as the bound allows."""
        left = MAX_COMPACTED_BYTES
        for number, segment in sorted(self._kept.items()):
            alive = self._state.sizes.get(number, 0)
            small = len(self._kept) > MAX_SEGMENTS and alive < self._segment_bytes / MAX_SEGMENTS
            if alive == 0 or alive > left or not (small or alive < MOSTLY_DEAD * segment.size):
                continue
            left -= alive
            entries = [_again(read_entry(self._directory, place)) for place in self._state.living(number)]
            self._write([entries])
            failpoints.reach("log.compacted")

    def _remove_dead(self) -> None:
        for number, segment in list(self._kept.items()):
            if self._state.sizes.get(number, 0) == 0 and number not in self._pinned:
                del self._kept[number]
                self._state.sizes.pop(number, None)
                segment.path.unlink(missing_ok=True)
                failpoints.reach("log.removed")

    def _mark(self) -> Mark:
        places = dict(self._state.records)
        return Mark(places, {number: self._kept[number] for number in {place.segment for place in places.values()}})

    def _give_up(self) -> None:
        """Make sure that nobody believes this log any more; without that, end the process.

        The Gym runs on without a log: its incarnation lives as long as the process.
        """
        lost = self._directory.with_name(f"{self._directory.name}.lost")
        try:
            with contextlib.suppress(FileNotFoundError):
                _remove_tree(lost)
            self._directory.rename(lost)
        except OSError:
            logger.critical("the boundary log cannot be set aside either; the process ends")
            os._exit(70)
        self._lost()
        while (item := self._queue.get()) is not None:
            if isinstance(item, Future):
                item.set_exception(OSError("the boundary log is lost"))


def lock(directory: Path) -> int | None:
    """Claim a log's directory for this process; return the descriptor that holds it, or None if another one has it."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _again(entry: Entry) -> Entry:
    """Return a copied entry: the same boundary again closes no effect that has begun since."""
    return Entry({**entry.header, "same": True}, entry.pieces) if entry.op == "put" else entry


def _write_all(descriptor: int, pieces: list[bytes]) -> None:
    """Write all pieces, however many calls that takes."""
    for begin in range(0, len(pieces), _MAX_PIECES):
        part = pieces[begin : begin + _MAX_PIECES]
        done, size = os.writev(descriptor, part), sum(map(len, part))
        if done < size:
            rest = memoryview(b"".join(part))[done:]
            while rest:
                rest = rest[os.write(descriptor, rest) :]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_tree(directory: Path) -> None:
    for entry in directory.iterdir():
        entry.unlink()
    directory.rmdir()


__all__ = ["LogDamaged", "LogWriter", "Mark", "Segment", "lock"]
