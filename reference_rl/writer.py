# SPDX-License-Identifier: Apache-2.0
"""The RL side's half of a snapshot: ledger, replay index, token rows, restarts, manifest."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reference_rl import queries
from reference_rl.capture import DurableCut
from reference_rl.crosscheck import Cut, Restart, cross_check
from reference_rl.dataplane import DataPlane, RowKey, export_rows
from reference_rl.deployment import Deployment
from reference_rl.errors import SnapshotDamaged, SnapshotFailed
from reference_rl.ledger import Ledger, open_copy
from reference_rl.rows import rows_of_cut, rows_of_results
from reference_rl.snapshots import (
    LEDGER_FILE,
    REPLAY_FILE,
    RESTARTS_FILE,
    ROWS_FILE,
    TRAINER_FILE,
    Draft,
    FileEntry,
    Snapshot,
    SnapshotStore,
)
from reference_rl.verification import read_index, read_participant_manifest, read_plain
from spec import wire
from spec.messages import IndexRecord, IndexRef, ManifestRef


class SnapshotWriter:
    """Writes what the controller itself contributes to one draft, and its manifest.

    Attributes:
        revision: the revision of the ledger that was captured.

    Requirements: CKPT-SNAP-009…016.
    """

    def __init__(self, draft: Draft, ledger: Ledger, plane: DataPlane, store: SnapshotStore) -> None:
        self.revision = -1
        self._draft = draft
        self._ledger = ledger
        self._plane = plane
        self._store = store
        self._step = (0, 0)
        self._restarts: list[dict[str, Any]] = []
        self._rows = 0

    async def capture_ledger(self) -> None:
        """Flush the data plane, then copy the ledger: always after the last capture of a Gym."""
        await self._plane.flush()
        await asyncio.to_thread(self._copy_ledger)

    def _copy_ledger(self) -> None:
        self._draft.directory("rl")
        path = self._draft.path / LEDGER_FILE
        self.revision = self._ledger.copy_to(path)
        self._draft.add(LEDGER_FILE)
        con = open_copy(path)
        try:
            self._step = queries.trainer(con)
            self._draft.write(REPLAY_FILE, _lines([queries.replay_index(con)]))
        finally:
            con.close()
        step, weights_version = self._step
        self._draft.write(TRAINER_FILE, _lines([{"step": step, "weights_version": weights_version}]))

    async def assemble(self, cuts: Sequence[DurableCut], gyms: Iterable[Deployment]) -> dict[str, Any]:
        """Check the cuts against each other, save the token rows that they name, and return the manifest.

        Args:
            cuts: what every participant that is in reported as durable.
            gyms: every Gym of the run, those that were left out included.

        Raises:
            SnapshotFailed: a cut is not what its participant reported.
        """
        for cut in cuts:
            if not cut.member.participant.by_file:
                await self._fetch(cut)
        return await asyncio.to_thread(self._assemble, cuts, list(gyms), await self._plane_rows(cuts))

    def publish(self, manifest: Mapping[str, Any]) -> Snapshot:
        """Publish the draft."""
        return self._store.publish(self._draft, manifest)

    def metrics(self) -> dict[str, Any]:
        """Return what was written."""
        return {
            "step": self._step[0],
            "restarts": len(self._restarts),
            "token_rows": self._rows,
            "files": len(self._draft.files),
        }

    def _assemble(self, cuts: Sequence[DurableCut], gyms: Sequence[Deployment], rows: int) -> dict[str, Any]:
        self._rows = rows
        self._draft.add(ROWS_FILE)
        indexes = {cut.member.key: self._take_cut(cut) for cut in cuts}
        entries = []
        for gym in gyms:
            members = [cut for cut in cuts if cut.member.gym is gym]
            if members:
                checked = cross_check(
                    Cut(
                        cut.member.participant.name,
                        cut.member.participant.owns("rollouts"),
                        frozenset(gym.continuing_environments(cut.member.participant)),
                        indexes[cut.member.key],
                    )
                    for cut in members
                )
                self._restarts += [_restart_line(gym.alias, restart) for restart in checked]
            else:
                self._restarts += self._left_out(gym.alias)
            entries.append(
                {
                    "alias": gym.alias,
                    "included": bool(members),
                    "participants": [_participant_entry(cut) for cut in members],
                }
            )
        self._draft.write(RESTARTS_FILE, _lines(self._restarts))
        step, weights_version = self._step
        return {
            "trainer_step": step,
            "weights_version": weights_version,
            "gyms": entries,
            "restart_count": len(self._restarts),
        }

    def _take_cut(self, cut: DurableCut) -> dict[str, IndexRecord]:
        alias, name = cut.member.key
        reply = cut.reply
        if reply.manifest is None or reply.index is None:
            raise SnapshotFailed("durable", f"{name} reports a durable cut without its manifest", name)
        prefix = f"gym/{alias}/{name}"
        try:
            return self._take_files(prefix, reply.manifest, reply.index)
        except (SnapshotDamaged, OSError) as error:
            raise SnapshotFailed("cross-check", f"the cut of {alias}/{name}: {error}", f"{alias}/{name}") from error

    def _take_files(self, prefix: str, reported: ManifestRef, index: IndexRef) -> dict[str, IndexRecord]:
        path = self._draft.path / prefix / reported.name
        manifest = read_participant_manifest(path, f"{prefix}/{reported.name}")
        data = read_plain(path)
        if (len(data), wire.bytes_digest(data)) != (reported.bytes, reported.digest):
            raise SnapshotDamaged(path.name, "it is not the manifest that the participant reported")
        self._draft.name_file(FileEntry(f"{prefix}/{reported.name}", len(data), reported.digest))
        for file in manifest.files:
            size = (path.parent / file.name).stat().st_size
            if size != file.bytes:
                raise SnapshotDamaged(file.name, f"it has {size} bytes, its manifest says {file.bytes}")
            self._draft.name_file(FileEntry(f"{prefix}/{file.name}", file.bytes, file.digest))
        return read_index(path.parent / index.name)

    async def _fetch(self, cut: DurableCut) -> None:
        # Feature artifacts_http: the files are with the participant; the manifest says which.
        alias, name = cut.member.key
        client, reply = cut.member.participant.client, cut.reply
        if reply.manifest is None:
            raise SnapshotFailed("durable", f"{name} reports a durable cut without its manifest", name)
        checkpoint_id, prefix = str(self._draft.checkpoint_id), f"gym/{alias}/{name}"
        data = await client.get_artifact(checkpoint_id, reply.manifest.name)
        await asyncio.to_thread(self._draft.write, f"{prefix}/{reply.manifest.name}", data)
        manifest = read_participant_manifest(
            self._draft.path / prefix / reply.manifest.name, f"{prefix}/{reply.manifest.name}"
        )
        for file in manifest.files:
            content = await client.get_artifact(checkpoint_id, file.name)
            if wire.bytes_digest(content) != file.digest:
                raise SnapshotFailed("fetch", f"{alias}/{name}/{file.name} is not what its manifest says", name)
            await asyncio.to_thread(self._draft.write, f"{prefix}/{file.name}", content)

    async def _plane_rows(self, cuts: Sequence[DurableCut]) -> int:
        keys: set[RowKey] = set()
        listed = await self._plane.list()
        con = open_copy(self._draft.path / LEDGER_FILE)
        try:
            keys |= rows_of_results(con, listed)
            for cut in cuts:
                if cut.member.participant.owns("rollouts") and cut.reply.index is not None:
                    path = self._draft.path / "gym" / cut.member.gym.alias / cut.member.participant.name
                    index = await asyncio.to_thread(read_index, path / cut.reply.index.name)
                    keys |= rows_of_cut(con, index.values(), listed)
        except (SnapshotDamaged, OSError, sqlite3.Error) as error:
            raise SnapshotFailed("cross-check", str(error)) from error
        finally:
            con.close()
        self._draft.directory("dataplane")
        return await export_rows(self._plane, keys, self._draft.path / ROWS_FILE)

    def _left_out(self, alias: str) -> list[dict[str, Any]]:
        con = open_copy(self._draft.path / LEDGER_FILE)
        try:
            rows = queries.unfinished(con, alias)
        finally:
            con.close()
        detail = "the Gym was not part of this snapshot"
        return [
            {
                "gym": alias,
                "rollout_id": row.rollout_id,
                "attempt": row.attempt,
                "reason": "left_out",
                "turns_done": 0,
                "detail": detail,
            }
            for row in rows
        ]


def _participant_entry(cut: DurableCut) -> dict[str, Any]:
    participant, capabilities = cut.member.participant, cut.member.participant.capabilities
    assert cut.reply.manifest is not None
    assert cut.reply.index is not None
    return {
        "name": participant.name,
        "incarnation": participant.incarnation,
        "owns": list(capabilities.owns),
        "stage": capabilities.stage,
        "state_schema": {"id": capabilities.state_schema.id, "version": capabilities.state_schema.version},
        "environments": [
            {"name": e.name, "state_version": e.state_version}
            for e in capabilities.environments
            if e.continuation == "export_restore"
        ],
        "manifest": cut.reply.manifest.to_object(),
        "index": cut.reply.index.to_object(),
    }


def _restart_line(alias: str, restart: Restart) -> dict[str, Any]:
    return {
        "gym": alias,
        "rollout_id": restart.rollout_id,
        "attempt": restart.attempt,
        "reason": restart.reason,
        "turns_done": restart.turns_done,
        "detail": restart.detail,
    }


def _lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(record, sort_keys=True).encode() + b"\n" for record in records)
