# SPDX-License-Identifier: Apache-2.0
"""A cut: what it holds, how it is written to a directory, and how a directory is read and verified."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.second_gym.book import Book
from tests.second_gym.entries import Result, Rollout, Tombstone, digest_of
from tests.second_gym.refusals import Refusal
from tests.second_gym.sessions import ENVIRONMENTS

Json = dict[str, Any]
SCHEMA = "second-gym"
VERSION = 1
MANIFEST, INDEX, RESULTS, TOMBSTONES = "manifest.json", "rollouts.jsonl", "results.jsonl", "tombstones.jsonl"
FLAT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Cut:
    """What was captured at one instant: everything in it is immutable."""

    rows: tuple[Json, ...]
    results: tuple[Result, ...]
    tombstones: tuple[tuple[str, Tombstone], ...]

    def count(self, state: str) -> int:
        """Return how many rollouts the index lists in a state."""
        return sum(row["state"] == state for row in self.rows)


@dataclass(frozen=True)
class Written:
    """How a cut stands in its directory."""

    manifest: Json
    index: Json
    files: int
    size: int


@dataclass(frozen=True)
class Heading:
    """Whose cut it is, as the manifest says."""

    run_id: str
    checkpoint_id: str
    participant: str


def reason(rollout: Rollout) -> str:
    """Return why a live rollout would be listed as `restart`: the agent cannot continue any."""
    if rollout.session.uncertain:
        return "uncertain"
    return "blocked" if rollout.blocks else "restart_only"


def capture(book: Book) -> Cut:
    """Return the cut of this instant; wants the lock held."""
    rows = []
    for entry in book.entries.values():
        if isinstance(entry, Tombstone):
            continue
        row: Json = {
            "rollout_id": entry.rollout_id,
            "attempt": entry.attempt,
            "turns_done": entry.turns_done,
            "task_digest": entry.task_digest,
            "environment": entry.environment,
            "effects": {entry.environment: entry.effects_saved},
            "data_refs": list(entry.data_refs),
        }
        if entry.version is not None:
            row["policy_version"] = entry.version
        if isinstance(entry, Result):
            row |= {"state": "finished", "receipt": entry.receipt}
        else:
            row |= {"state": "restart", "reason": reason(entry)}
        rows.append(row)
    rows.sort(key=lambda row: row["rollout_id"].encode("ascii"))
    tombstones = ((key, entry) for key, entry in book.entries.items() if isinstance(entry, Tombstone))
    return Cut(tuple(rows), tuple(book.results()), tuple(sorted(tombstones, key=lambda pair: pair[0])))


# --- the directory ---


def directory(path: str, roots: list[Path]) -> Path:
    """Return an existing directory inside a root, after following links.

    Raises:
        Refusal: `forbidden_target`.
    """
    try:
        real = Path(path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        real = Path()
    if not any(real.is_relative_to(root) for root in roots) or not real.is_dir():
        raise Refusal("forbidden_target", "The path is no existing directory inside a configured root.")
    return real


def must_be_empty(target: Path) -> None:
    """Refuse a target that holds anything; a failed writing has removed what it wrote."""
    if any(target.iterdir()):
        raise Refusal("target_exists", "The target directory is not empty.")


class Stopped(Exception):
    """The writing was told to stop."""


def write(target: Path, heading: Heading, cut: Cut, publish: Callable[[Callable[[], None]], None]) -> Written:
    """Write and sync a cut, its manifest last.

    Args:
        target: an empty directory.
        heading: whose cut it is.
        cut: what to write.
        publish: calls its argument, which makes the manifest appear, or raises instead.

    Raises:
        Refusal: `insufficient_storage` or `internal`; what was written is gone again.
        Exception: what `publish` raised.
    """
    tombstones = [
        {"hash": key, "attempt": stone.attempt, "digest": stone.digest, "final": stone.final}
        for key, stone in cut.tombstones
    ]
    results = [
        {"receipt": result.receipt, "result": result.text, "effects": result.effects_saved, "version": result.version}
        for result in cut.results
    ]
    contents = {INDEX: list(cut.rows), RESULTS: results, TOMBSTONES: tombstones}
    files: list[Json] = []
    made: list[Path] = []
    draft = target / f"{MANIFEST}.tmp"

    def appear() -> None:
        draft.rename(target / MANIFEST)
        made[-1] = target / MANIFEST
        _sync_directory(target)

    try:
        for name, records in contents.items():
            data = b"".join(json.dumps(record).encode("ascii") + b"\n" for record in records)
            made.append(target / name)
            _write_file(target / name, data)
            files.append({"name": name, "bytes": len(data), "digest": digest_of(data), "records": len(records)})
        index = {"name": INDEX, "digest": files[0]["digest"], "records": len(cut.rows)}
        manifest = {
            "protocol_version": "1.0",
            "run_id": heading.run_id,
            "checkpoint_id": heading.checkpoint_id,
            "participant": heading.participant,
            "owns": ["rollouts", "sessions"],
            "state_schema": {"id": SCHEMA, "version": VERSION},
            "environments": [{"name": name, "state_version": "1"} for name in ENVIRONMENTS],
            "index": index,
            "counts": {state: cut.count(state) for state in ("turn", "finished", "restart")},
            "files": files,
        }
        data = json.dumps(manifest).encode("ascii")
        made.append(draft)
        _write_file(draft, data)
        publish(appear)
    except BaseException as error:
        for path in made:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise Refusal(
                "insufficient_storage" if full else "internal", f"Writing failed: {error.strerror}."
            ) from error
        raise
    size = len(data) + sum(file["bytes"] for file in files)
    return Written({"name": MANIFEST, "digest": digest_of(data), "bytes": len(data)}, index, len(files) + 1, size)


def _write_file(path: Path, data: bytes) -> None:
    """Create a file, write it and sync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading ---


def read(source: Path, wanted: Json, expected: Heading) -> Cut:
    """Verify every file of a directory and return the cut in it.

    Args:
        source: the directory.
        wanted: the `source` of the restore.
        expected: whose cut it has to be.

    Raises:
        Refusal: `checkpoint_corrupt`, `state_mismatch` or `state_incompatible`.
    """
    data = _read_file(source, MANIFEST)
    if digest_of(data) != wanted["manifest_digest"]:
        raise _corrupt(MANIFEST, "has another digest than the restore names")
    try:
        manifest = json.loads(data)
        schema, files = manifest["state_schema"], list(manifest["files"])
        claimed = Heading(manifest["run_id"], manifest["checkpoint_id"], manifest["participant"])
        named = {file["name"]: (file["bytes"], file["digest"], file["records"]) for file in files}
        flat = all(FLAT_NAME.fullmatch(name) for name in named) and MANIFEST not in named
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(MANIFEST, "cannot be parsed") from error
    if claimed.checkpoint_id != expected.checkpoint_id:
        raise Refusal("state_mismatch", f"The manifest is of checkpoint {claimed.checkpoint_id}.", {"rollouts": []})
    if claimed != expected:
        raise Refusal("state_incompatible", "The source is of another run or participant.")
    if schema != {"id": SCHEMA, "version": VERSION}:
        raise Refusal("state_incompatible", "The source has a state schema that is not read here.")
    if not flat or not {INDEX, RESULTS, TOMBSTONES} <= named.keys():
        raise _corrupt(MANIFEST, "does not name the files of a cut")
    records = {name: _read_records(source, name, facts) for name, facts in named.items()}
    for number, row in enumerate(records[INDEX], 1):
        _parsed(INDEX, number, lambda row: (row["rollout_id"], row["attempt"], row["state"], row["turns_done"]), row)
    results = [_parsed(RESULTS, n, _result, row) for n, row in enumerate(records[RESULTS], 1)]
    stones = [_parsed(TOMBSTONES, n, _tombstone, row) for n, row in enumerate(records[TOMBSTONES], 1)]
    return Cut(tuple(records[INDEX]), tuple(results), tuple(stones))


def _corrupt(name: str, what: str) -> Refusal:
    return Refusal("checkpoint_corrupt", f"{name}: {what}")


def _read_file(source: Path, name: str) -> bytes:
    """Return a plain file directly in a directory; nothing else is opened for more than a look."""
    try:
        descriptor = os.open(source / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _corrupt(name, "is no plain file")
            return file.read()
    except OSError as error:
        raise _corrupt(name, f"cannot be read ({error.strerror})") from error


def _read_records(source: Path, name: str, facts: tuple[int, str, int]) -> list[Any]:
    size, digest, count = facts
    data = _read_file(source, name)
    if len(data) != size or "sha256:" + hashlib.sha256(data).hexdigest() != digest:
        raise _corrupt(name, "differs from its manifest")
    lines = data.splitlines()
    if len(lines) != count:
        raise _corrupt(name, f"has {len(lines)} records, not {count}")
    return [_parsed(name, number, json.loads, line) for number, line in enumerate(lines, 1)]


def _parsed(name: str, number: int, parse: Callable[[Any], Any], record: Any) -> Any:
    try:
        return parse(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(name, f"record {number} cannot be parsed") from error


def _result(record: Json) -> Result:
    result = Result.of(record["result"], sequence=0, effects=record["effects"], version=record["version"])
    if result.receipt != record["receipt"]:
        raise ValueError("the receipt is of another result")
    return result


def _tombstone(record: Json) -> tuple[str, Tombstone]:
    return record["hash"], Tombstone(record["attempt"], record["digest"], record["final"])
