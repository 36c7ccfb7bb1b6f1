# SPDX-License-Identifier: Apache-2.0
"""One Gym brought back: adopted as it lives, restored from a snapshot, or reset for a clean start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reference_rl import failpoints, queries, transitions
from reference_rl.control import Leases, Tenure, abort_everywhere
from reference_rl.deployment import Deployment, Outcome, Participant, differences, everywhere, raise_first
from reference_rl.errors import (
    Incompatible,
    InvariantViolated,
    RecoveryFailed,
    Refused,
    RlError,
    SnapshotDamaged,
    Superseded,
)
from reference_rl.events import Events
from reference_rl.ledger import Ledger
from reference_rl.living import Fated, GymReport, Living
from reference_rl.records import Receipt, Reservation
from reference_rl.restore_plan import RestorePlan, SavedGym, plan_restore
from reference_rl.snapshots import Snapshot, SnapshotStore
from spec import messages, wire


@dataclass(frozen=True, slots=True)
class RestoreLimits:
    """How a restore is tried: limits in milliseconds, tries in all, and the wait between them in seconds."""

    timeout_ms: int = 60_000
    lease_ms: int = 60_000
    tries: int = 5
    pause_s: float = 0.5


@dataclass
class RestoreWish:
    """What a restore has to respect, and what its failed tries have taught.

    Attributes:
        not_newer: no snapshot above this one is used.
        dropped: rollouts whose saved result will not be kept: they count as unfinished.
        restarts: rollout → why the snapshot chosen for RL says that it starts at turn 1.
        forced: rollout → why a failed try says so.
        highest: rollout → the highest attempt that any participant showed.
    """

    not_newer: wire.CheckpointId | None = None
    dropped: frozenset[str] = frozenset()
    restarts: Mapping[str, str] = field(default_factory=dict)
    forced: dict[str, str] = field(default_factory=dict)
    highest: dict[str, int] = field(default_factory=dict)


class Restorer:
    """Brings Gyms back, one at a time or together.

    Args:
        tenure: claim and ids of this controller.
        living: how a Gym that lives is read and told.
        ledger: the run's ledger.
        store: the snapshots.
        events: where what happened is written.
        policy: the policy address that continued rollouts call.
        limits: how a restore is tried.
        snapshot_dirs: alias → the path under which that Gym sees the directory of the store.

    Requirements: CKPT-RESTORE-049, CKPT-RESTORE-051, CKPT-STAGE-006, CKPT-RESTART-012, CKPT-RESTART-014,
    CKPT-RESTART-015, CKPT-RESTART-017, CKPT-RESTART-032, CKPT-RESTART-038…041, CKPT-RESTART-052, CKPT-DUTY-022.
    """

    def __init__(
        self,
        tenure: Tenure,
        living: Living,
        ledger: Ledger,
        store: SnapshotStore,
        events: Events,
        policy: Mapping[str, str],
        limits: RestoreLimits,
        *,
        snapshot_dirs: Mapping[str, str] | None = None,
    ) -> None:
        self._tenure = tenure
        self._living = living
        self._ledger = ledger
        self._store = store
        self._events = events
        self._policy = dict(policy)
        self._limits = limits
        self._snapshot_dirs = dict(snapshot_dirs or {})

    # --- restore ----------------------------------------------------------------------------------------------

    def saved_gym(self, gym: Deployment, not_newer: wire.CheckpointId | None, report: GymReport) -> Snapshot | None:
        """Return the newest compatible snapshot in which this Gym's part verifies; what is passed over is reported."""
        for checkpoint_id in self._store.ids():
            if not_newer is not None and checkpoint_id > not_newer:
                continue
            try:
                if self._store.read(checkpoint_id).gym(gym.alias) is None:
                    continue
                snapshot = self._store.verify(checkpoint_id, gym.alias)
            except SnapshotDamaged as error:
                report.refused.append(f"{checkpoint_id}: {error}")
                continue
            reasons = differences(snapshot.manifest, gym.alias, gym)
            if reasons:
                report.refused.append(f"{checkpoint_id}: {' '.join(reasons)}")
                continue
            return snapshot
        return None

    def plan(self, gym: Deployment, snapshot: Snapshot | None, wish: RestoreWish) -> RestorePlan:
        """Return what would happen to each rollout of a Gym; changes nothing."""
        surplus = [
            Receipt(s["rollout_id"], s["attempt"], s["digest"])
            for s in self._ledger.read(queries.surplus)
            if s["gym"] == gym.alias
        ]
        rows = self._ledger.read(queries.rollouts)
        wanted = [r for r in rows if r.gym == gym.alias and (r.state == "unfinished" or r.rollout_id in wish.dropped)]
        return plan_restore(
            wanted,
            None if snapshot is None else _saved(snapshot, gym, wish.restarts),
            owed=self._ledger.read(queries.debts, gym.alias),
            surplus=surplus,
            highest=wish.highest,
            forced=wish.forced,
        )

    async def restore(
        self,
        gym: Deployment,
        wish: RestoreWish,
        *,
        first_plan: tuple[RestorePlan, Snapshot | None, dict[str, int]] | None = None,
        report: GymReport | None = None,
        before_resume: Callable[[], Awaitable[None]] | None = None,
    ) -> GymReport:
        """Restore a whole Gym for exactly the rollouts that the ledger calls unfinished, and resume it.

        Args:
            gym: discovered, and obeying this controller.
            wish: what to respect; what failed tries teach is added to it.
            first_plan: a plan whose attempts were reserved already, together with the new epoch.
            report: continued when given.
            before_resume: called when every participant is restored and still paused.

        Raises:
            RecoveryFailed: no try succeeded; nothing of this Gym may be dispatched or saved.
        """
        report = report or GymReport(gym.alias, "restored")
        last: Exception | None = None
        for number in range(self._limits.tries):
            if first_plan is not None and number == 0:
                plan, snapshot, attempts = first_plan
            else:
                for rollout_id, attempt in (await self._living.highest_attempts(gym)).items():
                    wish.highest[rollout_id] = max(wish.highest.get(rollout_id, -1), attempt)
                snapshot = await asyncio.to_thread(self.saved_gym, gym, wish.not_newer, report)
                plan = await asyncio.to_thread(self.plan, gym, snapshot, wish)
                attempts = await self.reserve(gym, plan)
            try:
                failed = await self._install(gym, plan, snapshot, attempts, before_resume)
            except (Superseded, InvariantViolated):
                raise
            except RlError as error:
                last = error
                self._events.trouble("restore_failed", gym.alias, gym=gym.alias, reason=str(error), attempt=number + 1)
                self._learn(error, snapshot, wish, report)
                await self._look_again(gym)
                continue
            await self._redo(gym, failed, attempts)
            self._events.over(gym.alias)
            report.how = "restored" if snapshot is not None else "reset"
            report.snapshot_id = str(snapshot.checkpoint_id) if snapshot is not None else None
            report.rollouts += _fates(plan, attempts, failed)
            return report
        participant = getattr(last, "participant", None)
        raise RecoveryFailed(gym.alias, f"{self._limits.tries} restores failed, the last one: {last}", participant)

    async def reserve(self, gym: Deployment, plan: RestorePlan) -> dict[str, int]:
        """Reserve the attempts of a plan and open the restore in the ledger, in one transaction."""
        origin = f"restore of {plan.saved.snapshot_id}" if plan.saved else "reset"
        return await self._ledger.do(
            transitions.open_restore, gym.alias, self._tenure.epoch, plan.reservations(origin), plan.awaited()
        )

    async def _install(
        self,
        gym: Deployment,
        plan: RestorePlan,
        snapshot: Snapshot | None,
        attempts: Mapping[str, int],
        before_resume: Callable[[], Awaitable[None]] | None,
    ) -> dict[str, str]:
        checkpoint_id = str(self._tenure.next_id())
        failed: dict[str, str] = {}
        async with Leases(checkpoint_id, self._limits.lease_ms) as leases:

            async def restore_one(participant: Participant) -> messages.RestoreResponse:
                body = self._request(gym, participant, plan, snapshot, attempts, checkpoint_id)
                if body["source"] is not None and body["source"]["scheme"] == "http":
                    await self._upload(gym, participant, snapshot)
                leases.hold(participant)
                reply = await participant.client.restore(body, budget_s=self._limits.timeout_ms / 1000)
                _check_counts(participant, body, reply)
                return reply

            try:
                for stage in gym.stages(descending=True):
                    outcomes = await everywhere(stage, restore_one)
                    raise_first(outcomes)
                    for outcome in outcomes:
                        failed |= _cannot(outcome)
                failpoints.hit("restart.participants_restored")
                if before_resume is not None:
                    await before_resume()
                failpoints.hit("restart.ledger_restored")
                for stage in gym.stages(descending=True):
                    raise_first(await everywhere(stage, self._resumer(checkpoint_id, leases)))
            except BaseException:
                await leases.release_all()
                await asyncio.shield(abort_everywhere(gym.participants, checkpoint_id, self._limits.timeout_ms))
                raise
        failpoints.hit("restart.resumed")
        continued = [(r, a) for r, a in plan.continued(attempts) if r not in failed]
        await self._ledger.do(transitions.close_restore, gym.alias, gym.incarnations(), continued)
        failpoints.hit("restart.closed")
        return failed

    def _resumer(self, checkpoint_id: str, leases: Leases) -> Any:
        async def resume_one(participant: Participant) -> str | None:
            reply = await participant.client.resume(checkpoint_id, timeout_ms=self._limits.timeout_ms)
            await leases.release(participant)
            return reply.ended_as

        return resume_one

    def _request(
        self,
        gym: Deployment,
        participant: Participant,
        plan: RestorePlan,
        snapshot: Snapshot | None,
        attempts: Mapping[str, int],
        checkpoint_id: str,
    ) -> dict[str, Any]:
        source: dict[str, Any] | None = None
        if snapshot is not None:
            entry = next(p for p in snapshot.gym(gym.alias).participants if p.name == participant.name)  # type: ignore[union-attr] # chosen because it holds the Gym
            source = {"checkpoint_id": str(snapshot.checkpoint_id), "manifest_digest": entry.manifest.digest}
            if participant.by_file:
                source = {"scheme": "file", "path": self._path(gym, participant, snapshot), **source}
            else:
                source = {"scheme": "http", **source}
        return {
            "checkpoint_id": checkpoint_id,
            "run_id": self._store.run_id,
            "source": source,
            **plan.request(participant.name, attempts),
            "policy": self._policy,
            "timeout_ms": min(self._limits.timeout_ms, participant.capabilities.limits.max_wait_ms),
            "lease_ms": self._limits.lease_ms,
        }

    def _path(self, gym: Deployment, participant: Participant, snapshot: Snapshot) -> str:
        root = self._snapshot_dirs.get(gym.alias)
        if root is None:
            return str(snapshot.participant_dir(gym.alias, participant.name))
        return f"{root.rstrip('/')}/{snapshot.checkpoint_id}/gym/{gym.alias}/{participant.name}"

    async def _upload(self, gym: Deployment, participant: Participant, snapshot: Snapshot | None) -> None:
        assert snapshot is not None
        directory = snapshot.participant_dir(gym.alias, participant.name)
        for path in sorted(directory.iterdir()):
            data = await asyncio.to_thread(path.read_bytes)
            await participant.client.put_artifact(str(snapshot.checkpoint_id), path.name, data)

    async def _redo(self, gym: Deployment, failed: Mapping[str, str], attempts: Mapping[str, int]) -> None:
        if not failed:
            return
        await self._living.retire_everywhere(gym, [(r, attempts[r]) for r in failed])
        wishes = [Reservation(r, f"restart: {why}", attempts[r]) for r, why in failed.items()]
        await self._ledger.do(transitions.reserve, wishes, self._tenure.epoch)

    def _learn(self, error: RlError, snapshot: Snapshot | None, wish: RestoreWish, report: GymReport) -> None:
        """Take from a failed try what the next one must do differently."""
        if not isinstance(error, Refused):
            return
        named = error.problem.rollouts
        if error.code == "stale_attempt":
            for entry in named:
                fence = int(entry.get("through_attempt", -1))
                wish.highest[entry["rollout_id"]] = max(wish.highest.get(entry["rollout_id"], -1), fence)
        elif error.code == "state_mismatch" and named:
            for entry in named:
                wish.forced[entry["rollout_id"]] = f"{error.participant} found lists and files to disagree"
        elif error.code in _UNUSABLE and snapshot is not None:
            report.refused.append(f"{snapshot.checkpoint_id}: {error}")
            wish.not_newer = _before(snapshot.checkpoint_id)

    async def _look_again(self, gym: Deployment) -> None:
        await asyncio.sleep(self._limits.pause_s)
        names = [participant.name for participant in gym.participants]
        try:
            await gym.discover(names)
        except (Superseded, InvariantViolated):
            raise
        except (RlError, OSError, ValueError):
            return  # still away: the next try says so


_UNUSABLE = frozenset({"checkpoint_corrupt", "state_incompatible", "state_mismatch", "forbidden_target"})
"""Refusals that say that this snapshot will not do, whatever the lists are."""


def _before(checkpoint_id: wire.CheckpointId) -> wire.CheckpointId:
    if checkpoint_id.sequence > 0:
        return wire.CheckpointId(checkpoint_id.epoch, checkpoint_id.sequence - 1)
    return wire.CheckpointId(checkpoint_id.epoch - 1, 10**15)


def _saved(snapshot: Snapshot, gym: Deployment, extra_restarts: Mapping[str, str]) -> SavedGym:
    entry = snapshot.gym(gym.alias)
    assert entry is not None
    indexes = {p.name: snapshot.index(gym.alias, p.name) for p in entry.participants}
    owner = next(p.name for p in entry.participants if "rollouts" in p.owns)
    restarts = {
        rollout_id: f"the snapshot restarts it: {record.reason}"
        for (alias, rollout_id), record in snapshot.restarts().items()
        if alias == gym.alias
    }
    return SavedGym(str(snapshot.checkpoint_id), owner, indexes, {**restarts, **extra_restarts})


def _check_counts(participant: Participant, body: Mapping[str, Any], reply: messages.RestoreResponse) -> None:
    listed = len(body["rollouts"])
    if reply.restored_count + len(reply.restarts) != listed or reply.results_count != len(body["results"]):
        raise Incompatible(
            participant.client.name,
            [
                f"It was given {listed} rollouts and {len(body['results'])} results, and reports "
                f"{reply.restored_count} restored, {len(reply.restarts)} restarts and {reply.results_count} results."
            ],
        )


def _cannot(outcome: Outcome) -> dict[str, str]:
    reply = outcome.value
    assert isinstance(reply, messages.RestoreResponse)
    return {r.rollout_id: f"{outcome.participant.name} cannot continue it: {r.reason}" for r in reply.restarts}


def _fates(plan: RestorePlan, attempts: Mapping[str, int], failed: Mapping[str, str]) -> Iterable[Fated]:
    for fate in plan.fates:
        row = fate.row
        attempt = attempts.get(row.rollout_id, fate.saved_attempt if fate.saved_attempt is not None else row.attempt)
        if row.rollout_id in failed:
            reason = failed[row.rollout_id]
            yield Fated(row.rollout_id, row.group, row.sibling, "restarted", attempt + 1, 0, reason)
        else:
            yield Fated(row.rollout_id, row.group, row.sibling, fate.how, attempt, fate.turns_done, fate.reason)
