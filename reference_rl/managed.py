# SPDX-License-Identifier: Apache-2.0
"""Columns 2 and 3: fixed rollout ids, the results feed, ACKs; with column 3 snapshots hold the Gyms' state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import httpx

from reference_rl import queries
from reference_rl.checkpointer import Checkpointer
from reference_rl.client import Controller, make_http
from reference_rl.control import Tenure, best_effort
from reference_rl.dataplane import DataPlane
from reference_rl.deployment import Deployment
from reference_rl.errors import Incompatible, RecoveryFailed
from reference_rl.events import Events
from reference_rl.gateway import gateway
from reference_rl.ledger import Ledger
from reference_rl.living import GymReport, Living
from reference_rl.office import Office
from reference_rl.recovery import Recovery, RestartReport
from reference_rl.restorer import RestoreLimits, Restorer
from reference_rl.rollouts import RolloutManager
from reference_rl.session import EXIT_DONE, Session
from reference_rl.settings import RunSettings
from reference_rl.snapshots import SnapshotStore

SETTLE_AT_END_S = 10.0
"""How long the last ACKs may take at the end of a run, in seconds."""


class ManagedSession(Session):
    """One process of a run in column 2 or 3."""

    report: RestartReport
    background: Sequence[asyncio.Task[None]] = ()

    async def run(self) -> int:
        """Recover, run to the end or to SIGTERM, return the exit code."""
        with self.signals():
            async with self.opened():
                snapshots = asyncio.create_task(self.snapshot_loop())
                code = await self.until_done(*self.background, snapshots)
                if code == EXIT_DONE:
                    self.write_results()
                    await best_effort(self._settle_to_the_end(), SETTLE_AT_END_S)
                    self.events.emit("done", **self.ledger.read(queries.counts), metrics=self.write_metrics())
        return code

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Recover, then run rollouts in the background until the block ends."""
        self.events.emit("started", column=self.settings.column, run_id=self.settings.run_id)
        async with (
            make_http(self.settings.client.build(), self.transport) as http,
            contextlib.AsyncExitStack() as stack,
        ):
            if self.settings.gateway:
                seen = await stack.enter_async_context(gateway(self.settings.policy, self.plane))
                self.settings = self.settings.model_copy(update={"policy": seen})
            self._assemble(http)
            self.report = await self.recovery.start(trainer_survives=self.settings.trainer.survives)
            if self.is_restart:
                self._report_restart(self.report)
            done = {gym.alias for gym in self.report.gyms}
            self.background = [asyncio.create_task(self._run_gym(gym, gym.alias in done)) for gym in self.gyms]
            try:
                yield
            finally:
                for task in self.background:
                    task.cancel()
                await asyncio.gather(*self.background, return_exceptions=True)
                for manager in self.managers.values():
                    await manager.acks.give_up()

    def _assemble(self, http: httpx.AsyncClient) -> None:
        settings = self.settings
        parts = assemble(settings, http, self.ledger, self.store, self.events, self.tenure, self.plane)
        self.gyms, self.recovery = parts.gyms, parts.recovery
        policy = settings.policy.to_object()
        self.managers = {
            gym.alias: RolloutManager(
                gym,
                self.ledger,
                self.tenure,
                parts.living,
                self.events,
                policy,
                max_batch=settings.max_batch,
                max_live=settings.max_live,
                max_failures=settings.max_failures,
                health_s=settings.recovery.health_s,
                on_result=self.changed.set,
            )
            for gym in self.gyms
        }
        self.checkpointer = Checkpointer(
            self.tenure,
            self.gyms,
            self.ledger,
            self.store,
            self.plane,
            settings.snapshot,
            settings.switches,
            self.events,
            settle_acks=self._settle_all,
            snapshot_dirs=_snapshot_dirs(settings),
        )
        self.checkpointer.lost_gym = lambda alias: self.managers[alias].lose()

    async def _settle_to_the_end(self) -> None:
        for manager in self.managers.values():
            while self.ledger.read(queries.debts, manager.gym.alias, 1):
                if not await best_effort(manager.acks.settle(), SETTLE_AT_END_S):
                    await asyncio.sleep(0.1)

    async def _settle_all(self) -> None:
        for manager in self.managers.values():
            if manager.gym.participants:
                await manager.acks.settle()

    async def _run_gym(self, gym: Deployment, is_up: bool) -> None:
        manager = self.managers[gym.alias]
        while True:
            if is_up:
                await manager.run()
            is_up = False
            self.events.trouble("gym_lost", gym.alias, gym=gym.alias)
            try:
                await self.recovery.wait_for(gym)
                async with self.tenure.lock:
                    report = await self.recovery.recover_gym(gym)
            except (RecoveryFailed, Incompatible) as error:
                # The others go on; this one is asked again for as long as the run lasts.
                self.events.trouble("gym_away", gym.alias, gym=gym.alias, reason=str(error))
                await asyncio.sleep(self.settings.recovery.health_s)
                continue
            is_up = True
            self.events.over(gym.alias)
            self.events.emit("gym_recovered", **_report(report))
            self.changed.set()

    def _report_restart(self, report: RestartReport) -> None:
        fated = {f.rollout_id: asdict(f) for gym in report.gyms for f in gym.rollouts}
        rows = []
        for row in self.ledger.read(queries.rollouts):
            rest = {
                "rollout_id": row.rollout_id,
                "group": row.group,
                "sibling": row.sibling,
                "how": "reused" if row.state != "unfinished" else "not started",
                "attempt": row.attempt,
                "turns_done": 0,
                "reason": f"the ledger calls it {row.state}",
            }
            rows.append(fated.get(row.rollout_id, rest))
        snapshots = sorted({gym.snapshot_id for gym in report.gyms if gym.snapshot_id})
        point = report.point.snapshot
        self.events.emit(
            "restarted",
            snapshot=snapshots[-1] if snapshots else (str(point.checkpoint_id) if point else None),
            rl_from=report.point.how,
            gyms={gym.alias: gym.how for gym in report.gyms},
            refused=sorted({text for gym in report.gyms for text in gym.refused} | set(report.point.refused)),
            dropped=report.dropped,
            redone=report.redone,
            rollouts=rows,
        )


def _report(report: GymReport) -> Mapping[str, object]:
    return {
        "gym": report.alias,
        "how": report.how,
        "snapshot": report.snapshot_id,
        "refused": report.refused,
        "rollouts": [asdict(fated) for fated in report.rollouts],
    }


@dataclass(frozen=True)
class Parts:
    """What brings a run's Gyms back."""

    gyms: Sequence[Deployment]
    ledger: Ledger
    store: SnapshotStore
    living: Living
    restorer: Restorer
    recovery: Recovery


def assemble(
    settings: RunSettings,
    http: httpx.AsyncClient,
    ledger: Ledger,
    store: SnapshotStore,
    events: Events,
    tenure: Tenure | None = None,
    plane: DataPlane | None = None,
) -> Parts:
    """Put together what discovers, judges and restores the Gyms of a run.

    Without a tenure and a data plane the parts can look and plan, but not call anything that changes a Gym.
    """
    tenure = tenure or Tenure(Controller(f"{settings.run_id}.preview"))
    gyms = [
        Deployment(
            gym.alias,
            gym.urls,
            http,
            tenure.controller,
            token=settings.tokens.control.read(),
            settings=settings.client.build(),
            optional=gym.optional,
            shares_files=gym.shares_files,
        )
        for gym in settings.gyms
    ]
    environments: dict[str, set[str]] = {}
    for group in settings.groups():
        environments.setdefault(group.gym, set()).update(r.environment for r in group.rollouts)
    limits = RestoreLimits(
        settings.snapshot.durable_timeout_ms, settings.snapshot.lease_ms, settings.recovery.restore_tries
    )
    living = Living(tenure, ledger, settings.max_failures, limits.timeout_ms)
    restorer = Restorer(
        tenure,
        living,
        ledger,
        store,
        events,
        settings.policy.to_object(),
        limits,
        snapshot_dirs=_snapshot_dirs(settings),
    )
    switches = settings.switches
    office = Office(tenure, gyms, ledger, store, settings.recovery.reach_s, switches, events, environments)
    recovery = Recovery(tenure, office, ledger, store, plane, living, restorer, settings.recovery, switches, events)
    return Parts(gyms, ledger, store, living, restorer, recovery)


def _snapshot_dirs(settings: RunSettings) -> dict[str, str]:
    return {gym.alias: str(gym.snapshot_dir) for gym in settings.gyms if gym.snapshot_dir is not None}
