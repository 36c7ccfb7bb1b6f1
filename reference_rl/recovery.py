# SPDX-License-Identifier: Apache-2.0
"""The restart sequence: from whatever a crash left to a run that goes on.

Order: discover → claim an epoch → sweep foreign drafts, choose where RL goes on → become known everywhere → read what
living Gyms say → one ledger transaction with the epoch and every next attempt → data plane → participants (paused) →
ledger → resume. What is left is started by the dispatcher; token rows that nothing refers to go last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from reference_rl import failpoints, queries, transitions
from reference_rl.columns import Switches
from reference_rl.control import Tenure
from reference_rl.dataplane import DataPlane, import_rows
from reference_rl.deployment import Deployment
from reference_rl.errors import GymError, RecoveryFailed
from reference_rl.events import Events
from reference_rl.ledger import Ledger
from reference_rl.living import Fated, GymReport, Living
from reference_rl.office import Office
from reference_rl.records import Reservation, RolloutRow
from reference_rl.restart_point import Meeting, RestartPoint, Rollback, choose_point, plan_rollback, rollouts_to_redo
from reference_rl.restore_plan import RestorePlan
from reference_rl.restorer import Restorer, RestoreWish
from reference_rl.settings import RecoverySettings
from reference_rl.snapshots import ROWS_FILE, Snapshot, SnapshotStore
from reference_rl.unreferenced import delete_unreferenced

AGAIN_S: Final = 5.0
"""How long a Gym that was just found may be away again while snapshots wait for its recovery, in seconds."""

REDONE: Final = "its group is redone"


@dataclass
class RestartReport:
    """What a restart did.

    Attributes:
        point: where RL went on.
        gyms: what became of each Gym and its rollouts.
        dropped: rollouts whose result the salvage rule did not keep.
        redone: rollout → its new name, where a whole group is redone.
    """

    point: RestartPoint
    gyms: list[GymReport] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    redone: dict[str, str] = field(default_factory=dict)


class Recovery:
    """Runs the restart sequence for a run's Gyms.

    Args:
        tenure: the controller's tenure.
        office: finds the Gyms of the run, and takes office there.
        ledger: the run's ledger.
        store: the snapshots.
        plane: the data plane.
        living: how a Gym that lives is read and told.
        restorer: brings single Gyms back.
        settings: waits and the salvage rule.
        switches: what the column turns on.
        events: where what happened is written.

    Requirements: CKPT-RESTART-001…006, CKPT-RESTART-024, CKPT-RESTART-025, CKPT-RESTART-030…033, CKPT-CTRL-013.
    """

    def __init__(
        self,
        tenure: Tenure,
        office: Office,
        ledger: Ledger,
        store: SnapshotStore,
        plane: DataPlane | None,
        living: Living,
        restorer: Restorer,
        settings: RecoverySettings,
        switches: Switches,
        events: Events,
    ) -> None:
        self.office = office
        self._tenure = tenure
        self._ledger = ledger
        self._store = store
        self._plane = plane
        self._living = living
        self._restorer = restorer
        self._settings = settings
        self._switches = switches
        self._events = events

    async def start(self, *, trainer_survives: bool) -> RestartReport:
        """Bring the run to the point where rollouts can be dispatched.

        Args:
            trainer_survives: the trainer goes on at the step that the ledger last recorded; otherwise it comes back
                at the step of the snapshot.

        Raises:
            Incompatible: a Gym cannot be used; names every difference.
            RecoveryFailed: a Gym did not come back within its limit.
            Superseded: a higher controller has taken over.
        """
        present, fresh = await self.office.take()
        failpoints.hit("restart.claimed")
        # From here on nobody else publishes in this run directory: what is listed now is what there is.
        self._store.sweep()
        await asyncio.to_thread(self._store.empty_trash)
        point = await asyncio.to_thread(choose_point, self._ledger, self._store, trainer_survives=trainer_survives)
        await self.office.become_known(present)
        failpoints.hit("restart.known")
        report = RestartReport(point)
        adopted = [gym for gym in present if self.adoptable(gym, point)]
        restored = [gym for gym in present if gym not in adopted]
        for gym in restored:
            if gym.alias not in fresh:
                await self._living.read_feed(gym)
        failpoints.hit("restart.feeds_read")
        rollback = await plan_rollback(self._ledger, point, self._settings.salvage)
        report.dropped = sorted(rollback.dropped)
        await self._redo_groups(restored, rollback, report)
        await self._restore_all(restored, fresh, rollback, report)
        for gym in adopted:
            try:
                report.gyms.append(await self._living.adopt(gym))
            except GymError as error:
                if not error.retryable and error.code != "stale_incarnation":
                    raise
                # It died since it was discovered: it is away, and recovered like any Gym that is lost later on.
                self._events.emit("gym_away", gym=gym.alias, reason=str(error))
                continue
            await self._ledger.do(transitions.record_incarnations, gym.alias, gym.incarnations())
        await delete_unreferenced(self._ledger, self._store, self._plane)
        return report

    async def wait_for(self, gym: Deployment) -> None:
        """Return when a Gym that was lost can be reached again; nothing of it is taken for known by that.

        A Gym that stays away holds nobody up: this needs no lock.

        Raises:
            RecoveryFailed: it did not come back within its limit.
        """
        known = self._ledger.read(queries.incarnations, gym.alias)
        await self.office.reached(gym, lambda: gym.find(known), self._settings.reach_s)

    async def recover_gym(self, gym: Deployment) -> GymReport:
        """Bring one Gym back that died, wholly or in part, while RL lives; RL does not roll back.

        Call it after :meth:`wait_for`, under the lock of the tenure.

        Raises:
            RecoveryFailed: it did not come back within its limit.

        Requirements: CKPT-RESTART-050…054, CKPT-RESTART-062.
        """
        known = await self.office.discover(gym, min(self._settings.reach_s, AGAIN_S))
        await self.office.make_known([gym])
        if known == gym.incarnations() and not self._ledger.read(queries.restore_is_open, gym.alias):
            return await self._living.adopt(gym)
        await self._living.read_feed(gym)
        if self._switches.captures_gyms:
            return await self._restorer.restore(gym, RestoreWish())
        return await self._start_over(gym)

    # --- steps ------------------------------------------------------------------------------------------------

    def adoptable(self, gym: Deployment, point: RestartPoint) -> bool:
        """Return whether a Gym may go on as it lives: known incarnations, the ledger's step, no open restore."""
        step, _ = self._ledger.read(queries.trainer)
        known = self._ledger.read(queries.incarnations, gym.alias)
        open_restore = self._ledger.read(queries.restore_is_open, gym.alias)
        return bool(known) and known == gym.incarnations() and step == point.step and not open_restore

    def redone(self, gyms: Iterable[Deployment], rollback: Rollback) -> frozenset[str]:
        """Return the rollouts that start again because the settings want whole groups redone."""
        if not self._settings.redo_groups:
            return frozenset()
        return rollouts_to_redo(self._ledger, rollback, {gym.alias for gym in gyms})

    async def _redo_groups(self, gyms: Sequence[Deployment], rollback: Rollback, report: RestartReport) -> None:
        wanted = self.redone(gyms, rollback)
        if not wanted:
            return
        rows = [row for row in self._ledger.read(queries.rollouts) if row.rollout_id in wanted]
        for gym in gyms:
            # Their old names may still be under way to the Gym; whatever comes under them now is stale.
            await self._living.retire_everywhere(
                gym, [(row.rollout_id, row.attempt) for row in rows if row.gym == gym.alias and row.sent]
            )
        report.redone = await self._ledger.do(transitions.redo_rollouts, sorted(wanted), REDONE)
        self._events.emit("groups_redone", groups=sorted({row.group for row in rows}), rollouts=report.redone)

    async def _carry_out(self, rollback: Rollback) -> None:
        if not rollback.needed:
            return
        point = rollback.point
        await self._ledger.do(
            transitions.roll_back_training, point.step, point.weights_version, rollback.consumed, rollback.dropped
        )
        dropped = sorted(rollback.dropped)
        self._events.emit(
            "rolled_back",
            step=point.step,
            weights_version=point.weights_version,
            dropped=dropped,
            salvaged=rollback.salvaged,
        )

    async def _restore_all(
        self, gyms: Sequence[Deployment], fresh: set[str], rollback: Rollback, report: RestartReport
    ) -> None:
        point = rollback.point
        plans: dict[str, tuple[RestorePlan, Snapshot | None, GymReport]] = {}
        restored = [gym for gym in gyms if self._switches.captures_gyms and gym.alias not in fresh]
        for gym in restored:
            gym_report = GymReport(gym.alias, "restored", refused=list(point.refused))
            snapshot = await asyncio.to_thread(self._restorer.saved_gym, gym, point.limit, gym_report)
            wish = make_wish(gym, rollback, report.redone.values())
            wish.highest = await self._living.highest_attempts(gym)
            plans[gym.alias] = (await asyncio.to_thread(self._restorer.plan, gym, snapshot, wish), snapshot, gym_report)
        wishes = {
            alias: (plan.reservations(_origin(snapshot)), plan.awaited())
            for alias, (plan, snapshot, _) in plans.items()
        }
        # One transaction: the epoch, and every attempt before it is sent to anybody.
        claim = self._tenure.claim
        assert claim is not None
        attempts = await self._ledger.do(transitions.open_recovery, claim.epoch, claim.controller_id, wishes)
        self._ledger.bind(claim.epoch)
        failpoints.hit("restart.reserved")
        if point.snapshot is not None and self._plane is not None:
            await import_rows(self._plane, point.snapshot.path / ROWS_FILE)
        failpoints.hit("restart.rows_restored")
        ledger_step = Meeting(len(restored), lambda: self._carry_out(rollback))
        if not restored:
            await self._carry_out(rollback)

        async def one(gym: Deployment) -> GymReport:
            if gym.alias not in plans:
                return await self._start_over(gym)
            plan, snapshot, gym_report = plans[gym.alias]
            try:
                return await self._restorer.restore(
                    gym,
                    make_wish(gym, rollback, report.redone.values()),
                    first_plan=(plan, snapshot, attempts[gym.alias]),
                    report=gym_report,
                    before_resume=ledger_step.arrive,
                )
            finally:
                await ledger_step.leave()

        results = await asyncio.gather(*(one(gym) for gym in gyms), return_exceptions=True)
        for gym, result in zip(gyms, results, strict=True):
            if isinstance(result, RecoveryFailed) and gym.optional:
                self._events.emit("gym_away", gym=gym.alias, reason=str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                report.gyms.append(result)

    async def _start_over(self, gym: Deployment) -> GymReport:
        """Begin at turn 1 with what is unfinished and was sent before: without the Gym's state, or at a first start."""
        report = GymReport(gym.alias, "started over")
        highest = await self._living.highest_attempts(gym)
        rows = self._ledger.read(queries.unfinished, gym.alias)
        again = [row for row in rows if row.sent or row.rollout_id in highest]
        await self._living.retire_everywhere(
            gym, [(row.rollout_id, max(row.attempt, highest.get(row.rollout_id, -1))) for row in again if row.sent]
        )
        kept = {receipt.rollout_id for receipt in self._ledger.read(queries.kept, gym.alias)}
        wishes = [
            Reservation(row.rollout_id, "started over", highest.get(row.rollout_id, -1))
            for row in again
            if row.rollout_id not in kept
        ]
        attempts = await self._ledger.do(transitions.reserve, wishes, self._tenure.epoch)
        await self._ledger.do(transitions.close_restore, gym.alias, gym.incarnations(), ())
        for row in again:
            how = "kept" if row.rollout_id in kept else "restarted"
            report.rollouts.append(
                _fated(row, how, attempts.get(row.rollout_id, row.attempt), "its Gym's state was not saved")
            )
        return report


def _origin(snapshot: Snapshot | None) -> str:
    return f"restore of {snapshot.checkpoint_id}" if snapshot is not None else "reset"


def make_wish(gym: Deployment, rollback: Rollback, redone: Iterable[str] = ()) -> RestoreWish:
    """Return what the first restore of a Gym in a restart has to respect."""
    point = rollback.point
    forced = dict.fromkeys(redone, REDONE)
    return RestoreWish(point.limit, rollback.dropped, point.left_out(gym.alias), forced)


def _fated(row: RolloutRow, how: str, attempt: int, reason: str) -> Fated:
    return Fated(row.rollout_id, row.group, row.sibling, how, attempt, 0, reason)
