# SPDX-License-Identifier: Apache-2.0
"""The bytes of the boundary log: lengths beyond 32 bits, and a system that writes and reads less than it is asked."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from reference_gym.participant import log_segment
from reference_gym.participant.log_format import (
    MORE,
    Before,
    Entry,
    LogDamaged,
    encode_frame,
    read_entry,
    read_frames,
    segment_name,
)

GIB = 2**30


class Huge(bytes):
    """A piece that says of itself that it is long."""

    def __len__(self) -> int:
        return 5 * GIB


def put(number: int, *pieces: bytes) -> Entry:
    """An entry with a blob."""
    return Entry({"op": "put", "rollout_id": f"r{number}"}, pieces)


@pytest.mark.parametrize(
    "entries",
    [[put(1, Huge(b"x"))], [put(number, Huge(b"x")) for number in range(3)]],
    ids=["one blob", "blobs together"],
)
def test_a_frame_may_be_longer_than_four_gibibytes(entries: list[Entry], tmp_path: Path) -> None:
    """All that a restore installs is one frame: its length and its places are told, whatever they are."""
    frame = encode_frame(entries, MORE)
    assert len(entries) * 5 * GIB < frame.size
    assert (frame.size - 32,) == struct.unpack("<Q", frame.pieces[0][:8])
    assert [5 * GIB] * len(entries) == [place.blob for place in frame.places]
    assert len(entries) == len({place.offset for place in frame.places})
    path = tmp_path / segment_name(1)
    path.write_bytes(b"".join(encode_frame([put(9, b"first")], MORE).pieces) + frame.pieces[0] + b"the beginning of it")
    assert [["r9"]] == [[entry.header["rollout_id"] for entry, _ in found.entries] for found in read_frames(path, 1)]


def test_what_the_system_writes_and_reads_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than 2 GiB are written or read by one call; here it is seven bytes."""
    writev, pread = os.writev, os.pread

    def write_little(descriptor: int, pieces: Sequence[bytes]) -> int:
        left, taken = 7, []
        for piece in pieces:
            taken.append(bytes(piece[:left]))
            left -= len(taken[-1])
        return writev(descriptor, taken)

    monkeypatch.setattr(os, "writev", write_little)
    monkeypatch.setattr(os, "pread", lambda descriptor, length, offset: pread(descriptor, min(length, 7), offset))
    entries = [put(1, b"", b"a" * 20, b"", b"b" * 7), put(2), put(3, b"c" * 100)]
    frame = encode_frame(entries, Before(2**62, 2**63))
    path = tmp_path / segment_name(1)
    with path.open("wb") as file:
        log_segment._write_all(file.fileno(), list(frame.pieces))
    assert b"".join(frame.pieces) == path.read_bytes()
    found, *more = read_frames(path, 1)
    assert (frame.size, (2**62, 2**63), []) == (found.after, found.before, more)
    blobs = [b"".join(read_entry(tmp_path, place).pieces) for _, place in found.entries]
    assert [b"".join(entry.pieces) for entry in entries] == blobs


def test_blobs_are_not_kept_while_a_segment_is_read(tmp_path: Path) -> None:
    """The state that a log has recorded needs no payloads: they are read by their places, those that live."""
    path = tmp_path / segment_name(1)
    path.write_bytes(b"".join(encode_frame([put(1, b"a" * 3_000_000)], MORE).pieces))
    ((entry, place),) = next(read_frames(path, 1)).entries
    assert ((), 3_000_000) == (entry.pieces, place.blob)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(Exception, match="checksum"):
        list(read_frames(path, 1))


def test_a_log_of_an_earlier_format_is_named(tmp_path: Path) -> None:
    """Frames of format 2 began without a time: that is said, and not that they are damaged."""
    path = tmp_path / segment_name(1)
    begin = struct.pack("<QI", 5, 77)
    path.write_bytes(begin + struct.pack("<I", zlib.crc32(begin)) + bytes(100))
    with pytest.raises(LogDamaged, match="not of format 3"):
        list(read_frames(path, 1))
    path.write_bytes(begin + bytes(104))
    with pytest.raises(LogDamaged, match="is damaged"):
        list(read_frames(path, 1))
