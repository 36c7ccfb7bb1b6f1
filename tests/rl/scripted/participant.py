# SPDX-License-Identifier: Apache-2.0
"""A scripted participant, what a test does with it, and how it is served."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from spec import wire
from tests.rl.scripted.checkpoints import Checkpoints
from tests.rl.scripted.http import Served
from tests.rl.scripted.rollouts import Rollouts
from tests.rl.scripted.values import ENVIRONMENT, Run


class ScriptedParticipant(Served, Checkpoints, Rollouts):
    """One participant; see the package."""

    def end_lease(self) -> None:
        """Let the lease of the open checkpoint end now."""
        self._event("lease_end")

    def turn(self, rollout_id: str, count: int = 1) -> None:
        """Let a rollout cross boundaries; session owners see the effects."""
        for participant in (self, *self.peers):
            run = participant.runs.setdefault(rollout_id, Run(rollout_id, self.runs[rollout_id].attempt, ""))
            run.attempt = self.runs[rollout_id].attempt
            run.turns += count
            participant.touch()

    def turn_without_effect(self, rollout_id: str) -> None:
        """Let a rollout cross a boundary whose policy call had no effects: nobody else sees it."""
        self.runs[rollout_id].turns += 1
        self.runs[rollout_id].without_effect += 1
        self.touch()

    def finish(self, rollout_id: str, reward: float = 1.0, **extra: Any) -> None:
        """Let a rollout finish."""
        run = self.runs[rollout_id]
        body = {"outcome": "completed", "reward": reward, "turns": run.turns, "messages": [{"role": "user"}]}
        self._end(run, "finished", {"body": body}, **extra)

    def fail(self, rollout_id: str, kind: str = "broken", *, terminal: bool = False) -> None:
        """Let a rollout fail."""
        run = self.runs[rollout_id]
        failure = {"kind": kind, "reason": "on order", "terminal": terminal, "turns": run.turns}
        self._end(run, "failed", {"failure": failure})

    def _end(self, run: Run, state: str, outcome: dict[str, Any], versions: tuple[int, ...] = ()) -> None:
        info = {"attempt": run.attempt, "policy_versions": list(versions), "data_refs": []}
        head = {"rollout_id": run.rollout_id, "environment": run.environment, "task_digest": run.task_digest}
        run.result = json.dumps({**head, **outcome, "info": info})
        run.state = state
        self.touch()

    def app(self) -> web.Application:
        """Return the application of this participant."""
        app = web.Application(client_max_size=1 << 26)
        route = wire.PREFIX
        handlers = {
            ("GET", "/capabilities"): ("capabilities", self.on_capabilities),
            ("GET", "/checkpoint"): ("status", self.on_status),
            ("POST", "/checkpoint/prepare"): ("prepare", self.on_prepare),
            ("POST", "/checkpoint/commit"): ("commit", self.on_commit),
            ("POST", "/checkpoint/resume"): ("resume", self.on_resume),
            ("POST", "/checkpoint/abort"): ("abort", self.on_abort),
            ("POST", "/checkpoint/renew"): ("renew", self.on_renew),
            ("POST", "/checkpoint/restore"): ("restore", self.on_restore),
            ("POST", "/retire"): ("retire", self.on_retire),
            ("POST", "/rollouts"): ("start", self.on_start),
            ("GET", "/rollouts"): ("rollouts", self.on_rollouts),
            ("GET", "/rollouts/{rollout_id}"): ("rollout", self.on_rollout),
            ("GET", "/results"): ("results", self.on_results),
            ("POST", "/acks"): ("acks", self.on_acks),
        }
        for (method, path), (operation, handler) in handlers.items():
            app.router.add_route(method, route + path, self._guarded(operation, handler))
        app.router.add_post("/run", self.on_older_run)
        return app

    async def on_capabilities(self, request: web.Request, body: Any) -> Any:
        if self.gone_404:
            raise web.HTTPNotFound
        environment = {"continuation": "export_restore", "verify": "repeat", "state_version": self.state_version}
        return {
            "name": self.name,
            "role": self.role,
            "owns": list(self.owns),
            "incarnation": self.incarnation,
            "implementation": {"name": "scripted", "version": "1"},
            "protocol_versions": self.versions,
            "profiles": self.profiles,
            "features": self.features,
            "state_schema": {"id": "scripted", "version": 1, "reads": [1]},
            "agents": [],
            "environments": [{"name": ENVIRONMENT, **environment}],
            "storage": ["file"],
            "stage": self.stage,
            "workers": self.workers,
            "participants": [{"name": p.name, "url": p.url} for p in self.peers],
            "limits": {
                "max_body_bytes": 1 << 26,
                "max_batch": 100,
                "max_page_items": 100,
                "max_page_bytes": 1 << 22,
                "max_wait_ms": 500,
                "min_lease_ms": 10,
                "max_lease_ms": 600_000,
                "max_write_ms": 60_000,
                "max_result_bytes": 1 << 22,
                "max_record_bytes": 1 << 22,
                "max_artifact_bytes": 1 << 26,
                "max_live_rollouts": 1000,
                "shutdown_grace_ms": 1000,
                "policy_retry_ms": 1000,
                **self.limits,
            },
        }

    async def on_status(self, request: web.Request, body: Any) -> Any:
        states = Counter(run.state for run in self.runs.values())
        live = sum(n for state, n in states.items() if state not in ("finished", "failed"))
        counts = {
            "live": live,
            "restart": states["restart"],
            "finished_unreleased": states["finished"],
            "failed_unreleased": states["failed"],
            "released": len(self.released),
            "retired": len(self.retired),
        }
        admitted = sum(n for name, n in counts.items() if name != "restart")
        controller = {"id": self.controller.name, "epoch": self.controller.epoch} if self.controller else None
        reply = {
            "phase": self.phase,
            "gate": self.gate,
            "checkpoint_id": str(self.open_id) if self.open_id else None,
            "controller": controller,
            "lease_remaining_ms": None,
            "progress": self.progress,
            "fresh": self.fresh,
            "draining": False,
            "captured": self.captured,
            "counts": {**counts, "admitted": admitted, "unmanaged": 0},
            "last": self.last,
        }
        return {**reply, "feed": self.feed} if "rollouts" in self.owns else reply


@contextlib.asynccontextmanager
async def serving(*participants: ScriptedParticipant) -> AsyncIterator[None]:
    """Serve participants on loopback; the first one names the others as its peers."""
    runners = []
    try:
        for participant in participants:
            runner = web.AppRunner(participant.app(), shutdown_timeout=0.1, access_log=None)
            await runner.setup()
            runners.append(runner)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr] # it is listening
            participant.url = f"http://127.0.0.1:{port}"
        yield
    finally:
        for participant in participants:
            if participant.lease is not None:
                participant.lease.cancel()
        await asyncio.gather(*(runner.cleanup() for runner in runners))


def one_gym() -> ScriptedParticipant:
    """Return a Gym in one process: one participant that owns everything."""
    return ScriptedParticipant("gym", ("rollouts", "sessions", "ledger"), 10)


def three_servers() -> tuple[ScriptedParticipant, ScriptedParticipant, ScriptedParticipant]:
    """Return agent, model and resources; the agent names the others."""
    agent = ScriptedParticipant("agent", ("rollouts",), 10)
    model = ScriptedParticipant("model", ("ledger",), 20)
    resources = ScriptedParticipant("resources", ("sessions",), 30)
    agent.peers = [model, resources]
    return agent, model, resources


def calls_of(participant: ScriptedParticipant) -> dict[str, list[dict[str, Any]]]:
    """Return the bodies of the calls that a participant got, by operation."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for operation, body in participant.calls:
        found[operation].append(body)
    return found
