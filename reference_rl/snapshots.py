# SPDX-License-Identifier: Apache-2.0
"""Snapshots on disk: drafts, publication, verification, order, retention, the fallback marker.

snapshots/<epoch>-<sequence>.tmp/      a draft; invisible to every reader
snapshots/<epoch>-<sequence>/          published: renamed in one step, never replacing, `manifest.json` written last
snapshots/.trash/                      what retention and foreign drafts leave; emptied later
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pydantic import ValidationError

from reference_rl import failpoints
from reference_rl.errors import SettingsError, SnapshotDamaged, SnapshotError, SnapshotExists
from reference_rl.sealed import seal
from reference_rl.verification import (
    check_file,
    check_participant,
    check_records,
    file_digest,
    read_index,
    read_plain,
    unsealed,
    valid,
)
from spec import durable, wire
from spec.messages import FallbackMarker, IndexRecord, RestartRecord, SnapshotManifest

SCHEMA_VERSION: Final = 1
"""Version of the controller's own files in a snapshot."""

MANIFEST: Final = "manifest.json"
LEDGER_FILE: Final = "rl/ledger.sqlite"
REPLAY_FILE: Final = "rl/replay-index.json"
TRAINER_FILE: Final = "rl/trainer.json"
ROWS_FILE: Final = "dataplane/rows.jsonl"
RESTARTS_FILE: Final = "restarts.jsonl"
MARKER: Final = "gym-restart-fallback.json"

RL_PART: Final = ""
"""Names, where a part of a snapshot is meant, everything that belongs to no Gym."""

_TRASH = ".trash"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a snapshot: its path below the directory, size in bytes, digest."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class Snapshot:
    """A published snapshot whose manifest was read and whose files were verified."""

    path: Path
    checkpoint_id: wire.CheckpointId
    manifest: SnapshotManifest

    def gym(self, alias: str) -> Any | None:
        """Return the entry of one Gym if its cuts are in."""
        return next((g for g in self.manifest.gyms if g.alias == alias and g.included), None)

    def participant_dir(self, alias: str, participant: str) -> Path:
        """Return the directory of one participant's cut."""
        return self.path / "gym" / alias / participant

    def index(self, alias: str, participant: str) -> dict[str, IndexRecord]:
        """Return a participant's index by rollout."""
        entry = next(p for p in self.gym(alias).participants if p.name == participant)  # type: ignore[union-attr] # callers ask for what is in
        return read_index(self.participant_dir(alias, participant) / entry.index.name)

    def restarts(self) -> dict[tuple[str, str], RestartRecord]:
        """Return what a restart from this snapshot begins at turn 1, by (gym, rollout)."""
        lines = read_plain(self.path / RESTARTS_FILE).split(b"\n")[:-1]
        records = (RestartRecord.read(line) for line in lines)
        return {(record.gym, record.rollout_id): record for record in records}


class Draft:
    """A snapshot that is being written; nothing reads it before :meth:`SnapshotStore.publish`."""

    def __init__(self, path: Path, checkpoint_id: wire.CheckpointId) -> None:
        self.path = path
        self.checkpoint_id = checkpoint_id
        self._entries: dict[str, FileEntry] = {}

    def directory(self, *parts: str) -> Path:
        """Make a directory, with its parents, below the draft and return it."""
        path = self.path
        for part in parts:
            path = path / part
            if not path.is_dir():
                durable.make_dir(path)
        return path

    def write(self, name: str, data: bytes) -> None:
        """Write and sync one file of the controller."""
        *parents, _ = name.split("/")
        self.directory(*parents)
        durable.write_file(self.path / name, data)
        self._entries[name] = FileEntry(name, len(data), wire.bytes_digest(data))

    def add(self, name: str) -> None:
        """Register a file that was written and synced by somebody else."""
        path = self.path / name
        self._entries[name] = FileEntry(name, path.stat().st_size, file_digest(path))

    def name_file(self, entry: FileEntry) -> None:
        """Register a file whose size and digest a participant's manifest states."""
        self._entries[entry.path] = entry

    @property
    def files(self) -> list[dict[str, Any]]:
        """Return the entries for the manifest, sorted by path."""
        return [{"path": e.path, "bytes": e.bytes, "digest": e.digest} for _, e in sorted(self._entries.items())]


class SnapshotStore:
    """The snapshots of one run.

    Args:
        root: the directory ``snapshots`` of the run; created when missing.
        run_id: snapshots of another run are refused.
        marker_dir: where the fallback marker lives, the run directory.

    Raises:
        SettingsError: the file system cannot rename without replacing; the text says so.

    Requirements: CKPT-SNAP-020…024, CKPT-SNAP-028…031, CKPT-SNAP-035, CKPT-SNAP-042, CKPT-SNAP-045, CKPT-SEC-015,
    CKPT-SEC-016.
    """

    def __init__(self, root: Path, run_id: str, marker_dir: Path | None = None) -> None:
        self._take(root, run_id, marker_dir)
        if not root.is_dir():
            durable.make_dir(root)
        if not self._trash.is_dir():
            durable.make_dir(self._trash)
        self._probe()

    @classmethod
    def reading(cls, root: Path, run_id: str, marker_dir: Path | None = None) -> Self:
        """Return a store to look at: nothing is created or tried out, and no directory need be there."""
        store = cls.__new__(cls)
        store._take(root, run_id, marker_dir)
        return store

    def _take(self, root: Path, run_id: str, marker_dir: Path | None) -> None:
        self.root = root
        self.run_id = run_id
        self._marker_dir = marker_dir or root.parent
        self._trash = root / _TRASH

    def sweep(self) -> list[str]:
        """Rename every draft away, so that an older controller's late rename fails; return their names."""
        swept = []
        for path in sorted(self.root.glob("*.tmp")):
            with contextlib.suppress(FileNotFoundError):
                self._discard(path)
                swept.append(path.name)
        return swept

    def empty_trash(self) -> None:
        """Delete what retention and sweeping left; failures are left for the next time."""
        for path in self._trash.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def begin(self, checkpoint_id: wire.CheckpointId) -> Draft:
        """Open a draft.

        Raises:
            SnapshotExists: the id was used before.
        """
        if (self.root / str(checkpoint_id)).exists():
            raise SnapshotExists(f"{checkpoint_id} is published already")
        path = self.root / f"{checkpoint_id}.tmp"
        try:
            durable.make_dir(path)
        except FileExistsError:
            raise SnapshotExists(f"{path.name} exists already") from None
        return Draft(path, checkpoint_id)

    def publish(self, draft: Draft, manifest: Mapping[str, Any]) -> Snapshot:
        """Sync everything, write the manifest, rename: the snapshot exists when this returns.

        Raises:
            SnapshotExists: something is at the final name; nothing was replaced.
            SnapshotError: the manifest does not fit its own schema.
            OSError: writing failed; the draft is still there.

        Requirements: CKPT-SNAP-017…019, CKPT-SNAP-037…040.
        """
        content = {
            "protocol_version": wire.PROTOCOL_VERSION,
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "checkpoint_id": str(draft.checkpoint_id),
            **manifest,
            "files": draft.files,
        }
        try:
            parsed = SnapshotManifest.of(content)
        except ValidationError as error:
            raise SnapshotError(f"the manifest is not one: {error}") from error
        for directory, _, _ in os.walk(draft.path, topdown=False):
            durable.sync_dir(Path(directory))
        durable.write_file(draft.path / MANIFEST, seal(content))
        durable.sync_dir(draft.path)
        failpoints.hit("snapshot.manifest_written")
        final = self.root / str(draft.checkpoint_id)
        try:
            durable.rename_noreplace(draft.path, final)
        except FileExistsError:
            raise SnapshotExists(f"something is at {final.name} already") from None
        failpoints.hit("snapshot.renamed")
        return Snapshot(final, draft.checkpoint_id, parsed)

    def discard(self, draft: Draft) -> None:
        """Remove a draft that will not be published."""
        with contextlib.suppress(OSError):
            self._discard(draft.path)

    def ids(self) -> list[wire.CheckpointId]:
        """Return the published ids, the newest first, ordered as numbers; nothing is opened."""
        found: list[wire.CheckpointId] = []
        if not self.root.is_dir():
            return found
        for entry in self.root.iterdir():
            with contextlib.suppress(ValueError):
                checkpoint_id = wire.parse_checkpoint_id(entry.name)
                if entry.is_dir() and not entry.is_symlink():
                    found.append(checkpoint_id)
        return sorted(found, reverse=True)

    def read(self, checkpoint_id: wire.CheckpointId) -> Snapshot:
        """Return a snapshot by its manifest alone; the other files are not looked at.

        Raises:
            SnapshotDamaged: the manifest is damaged, of another run, or of another id.
        """
        path = self.root / str(checkpoint_id)
        content = unsealed(path / MANIFEST, MANIFEST)
        if content.get("schema_version") != SCHEMA_VERSION:
            raise SnapshotDamaged(MANIFEST, f"schema version {content.get('schema_version')} is not readable here")
        manifest = valid(SnapshotManifest, content, MANIFEST)
        if manifest.run_id != self.run_id:
            raise SnapshotDamaged(MANIFEST, f"it belongs to run {manifest.run_id!r}, not to {self.run_id!r}")
        if manifest.checkpoint_id != str(checkpoint_id):
            raise SnapshotDamaged(MANIFEST, f"it is the manifest of {manifest.checkpoint_id}")
        return Snapshot(path, checkpoint_id, manifest)

    def verify(self, checkpoint_id: wire.CheckpointId, part: str | None = None) -> Snapshot:
        """Return a snapshot after every byte of it, or of one part of it, was checked.

        Args:
            checkpoint_id: which one.
            part: the alias of a Gym: its cuts, and what the snapshot says about its rollouts; ``RL_PART``: what
                belongs to no Gym; ``None``: everything.

        Raises:
            SnapshotDamaged: naming the first file, and record where there is one, that is missing or altered.

        Requirements: CKPT-RESTART-016, CKPT-RESTART-017.
        """
        snapshot = self.read(checkpoint_id)
        named = {entry.path: entry for entry in snapshot.manifest.files}
        for required in (LEDGER_FILE, REPLAY_FILE, TRAINER_FILE, ROWS_FILE, RESTARTS_FILE):
            if required not in named:
                raise SnapshotDamaged(required, "the manifest does not name it")
        for entry in snapshot.manifest.files:
            if part is None or entry.path == RESTARTS_FILE or _part_of(entry.path) == part:
                check_file(snapshot.path / entry.path, entry.path, entry.bytes, entry.digest)
        for gym in snapshot.manifest.gyms:
            for participant in gym.participants if part in (None, gym.alias) else ():
                check_participant(snapshot, gym.alias, participant, named)
        check_records(snapshot.path / RESTARTS_FILE, RESTARTS_FILE, RestartRecord)
        return snapshot

    def retain(self, keep: int, aliases: Iterable[str]) -> list[wire.CheckpointId]:
        """Move all but the last ``keep`` snapshots to the trash; return what went.

        The newest one that holds a Gym's cuts stays in any case: an RL-only snapshot that is newer does not replace it.
        """
        ids = self.ids()
        needed = set(ids[:keep])
        wanted = set(aliases)
        for checkpoint_id in ids:
            if not wanted:
                break
            with contextlib.suppress(SnapshotDamaged):
                held = {gym.alias for gym in self.read(checkpoint_id).manifest.gyms if gym.included}
                if held & wanted:
                    needed.add(checkpoint_id)
                    wanted -= held
        gone = [checkpoint_id for checkpoint_id in ids if checkpoint_id not in needed]
        for checkpoint_id in gone:
            self._discard(self.root / str(checkpoint_id))
        return gone

    def write_marker(self, marker: Mapping[str, Any]) -> None:
        """Publish the fallback marker; the one before is replaced.

        Requirements: CKPT-SNAP-033, CKPT-SNAP-043, CKPT-SNAP-044.
        """
        content = {
            "protocol_version": wire.PROTOCOL_VERSION,
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "action": "start_at_turn_1",
            **marker,
        }
        FallbackMarker.of(content)
        durable.publish_file(self._marker_dir / MARKER, seal(content))

    def marker(self) -> FallbackMarker | None:
        """Return the fallback marker, or ``None`` when there is none.

        Raises:
            SnapshotDamaged: it is damaged or another run's.
        """
        path = self._marker_dir / MARKER
        if not path.exists():
            return None
        marker: FallbackMarker = valid(FallbackMarker, unsealed(path, MARKER), MARKER)
        if marker.run_id != self.run_id:
            raise SnapshotDamaged(MARKER, f"it belongs to run {marker.run_id!r}, not to {self.run_id!r}")
        return marker

    def _discard(self, path: Path) -> None:
        # First out of sight in one step, then removed at leisure: a crash in between leaves no half directory in sight.
        away = self._trash / f"{path.name}.{uuid.uuid4().hex}"
        path.rename(away)
        durable.sync_dir(self.root)
        shutil.rmtree(away, ignore_errors=True)

    def _probe(self) -> None:
        # Told apart at the start, not in the middle of the first save.
        # Its own name each time: what a kill in the middle of this leaves must not be in the way of the next start.
        probe = self.root / f".probe.{uuid.uuid4().hex}"
        renamed = self._trash / probe.name
        try:
            durable.make_dir(probe)
            durable.write_file(probe / "content", b"")
            durable.rename_noreplace(probe, renamed)
        except OSError as error:
            raise SettingsError(
                f"{self.root}: this file system cannot publish snapshots: "
                f"a directory cannot be renamed in one step ({error})"
            ) from error
        finally:
            shutil.rmtree(probe, ignore_errors=True)
            shutil.rmtree(renamed, ignore_errors=True)


def _part_of(path: str) -> str:
    """Return the alias of the Gym to which a file of a snapshot belongs, or ``RL_PART``."""
    first, *rest = path.split("/")
    return rest[0] if first == "gym" and rest else RL_PART
