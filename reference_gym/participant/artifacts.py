# SPDX-License-Identifier: Apache-2.0
"""The participant's directory in a snapshot: writing a cut.

With a boundary log the payloads are its sealed segments, hard-linked into the directory, and ``places.jsonl`` says
where in them each boundary lies; without one, where links fail, and every few cuts they are written out as
``state.jsonl``.

Order: payload files and the index, each synced; the directory, synced; ``manifest.json`` in one atomic step; the
directory, synced. The number of syncs does not depend on the number of rollouts. ``reading`` is the counterpart.

Every payload line is ``{"crc32":"xxxxxxxx","record":…}``, so that a reader can name the damaged record.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from reference_gym.participant import failpoints
from reference_gym.participant.config import ParticipantConfig
from reference_gym.participant.directories import Held, hold
from reference_gym.participant.index import index_rows
from reference_gym.participant.jsontext import encode
from reference_gym.participant.log_format import Place
from reference_gym.participant.records import Cut
from reference_gym.participant.result import Finished
from reference_gym.participant.slices import Rests
from spec import wire

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
INDEX = "rollouts.jsonl"
STATE = "state.jsonl"
RESULTS = "results.jsonl"
TOMBSTONES = "tombstones.jsonl"
PLACES = "places.jsonl"
_MARK_S = 60.0
"""How long the log's writer may take to seal a segment, in seconds."""
FRAME = b'{"crc32":"%08x","record":'
FRAME_BYTES = len(FRAME % 0)


class Durable(Protocol):
    """The durable file steps; the module ``spec.durable`` is one, tests count or break them."""

    def write_file(self, path: Path, data: bytes | Iterable[bytes]) -> int:
        """Write a new file and sync it; return its size in bytes."""
        ...

    def sync_dir(self, path: Path) -> None:
        """Sync the entries of a directory."""
        ...

    def publish_file(self, path: Path, data: bytes, unnamed: Callable[[], None]) -> None:
        """Make a file appear whole or not at all, durably; ``unnamed`` is called before it gets its name."""
        ...


class WriteStopped(Exception):
    """The writer was told to stop."""


@dataclass(frozen=True, slots=True)
class Written:
    """A durable cut: what the commit's reply and ``last`` say about it."""

    manifest: dict[str, Any]
    index: dict[str, Any]
    files: int
    bytes: int


@dataclass(slots=True)
class Target:
    """Where one commit writes: a resolved directory, and the names that this commit has written there."""

    directory: Path
    own: set[str] = field(default_factory=set)


def find_foreign(target: Target) -> str | None:
    """Return the name of an entry in the target that this commit did not write, or None (CKPT-ERR-030).

    Raises:
        ForbiddenTarget: the target is no longer what was resolved.
        OSError: the directory cannot be read.
    """
    with hold(target.directory) as held:
        return min((entry.name for entry in held.path.iterdir() if entry.name not in target.own), default=None)


def write_cut(
    cut: Cut,
    target: Target,
    config: ParticipantConfig,
    owns: Iterable[str],
    run_id: str,
    checkpoint_id: str,
    durable: Durable,
    stop: threading.Event,
) -> Written:
    """Write a cut and make it durable; runs on the writer's thread.

    Args:
        cut: what was captured.
        target: an empty directory, but for what an earlier try of this commit left.
        config: the participant's.
        owns: what the participant owns.
        run_id: the run's.
        checkpoint_id: the checkpoint's.
        durable: the durable file steps.
        stop: when set, writing ends at the next record and before the manifest.

    Raises:
        WriteStopped: ``stop`` was set before the manifest was published.
        ForbiddenTarget: the target was replaced meanwhile; nothing was written to what replaced it (CKPT-SEC-011).
        OSError: writing failed. In all three cases what was written has been removed as far as it could be.
    """
    with hold(target.directory) as held:
        _remove_own(target, held)
        try:
            return _write(cut, target, held, config, owns, run_id, checkpoint_id, durable, stop)
        except BaseException:
            with contextlib.suppress(OSError):
                _remove_own(target, held)
            raise


def _write(
    cut: Cut,
    target: Target,
    held: Held,
    config: ParticipantConfig,
    owns: Iterable[str],
    run_id: str,
    checkpoint_id: str,
    durable: Durable,
    stop: threading.Event,
) -> Written:
    rows, rests = [], Rests()
    for row in index_rows(cut):
        rests.rest()
        rows.append(row)
    files, places = _link(cut, target, held, stop)
    sources: dict[str, tuple[Iterable[bytes], int]] = {
        PLACES if places else STATE: (_place_lines(places) if places else _state_lines(cut), cut.counts["turn"]),
        RESULTS: (_result_lines(cut.results), len(cut.results)),
        TOMBSTONES: (_tombstone_lines(cut), len(cut.tombstones)),
        INDEX: ((encode(row) + b"\n" for row in rows), len(rows)),
    }
    for name, (lines, records) in sources.items():
        target.own.add(name)
        digest = hashlib.sha256()
        size = durable.write_file(held.path / name, _watched(lines, digest.update, stop))
        files.append({"name": name, "bytes": size, "digest": f"sha256:{digest.hexdigest()}", "records": records})
        failpoints.reach("commit.file")
    durable.sync_dir(held.path)
    index = files[-1]
    manifest = encode(
        {
            "protocol_version": wire.PROTOCOL_VERSION,
            "run_id": run_id,
            "checkpoint_id": checkpoint_id,
            "participant": config.name,
            "owns": sorted(owns),
            "state_schema": {"id": config.state_schema.id, "version": config.state_schema.version},
            "environments": _environments(rows, config),
            "index": {"name": INDEX, "digest": index["digest"], "records": index["records"]},
            "counts": cut.counts,
            "files": files,
        }
    )
    target.own |= {MANIFEST, f".{MANIFEST}.tmp"}
    failpoints.reach("commit.files")
    if stop.is_set():
        raise WriteStopped
    held.verify()
    durable.publish_file(held.path / MANIFEST, manifest, lambda: failpoints.reach("commit.unnamed"))
    held.verify()
    failpoints.reach("commit.manifest")
    return Written(
        manifest={"name": MANIFEST, "digest": wire.bytes_digest(manifest), "bytes": len(manifest)},
        index={"name": INDEX, "digest": index["digest"], "records": index["records"]},
        files=len(files) + 1,
        bytes=sum(file["bytes"] for file in files) + len(manifest),
    )


def frame(*pieces: bytes) -> tuple[bytes, ...]:
    """Return one payload line in pieces: the record with its checksum, and a newline."""
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return (FRAME % crc, *pieces, b"}\n")


def _state_lines(cut: Cut) -> Iterator[bytes]:
    for rollout_id in sorted(cut.records):
        if rollout_id not in cut.restarts:
            yield from frame(*cut.records[rollout_id].payload)


def _link(cut: Cut, target: Target, held: Held, stop: threading.Event) -> tuple[list[dict[str, Any]], dict[str, Place]]:
    """Link the sealed segments that hold the cut's boundaries; return what the manifest says of them, and the places.

    Both are empty where there is nothing to link, or it cannot be: then everything is written out.
    """
    if cut.mark is None:
        return [], {}
    try:
        mark = cut.mark.result(_MARK_S)
        places, rests = {}, Rests()
        for key in sorted(cut.records):
            rests.rest()
            if key not in cut.restarts:
                places[key] = mark.places[key]
        records = Counter(place.segment for place in places.values())
        files = []
        for number in sorted(records):
            if stop.is_set():
                raise WriteStopped
            segment = mark.segments[number]
            path = held.path / segment.path.name
            target.own.add(path.name)
            os.link(segment.path, path, follow_symlinks=False)
            failpoints.reach("commit.linked")
            if not segment.durable:
                _sync(path)
                segment.durable = True
            if segment.sha256 is None:
                segment.sha256 = _sha256(path, stop)
            size = path.stat().st_size
            files.append(
                {
                    "name": path.name,
                    "bytes": size,
                    "digest": f"sha256:{segment.sha256}",
                    "records": records[number],
                }
            )
    except (OSError, KeyError, FutureTimeout) as error:
        logger.warning("the log's segments cannot be linked, a full copy is written: %r", error)
        _remove_own(target, held)
        return [], {}
    return files, places


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path, stop: threading.Event) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1024 * 1024):
            if stop.is_set():
                raise WriteStopped
            digest.update(data)
    return digest.hexdigest()


def _place_lines(places: Mapping[str, Place]) -> Iterator[bytes]:
    for rollout_id, place in places.items():
        yield from frame(encode({"rollout_id": rollout_id, "place": list(place)}))


def _result_lines(results: Iterable[Finished]) -> Iterator[bytes]:
    for finished in sorted(results, key=lambda finished: finished.receipt.rollout_id):
        yield from frame(encode({**finished.as_header(), "result": finished.text}))


def _tombstone_lines(cut: Cut) -> Iterator[bytes]:
    for key in sorted(cut.tombstones):
        stone = cut.tombstones[key]
        yield from frame(
            encode(
                {
                    "id_hash": key,
                    "attempt": stone.attempt,
                    "kind": stone.kind,
                    "digest": stone.digest,
                    "final": stone.final,
                }
            )
        )


def _watched(lines: Iterable[bytes], update: Callable[[bytes], None], stop: threading.Event) -> Iterator[bytes]:
    rests = Rests()
    for line in lines:
        rests.rest()
        if stop.is_set():
            raise WriteStopped
        failpoints.reach("commit.record")
        update(line)
        yield line


def _environments(rows: Iterable[dict[str, Any]], config: ParticipantConfig) -> list[dict[str, str]]:
    used = {row["environment"] for row in rows}
    return [
        {"name": environment.name, "state_version": environment.state_version}
        for environment in config.environments
        if environment.name in used
    ]


def _remove_own(target: Target, held: Held) -> None:
    """Remove what an unfinished write left; a complete manifest and what it names are never touched."""
    if (held.path / MANIFEST).exists():
        return
    for name in sorted(target.own):
        (held.path / name).unlink(missing_ok=True)
    target.own.clear()
