# SPDX-License-Identifier: Apache-2.0
"""The acknowledged end of a boundary log: two small files beside the segments, written in turn before anybody is told.

The newer one says where the log ended; a log that ends earlier has lost something that was acknowledged. It also says
when the older one was changed last, by the file system's time, and the last frame of each write says that of the newer
one, with its number: two files may have been changed at the same time. So a log of a while ago is recognised too that
somebody has put in the place of this one, whole and with its acknowledged end: nobody can give files the times of their
last change that their content names.

SIGKILL may end a write after the system has noted its time and before a byte has come, so that the one file that was
being written says nothing by its time. Whichever it was, the times of the two others are still those that were named:

- a segment: the newer file says when the older one was changed;
- the older file, about to be the newer: the last frame of the log, written before, says when the newer one was changed.

``touched`` asks for one of the two. Nothing here compares a time with the clock.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from reference_gym.participant.log_format import Before, LogDamaged

END_FILES = ("end.0", "end.1")
"""The one with the number of an end modulo two is written by it."""
_MAGIC = b"GYMLOGE3"
_RECORD = struct.Struct("<8sQIQQ")
_CHECKED = struct.Struct("<8sQIQQI")


class End(NamedTuple):
    """One acknowledged end; ``other_ns`` is the ctime of the other file when it was said.

    ``changed_ns``, where it was read back, is the ctime of its own file.
    """

    number: int
    segment: int
    offset: int
    other_ns: int
    changed_ns: int = 0


class EndFiles:
    """The two files, open for their writer.

    Args:
        directory: of the log.
        newer: what was said last, as it was read back; None for a new log.
    """

    def __init__(self, directory: Path, newer: End | None) -> None:
        if newer is None:
            for name in END_FILES:
                (directory / name).unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptors = [os.open(directory / name, flags, 0o600) for name in END_FILES]
        self.last = Before(0, 0) if newer is None else Before(newer.number, newer.changed_ns)
        """What was said last."""
        if newer is None:
            for _ in END_FILES:
                self.write(1, 0)

    def write(self, segment: int, offset: int) -> None:
        """Say where the log ends now; one small write, which the end of the process does not tear."""
        number = self.last.number + 1
        record = _RECORD.pack(_MAGIC, number, segment, offset, self.last.changed_ns)
        descriptor = self._descriptors[number % 2]
        os.pwrite(descriptor, record + struct.pack("<I", zlib.crc32(record)), 0)
        self.last = Before(number, os.fstat(descriptor).st_ctime_ns)

    def sync(self) -> None:
        """Make the files themselves durable; what they say later may be lost with the machine: then it is earlier."""
        for descriptor in self._descriptors:
            os.fsync(descriptor)

    def close(self) -> None:
        """Close them."""
        for descriptor in self._descriptors:
            os.close(descriptor)


def read_ends(directory: Path) -> tuple[End, End]:
    """Return the acknowledged end of a log, and the one before it.

    Raises:
        LogDamaged: a file is missing or damaged.
    """
    first, second = (_read(directory / name) for name in END_FILES)
    return (first, second) if first.number > second.number else (second, first)


def _read(path: Path) -> End:
    try:
        data = path.read_bytes()
        changed_ns = path.stat().st_ctime_ns
    except OSError as error:
        raise LogDamaged(f"the file {path.name} cannot be read: {error.strerror}") from error
    try:
        magic, number, segment, offset, other_ns, checksum = _CHECKED.unpack(data)
    except struct.error:
        magic, number, segment, offset, other_ns, checksum = b"", 0, 0, 0, 0, 0
    if magic != _MAGIC or checksum != zlib.crc32(data[: _RECORD.size]):
        raise LogDamaged(f"the file {path.name} is damaged")
    return End(number, segment, offset, other_ns, changed_ns)


def touched(newer: End, older: End, before: Before) -> str | None:
    """Return which times show that somebody but the log's writer has written the files since; None if none do.

    Args:
        newer: the acknowledged end.
        older: the one before it.
        before: the end that the last frame of the log names.
    """
    if (newer.number - 1, newer.other_ns) == (older.number, older.changed_ns):
        return None
    if before == (newer.number, newer.changed_ns):
        return None
    first, second = END_FILES[newer.number % 2], END_FILES[older.number % 2]
    return (
        f"{second} holds end {older.number} and was changed at {older.changed_ns} ns, {first} says {newer.other_ns}; "
        f"{first} holds end {newer.number} and was changed at {newer.changed_ns} ns, the last frame says {before}"
    )
