# SPDX-License-Identifier: Apache-2.0
"""The one thread that writes the boundary log: frames in order, segments, and what is done with dead ones.

Batches are written in the order in which they were handed over; whoever waits is told a batch's number once its write
(and, with ``synced``, its sync) has returned. A segment ends when it is large enough, or when a commit seals it.

A write that fails is cut off and repeated a few times; where a segment cannot be ended the present one goes on. When
nothing helps the log is lost: it is set aside, and the next process begins a new incarnation.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue

from reference_gym.participant import failpoints
from reference_gym.participant.log_end import End, EndFiles
from reference_gym.participant.log_format import MORE, Entry, Frame, LogDamaged, encode_frame, read_entry
from reference_gym.participant.log_segment import Mark, OpenSegment, Segment, end_earlier, repeated, sync_directory
from reference_gym.participant.log_state import LogState
from reference_gym.participant.slices import Rests

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 * 1024 * 1024
MOSTLY_DEAD = 0.3
"""A segment is compacted when less than this part of it lives."""
MAX_SEGMENTS = 16
"""With more segments than this, small ones are compacted too: each commit ends one."""
MAX_COMPACTED_BYTES = 16 * 1024 * 1024
"""How much is copied at the end of one segment at most."""
NO_ROTATION_S = 1.0
"""For how long a segment that could not be ended goes on before that is tried again."""
_MAX_GROUP = 256

Told = Callable[[int], None]
_Seal = Future[Mark]


class LogWriter:
    """Writes the log of one participant.

    Args:
        directory: of this log alone; it exists and is locked by ``lock``.
        state: what the log says so far; the thread's own from now on.
        previous: the segment with which the log ends, the offset after its last frame, and its acknowledged end; None
            for a new log.
        kept: earlier segments that hold live entries, by number.
        told: called on the thread with the number of the last batch that is written.
        lost: called on the thread when the log cannot be written any more.
        segment_bytes: when a segment has this size, the next one begins.
    """

    def __init__(
        self,
        directory: Path,
        state: LogState,
        previous: tuple[int, int, End] | None,
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
        self._rotate_from = 0.0
        self._pinned: frozenset[int] = frozenset()  # A commit may still link what the last mark names.
        self._queue: SimpleQueue[tuple[int, list[Entry]] | _Seal | None] = SimpleQueue()
        # Before a segment has its name: a log without an acknowledged end is none.
        self._end = EndFiles(directory, None if previous is None else previous[2])
        if state.life.synced:
            self._end.sync()
        self._open = OpenSegment(directory, 1 if previous is None else previous[0] + 1, state, self._end.last)
        if previous is not None:
            failpoints.reach("recover.based")
            number, end, _ = previous
            size = end_earlier(directory, number, end, self._end.last, synced=state.life.synced)
            if number in self._kept:
                self._kept[number].size = size
            failpoints.reach("recover.sealed")
        self._open.name()
        self._acknowledge()
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
                    self._seal(seal)
                elif self._open.segment.size >= self._segment_bytes and time.monotonic() >= self._rotate_from:
                    self._rotate()
                    self._tidy()
                if ended:
                    self._open.close()
                    self._end.close()
                    return
        except Exception:
            logger.exception("the boundary log cannot be written any more")
            if seal is not None and not seal.done():
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
        """Append batches; the state follows, and the acknowledged end before anybody is told."""
        # The last one alone names the end: a log that is cut between them is no whole one.
        frames = [encode_frame(entries, MORE) for entries in batches[:-1]]
        frames.append(encode_frame(batches[-1], self._end.last))
        at = self._open.segment.size
        self._open.append([piece for frame in frames for piece in frame.pieces])
        for entries, frame in zip(batches, frames, strict=True):
            self._take(entries, frame, at)
            at += frame.size
        self._acknowledge()

    def _take(self, entries: list[Entry], frame: Frame, at: int) -> None:
        """Let the state follow a frame that begins at an offset of the open segment."""
        number, rests = self._open.segment.number, Rests()
        for entry, place in zip(entries, frame.places, strict=True):
            rests.rest()
            self._state.apply(entry, place._replace(segment=number, offset=at + place.offset))

    def _acknowledge(self) -> None:
        segment = self._open.segment
        repeated("writing the acknowledged end", lambda: self._end.write(segment.number, segment.size))

    def _seal(self, seal: _Seal) -> None:
        """End the segment and hand out the mark, or say that it cannot be: then the cut is written out."""
        if not self._rotate():
            seal.set_exception(OSError("the segment cannot be ended"))
            return
        places = dict(self._state.records)
        mark = Mark(places, {number: self._kept[number] for number in {place.segment for place in places.values()}})
        self._pinned = frozenset(mark.segments)
        seal.set_result(mark)
        self._tidy()

    def _rotate(self) -> bool:
        """End the segment and begin the next one; return False, with everything as before, where that fails."""
        ended = self._open
        try:
            following = OpenSegment(self._directory, ended.segment.number + 1, self._state, self._end.last)
            ended.follow(following, self._end.last)
        except OSError as error:
            logger.warning("%s cannot be ended, it goes on: %s", ended.segment.path.name, error)
            self._rotate_from = time.monotonic() + NO_ROTATION_S
            return False
        self._kept[ended.segment.number] = ended.segment
        self._open = following
        self._acknowledge()
        failpoints.reach("log.named")
        return True

    def _tidy(self) -> None:
        """Compact, and remove what is dead; what cannot be done now is left for the next time."""
        try:
            self._compact()
            self._remove_dead()
        except OSError as error:
            logger.warning("the boundary log is larger than it need be: %s", error)

    def _compact(self) -> None:
        """Copy what lives in mostly dead segments, as far as the bound allows."""
        left, rests = MAX_COMPACTED_BYTES, Rests()
        for number, segment in sorted(self._kept.items()):
            alive = self._state.sizes.get(number, 0)
            small = len(self._kept) > MAX_SEGMENTS and alive < self._segment_bytes / MAX_SEGMENTS
            if alive == 0 or alive > left or not (small or alive < MOSTLY_DEAD * segment.size):
                continue
            left -= alive
            entries: list[Entry] = []
            for place in self._state.living(number):
                rests.rest()
                entries.append(_again(read_entry(self._directory, place)))
            self._write([entries])
            failpoints.reach("log.compacted")

    def _remove_dead(self) -> None:
        for number, segment in list(self._kept.items()):
            if self._state.sizes.get(number, 0) == 0 and number not in self._pinned:
                segment.path.unlink(missing_ok=True)
                del self._kept[number]
                self._state.sizes.pop(number, None)
                failpoints.reach("log.removed")

    def _give_up(self) -> None:
        """Make sure that nobody believes this log any more; without that, end the process.

        The Gym runs on without a log: its incarnation lives as long as the process.
        """
        lost = self._directory.with_name(f"{self._directory.name}.lost")
        try:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(lost)
            self._directory.rename(lost)
            if self._state.life.synced:
                sync_directory(lost.parent)
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


__all__ = ["LogDamaged", "LogWriter", "Mark", "Segment", "lock"]
