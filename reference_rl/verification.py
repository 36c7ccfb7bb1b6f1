# SPDX-License-Identifier: Apache-2.0
"""Checking the files of a snapshot: only plain files that a manifest names, to the byte and to the record."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pydantic import ValidationError

from reference_rl.errors import SnapshotDamaged
from reference_rl.sealed import SealBroken, unseal
from spec.messages import IndexRecord, ParticipantManifest

if TYPE_CHECKING:
    from reference_rl.snapshots import Snapshot

_CHUNK = 1 << 20


def file_digest(path: Path) -> str:
    """Return the digest of a file's bytes."""
    return _digest_and_size(path)[0]


def read_index(path: Path) -> dict[str, IndexRecord]:
    """Return the records of an index by rollout.

    Raises:
        SnapshotDamaged: a record is damaged, a rollout is listed twice, or the order is wrong.
    """
    found: dict[str, IndexRecord] = {}
    previous = ""
    for number, record in enumerate(check_records(path, path.name, IndexRecord), start=1):
        if record.rollout_id <= previous:
            raise SnapshotDamaged(path.name, f"{record.rollout_id} is not in order", number)
        previous = record.rollout_id
        found[record.rollout_id] = record
    return found


def read_plain(path: Path) -> bytes:
    """Return the content of a plain file; anything else at that name is an ``OSError``.

    Requirements: CKPT-DIR-021.
    """
    with _open_plain(path) as file:
        return file.read()


def _open_plain(path: Path) -> BinaryIO:
    # O_NONBLOCK: opening a pipe that somebody put there must not hang.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return os.fdopen(descriptor, "rb")


def _digest_and_size(path: Path) -> tuple[str, int]:
    hasher, size = hashlib.sha256(), 0
    with _open_plain(path) as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
            size += len(chunk)
    return "sha256:" + hasher.hexdigest(), size


def check_file(path: Path, name: str, size: int, digest: str) -> None:
    """Return when a file has the size in bytes and the digest that the manifest gives it.

    Raises:
        SnapshotDamaged: naming the file.
    """
    try:
        found_digest, found_size = _digest_and_size(path)
    except OSError as error:
        raise SnapshotDamaged(name, f"it cannot be read: {error.strerror}") from error
    if found_size != size:
        raise SnapshotDamaged(name, f"it has {found_size} bytes, the manifest says {size}")
    if found_digest != digest:
        raise SnapshotDamaged(name, "its digest is not the one in the manifest")


def check_participant(snapshot: Snapshot, alias: str, participant: Any, named: Mapping[str, Any]) -> None:
    """Return when one participant's cut is the one that it reported: manifest, files, index.

    Args:
        snapshot: where it lies.
        alias: its Gym.
        participant: its entry in the snapshot's manifest.
        named: path → entry, of the snapshot's manifest.

    Raises:
        SnapshotDamaged: naming file and, in an index, record.

    Requirements: CKPT-RESTART-013.
    """
    prefix = f"gym/{alias}/{participant.name}"
    name = f"{prefix}/{participant.manifest.name}"
    entry = named.get(name)
    if entry is None or (entry.digest, entry.bytes) != (participant.manifest.digest, participant.manifest.bytes):
        raise SnapshotDamaged(name, "the participant's manifest is not the one that it reported")
    manifest = read_participant_manifest(snapshot.path / name, name)
    found = (manifest.participant, manifest.run_id, manifest.checkpoint_id)
    if found != (participant.name, snapshot.manifest.run_id, str(snapshot.checkpoint_id)):
        raise SnapshotDamaged(name, f"it is of participant {found[0]}, run {found[1]}, checkpoint {found[2]}")
    for file in manifest.files:
        listed = named.get(f"{prefix}/{file.name}")
        if listed is None or (listed.bytes, listed.digest) != (file.bytes, file.digest):
            raise SnapshotDamaged(f"{prefix}/{file.name}", "the two manifests disagree about it")
    index_name = f"{prefix}/{participant.index.name}"
    if index_name not in named or named[index_name].digest != participant.index.digest:
        raise SnapshotDamaged(index_name, "it is not the index that the participant reported")
    records = read_index(snapshot.path / index_name)
    if len(records) != participant.index.records:
        raise SnapshotDamaged(index_name, f"it has {len(records)} records, {participant.index.records} were reported")


def read_participant_manifest(path: Path, name: str) -> ParticipantManifest:
    """Return a participant's manifest.

    Raises:
        SnapshotDamaged: it cannot be read or does not fit its schema.
    """
    try:
        return ParticipantManifest.read(read_plain(path))
    except OSError as error:
        raise SnapshotDamaged(name, f"it cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise SnapshotDamaged(name, f"it does not fit its schema: {error.errors()[0]['msg']}") from error


def check_records(path: Path, name: str, kind: Any) -> list[Any]:
    """Return the records of a file of JSON lines.

    Raises:
        SnapshotDamaged: naming the first record that is cut or does not fit ``kind``.
    """
    records = []
    try:
        data = read_plain(path)
    except OSError as error:
        raise SnapshotDamaged(name, f"it cannot be read: {error.strerror}") from error
    if data and not data.endswith(b"\n"):
        raise SnapshotDamaged(name, "its last record is cut", data.count(b"\n") + 1)
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            records.append(kind.read(line))
        except ValidationError as error:
            raise SnapshotDamaged(name, f"it does not fit its schema: {error.errors()[0]['msg']}", number) from error
    return records


def unsealed(path: Path, name: str) -> dict[str, Any]:
    """Return the content of a sealed file.

    Raises:
        SnapshotDamaged: it is missing, or its bytes are not those that were sealed.
    """
    try:
        return unseal(read_plain(path))
    except OSError as error:
        raise SnapshotDamaged(name, f"it cannot be read: {error.strerror}") from error
    except SealBroken as error:
        raise SnapshotDamaged(name, str(error)) from error


def valid(kind: Any, content: Mapping[str, Any], name: str) -> Any:
    """Return content as a message of the specification.

    Raises:
        SnapshotDamaged: it does not fit its schema.
    """
    try:
        return kind.of(content)
    except ValidationError as error:
        raise SnapshotDamaged(name, f"it does not fit its schema: {error.errors()[0]['msg']}") from error
