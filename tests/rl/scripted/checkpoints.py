# SPDX-License-Identifier: Apache-2.0
"""The verbs of a checkpoint: prepare, commit, resume, abort, renew, restore."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web

from spec import wire
from tests.rl.scripted.machine import Machine
from tests.rl.scripted.values import ENVIRONMENT, ProblemError, Run


class Checkpoints(Machine):
    """Captures what the participant holds at one instant, writes it, and installs it again."""

    async def on_prepare(self, request: web.Request, body: Any) -> Any:
        cell = self._cell("prepare", body["checkpoint_id"])
        if cell.answer == "accepted":
            self.open_id, self.captured, self.manifest = wire.parse_checkpoint_id(body["checkpoint_id"]), False, None
            self.run_id, self.lease_ms = body["run_id"], body["lease_ms"]
            self._apply(cell)
        if self.blocked is not None and self.phase == "preparing":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.blocked.wait(), min(body["timeout_ms"] / 1000, self.waits_s))
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


def _is_empty(path: Path) -> bool:
    return not any(path.iterdir())


def _is_there(path: Path) -> bool:
    return path.is_dir()


def _plain(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
