# SPDX-License-Identifier: Apache-2.0
"""The verbs of rollouts and results, and the older route."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from aiohttp import web

from tests.rl.scripted.machine import Machine
from tests.rl.scripted.values import ProblemError, Run


class Rollouts(Machine):
    """Starts, lists, retires and releases rollouts; nothing of them goes on by itself."""

    async def on_retire(self, request: web.Request, body: Any) -> Any:
        self.fresh = False
        outcomes = []
        for item in body["rollouts"]:
            name, through = item["rollout_id"], item["through_attempt"]
            self.fences[name] = max(self.fences.get(name, -1), through)
            run = self.runs.get(name)
            if run is not None and run.state == "finished" and run.attempt <= through:
                outcomes.append({"rollout_id": name, "outcome": "finished", "receipt": run.receipt()})
                continue
            if run is not None and run.attempt <= through:
                del self.runs[name]
                self.retired[name] = through
            outcomes.append({"rollout_id": name, "outcome": "retired"})
        self.touch()
        return {"outcomes": outcomes}

    async def on_start(self, request: web.Request, body: Any) -> Any:
        self.fresh = False
        return {"outcomes": [self._start(item, body.get("policy", {})) for item in body["rollouts"]]}

    def _start(self, item: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
        name, attempt = item["rollout_id"], item["attempt"]
        reply = {"rollout_id": name, "attempt": attempt}
        run = self.runs.get(name)
        if attempt <= self.fences.get(name, -1) or (run is not None and attempt < run.attempt):
            return {**reply, "outcome": "stale_attempt"}
        if name in self.released:
            return {**reply, "outcome": "released"}
        if run is not None and run.task_digest != item["task_digest"]:
            return {**reply, "outcome": "conflict"}
        if run is not None and run.state == "finished":
            return {**reply, "outcome": "already_finished", "receipt": run.receipt()}
        if run is not None and run.attempt == attempt and run.state != "failed":
            run.policy = policy
            run.starts += 1
            return {**reply, "outcome": "already_started"}
        if self.gate == "closed":
            return {**reply, "outcome": "admission_closed"}
        self.retired.pop(name, None)
        self.runs[name] = Run(name, attempt, item["task_digest"], seed=item.get("seed", 0), policy=policy, starts=1)
        self.touch()
        return {**reply, "outcome": "started"}

    async def on_rollouts(self, request: web.Request, body: Any) -> Any:
        rows = [self._listed(run) for run in self.runs.values()]
        rows += [
            {"rollout_id": r, "attempt": a, "state": "released", "open_turn": None}
            for r, (a, _) in self.released.items()
        ]
        rows += [
            {"rollout_id": r, "attempt": a, "state": "retired", "open_turn": None} for r, a in self.retired.items()
        ]
        wanted = request.query.get("state")
        return {"rollouts": [row for row in rows if wanted in (None, row["state"])], "next": None}

    def _listed(self, run: Run) -> dict[str, Any]:
        row = {"rollout_id": run.rollout_id, "attempt": run.attempt, "state": run.state, "turns_done": run.turns}
        row |= {"open_turn": None, "environment": run.environment, "task_digest": run.task_digest, "since_ms": 1}
        return {**row, "receipt": run.receipt()} if run.result is not None else row

    async def on_rollout(self, request: web.Request, body: Any) -> Any:
        run = self.runs.get(request.match_info["rollout_id"])
        if run is None:
            raise ProblemError("not_found")
        return self._listed(run)

    async def on_results(self, request: web.Request, body: Any) -> Any:
        after = request.query.get("after", "")
        number = int(after.split(":")[1]) if after.startswith(f"{self.feed}:") else 0
        end = asyncio.get_running_loop().time() + min(int(request.query.get("wait_ms", 0)) / 1000, self.waits_s)
        while True:
            done = [run for run in self.runs.values() if run.result is not None]
            if len(done) > number or asyncio.get_running_loop().time() >= end:
                break
            moved = self.moved
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(moved.wait(), max(end - asyncio.get_running_loop().time(), 0.001))
        results = [run.served() for run in done]
        page = {"feed": self.feed, "results": results, "next": self.cursor or f"{self.feed}:0", "more": False}
        if self.page_gate is not None:
            await self.page_gate.wait()
        self.hits["results served"] += len(results)
        if not results:
            await asyncio.sleep(0)
        return page

    async def on_acks(self, request: web.Request, body: Any) -> Any:
        outcomes = []
        for receipt in body["receipts"]:
            name, digest = receipt["rollout_id"], receipt["digest"]
            run = self.runs.get(name)
            if name in self.released and self.released[name] == (receipt["attempt"], digest):
                outcome = "already_released"
            elif run is None or run.result is None or run.attempt != receipt["attempt"]:
                outcome = "unknown"
            elif run.receipt()["digest"] != digest:
                outcome = "mismatch"
            else:
                outcome = "released"
                if run.state == "finished":
                    self.released[name] = (run.attempt, digest)
                else:
                    self.fences[name] = run.attempt
                del self.runs[name]
            outcome = self.ack_outcome or outcome
            outcomes.append({"rollout_id": name, "attempt": receipt["attempt"], "outcome": outcome})
        self.touch()
        return {"outcomes": outcomes}

    async def on_older_run(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(("run", {"headers": dict(request.headers), **body}))
        run = Run(f"u{len(self.calls)}", 0, "older", seed=body.get("seed", 0))
        self.parked[run.rollout_id] = run
        while run.result is None:
            await self.moved.wait()
        return web.json_response(json.loads(run.result))
