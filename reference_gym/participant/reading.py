# SPDX-License-Identifier: Apache-2.0
"""The participant's directory in a snapshot: verifying it whole, and reading what a restore lists.

Only plain files that the manifest names are opened. Every byte is judged by size and digest before anything of it
is used; what is damaged is named with its file and, where the checksums tell, its record (CKPT-RESTORE-002,
CKPT-ERR-033).
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from reference_gym.participant.artifacts import FRAME, FRAME_BYTES, INDEX, MANIFEST, PLACES, RESULTS, STATE, TOMBSTONES
from reference_gym.participant.config import ParticipantConfig
from reference_gym.participant.directories import hold
from reference_gym.participant.errors import CheckpointCorrupt, Internal, StateIncompatible, StateMismatch
from reference_gym.participant.fences import Tombstone
from reference_gym.participant.jsontext import NotJson, decode, decode_private
from reference_gym.participant.log_format import LogDamaged, Place, entry_at, is_segment, segment_name
from reference_gym.participant.result import Finished
from reference_gym.participant.slices import Rests, free
from spec import wire
from spec.messages import IndexRecord, ParticipantManifest

_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
MAX_MANIFEST_BYTES = 64 * 1024 * 1024


class ReadStopped(Exception):
    """The reader was told to stop."""


@dataclass(slots=True)
class Source:
    """What a verified directory holds; payloads only of the rollouts that were asked for."""

    index: dict[str, IndexRecord] = field(default_factory=dict)
    payloads: dict[str, bytes] = field(default_factory=dict)
    results: dict[str, Finished] = field(default_factory=dict)
    tombstones: dict[str, Tombstone] = field(default_factory=dict)
    environments: dict[str, str] = field(default_factory=dict)

    def tables(self) -> list[Mapping[Any, Any]]:
        """Return what takes long to free."""
        return [self.index, self.payloads, self.results]


def read_source(
    directory: Path,
    manifest_digest: str,
    config: ParticipantConfig,
    run_id: str,
    checkpoint_id: str,
    wanted: Iterable[str],
    stop: threading.Event,
) -> Source:
    """Verify a participant's directory whole and return what it holds; runs on a thread.

    Args:
        directory: resolved and confined.
        manifest_digest: what the snapshot says.
        config: the reading participant's.
        run_id: the request's.
        checkpoint_id: that of the cut.
        wanted: the rollouts whose payload is needed.
        stop: when set, reading ends at the next record.

    Raises:
        CheckpointCorrupt: a file is missing, damaged, no plain file, or cannot be parsed.
        StateIncompatible: another run, another participant, or a state schema that is not read here.
        StateMismatch: another checkpoint.
        ForbiddenTarget: the directory is no longer what was resolved (CKPT-SEC-011).
        ReadStopped: ``stop`` was set.
    """
    if not directory.is_dir():
        raise CheckpointCorrupt(f"{MANIFEST} is missing")
    source = Source()
    try:
        _read_into(source, directory, manifest_digest, config, run_id, checkpoint_id, frozenset(wanted), stop)
    except BaseException:
        free(*source.tables())
        raise
    return source


def _read_into(
    source: Source,
    directory: Path,
    manifest_digest: str,
    config: ParticipantConfig,
    run_id: str,
    checkpoint_id: str,
    wanted: frozenset[str],
    stop: threading.Event,
) -> None:
    with hold(directory) as held:
        manifest = _manifest(held.path, manifest_digest)
        _compatible(manifest, config, run_id, checkpoint_id)
        source.environments = {env.name: env.state_version for env in manifest.environments}
        named = {file.name: file for file in manifest.files}
        if len(named) != len(manifest.files):
            (twice, _), *_ = Counter(file.name for file in manifest.files).most_common(1)
            raise CheckpointCorrupt(f"{MANIFEST} names {twice} twice")
        places: dict[str, Place] = {}
        readers: dict[str, Callable[[bytes], None]] = {
            PLACES if PLACES in named else STATE: lambda line: (
                _take_place(places, line) if PLACES in named else _take_state(source, line, wanted)
            ),
            RESULTS: lambda line: _take_result(source, line),
            TOMBSTONES: lambda line: _take_tombstone(source, line),
            INDEX: lambda line: _take_index(source, line),
        }
        for name in readers:
            if name not in named:
                raise CheckpointCorrupt(f"{MANIFEST} does not name {name}")
        for name, file in sorted(named.items(), key=lambda item: is_segment(item[0])):
            if PLACES in named and is_segment(name):
                _read_segment(held.path / name, file.bytes, file.digest, file.records, places, wanted, source, stop)
                continue
            take = readers.get(name, lambda _: None)
            _read(held.path / name, file.bytes, file.digest, file.records, take, framed=name != INDEX, stop=stop)
        for rollout_id, place in places.items():
            if segment_name(place.segment) not in named:
                raise CheckpointCorrupt(f"{PLACES} has {rollout_id} in a segment that {MANIFEST} does not name")
        if manifest.index.digest != named[INDEX].digest or manifest.index.name != INDEX:
            raise CheckpointCorrupt(f"{MANIFEST} names two indexes")


def _manifest(directory: Path, digest: str) -> ParticipantManifest:
    with _open(directory / MANIFEST) as file, _readable(directory / MANIFEST):
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if wire.bytes_digest(data) != digest:
        raise CheckpointCorrupt(f"{MANIFEST} does not have the digest that the request names")
    try:
        return ParticipantManifest.of(decode(data))
    except (NotJson, ValidationError) as error:
        raise CheckpointCorrupt(f"{MANIFEST} is no manifest: {_first(error)}") from error


def _compatible(manifest: ParticipantManifest, config: ParticipantConfig, run_id: str, checkpoint_id: str) -> None:
    if manifest.participant != config.name:
        raise StateIncompatible(f"the cut is of participant {manifest.participant}, this is {config.name}")
    if manifest.run_id != run_id:
        raise StateIncompatible(f"the cut is of run {manifest.run_id}, the request of {run_id}")
    schema = config.state_schema
    if manifest.state_schema.id != schema.id or manifest.state_schema.version not in schema.reads:
        written = f"{manifest.state_schema.id} version {manifest.state_schema.version}"
        raise StateIncompatible(f"the state schema is {written}; here {schema.id} {list(schema.reads)} can be read")
    if manifest.checkpoint_id != checkpoint_id:
        raise StateMismatch(f"the cut is of checkpoint {manifest.checkpoint_id}, the request names {checkpoint_id}")


def _open(path: Path) -> BinaryIO:
    """Open a plain file for reading, never through a link.

    Raises:
        CheckpointCorrupt: it is missing or something else than a plain file.
        Internal: this process has no descriptor or memory left, which says nothing about the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _OWN_FAULTS:
            raise Internal(f"{path.name} cannot be opened: {error.strerror}") from error
        raise CheckpointCorrupt(f"{path.name} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointCorrupt(f"{path.name} is not a plain file")
    return os.fdopen(descriptor, "rb")


def _read(
    path: Path,
    size: int,
    digest: str,
    records: int,
    take: Callable[[bytes], None],
    *,
    framed: bool,
    stop: threading.Event,
) -> None:
    """Hand every record of a file to ``take`` and judge the file; nothing taken counts if this raises."""
    found = hashlib.sha256()
    rests, length, number = Rests(), 0, 0
    damaged: str | None = None
    with _open(path) as file, _readable(path):
        for number, line in enumerate(_lines(file, size), 1):
            rests.rest()
            if stop.is_set():
                raise ReadStopped
            found.update(line)
            length += len(line)
            if damaged is None:
                try:
                    take(_record(line) if framed else line)
                except (ValueError, KeyError, TypeError) as error:
                    damaged = f"record {number}: {_first(error)}"
    if length != size or f"sha256:{found.hexdigest()}" != digest:
        wrong = f"{length} bytes instead of {size}" if length != size else "another digest than its manifest says"
        raise CheckpointCorrupt(f"{path.name} has {wrong}" + (f" ({damaged})" if damaged else ""))
    if damaged is not None:
        raise CheckpointCorrupt(f"{path.name}, {damaged}")
    if number != records:
        raise CheckpointCorrupt(f"{path.name} has {number} records instead of {records}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Name the file that the disk cannot give back.

    Raises:
        CheckpointCorrupt: reading it failed.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointCorrupt(f"{path.name} cannot be read: {error.strerror}") from error


def _lines(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the lines of a file, and not much more of it than the manifest says that there is."""
    left = size + 1
    while left > 0 and (line := file.readline(left)):
        left -= len(line)
        yield line


def _record(line: bytes) -> bytes:
    record = line[FRAME_BYTES:-2]
    crc = zlib.crc32(record)
    if line[:FRAME_BYTES] != FRAME % crc or not line.endswith(b"}\n"):
        raise NotJson(f"its checksum is not that of its content (crc32 {crc:08x})")
    return record


def _take_state(source: Source, record: bytes, wanted: frozenset[str]) -> None:
    # The id is the first field, so that what is not wanted need not be parsed.
    rollout_id = record[len(b'{"rollout_id":"') : record.index(b'"', len(b'{"rollout_id":"'))].decode()
    if rollout_id in wanted:
        source.payloads[rollout_id] = record


def _take_place(places: dict[str, Place], record: bytes) -> None:
    value: dict[str, Any] = decode_private(record)
    places[value["rollout_id"]] = Place(*value["place"])


def _read_segment(
    path: Path,
    size: int,
    digest: str,
    records: int,
    places: Mapping[str, Place],
    wanted: frozenset[str],
    source: Source,
    stop: threading.Event,
) -> None:
    """Judge a segment of the boundary log as a whole, and take the payloads that are wanted."""
    here = {key: place for key, place in places.items() if segment_name(place.segment) == path.name}
    found = hashlib.sha256()
    length, rests = 0, Rests()
    with _open(path) as file, _readable(path):
        while data := file.read(1024 * 1024):
            if stop.is_set():
                raise ReadStopped
            found.update(data)
            length += len(data)
        if length != size or f"sha256:{found.hexdigest()}" != digest:
            wrong = f"{length} bytes instead of {size}" if length != size else "another digest than its manifest says"
            raise CheckpointCorrupt(f"{path.name} has {wrong}")
        if len(here) != records:
            raise CheckpointCorrupt(f"{path.name} has {len(here)} records instead of {records}")
        for rollout_id in sorted(wanted & here.keys()):
            rests.rest()
            if stop.is_set():
                raise ReadStopped
            try:
                entry = entry_at(file.fileno(), path.name, here[rollout_id])
            except LogDamaged as damage:
                raise CheckpointCorrupt(f"{damage} ({rollout_id})") from damage
            if entry.op != "put" or entry.header.get("rollout_id") != rollout_id:
                raise CheckpointCorrupt(f"{path.name} has no record of {rollout_id} where {PLACES} says")
            source.payloads[rollout_id] = b"".join(entry.pieces)


def _take_index(source: Source, line: bytes) -> None:
    if not line.endswith(b"\n"):
        raise NotJson("the line has no end")
    row = IndexRecord.of(decode(line))
    if source.index and row.rollout_id <= next(reversed(source.index)):
        raise NotJson(f"{row.rollout_id} is not in order")
    source.index[row.rollout_id] = row


def _take_result(source: Source, record: bytes) -> None:
    value: dict[str, Any] = decode_private(record)
    finished = Finished.of(value, value["result"])
    source.results[finished.receipt.rollout_id] = finished


def _take_tombstone(source: Source, record: bytes) -> None:
    value: dict[str, Any] = decode_private(record)
    source.tombstones[value["id_hash"]] = Tombstone(
        attempt=value["attempt"], kind=value["kind"], digest=value["digest"], final=value["final"]
    )


def _first(error: Exception) -> str:
    """Return the first line of what went wrong, without the values that the file holds."""
    if isinstance(error, ValidationError):
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return f"{'/'.join(map(str, fault['loc']))}: {fault['msg']}"
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
