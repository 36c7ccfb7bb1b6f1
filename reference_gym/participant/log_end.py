# SPDX-License-Identifier: Apache-2.0
"""The acknowledged end of a boundary log: a file of one record beside the segments, written before anybody is told.

It says where the log ended, and when that segment was last changed by its writer. A log that ends earlier has lost
something that was acknowledged; one whose segment was changed since has been written by somebody else, e.g. by whoever
put an older copy in its place. After SIGKILL both files are as the process left them.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from reference_gym.participant.log_format import LogDamaged

END_FILE = "end"
_MAGIC = b"GYMLOGE1"
_RECORD = struct.Struct("<8sIQQ")
_CHECKED = struct.Struct("<8sIQQI")


class End(NamedTuple):
    """``changed_ns`` is the segment's ctime when it was written last; 0 says nothing.

    ``written_ns``, where it was read back, is when that was said: the ctime of the file.
    """

    segment: int
    offset: int
    changed_ns: int
    written_ns: int = 0


class EndFile:
    """The file, open for its writer.

    Args:
        directory: of the log.
        end: what is said at first.
    """

    def __init__(self, directory: Path, end: End) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(directory / END_FILE, flags, 0o600)
        self.write(end)

    def write(self, end: End) -> None:
        """Say where the log ends now; one small write, which the end of the process does not tear."""
        record = _RECORD.pack(_MAGIC, end.segment, end.offset, end.changed_ns)
        os.pwrite(self._descriptor, record + struct.pack("<I", zlib.crc32(record)), 0)

    def sync(self) -> None:
        """Make the file itself durable; what it says later may be lost with the machine, and is then an earlier end."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)


def read_end(directory: Path) -> End:
    """Return the acknowledged end of a log.

    Raises:
        LogDamaged: it is missing or damaged.
    """
    try:
        data = (directory / END_FILE).read_bytes()
        written_ns = (directory / END_FILE).stat().st_ctime_ns
    except OSError as error:
        raise LogDamaged(f"the file {END_FILE} cannot be read: {error.strerror}") from error
    try:
        magic, segment, offset, changed_ns, checksum = _CHECKED.unpack(data)
    except struct.error:
        magic, segment, offset, changed_ns, checksum = b"", 0, 0, 0, 0
    if magic != _MAGIC or checksum != zlib.crc32(data[: _RECORD.size]):
        raise LogDamaged(f"the file {END_FILE} is damaged")
    return End(segment, offset, changed_ns, written_ns)
