# SPDX-License-Identifier: Apache-2.0
"""A scripted Gym: participants that answer by the phase table of the specification and fail on order.

Nothing runs by itself: a test says when a rollout does a turn, finishes or is lost. One participant owns rollouts;
the others own sessions or a ledger and see the same turns as effects.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web

from spec import load, wire

SPEC = load()
ENVIRONMENT = "scripted"


@dataclass
class Fault:
    """What happens to a call: see ``FAULTS``; after ``after`` good ones ``times`` are hit, before it acted or after."""

    kind: str
    times: int = 10_000
    acts: bool = False
    after: int = 0


FAULTS = ("500", "502", "503", "504", "reset_before", "reset_after", "cut_json", "html", "silence")


@dataclass
class Run:
    """One rollout as a participant holds it."""

    rollout_id: str
    attempt: int
    task_digest: str
    environment: str = ENVIRONMENT
    seed: int = 0
    turns: int = 0
    state: str = "waiting_policy"
    result: str | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    starts: int = 0
    without_effect: int = 0
    served_as: str | None = None

    def receipt(self) -> dict[str, Any]:
        assert self.result is not None
        return {
            "rollout_id": self.rollout_id,
            "attempt": self.attempt,
            "digest": wire.result_digest(self.result),
        }

    def served(self) -> dict[str, Any]:
        return {"receipt": self.receipt(), "result": self.result if self.served_as is None else self.served_as}


@dataclass(frozen=True)
class Received:
    """One request as it came in."""

    operation: str
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class ProblemError(Exception):
    """A refusal in the protocol's form."""

    def __init__(self, code: str, **fields: Any) -> None:
        self.code, self.fields = code, fields
        super().__init__(code)


class ScriptedParticipant:
    """One participant; see the module."""

    def __init__(self, name: str, owns: tuple[str, ...], stage: int, lease_scale: float = 1.0) -> None:
        self.name, self.owns, self.stage = name, owns, stage
        self.url = ""
        self.peers: list[ScriptedParticipant] = []
        self.workers = {"count": 1, "coordinated": True}
        self.profiles = ["results", "checkpoint", "turn-recovery"]
        self.state_version = "1"
        self.versions = ["1.0"]
        self.role = name
        self.features: list[str] = []
        self.limits: dict[str, int] = {}
        self.cursor: str | None = None
        self.cannot: dict[str, str] = {}
        self.watch: Callable[[str], None] = lambda operation: None
        self.hold: dict[str, asyncio.Event] = {}
        self.received: list[Received] = []
        self.gone_404 = False
        self.faults: dict[str, Fault] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.hits: Counter[str] = Counter()
        self.blocked: asyncio.Event | None = None
        self.hold_write: asyncio.Event | None = None
        self.storage_full = False
        self.page_gate: asyncio.Event | None = None
        self.lease_scale = lease_scale
        self.ack_outcome: str | None = None
        self.new_life()

    # --- what a test does -------------------------------------------------------------------------------------

    def new_life(self) -> None:
        """Lose everything: a new incarnation."""
        self.incarnation = f"i-{uuid4().hex[:8]}"
        self.feed = f"f-{uuid4().hex[:8]}"
        self.phase, self.gate, self.open_id = "idle", "open", None
        self.controller: wire.ControllerPair | None = None
        self.last: dict[str, Any] | None = None
        self.fresh, self.progress, self.captured = True, 0, None
        self.runs: dict[str, Run] = {}
        self.fences: dict[str, int] = {}
        self.released: dict[str, tuple[int, str]] = {}
        self.retired: dict[str, int] = {}
        self.parked: dict[str, Run] = {}
        self.index: list[dict[str, Any]] = []
        self.target: dict[str, Any] = {}
        self.manifest: dict[str, Any] | None = None
        self.moved = asyncio.Event()
        self.lease: asyncio.TimerHandle | None = None
        self.journal: list[str] = []

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

    def touch(self) -> None:
        """Count progress and wake whoever waits."""
        self.progress += 1
        self.moved.set()
        self.moved = asyncio.Event()

    # --- HTTP -------------------------------------------------------------------------------------------------

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

    def _guarded(self, operation: str, handler: Any) -> Any:
        async def guarded(request: web.Request) -> web.StreamResponse:
            raw = await request.read()
            body = json.loads(raw or b"{}") if request.method == "POST" else {}
            self.received.append(Received(operation, request.method, request.raw_path, dict(request.headers), raw))
            self.calls.append((operation, body if request.method == "POST" else dict(request.query)))
            self.watch(operation)
            if operation in self.hold:
                await self.hold[operation].wait()
            fault = self.faults.get(operation)
            if fault is not None and fault.after > 0:
                fault.after -= 1
                fault = None
            if fault is None or fault.times <= 0:
                return await self._answer(operation, handler, request, body)
            fault.times -= 1
            self.hits[operation] += 1
            return await self._faulty(fault, operation, handler, request, body)

        return guarded

    async def _faulty(
        self, fault: Fault, operation: str, handler: Any, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        kind = fault.kind
        if kind == "reset_before":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if kind == "silence":
            await asyncio.Event().wait()
        reply = None
        if kind in ("reset_after", "cut_json") or fault.acts:
            reply = await self._answer(operation, handler, request, body)
        if kind == "reset_after":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if kind == "cut_json":
            text = reply.text if isinstance(reply, web.Response) else ""
            return web.Response(text=(text or "{}")[:-1], content_type="application/json")
        if kind == "html":
            return web.Response(text="<html>bad gateway</html>", content_type="text/html", status=200)
        if kind == "502":
            return web.Response(text="<html>bad gateway</html>", content_type="text/html", status=502)
        codes = {"500": "internal", "503": "unavailable", "504": "deadline_exceeded"}
        if kind in codes:
            answer = self._problem(ProblemError(codes[kind], continues=kind == "504", retry_after_ms=1), operation)
            if kind == "503":
                answer.headers["Retry-After"] = "0"
            return answer
        return self._problem(ProblemError(kind), operation)

    async def _answer(self, operation: str, handler: Any, request: web.Request, body: dict[str, Any]) -> web.Response:
        try:
            if request.method == "POST":
                self._check_controller(request, body)
            reply = await handler(request, body)
        except ProblemError as problem:
            return self._problem(problem, operation)
        return web.json_response(reply, headers={wire.HEADER_INCARNATION: self.incarnation})

    def _problem(self, problem: ProblemError, operation: str) -> web.Response:
        error = SPEC.errors[problem.code]
        body = {
            "code": error.code,
            "title": error.title,
            "detail": str(problem.fields.pop("detail", error.title)),
            "retryable": error.retryable,
            "definite": error.definite_on(operation),
            **{k: v for k, v in problem.fields.items() if v is not None},
        }
        headers = {wire.HEADER_INCARNATION: self.incarnation}
        return web.json_response(body, status=error.status, headers=headers, content_type="application/problem+json")

    def _check_controller(self, request: web.Request, body: dict[str, Any]) -> None:
        headers = request.headers
        if headers[wire.HEADER_EXPECT_INCARNATION] != self.incarnation:
            raise ProblemError("stale_incarnation")
        pair = wire.ControllerPair.of(int(headers[wire.HEADER_CONTROLLER_EPOCH]), headers[wire.HEADER_CONTROLLER_ID])
        if self.controller is not None and pair < self.controller:
            current = {"id": self.controller.name, "epoch": self.controller.epoch}
            raise ProblemError("stale_controller", controller=current)
        if self.controller is not None and pair > self.controller:
            self._event("higher_controller")
        self.controller = pair
        if "checkpoint_id" in body:
            assert body["checkpoint_id"].split("-")[0] == headers[wire.HEADER_CONTROLLER_EPOCH]

    # --- the phase machine, read from the specification -------------------------------------------------------

    def _cell(self, operation: str, checkpoint_id: str, **facts: Any) -> Any:
        cid = wire.parse_checkpoint_id(checkpoint_id)
        last = wire.parse_checkpoint_id(self.last["checkpoint_id"]) if self.last else None
        if self.open_id is not None and cid == self.open_id:
            relation = "open"
        elif cid == last:
            relation = "last"
        elif (last is None or cid > last) and (self.open_id is None or cid > self.open_id):
            relation = "unseen"
        else:
            relation = "lower"
        facts |= {"gate": self.gate, "last": self.last["ended_as"] if self.last else "aborted"}
        cell = SPEC.machine.cell(operation, self.phase, relation, **facts)
        if cell.answer == "refused":
            raise ProblemError(cell.error, phase=self.phase, checkpoint_id=self.open_id and str(self.open_id))
        self.fresh = False
        return cell

    def _event(self, event: str) -> None:
        row = SPEC.machine.on(event, self.phase, gate=self.gate)
        if row is not None:
            self.journal.append(event)
            self._apply(row)

    def _apply(self, row: Any, checkpoint_id: str | None = None) -> None:
        if row.state in ("as_before", "installed_discarded") and self.phase == "restored":
            self.runs, self.fences = {}, {**self.fences, **{r.rollout_id: r.attempt for r in self.runs.values()}}
        if row.gate is not None:
            self.gate = row.gate
        if row.ends is not None:
            self.last = {
                "checkpoint_id": checkpoint_id or str(self.open_id),
                "ended_as": row.ends,
                "manifest": self.manifest,
                "error_code": None,
                "pause_ms": 0,
            }
            self.open_id, self.captured = None, None
        self.phase = row.next
        self._arm()
        self.touch_waiters()

    def touch_waiters(self) -> None:
        self.moved.set()
        self.moved = asyncio.Event()

    def _arm(self, lease_ms: int | None = None) -> None:
        if self.lease is not None:
            self.lease.cancel()
            self.lease = None
        if lease_ms is not None:
            self.lease_ms = lease_ms
        if self.open_id is not None and self.gate == "closed":
            delay = self.lease_ms / 1000 * self.lease_scale
            self.lease = asyncio.get_running_loop().call_later(delay, self._event, "lease_end")

    # --- verbs ------------------------------------------------------------------------------------------------

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

    async def on_prepare(self, request: web.Request, body: Any) -> Any:
        cell = self._cell("prepare", body["checkpoint_id"])
        if cell.answer == "accepted":
            self.open_id, self.captured, self.manifest = wire.parse_checkpoint_id(body["checkpoint_id"]), False, None
            self.run_id, self.lease_ms = body["run_id"], body["lease_ms"]
            self._apply(cell)
        if self.blocked is not None and self.phase == "preparing":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.blocked.wait(), min(body["timeout_ms"], 500) / 1000)
        if self.phase == "preparing" and (self.blocked is None or self.blocked.is_set()):
            self._event("quiescent")
        self._arm(body["lease_ms"])
        ready = self.phase not in ("preparing", "idle")
        blockers = [] if ready else [{"kind": "effect", "since_ms": 1, "detail": "held on order"}]
        return {
            "phase": self.phase,
            "ready": ready,
            "blockers": blockers,
            "blocker_count": len(blockers),
            "restart_count": 0,
            "progress": self.progress,
            "wait_ms": 0,
            "lease_remaining_ms": self.lease_ms,
        }

    async def on_commit(self, request: web.Request, body: Any) -> Any:
        left_out = bool(body.get("leave_out_blocked"))
        cell = self._cell("commit", body["checkpoint_id"], leave_out_blocked=left_out)
        if cell.answer == "accepted":
            path = Path(body["target"]["path"])
            if not _is_empty(path):
                raise ProblemError("target_exists")
            if self.storage_full:
                raise ProblemError("insufficient_storage", phase=self.phase)
            self.index = [self._row(run) for _, run in sorted(self.runs.items())]
            self.captured, self.target = True, body["target"]
            self._apply(cell)
            self.writing = asyncio.create_task(self._write(path, body["checkpoint_id"]))
        self._arm()
        if body["wait"] == "durable":
            end = asyncio.get_running_loop().time() + min(body["timeout_ms"], 500) / 1000
            while self.manifest is None and asyncio.get_running_loop().time() < end:
                moved = self.moved
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(moved.wait(), 0.02)
        counts = Counter(row["state"] for row in self.index)
        return {
            "phase": self.phase,
            "captured": True,
            "durable": self.manifest is not None,
            "manifest": self.manifest,
            "index": self.index_ref if self.manifest else None,
            "counts": {k: counts[k] for k in ("turn", "finished", "restart")} | {"files": 2, "bytes": 100},
            "pause_ms": 3,
        }

    def _row(self, run: Run) -> dict[str, Any]:
        state = {"finished": "finished", "failed": "finished", "restart": "restart"}.get(run.state, "turn")
        effects = run.turns - run.without_effect
        row = {
            "rollout_id": run.rollout_id,
            "attempt": run.attempt,
            "state": state,
            "turns_done": run.turns,
            "task_digest": run.task_digest or None,
            "environment": run.environment,
            "effects": {run.environment: effects} if effects else {},
            "data_refs": [{"prefix": f"{run.rollout_id}/{run.attempt}/"}],
        }
        if state == "finished":
            row["receipt"] = run.receipt()
            row["saved_result"] = run.result
        if state == "restart":
            row["reason"] = "uncertain"
        return row

    async def _write(self, path: Path, checkpoint_id: str) -> None:
        if self.hold_write is not None:
            await self.hold_write.wait()
        if self.open_id is None or str(self.open_id) != checkpoint_id or not _is_there(path):
            return
        index = b"".join(json.dumps(row).encode() + b"\n" for row in self.index)
        _plain(path / "rollouts.jsonl", index)
        counts = Counter(row["state"] for row in self.index)
        self.index_ref = {
            "name": "rollouts.jsonl",
            "digest": wire.bytes_digest(index),
            "records": len(self.index),
        }
        manifest = json.dumps(
            {
                "protocol_version": "1.0",
                "run_id": self.run_id,
                "checkpoint_id": checkpoint_id,
                "participant": self.name,
                "owns": list(self.owns),
                "state_schema": {"id": "scripted", "version": 1},
                "environments": [{"name": ENVIRONMENT, "state_version": self.state_version}],
                "index": self.index_ref,
                "counts": {k: counts[k] for k in ("turn", "finished", "restart")},
                "files": [
                    {
                        "name": "rollouts.jsonl",
                        "bytes": len(index),
                        "digest": self.index_ref["digest"],
                        "records": len(self.index),
                    }
                ],
            }
        ).encode()
        _plain(path / "manifest.json", manifest)
        self.manifest = {"name": "manifest.json", "digest": wire.bytes_digest(manifest), "bytes": len(manifest)}
        self._event("durable")

    async def on_resume(self, request: web.Request, body: Any) -> Any:
        cell = self._cell("resume", body["checkpoint_id"])
        if cell.answer == "accepted":
            self._apply(cell)
        return {"phase": self.phase, "ended_as": self.last["ended_as"] if self.phase == "idle" else None, "pause_ms": 7}

    async def on_abort(self, request: web.Request, body: Any) -> Any:
        cell = self._cell("abort", body["checkpoint_id"])
        if cell.answer == "accepted":
            self._apply(cell, body["checkpoint_id"])
        return {"phase": self.phase, "ended_as": self.last["ended_as"] if self.last else None, "pause_ms": 0}

    async def on_renew(self, request: web.Request, body: Any) -> Any:
        self._cell("renew", body["checkpoint_id"])
        self._arm(body["lease_ms"])
        return {"lease_remaining_ms": body["lease_ms"]}

    async def on_restore(self, request: web.Request, body: Any) -> Any:
        cell = self._cell("restore", body["checkpoint_id"])
        lost = [r["rollout_id"] for r in body["rollouts"] if r["rollout_id"] in self.cannot]
        restarts = [{"rollout_id": r, "reason": self.cannot[r]} for r in lost]
        reply = {"phase": "restored", "restored_count": len(body["rollouts"]) - len(lost), "restarts": restarts}
        reply["results_count"] = len(body["results"])
        if cell.answer != "accepted":
            return reply
        self.open_id, self.lease_ms = wire.parse_checkpoint_id(body["checkpoint_id"]), body["lease_ms"]
        self._apply(cell)
        try:
            runs = self._load(body)
        except ProblemError:
            self._event("restore_failed")
            raise
        self._event("verified")
        for run in self.runs.values():
            self.fences[run.rollout_id] = max(self.fences.get(run.rollout_id, -1), run.attempt)
        for fence in body["fences"]:
            name, through = fence["rollout_id"], fence["through_attempt"]
            self.fences[name] = max(self.fences.get(name, -1), through)
        self.runs, self.released, self.retired = runs, {}, {}
        self.feed = f"f-{uuid4().hex[:8]}"
        self.touch()
        self._event("installed")
        return reply

    def _load(self, body: Any) -> dict[str, Run]:
        if body["source"] is None:
            return {}
        path = Path(body["source"]["path"])
        manifest = (path / "manifest.json").read_bytes()
        if wire.bytes_digest(manifest) != body["source"]["manifest_digest"]:
            raise ProblemError("checkpoint_corrupt")
        rows = [json.loads(line) for line in (path / "rollouts.jsonl").read_text().splitlines()]
        by_id = {row["rollout_id"]: row for row in rows}
        runs = {}
        for wanted in body["rollouts"]:
            row = by_id.get(wanted["rollout_id"])
            if row is None or row["turns_done"] != wanted["turns_done"] or row["attempt"] != wanted["attempt"]:
                raise ProblemError("state_mismatch", rollouts=[{"rollout_id": wanted["rollout_id"]}])
            if wanted["next_attempt"] <= self.fences.get(wanted["rollout_id"], -1):
                fence = {"rollout_id": wanted["rollout_id"], "through_attempt": self.fences[wanted["rollout_id"]]}
                raise ProblemError("stale_attempt", rollouts=[fence])
            run = Run(wanted["rollout_id"], wanted["next_attempt"], wanted["task_digest"], turns=row["turns_done"])
            run.policy = body.get("policy", {})
            run.without_effect = row["turns_done"] - sum(row["effects"].values())
            if run.rollout_id not in self.cannot:
                runs[run.rollout_id] = run
        for receipt in body["results"]:
            row = by_id[receipt["rollout_id"]]
            assert row["receipt"] == receipt
            run = Run(row["rollout_id"], row["attempt"], row["task_digest"], turns=row["turns_done"], state="finished")
            run.result = row["saved_result"]
            runs[run.rollout_id] = run
        return runs

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
        end = asyncio.get_running_loop().time() + min(int(request.query.get("wait_ms", 0)), 500) / 1000
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


def _is_empty(path: Path) -> bool:
    return not any(path.iterdir())


def _is_there(path: Path) -> bool:
    return path.is_dir()


def _plain(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


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
