# SPDX-License-Identifier: Apache-2.0
"""The boundary log's bytes: segments of frames, frames of entries.

A segment is a file ``00000001.log``. A frame is ``length, number, time, crc32, crc32 of these four`` and that many
bytes of entries; it counts whole or not at all. Number and time are those of the acknowledged end before it
(``log_end``). An entry is ``header length, blob length, crc32`` of both, a header of JSON text and a blob of bytes that
are never looked into; the checksum of a frame is that of these three numbers of its entries. All numbers are unsigned
and little endian; times and the lengths of frames and blobs have 64 bits (all that a restore installs is one frame,
whatever its size), the others 32. The first frame of a segment is its base: all state but the bytes of boundaries and
results, which it names by their places in this and in earlier segments. A segment gets its name when its base is
complete and the one before it has ended with an entry that says so: a log whose end is missing is told from a shorter
one.

What ends early, at the very end of the newest segment, is a frame whose writing was interrupted: nobody was told of it.
Everything else that does not fit is damage, and is named (``LogDamaged``).
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from reference_gym.participant.slices import Rests

FORMAT = 3
SUFFIX = ".log"
TEMPORARY = ".tmp"
_FRAME = struct.Struct("<QQQII")
_CHECKED = struct.Struct("<QQQI")
"""What the second checksum of a frame is about."""
_ENTRY = struct.Struct("<IQI")
_PIECE = 1024 * 1024
"""How much of a blob is read at once where only its checksum is wanted."""


class LogDamaged(Exception):
    """The log cannot be used; the text names the file and what is wrong with it."""


class Place(NamedTuple):
    """Where an entry lies: the segment's number, the offset of the entry in its file, the lengths of its two parts."""

    segment: int
    offset: int
    header: int
    blob: int

    @property
    def size(self) -> int:
        """The length of the entry in bytes."""
        return _ENTRY.size + self.header + self.blob


@dataclass(frozen=True, slots=True)
class Entry:
    """One change: ``op`` and its values in the header, bytes that travel with it as pieces of the blob."""

    header: Mapping[str, Any]
    pieces: tuple[bytes, ...] = ()

    @property
    def op(self) -> str:
        """What it changes."""
        return str(self.header["op"])


@dataclass(frozen=True, slots=True)
class Frame:
    """One encoded frame: its pieces, and per entry the place relative to the frame's beginning (segment 0)."""

    pieces: tuple[bytes, ...]
    places: tuple[Place, ...]
    size: int


class Before(NamedTuple):
    """The acknowledged end before a frame: its number, and the ctime of its file."""

    number: int
    changed_ns: int


MORE = Before(0, 0)
"""Named by a frame that was written in one piece with the one after it."""


class Found(NamedTuple):
    """A whole frame of a segment: its entries and their places, the offset after it, and the end that it names."""

    entries: list[tuple[Entry, Place]]
    after: int
    before: Before


def encode_frame(entries: list[Entry], before: Before) -> Frame:
    """Return the bytes of entries that belong together; on a thread, where there may be many of them.

    Args:
        entries: the changes.
        before: the acknowledged end.
    """
    rests = Rests()
    pieces: list[bytes] = []
    places: list[Place] = []
    at, whole = _FRAME.size, 0
    for entry in entries:
        rests.rest()
        header = _header(entry)
        blob = sum(map(len, entry.pieces))
        crc = zlib.crc32(header)
        for piece in entry.pieces:
            crc = zlib.crc32(piece, crc)
        preamble = _ENTRY.pack(len(header), blob, crc)
        whole = zlib.crc32(preamble, whole)
        places.append(Place(0, at, len(header), blob))
        pieces += (preamble, header, *entry.pieces)
        at += _ENTRY.size + len(header) + blob
    begin = _CHECKED.pack(at - _FRAME.size, *before, whole)
    return Frame((begin + struct.pack("<I", zlib.crc32(begin)), *pieces), tuple(places), at)


def _header(entry: Entry) -> bytes:
    """Return the JSON text of a header.

    Raises:
        ValueError: it holds what is no JSON; whose it is, is named.
    """
    try:
        return json.dumps(entry.header, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError) as error:
        whose = entry.header.get("rollout_id", "the participant")
        raise ValueError(f"an entry {entry.op} of {whose} cannot be written: {error}") from error


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"{number:08d}{SUFFIX}"


def is_segment(name: str) -> bool:
    """Return whether a file name is that of a segment."""
    return len(name) == 12 and name.endswith(SUFFIX) and name[:8].isdecimal()


def segments(directory: Path) -> list[int]:
    """Return the numbers of the segments in a directory, in order."""
    found = (entry.name for entry in os.scandir(directory))
    return sorted(int(name[:8]) for name in found if is_segment(name))


def read_frames(path: Path, number: int) -> Iterator[Found]:
    """Yield the whole frames of a segment; an unfinished one may end it.

    Blobs are checked and not kept: ``read_entry`` returns them.

    Args:
        path: the file.
        number: the segment's.

    Raises:
        LogDamaged: naming the file and the offset.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            at = 0
            while size - at >= _FRAME.size:
                length, number_before, changed_ns, crc, own = _FRAME.unpack(head := file.read(_FRAME.size))
                if zlib.crc32(head[: _CHECKED.size]) != own:
                    older = at == 0 and zlib.crc32(head[:12]) == int.from_bytes(head[12:16], "little")
                    what = f"not of format {FORMAT}" if older else "damaged"
                    raise LogDamaged(f"{path.name}, the frame at byte {at}: its beginning is {what}")
                after = at + _FRAME.size + length
                if after > size:
                    return
                found, whole = _entries(file, path.name, number, at + _FRAME.size, after)
                if whole != crc or not found:
                    raise LogDamaged(f"{path.name}, the frame at byte {at}: its checksum is not that of its content")
                yield Found(found, after, Before(number_before, changed_ns))
                at = after
    except OSError as error:
        raise LogDamaged(f"{path.name} cannot be read: {error.strerror}") from error


def _entries(file: BinaryIO, name: str, number: int, at: int, end: int) -> tuple[list[tuple[Entry, Place]], int]:
    """Return the entries up to an offset, without blobs, with their places; and the checksum of the frame they are."""
    found: list[tuple[Entry, Place]] = []
    whole = 0
    try:
        while at < end:
            preamble = file.read(_ENTRY.size)
            header, blob, crc = _ENTRY.unpack(preamble)
            whole = zlib.crc32(preamble, whole)
            place = Place(number, at, header, blob)
            at += place.size
            if at > end:
                return [], 0
            content = file.read(header)
            if _crc_of_rest(file, blob, zlib.crc32(content)) != crc:
                return [], 0
            found.append((Entry(json.loads(content)), place))
    except (struct.error, ValueError) as error:
        raise LogDamaged(f"{name}, the entry at byte {at}: {error}") from error
    return found, whole


def _crc_of_rest(file: BinaryIO, length: int, crc: int) -> int:
    """Return a checksum carried on over the next bytes of a file; another one where they are not all there."""
    while length > 0:
        piece = file.read(min(length, _PIECE))
        if not piece:
            return -1
        crc = zlib.crc32(piece, crc)
        length -= len(piece)
    return crc


def read_entry(directory: Path, place: Place) -> Entry:
    """Return one entry by its place.

    Raises:
        LogDamaged: it is not there.
    """
    name = segment_name(place.segment)
    try:
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return entry_at(descriptor, name, place)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise LogDamaged(f"{name} cannot be read: {error.strerror}") from error


def entry_at(descriptor: int, name: str, place: Place) -> Entry:
    """Return one entry of an open segment by its place.

    Raises:
        LogDamaged: it is not there.
    """
    lost = LogDamaged(f"{name} has no entry at byte {place.offset}")
    if min(place) < 0 or place.offset + place.size > os.fstat(descriptor).st_size:
        raise lost
    data = _bytes_at(descriptor, place.size, place.offset)
    begin = _ENTRY.size + place.header
    try:
        header, blob, crc = _ENTRY.unpack_from(data)
        if (len(data), header, blob) != (place.size, place.header, place.blob):
            raise lost
        if zlib.crc32(memoryview(data)[_ENTRY.size :]) != crc:
            raise lost
        return Entry(json.loads(data[_ENTRY.size : begin]), (data[begin:],) if blob else ())
    except (struct.error, ValueError) as error:
        raise lost from error


def _bytes_at(descriptor: int, length: int, offset: int) -> bytes:
    """Return that many bytes of a file, or fewer where it ends; the system reads less than 2 GiB at once."""
    data = os.pread(descriptor, length, offset)
    while len(data) < length and (more := os.pread(descriptor, length - len(data), offset + len(data))):
        data += more
    return data
