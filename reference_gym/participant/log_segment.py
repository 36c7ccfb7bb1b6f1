# SPDX-License-Identifier: Apache-2.0
"""One segment of the boundary log while it is written: appending, cutting off what failed, its name and its end.

All of it runs on the log's thread. With ``synced`` each step is synced before it counts.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_gym.participant import failpoints
from reference_gym.participant.log_format import TEMPORARY, Before, Entry, Place, encode_frame, segment_name
from reference_gym.participant.log_state import LogState

logger = logging.getLogger(__name__)

REPEATS_S = (0.01, 0.1, 0.5)
"""After how many seconds each a failed write is repeated."""
_MAX_PIECES = 512
_END = Entry({"op": "end"})


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


class OpenSegment:
    """The segment that is written; its base is written when it is made, and it has no name yet.

    Args:
        directory: of the log.
        number: the segment's.
        state: what its base says.
        before: the acknowledged end.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """

    def __init__(self, directory: Path, number: int, state: LogState, before: Before) -> None:
        self._directory = directory
        self._synced = state.life.synced
        self._digest: Any = hashlib.sha256()
        self.segment = Segment(number, directory / segment_name(number), 0)
        temporary = self.segment.path.with_suffix(TEMPORARY)
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(temporary, flags, 0o600)
        try:
            stat = os.fstat(self._descriptor)
            frame = encode_frame(state.base(stat.st_ino), before)
            _write_all(self._descriptor, list(frame.pieces))
            if self._synced:
                os.fsync(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            temporary.unlink(missing_ok=True)
            raise
        self._count(list(frame.pieces))

    def name(self) -> None:
        """Give it its name: from now on the log ends with it."""
        self.segment.path.with_suffix(TEMPORARY).rename(self.segment.path)
        if self._synced:
            sync_directory(self._directory)

    def append(self, pieces: list[bytes]) -> None:
        """Write (and sync) at the end; what a failed try has left is cut off, and the write is repeated.

        Raises:
            OSError: it failed every time; the segment ends where it did before.
        """
        repeated(f"writing {self.segment.path.name}", lambda: self._append(pieces), self._cut_off)
        self._count(pieces)

    def _append(self, pieces: list[bytes]) -> None:
        failpoints.reach("log.append")
        if failpoints.armed is not None and failpoints.armed.name == "log.half":
            whole = b"".join(pieces)
            _write_all(self._descriptor, [whole[: len(whole) // 2]])
            failpoints.reach("log.half")
            self._cut_off()
        _write_all(self._descriptor, pieces)
        failpoints.reach("log.written")
        if self._synced:
            os.fdatasync(self._descriptor)

    def follow(self, following: OpenSegment, before: Before) -> None:
        """End this segment, and name the next one.

        Args:
            following: the next one.
            before: the acknowledged end.

        Raises:
            OSError: that failed; this segment ends where it did before, and the next one is gone.
        """
        frame = encode_frame([_END], before)
        try:
            failpoints.reach("log.based")
            _write_all(self._descriptor, list(frame.pieces))
            failpoints.reach("log.ended")
            if self._synced:
                os.fdatasync(self._descriptor)
            failpoints.reach("log.sealed")
            following.name()
        except OSError:
            self._cut_off()  # First: an ended segment without a next one is no log.
            following.discard()
            raise
        self._count(list(frame.pieces))
        self.segment.sha256 = self._digest.hexdigest()
        self.segment.durable = self._synced
        os.close(self._descriptor)

    def discard(self) -> None:
        """Leave nothing of it."""
        os.close(self._descriptor)
        self.segment.path.with_suffix(TEMPORARY).unlink(missing_ok=True)
        self.segment.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close its file; the log ends with it."""
        os.close(self._descriptor)

    def _count(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            self._digest.update(piece)
            self.segment.size += len(piece)

    def _cut_off(self) -> None:
        os.ftruncate(self._descriptor, self.segment.size)
        os.lseek(self._descriptor, self.segment.size, os.SEEK_SET)


def repeated(what: str, step: Callable[[], None], undo: Callable[[], None] = lambda: None) -> None:
    """Do a step of writing, and do it again a few times where it fails; for the log's thread, which waits in between.

    Args:
        what: names the step.
        step: the step.
        undo: takes away what a failed try has left.

    Raises:
        OSError: it failed every time.
    """
    for wait_s in (*REPEATS_S, None):
        try:
            step()
        except OSError as error:
            logger.warning("%s failed: %s", what, error)
            undo()
            if wait_s is None:
                raise
            time.sleep(wait_s)
        else:
            return


def end_earlier(directory: Path, number: int, end: int, before: Before, *, synced: bool) -> int:
    """End the last segment of an earlier life where its last whole frame ends; return its size."""
    descriptor = os.open(directory / segment_name(number), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.ftruncate(descriptor, end)
        os.lseek(descriptor, end, os.SEEK_SET)
        frame = encode_frame([_END], before)
        _write_all(descriptor, list(frame.pieces))
        if synced:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return end + frame.size


def sync_directory(directory: Path) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, pieces: list[bytes]) -> None:
    """Write all pieces, however many calls that takes; the system writes less than 2 GiB at once."""
    for begin in range(0, len(pieces), _MAX_PIECES):
        part: list[bytes | memoryview] = [*pieces[begin : begin + _MAX_PIECES]]
        while part:
            done = os.writev(descriptor, part)
            while part and done >= len(part[0]):
                done -= len(part.pop(0))
            if part:
                part[0] = memoryview(part[0])[done:]
