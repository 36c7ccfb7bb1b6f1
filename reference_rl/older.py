# SPDX-License-Identifier: Apache-2.0
"""Columns 0 and 1: the Gym's own older route, a random name for each run, snapshots of the RL state alone.

Column 0 sends not one byte of the protocol. Column 1 reads the capabilities once, at setup, and then does the same.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import uuid4

import httpx

from reference_rl import epochs, queries, settling, transitions
from reference_rl.checkpointer import Checkpointer
from reference_rl.client import make_http
from reference_rl.deployment import Deployment
from reference_rl.errors import Incompatible, RlError
from reference_rl.ledger import Ledger
from reference_rl.records import Receipt, RolloutRow, ServedResult
from reference_rl.session import EXIT_DONE, LEDGER, Session
from reference_rl.settings import GymSettings
from spec import wire

PAUSE_S = 0.2
"""How long to wait before a run is tried again, in seconds."""


class OlderSession(Session):
    """One process of a run in column 0 or 1.

    Requirements: CKPT-DISC-031.
    """

    def open_ledger(self) -> Ledger:
        """Open the ledger of the newest snapshot: what came after it is lost, as it always was."""
        path = self.settings.run_dir / LEDGER
        for name in (path, path.with_name(LEDGER + "-wal"), path.with_name(LEDGER + "-shm")):
            name.unlink(missing_ok=True)
        self.store.sweep()
        self.store.empty_trash()
        self.restored_from = self.copy_ledger(path)
        return Ledger(path, self.settings.run_id)

    async def run(self) -> int:
        """Run to the end or to SIGTERM; return the exit code."""
        claim = await asyncio.to_thread(
            epochs.claim, self.settings.run_dir, self.tenure.controller.id, self.ledger.read(queries.highest_epoch)
        )
        self.tenure.take_office(claim)
        await self.ledger.do(transitions.claim_epoch, claim.epoch, claim.controller_id)
        self.ledger.bind(claim.epoch)
        self.events.emit("started", column=self.settings.column, run_id=self.settings.run_id, epoch=claim.epoch)
        self.checkpointer = Checkpointer(
            self.tenure,
            (),
            self.ledger,
            self.store,
            self.plane,
            self.settings.snapshot,
            self.settings.switches,
            self.events,
        )
        if self.settings.switches.discovers:
            await self._discover()
        if self.is_restart:
            self._report_restart()
        # The older route holds a request open for as long as its rollout runs.
        forever = httpx.Timeout(None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(transport=self.transport, limits=limits, timeout=forever) as http:
            with self.signals():
                snapshots = asyncio.create_task(self.snapshot_loop())
                rollouts = asyncio.create_task(self._run_all(http))
                code = await self.until_done(snapshots, rollouts)
        if code == EXIT_DONE:
            self.write_results()
            self.events.emit("done", **self.ledger.read(queries.counts), metrics=self.write_metrics())
        return code

    async def _discover(self) -> None:
        async with make_http(self.settings.client.build(), self.transport) as http:
            for gym in self.settings.gyms:
                deployment = Deployment(
                    gym.alias, gym.urls, http, self.tenure.controller, token=self.settings.tokens.control.read()
                )
                try:
                    await deployment.discover()
                    deployment.check(self.settings.switches, ())
                except Incompatible:
                    raise
                except RlError as error:
                    self.events.emit("gym_away", gym=gym.alias, reason=str(error))
                    continue
                found = {p.name: p.incarnation for p in deployment.participants}
                self.events.emit("discovered", gym=gym.alias, participants=found)

    async def _run_all(self, http: httpx.AsyncClient) -> None:
        slots = asyncio.Semaphore(self.settings.max_live)
        gyms = {gym.alias: gym for gym in self.settings.gyms}

        async def one(row: RolloutRow) -> None:
            async with slots:
                await self._run_one(http, gyms[row.gym], row)

        async with asyncio.TaskGroup() as group:
            for row in self.ledger.read(queries.rollouts):
                if row.state == "unfinished":
                    group.create_task(one(row))
        # Training ends the run; this task only must not end before it.
        await asyncio.Event().wait()

    async def _run_one(self, http: httpx.AsyncClient, gym: GymSettings, row: RolloutRow) -> None:
        failures = 0
        while True:
            name = f"run-{uuid4().hex}"
            rollouts = [{"rollout_id": name, "attempt": 0}]
            self.events.trouble("dispatched", row.rollout_id, gym=gym.alias, rollouts=rollouts)
            content = await self._call(http, gym, row)
            if content is None:
                await asyncio.sleep(PAUSE_S)
                continue
            self.events.over(row.rollout_id)
            failure = content.get("failure")
            failures += failure is not None
            if failure is not None and not failure.get("terminal") and failures < self.settings.max_failures:
                self.events.emit(
                    "retried", group=row.group, sibling=row.sibling, rollout_id=name, reason=failure["kind"]
                )
                continue
            text = json.dumps(content)
            served = ServedResult(Receipt(row.rollout_id, 0, wire.result_digest(text)), text, content)
            await self.ledger.do(settling.save_unmanaged, row.rollout_id, name, served)
            body = content.get("body") or {}
            self.events.emit(
                "finished" if failure is None else "failed",
                group=row.group,
                sibling=row.sibling,
                rollout_id=name,
                attempt=0,
                turns=body.get("turns"),
                reward=body.get("reward"),
            )
            self.changed.set()
            return

    async def _call(self, http: httpx.AsyncClient, gym: GymSettings, row: RolloutRow) -> dict[str, Any] | None:
        body = {
            "environment": row.environment,
            "task": dict(row.task),
            "seed": row.seed,
            "limits": dict(row.limits),
            "policy": self.settings.policy.to_object(),
        }
        token = self.settings.tokens.data.read()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            reply = await http.post(gym.older_route_url().rstrip("/") + "/run", json=body, headers=headers)
            reply.raise_for_status()
            content = reply.json()
        except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
            self.events.trouble("gym_trouble", gym.alias, gym=gym.alias, reason=str(error) or type(error).__name__)
            return None
        self.events.over(gym.alias)
        return content if isinstance(content, dict) and ("body" in content or "failure" in content) else None

    def _report_restart(self) -> None:
        rows = [
            {
                "rollout_id": row.rollout_id,
                "group": row.group,
                "sibling": row.sibling,
                "how": "restarted" if row.state == "unfinished" else "reused",
                "attempt": 0,
                "turns_done": 0,
                "reason": "it was not finished in the snapshot" if row.state == "unfinished" else "finished",
            }
            for row in self.ledger.read(queries.rollouts)
        ]
        snapshot = str(self.restored_from.checkpoint_id) if self.restored_from else None
        self.events.emit("restarted", snapshot=snapshot, rollouts=rows)
