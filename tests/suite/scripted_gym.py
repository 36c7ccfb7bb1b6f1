# SPDX-License-Identifier: Apache-2.0
"""A Gym whose body is the model: each answer is an outcome that the model allows.

It shows that the model works in the other direction, too, and it can be bent: `Twist` replaces one answer, so that a
test sees whether the machine notices. Rollouts really run (`scripted_rollouts`); everything else is the model's.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from conformance import model, model_looks
from conformance import model_rollouts as book
from conformance.loopback import Listener, Loopback
from conformance.model_rollouts import Plan, Receipt, Resumed, Retire, Rollout
from conformance.model_values import Call, Outcome, State
from spec import load, messages
from spec import wire as names
from spec.wire import ControllerPair
from tests.suite.scripted_rollouts import ENVIRONMENTS, Runs

Json = dict[str, Any]
Twist = Callable[[State, Call, Outcome], Outcome]
"""Bends the outcome that was picked for a call."""

NAME = "scripted"
REQUESTS: Mapping[str, tuple[str, type[messages.Request]]] = {
    "prepare": ("/checkpoint/prepare", messages.PrepareRequest),
    "commit": ("/checkpoint/commit", messages.CommitRequest),
    "resume": ("/checkpoint/resume", messages.ResumeRequest),
    "abort": ("/checkpoint/abort", messages.AbortRequest),
    "renew": ("/checkpoint/renew", messages.RenewRequest),
    "restore": ("/checkpoint/restore", messages.RestoreRequest),
    "retire": ("/retire", messages.RetireRequest),
    "start": ("/rollouts", messages.StartRequest),
    "ack": ("/acks", messages.AcksRequest),
}
LIMITS = {
    "max_body_bytes": 2**22, "max_batch": 100, "max_page_items": 100, "max_page_bytes": 2**20, "max_wait_ms": 30_000,
    "min_lease_ms": 60_000, "max_lease_ms": 600_000, "max_write_ms": 60_000, "max_result_bytes": 2**20,
    "max_record_bytes": 2**20, "max_artifact_bytes": 2**20, "max_live_rollouts": 1000, "shutdown_grace_ms": 100,
    "policy_retry_ms": 100,
}  # fmt: skip


@dataclass
class Refused(Exception):
    """An error that the model does not speak of."""

    code: str


class ScriptedGym:
    """One participant that owns everything.

    Args:
        loopback: the thread that serves it.
        root: where targets may lie.
        world_url: the outside of its conformance environment.
        twist: bends outcomes.
    """

    def __init__(self, loopback: Loopback, root: Path, world_url: str, twist: Twist | None = None) -> None:
        self.root = root
        self.twist = twist
        self.incarnation = f"i{secrets.token_hex(8)}"
        self.feed = self._new_feed()
        self.state = State(room=LIMITS["max_live_rollouts"])
        self.runs = Runs(self, world_url)
        self.progress = 0
        self.paths: dict[str, Path] = {}
        self.written: dict[str, Json] = {}
        self.errors = load().errors
        app = web.Application()
        for operation, (path, _) in REQUESTS.items():
            app.router.add_post(names.PREFIX + path, self._handler(operation))
        for path, read in {
            "/capabilities": self._capabilities,
            "/checkpoint": self._status,
            "/rollouts": self._rollouts,
            "/results": self._results,
        }.items():
            app.router.add_get(names.PREFIX + path, self._reader(read))
        app.router.add_get(names.PREFIX + "/rollouts/{rollout_id}", self._one)
        self._listener = Listener(loopback, app)

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._listener.url

    def close(self) -> None:
        """Stop listening and running."""
        self.runs.stop()
        self._listener.close()

    @staticmethod
    def _new_feed() -> str:
        return f"f{secrets.token_hex(8)}"

    # --- calls ---

    def _handler(self, operation: str) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.Response:
            try:
                call, body = self._read(operation, request, await request.read())
                return await self._execute(call, body)
            except Refused as error:
                return self._problem(operation, error.code)

        return handle

    def _read(self, operation: str, request: web.Request, raw: bytes) -> tuple[Call, Json]:
        try:
            body = REQUESTS[operation][1].read(raw).to_object()
            epoch = _epoch(request.headers[names.HEADER_CONTROLLER_EPOCH])
            pair = ControllerPair.of(epoch, request.headers[names.HEADER_CONTROLLER_ID])
            expects = request.headers[names.HEADER_EXPECT_INCARNATION] == self.incarnation
        except (ValueError, ValidationError, KeyError) as error:
            raise Refused("invalid_request") from error
        call = Call(operation, pair, expects=expects, run_id=body.get("run_id", ""))
        if "checkpoint_id" in body:
            call = replace(call, checkpoint_id=names.parse_checkpoint_id(body["checkpoint_id"]))
        return _FILL.get(operation, lambda gym, call, body: call)(self, call, body), body

    async def _execute(self, call: Call, body: Json) -> web.Response:
        if call.operation == "prepare":
            await self._quiet(call, body["timeout_ms"])
        before = self.state
        outcome = self._pick(model.step(before, call), call)
        if self.twist is not None:
            outcome = self.twist(before, call, outcome)
        self._become(before, outcome.after, call)
        if outcome.code is not None:
            return self._problem(call.operation, outcome.code)
        return self._json(_ANSWER[call.operation](self, call, outcome))

    async def _quiet(self, call: Call, timeout_ms: int) -> None:
        """Close the gate and wait for what the outside holds, as long as the caller does."""
        impatient = self._pick(model.step(self.state, replace(call, patient=False)), call, ready=False)
        if impatient.code is None and impatient.after.phase == "preparing":
            self._become(self.state, impatient.after, call)
            await self.runs.quiet(timeout_ms / 1000)

    def _pick(self, outcomes: frozenset[Outcome], call: Call, *, ready: bool = True) -> Outcome:
        """Return the outcome of a Gym that is quick: done rather than still at it, and nothing lost."""

        def rank(outcome: Outcome) -> tuple[Any, ...]:
            fields = outcome.fields
            return (
                outcome.code not in (None, call.deserves),
                outcome.code == "deadline_exceeded",
                ready not in fields.get("ready", {ready}),
                True not in fields.get("durable", {True}),
                -len(outcome.after.rollouts.known),
                repr(outcome.after),
            )

        return min(outcomes, key=rank)

    def _become(self, before: State, after: State, call: Call) -> None:
        """Make a state current: write what it has captured, stop and start what it says."""
        if after.last != before.last and after.last is not None and after.last.ended_as == "failed":
            after = replace(after, rollouts=before.rollouts)
        self.progress += after.rollouts != before.rollouts
        for id in set(after.cuts) - set(before.cuts):
            self._write(str(id), after)
        if after.phase == "restored" and before.phase != "restored":
            self.feed = self._new_feed()
            self.runs.load(self._saved(call), after)
        self.state = replace(after, rollouts=after.rollouts.each(lambda _, one: replace(one, loose=None)))
        self.runs.reconcile()

    # --- the two ends of a cut ---

    def _write(self, id: str, after: State) -> None:
        cut = after.cuts[names.parse_checkpoint_id(id)]
        rows = [self.runs.row(name, one) for name, one in sorted(cut.known.items()) if book.index_state(one)]
        files = {
            "rollouts.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
            "state.json": json.dumps(self.runs.saved(cut)).encode(),
        }
        listed = [{"name": n, "bytes": len(d), "digest": names.bytes_digest(d)} for n, d in files.items()]
        manifest = json.dumps({"checkpoint_id": id, "files": listed}).encode()
        for name, data in {**files, "manifest.json": manifest}.items():
            (self.paths[id] / name).write_bytes(data)
        states = [row["state"] for row in rows]
        self.written[id] = {
            "manifest": {"name": "manifest.json", "digest": names.bytes_digest(manifest), "bytes": len(manifest)},
            "index": {**listed[0], "records": len(rows)},
            "counts": {s: states.count(s) for s in ("turn", "finished", "restart")}
            | {"files": 3, "bytes": len(manifest) + sum(row["bytes"] for row in listed)},
        }
        del self.written[id]["index"]["bytes"]

    def _saved(self, call: Call) -> Json:
        if call.source is None:
            return {}
        return dict(json.loads((self.paths[str(call.source)] / "state.json").read_bytes()))

    # --- reading ---

    def _reader(self, read: Callable[[], Json]) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.Response:
            return self._json(read())

        return handle

    async def _one(self, request: web.Request) -> web.Response:
        name = request.match_info["rollout_id"]
        held = self.state.rollouts.get(name)
        return self._problem("getRollout", "not_found") if held is None else self._json(self._shown(name, held))

    def _capabilities(self) -> Json:
        environments = [
            {"name": name, "continuation": how, "verify": "wait", "state_version": "1"}
            for name, how in ENVIRONMENTS.items()
        ]
        return {
            "name": NAME, "role": "agent", "owns": ["rollouts", "sessions", "ledger"], "incarnation": self.incarnation,
            "implementation": {"name": NAME, "version": "1"}, "protocol_versions": ["1.0"],
            "profiles": ["results", "checkpoint", "turn-recovery"], "features": ["conformance"],
            "state_schema": {"id": NAME, "version": 1, "reads": [1]},
            "agents": [{"name": "only", "continuation": "export_restore"}], "environments": environments,
            "storage": ["file"], "stage": 10, "workers": {"count": 1, "coordinated": True}, "limits": LIMITS,
        }  # fmt: skip

    def _status(self) -> Json:
        state = self.state
        last = None
        if state.last is not None:
            written = self.written.get(str(state.last.id), {}) if state.last.ended_as == "committed" else {}
            last = {
                "checkpoint_id": str(state.last.id), "ended_as": state.last.ended_as,
                "manifest": written.get("manifest"), "error_code": None, "pause_ms": 0,
            }  # fmt: skip
        pair = state.controller
        return {
            "phase": state.phase, "gate": state.gate, "progress": self.progress, "fresh": pair is None,
            "checkpoint_id": str(state.open.id) if state.open else None,
            "controller": None if pair is None else {"id": pair.name, "epoch": pair.epoch},
            "lease_remaining_ms": None if state.gate == "open" else 60_000, "draining": False,
            "captured": model_looks.captured(state), "feed": self.feed, "counts": self._counts(), "last": last,
        }  # fmt: skip

    def _counts(self) -> Json:
        known = self.state.rollouts.known.values()
        counts = {
            kind: sum(1 for one in known if one.state == state)
            for kind, state in (
                ("live", "live"), ("finished_unreleased", "finished"), ("failed_unreleased", "failed"),
                ("released", "released"), ("retired", "retired"),
            )
        }  # fmt: skip
        restart = sum(1 for one in known if one.state == "live" and one.uncertain)
        return {**counts, "admitted": len(known), "restart": restart, "unmanaged": 0}

    def _rollouts(self) -> Json:
        return {"rollouts": [self._shown(n, one) for n, one in self.state.rollouts.known.items()], "next": None}

    def _shown(self, name: str, one: Rollout) -> Json:
        if one.state in ("released", "retired"):
            return {"rollout_id": name, "attempt": one.attempt, "state": one.state, "open_turn": None}
        shown: Json = {"rollout_id": name, "attempt": one.attempt, **self.runs.shown(name, one)}
        if one.state in ("finished", "failed"):
            shown["receipt"] = {"rollout_id": name, "attempt": one.attempt, "digest": one.digest}
        return shown

    def _results(self) -> Json:
        rows = [
            {"receipt": {"rollout_id": n, "attempt": one.attempt, "digest": one.digest}, "result": self.runs.results[n]}
            for n, one in self.state.rollouts.in_state("finished", "failed")
        ]
        return {"feed": self.feed, "results": rows, "next": f"c{len(rows)}", "more": False}

    # --- replies ---

    def _json(self, body: Json, status: int = 200, media: str = "application/json") -> web.Response:
        headers = {names.HEADER_INCARNATION: self.incarnation}
        return web.Response(body=json.dumps(body).encode(), status=status, content_type=media, headers=headers)

    def _problem(self, operation: str, code: str) -> web.Response:
        known = self.errors[code]
        body = {
            "code": code, "title": known.title, "detail": f"{operation}: {code}", "retryable": known.retryable,
            "definite": known.definite_on(operation), "phase": self.state.phase,
        }  # fmt: skip
        if code == "not_ready":
            body["blockers"] = []
        elif code == "stale_controller" and self.state.controller is not None:
            body["controller"] = {"id": self.state.controller.name, "epoch": self.state.controller.epoch}
        elif code in ("stale_attempt", "state_mismatch"):
            body["rollouts"] = [{"rollout_id": "some", "through_attempt": 0}]
        elif code == "deadline_exceeded":
            body["continues"] = True
        if self.state.open is not None:
            body["checkpoint_id"] = str(self.state.open.id)
        return self._json(body, known.status, names.PROBLEM_MEDIA_TYPE)

    def receipts(self, call: Call, outcome: Outcome) -> Json:
        """Return the entries of an answer to items."""
        entries = []
        for item, allowed in zip(call.items, outcome.outcomes or (), strict=True):
            name = max(allowed)  # `retired` rather than `pending`
            entry: Json = {"rollout_id": item.rollout_id, "outcome": name}
            if not isinstance(item, Retire):
                entry["attempt"] = item.attempt
            if name in ("finished", "already_finished"):
                held = self.state.rollouts.known[item.rollout_id]
                entry["receipt"] = {"rollout_id": item.rollout_id, "attempt": held.attempt, "digest": held.digest}
            entries.append(entry)
        return {"outcomes": entries}


# --- requests as the model's values ---


def _epoch(text: str) -> int:
    if not text.isdecimal() or text.startswith("0"):
        raise ValueError(text)
    return int(text)


def _fill_commit(gym: ScriptedGym, call: Call, body: Json) -> Call:
    path = Path(body["target"].get("path", "/"))
    inside = path.is_dir() and gym.root.resolve() in path.resolve().parents
    deserves = None if inside else "forbidden_target"
    id = str(call.id)
    if inside and id not in gym.paths:
        deserves = "target_exists" if any(path.iterdir()) else None
    opened = gym.state.open
    if deserves is None and opened is not None and opened.id == call.id and opened.arguments is None:
        gym.paths[id] = path
    out = body.get("leave_out_blocked", False)
    arguments = str(path)
    return replace(call, arguments=arguments, leave_out_blocked=out, wait=body["wait"], deserves=deserves)


def _fill_restore(gym: ScriptedGym, call: Call, body: Json) -> Call:
    plan = Plan(
        tuple(
            Resumed(r["rollout_id"], r["attempt"], r["next_attempt"], r["turns_done"], r["task_digest"])
            for r in body["rollouts"]
        ),
        tuple(Receipt(r["rollout_id"], r["attempt"], r["digest"]) for r in body["results"]),
        tuple(Retire(r["rollout_id"], r["through_attempt"]) for r in body["fences"]),
    )
    source, deserves, id = body["source"], None, None
    if source is not None:
        found = next((key for key, path in gym.paths.items() if str(path) == source["path"]), "")
        written = gym.written.get(found)
        if written is None or written["manifest"]["digest"] != source["manifest_digest"]:
            deserves = "checkpoint_corrupt"
        elif found != source["checkpoint_id"]:
            deserves = "state_mismatch"
        id = names.parse_checkpoint_id(found or "1-1")
    policy = body.get("policy")
    shown = json.dumps({key: body.get(key) for key in ("source", "rollouts", "results", "fences", "policy")})
    address = json.dumps(policy) if policy else None
    return replace(call, arguments=shown, source=id, plan=plan, policy=address, deserves=deserves)


def _fill_start(gym: ScriptedGym, call: Call, body: Json) -> Call:
    return replace(call, items=tuple(gym.runs.item(row, body.get("policy")) for row in body["rollouts"]))


def _fill_ack(gym: ScriptedGym, call: Call, body: Json) -> Call:
    rows = body["receipts"]
    return replace(call, items=tuple(Receipt(r["rollout_id"], r["attempt"], r["digest"]) for r in rows))


def _fill_retire(gym: ScriptedGym, call: Call, body: Json) -> Call:
    return replace(call, items=tuple(Retire(r["rollout_id"], r["through_attempt"]) for r in body["rollouts"]))


_FILL: Mapping[str, Callable[[ScriptedGym, Call, Json], Call]] = {
    "commit": _fill_commit,
    "restore": _fill_restore,
    "start": _fill_start,
    "ack": _fill_ack,
    "retire": _fill_retire,
}


# --- outcomes as answers ---


def _one_of(outcome: Outcome, name: str) -> Any:
    return sorted(outcome.fields[name], key=repr)[0]


def _prepared(gym: ScriptedGym, call: Call, outcome: Outcome) -> Json:
    blocked = sorted(outcome.after.blocked) if not _one_of(outcome, "ready") else []
    held = {"kind": "effect", "attempt": 0, "since_ms": 1, "detail": "held by the outside"}
    live = outcome.after.rollouts.in_state("live")
    restarts = sum(1 for _, one in live if (one.restart_only or one.uncertain) and not one.blocks)
    blockers = [{**held, "rollout_id": name} for name in blocked]
    return {
        "phase": outcome.after.phase, "ready": not blocked, "blockers": blockers, "blocker_count": len(blockers),
        "restart_count": restarts, "progress": gym.progress, "wait_ms": 0, "lease_remaining_ms": 60_000,
    }  # fmt: skip


def _committed(gym: ScriptedGym, call: Call, outcome: Outcome) -> Json:
    durable = _one_of(outcome, "durable")
    none = dict.fromkeys(("turn", "finished", "restart", "files", "bytes"), 0)
    written = gym.written[str(call.id)] if durable else {"manifest": None, "index": None, "counts": none}
    return {"phase": _one_of(outcome, "phase"), "captured": True, "durable": durable, **written, "pause_ms": 0}


def _ended(gym: ScriptedGym, call: Call, outcome: Outcome) -> Json:
    return {"phase": _one_of(outcome, "phase"), "ended_as": _one_of(outcome, "ended_as"), "pause_ms": 0}


def _renewed(gym: ScriptedGym, call: Call, outcome: Outcome) -> Json:
    return {"lease_remaining_ms": None if gym.state.gate == "open" else 60_000}


def _restored(gym: ScriptedGym, call: Call, outcome: Outcome) -> Json:
    return {
        "phase": gym.state.phase, "restored_count": len(call.plan.rollouts), "restarts": [],
        "results_count": len(call.plan.results),
    }  # fmt: skip


_ANSWER: Mapping[str, Callable[[ScriptedGym, Call, Outcome], Json]] = {
    "prepare": _prepared,
    "commit": _committed,
    "resume": _ended,
    "abort": _ended,
    "renew": _renewed,
    "restore": _restored,
    "start": ScriptedGym.receipts,
    "ack": ScriptedGym.receipts,
    "retire": ScriptedGym.receipts,
}
