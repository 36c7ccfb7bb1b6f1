# SPDX-License-Identifier: Apache-2.0
"""Where RL goes on after a crash: with its ledger, a snapshot, the fallback marker, or nothing; and what that drops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from reference_rl import queries, transitions
from reference_rl.errors import SnapshotDamaged
from reference_rl.ledger import Ledger, open_copy
from reference_rl.records import RolloutRow
from reference_rl.snapshots import LEDGER_FILE, RL_PART, Snapshot, SnapshotStore
from spec import messages, wire

_NOTHING: Final = wire.CheckpointId(0, 0)
"""An upper limit below every snapshot."""


@dataclass(frozen=True)
class RestartPoint:
    """Where RL goes on.

    Attributes:
        how: with the ledger's own training state, a snapshot's, the fallback marker's, or none.
        step: the trainer's step there.
        weights_version: the weights version there.
        snapshot: the snapshot chosen for RL.
        refused: what was passed over, and why.
    """

    how: Literal["ledger", "snapshot", "marker", "clean"]
    step: int
    weights_version: int
    snapshot: Snapshot | None = None
    refused: tuple[str, ...] = ()

    @property
    def limit(self) -> wire.CheckpointId | None:
        """Return the id above which no snapshot is used for a Gym; ``None`` for no limit."""
        if self.how not in ("snapshot", "ledger"):
            return _NOTHING
        return self.snapshot.checkpoint_id if self.snapshot is not None else None

    def left_out(self, alias: str) -> dict[str, str]:
        """Return the rollouts that the snapshot lists because their Gym was left out of it, each with that reason."""
        restarts = self.snapshot.restarts() if self.snapshot is not None else {}
        return {
            rollout_id: "its Gym was left out of the snapshot"
            for (gym, rollout_id), record in restarts.items()
            if gym == alias and record.reason == "left_out"
        }


@dataclass(frozen=True)
class Rollback:
    """How training goes back to a restart point.

    Attributes:
        consumed: rollout → step, as it will be.
        dropped: rollouts whose result the salvage rule does not keep; they run again.
        needed: whether anything changes at all.
        salvaged: how many results that came after the cut are kept.
    """

    point: RestartPoint
    consumed: Mapping[str, int]
    dropped: frozenset[str]
    needed: bool
    salvaged: int = 0


class Meeting:
    """Where several Gyms wait for each other: the work is done once, when all that are still coming have arrived.

    Args:
        parties: how many are coming.
        work: what is done when they are there.
    """

    def __init__(self, parties: int, work: Callable[[], Awaitable[None]]) -> None:
        self._coming = parties
        self._work = work
        self._lock = asyncio.Lock()
        self._done = asyncio.Event()
        self._waiting = 0

    async def arrive(self) -> None:
        """Return when the work is done."""
        self._waiting += 1
        try:
            await self._maybe_work()
            await self._done.wait()
        finally:
            self._waiting -= 1

    async def leave(self) -> None:
        """Say that one party comes no more."""
        self._coming -= 1
        await self._maybe_work()

    async def _maybe_work(self) -> None:
        async with self._lock:
            if not self._done.is_set() and self._waiting and self._waiting >= self._coming:
                await self._work()
                self._done.set()


def choose_point(ledger: Ledger, store: SnapshotStore, *, trainer_survives: bool) -> RestartPoint:
    """Return where RL goes on: the newest snapshot whose RL part verifies, the marker where that is newer, or nothing.

    Requirements: CKPT-RESTART-012, CKPT-RESTART-016, CKPT-RESTART-018, CKPT-RESTART-061, CKPT-SNAP-034.
    """
    step, weights = ledger.read(queries.trainer)
    if trainer_survives:
        return RestartPoint("ledger", step, weights)
    refused: list[str] = []
    snapshot: Snapshot | None = None
    for checkpoint_id in store.ids():
        try:
            snapshot = store.verify(checkpoint_id, RL_PART)
            break
        except SnapshotDamaged as error:
            refused.append(f"{checkpoint_id}: {error}")
    marker = _marker(store, refused)
    saved_step = (snapshot.manifest.trainer_step or 0) if snapshot is not None else -1
    if marker is not None and marker.trainer_step > saved_step:
        return RestartPoint("marker", marker.trainer_step, marker.weights_version, None, tuple(refused))
    if snapshot is not None:
        manifest = snapshot.manifest
        return RestartPoint("snapshot", saved_step, manifest.weights_version or 0, snapshot, tuple(refused))
    return RestartPoint("clean", 0, 0, None, tuple(refused))


def _marker(store: SnapshotStore, refused: list[str]) -> messages.FallbackMarker | None:
    try:
        return store.marker()
    except SnapshotDamaged as error:
        refused.append(str(error))
        return None


async def plan_rollback(ledger: Ledger, point: RestartPoint, salvage: str) -> Rollback:
    """Choose what RL goes back to, and what is salvaged: before the lists of any restore are made.

    Requirements: CKPT-RESTART-044…049.
    """
    step, _ = ledger.read(queries.trainer)
    consumed = ledger.read(queries.consumption)
    if point.how == "ledger":
        return Rollback(point, consumed, frozenset(), needed=False)
    facts: set[str] = set()
    wanted: dict[str, int] = {}
    if point.snapshot is not None:
        con = open_copy(point.snapshot.path / LEDGER_FILE)
        try:
            wanted = queries.consumption(con)
            saved_results = queries.result_rows(con)
            saved_attempts = {row.rollout_id: row.attempt for row in queries.rollouts(con)}
        finally:
            con.close()
        facts = {str(row["rollout_id"]) for row in saved_results}
        await ledger.do(transitions.merge_results, saved_results, saved_attempts)
    elif point.how == "marker":
        wanted = {rollout_id: at for rollout_id, at in consumed.items() if at <= point.step}
    if step == point.step and wanted == consumed:
        return Rollback(point, wanted, frozenset(), needed=False)
    dropped: frozenset[str] = frozenset()
    if salvage == "weights":
        newer = ledger.read(queries.results_newer_than, point.weights_version)
        dropped = frozenset(newer) - facts - wanted.keys()
    after = ledger.read(queries.result_receipts).keys() - facts if point.snapshot is not None else set()
    return Rollback(point, wanted, dropped, needed=True, salvaged=len(after - dropped))


def rollouts_to_redo(ledger: Ledger, rollback: Rollback, aliases: Collection[str]) -> frozenset[str]:
    """Return every sibling of the unfinished groups of granularity ``prompt_group`` in some Gyms.

    A group of which nothing was ever sent has nothing to redo, and one that training has consumed is finished.

    Args:
        ledger: the run's ledger.
        rollback: what will be consumed, and which results will not be kept.
        aliases: the Gyms that are not adopted.

    Requirements: CKPT-RESTART-060.
    """
    wanted = ledger.read(queries.prompt_groups)
    groups: dict[int, list[RolloutRow]] = {}
    for row in ledger.read(queries.rollouts):
        if row.group in wanted and row.gym in aliases:
            groups.setdefault(row.group, []).append(row)
    found: set[str] = set()
    for rows in groups.values():
        is_open = any(row.state == "unfinished" or row.rollout_id in rollback.dropped for row in rows)
        is_begun = any(row.sent or row.state != "unfinished" for row in rows)
        if is_open and is_begun and not any(row.rollout_id in rollback.consumed for row in rows):
            found |= {row.rollout_id for row in rows}
    return frozenset(found)
