# SPDX-License-Identifier: Apache-2.0
"""The calls of the machine: each as the model's value and as what is sent, usual or wrong in one way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from conformance import model
from conformance.controller import Controller, Json, Participant
from conformance.cuts import Part, read_part, target_for
from conformance.errors import NotOffered
from conformance.machine_outside import Piece
from conformance.machine_walk import Walk
from conformance.machine_watch import Watch
from conformance.model_rollouts import Plan, Receipt, Resumed, Retire, Start
from conformance.model_values import Call
from conformance.wire import Fault, Reply
from spec import wire as names
from spec.wire import CheckpointId, ControllerPair

RUN = "machine"
PATIENT_MS = 8_000
SHORT_MS = 60
Stale = Literal["controller", "epoch", "incarnation", "id-epoch"]
Send = Callable[[Fault | None], Reply]

ORDER: Mapping[str, Literal["ascending", "descending"]] = {
    "prepare": "ascending",
    "resume": "descending",
    "restore": "descending",
}
"""In which order of stages an operation goes to the participants; every other one ascending."""


@dataclass(frozen=True)
class Snapshot:
    """A committed cut of the whole Gym.

    Args:
        parts: what each participant wrote, by name.
    """

    id: CheckpointId
    parts: Mapping[str, Part] = field(repr=False)


@dataclass(frozen=True)
class Restoration:
    """What one checkpoint id restores; a repeat sends it again.

    Args:
        bodies: `source`, `rollouts`, `results`, `fences` and `policy` of the request, by participant.
        source: the checkpoint whose cut it is, or None.
        deserves: what its source earns by itself.
    """

    bodies: Mapping[str, Json] = field(repr=False)
    source: CheckpointId | None = None
    deserves: str | None = None
    words: str = " (source null)"


@dataclass(frozen=True)
class How:
    """How a call differs from the usual one.

    Args:
        stale: in which way it is stale.
        impatient: its time limit is over at once.
        other: its arguments differ from those of the first call of that id.
        target: of a commit: a usual target, one outside the roots, or one that holds another cut.
        wait: of a commit.
        leave_out: of a commit.
        policy: of a restore: the address that it gives; None: none.
        lease_ms: of prepare and restore.
    """

    stale: Stale | None = None
    impatient: bool = False
    other: bool = False
    target: Literal["usual", "forbidden", "taken"] = "usual"
    wait: Literal["captured", "durable"] = "durable"
    leave_out: bool = False
    lease_ms: int = 60_000

    @property
    def words(self) -> str:
        """The differences, for the story."""
        usual = How()
        shown = [f"{key} {value}" for key, value in vars(self).items() if value != getattr(usual, key)]
        return f" ({', '.join(shown)})" if shown else ""


class Driver(Walk):
    """A walk that can send every call of a controller to every participant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.snapshots: list[Snapshot] = []
        self.restorations: dict[CheckpointId, Restoration] = {}
        self._parts: dict[CheckpointId, dict[str, Part]] = {}

    # --- calls that name a checkpoint ---

    def drive(self, operation: str, id: CheckpointId, how: How | None = None, fault: Fault | None = None) -> None:
        """Send an operation to every participant in the order of stages that it asks for."""
        how = how or How()
        accepted = []
        for participant in self._addressed(operation, id, how):
            hopeful = operation == "restore" and self._takes(participant, operation, id, how)
            reply = self.send(participant, operation, id, how, fault)
            good = reply is not None and reply.ok
            accepted.append(good or reply is None)
            if operation == "prepare" and len(self.everyone) > 1 and not (good and reply and reply["ready"]):
                break
            if hopeful and reply is not None and not good:
                break
        if operation == "restore" and len(set(accepted)) > 1:
            self._give_up(id)
        self.settle()

    def _addressed(self, operation: str, id: CheckpointId, how: How) -> list[Participant]:
        """Return who gets an operation, in order: nobody restores one participant of a Gym without the others."""
        everyone = self.everyone[::-1] if ORDER.get(operation) == "descending" else self.everyone
        if operation != "restore" or len(everyone) == 1:
            return everyone
        takes = {p.name: self._takes(p, operation, id, how) for p in everyone}
        return everyone if len(set(takes.values())) == 1 else [p for p in everyone if not takes[p.name]]

    def _takes(self, participant: Participant, operation: str, id: CheckpointId, how: How) -> bool:
        watch, (call, _) = self.watches[participant.name], self.compose(participant, operation, id, how)
        states = model.unfold(watch.states)
        return any(one.code is None and one.after.phase == "restored" for s in states for one in model.step(s, call))

    def _give_up(self, id: CheckpointId) -> None:
        """A restore that some have installed and others not leaves rollouts in pieces: end it and retire them all."""
        for participant in self.everyone:
            self.send(participant, "abort", id, How())
        self.retire({name: piece.attempt for name, piece in self.pieces.items()})

    def send(
        self, participant: Participant, operation: str, id: CheckpointId, how: How, fault: Fault | None = None
    ) -> Reply | None:
        """Send an operation to one participant, judge the answer, and note what it wrote or installed."""
        call, send = self.compose(participant, operation, id, how)
        lists = self.restorations[id].words if operation == "restore" and id in self.restorations else ""
        words = f"{operation} {id}{lists}{how.words} at {participant.name}"
        watch = self.watches[participant.name]
        was_idle = watch.phase == "idle"
        reply = watch.call(call, lambda: send(fault), words)
        if operation == "restore":
            watch.feed_rule = "new" if was_idle and watch.phase == "restored" else "any"
        if reply is not None:
            self.answered(participant, call, reply)
        return reply

    def answered(self, participant: Participant, call: Call, reply: Reply) -> None:
        """Note what an answered call wrote; judge what its body says beyond the outcome."""
        if call.operation == "prepare" and reply.ok:
            self.watches[participant.name].readiness(reply.json)
        if call.operation == "commit" and reply.ok and reply["durable"]:
            self._written(participant, call, reply)

    def compose(self, participant: Participant, operation: str, id: CheckpointId, how: How) -> tuple[Call, Send]:
        """Return a call as the model's value and as what is sent."""
        watch = self.watches[participant.name]
        patient, timeout = self._time(watch, operation, how)
        controller, headers, call = self._identity(participant, operation, id, how)
        call = replace(call, patient=patient)
        text, verb = str(call.checkpoint_id), getattr(controller, operation)
        arguments: Json = {"headers": headers}
        if operation != "renew":
            arguments["timeout_ms"] = timeout
        positional: tuple[Any, ...] = (participant, text)
        if operation == "prepare":
            run_id = "another" if how.other else RUN
            call = replace(call, run_id=run_id)
            arguments |= {"run_id": run_id, "lease_ms": how.lease_ms}
        elif operation == "commit":
            target, deserves = self._target(participant, id, how)
            out = how.leave_out or None
            positional += (target,)
            arguments |= {"wait": how.wait, "leave_out_blocked": out}
            call = replace(call, arguments=json.dumps(target), deserves=deserves, wait=how.wait)
            call = replace(call, leave_out_blocked=how.leave_out)
        elif operation == "restore":
            body, call = self._restoration(participant, id, how, call)
            positional += (body.pop("source"),)
            arguments |= {**body, "run_id": RUN, "lease_ms": how.lease_ms}
        return call, lambda fault: verb(*positional, fault=fault, **arguments)

    def _time(self, watch: Watch, operation: str, how: How) -> tuple[bool, int]:
        """Return whether a call is patient, and its time limit: short where the outside holds what it waits for."""
        alone = self.gates_open or len(self.watches) == 1
        waits = watch.any(lambda state: bool(state.perhaps_blocked)) or not alone
        if how.impatient or (waits and operation in ("prepare", "restore")):
            return False, 0 if how.impatient else SHORT_MS
        return True, PATIENT_MS

    def _identity(
        self, participant: Participant, operation: str, id: CheckpointId, how: How
    ) -> tuple[Controller, dict[str, str], Call]:
        controller, pair, headers = self.controller, self.pair, {}
        call = Call(operation, pair, checkpoint_id=id)
        if how.stale == "controller":
            pair = ControllerPair.of(controller.epoch, "0")
            headers = {names.HEADER_CONTROLLER_ID: "0"}
        elif how.stale == "epoch":
            epoch = max(controller.epoch - 1, 1)
            pair = ControllerPair.of(epoch, "0")
            headers = {names.HEADER_CONTROLLER_ID: "0", names.HEADER_CONTROLLER_EPOCH: str(epoch)}
            call = replace(call, checkpoint_id=CheckpointId(epoch, id.sequence))
        elif how.stale == "incarnation":
            headers = {names.HEADER_EXPECT_INCARNATION: f"{controller.headers(participant)[_EXPECT]}-past"[-128:]}
            call = replace(call, expects=False)
        elif how.stale == "id-epoch":
            call = replace(call, checkpoint_id=CheckpointId(id.epoch + 1, id.sequence))
        return controller, headers, replace(call, controller=pair)

    def _target(self, participant: Participant, id: CheckpointId, how: How) -> tuple[Json, str | None]:
        if how.target == "forbidden":
            return {"scheme": "file", "path": "/nowhere/gym-conformance"}, "forbidden_target"
        if how.target == "taken" and self.snapshots:
            target = self.snapshots[-1].parts[participant.name].target
            if target["scheme"] == "file":
                return target, "target_exists" if self.snapshots[-1].id != id else None
        target, _ = target_for(self.case, participant, f"{id}-other" if how.other else str(id))
        if how.other and target["scheme"] == "http":
            raise NotOffered("with http there is only one target")
        return target, None

    def at_once(self, one: tuple[str, CheckpointId], other: tuple[str, CheckpointId]) -> None:
        """Make two calls at the same time at every participant, and judge both answers together."""
        if "restore" in (one[0], other[0]) and len(self.everyone) > 1:
            # The two may come in another order at each participant; then a rollout would be restored at some alone.
            self.retire({name: piece.attempt for name, piece in self.pieces.items() if self.lives(piece)})
        for participant in self.everyone:
            watch = self.watches[participant.name]
            (first, send), (second, send_too) = (self.compose(participant, *call, How()) for call in (one, other))
            replies = self.case.wire.together([lambda: send(None), lambda: send_too(None)])  # noqa: B023  # called at once
            words = f"{one[0]} {one[1]} and {other[0]} {other[1]} at once at {participant.name}"
            self.case.step(f"{words} → {' and '.join(reply.brief[:60] for reply in replies)}")
            watch.together((first, second), (replies[0], replies[1]), words)
            if "restore" in (one[0], other[0]):
                watch.feed_rule = "any"
            for call, reply in zip((first, second), replies, strict=True):
                self.answered(participant, call, reply)
        self.settle()

    def during(self, call: tuple[str, CheckpointId], other: Callable[[], None]) -> None:
        """Make a call everywhere, and something else that changes nothing while it is under way."""
        done = self.case.wire.background(lambda: self.drive(*call))
        other()
        done.result(self.case.patience.seconds(30.0))

    # --- restores ---

    def plan(
        self,
        snapshot: Snapshot,
        *,
        only: Sequence[str] | None = None,
        keep: Sequence[str] | None = None,
        policy: str | None = None,
        wrong: Literal["turns", "attempt", "task", "unknown", "digest", "checkpoint"] | None = None,
        used: bool = False,
    ) -> CheckpointId:
        """Reserve attempts and a checkpoint id for a restore, and return the id.

        Args:
            snapshot: what is restored.
            only: continue these alone; None: all that can be continued.
            keep: keep the results of these alone; None: all.
            policy: the address that is given; None: none.
            wrong: what disagrees with the files.
            used: take attempt numbers that were used before.
        """
        rows = {name: part.rows for name, part in snapshot.parts.items()}
        restarts = {key for part in rows.values() for key, row in part.items() if row["state"] == "restart"}
        turns = {key for key, row in rows[self.gym.agent.name].items() if row["state"] == "turn"}
        chosen = sorted(key for key in turns - restarts if only is None or key in only)
        following = {key: self.pieces[key].attempt + (0 if used else 1) for key in chosen}
        kept = [row["receipt"] for key, row in rows[self.gym.agent.name].items() if row["state"] == "finished"]
        kept = [receipt for receipt in kept if keep is None or receipt["rollout_id"] in keep]
        done = set(chosen) | {receipt["rollout_id"] for receipt in kept}
        fences = [
            {"rollout_id": key, "through_attempt": piece.attempt}
            for key, piece in self.pieces.items()
            if key not in done and self.agent.any(lambda state, key=key: _unfinished(state, key))  # type: ignore[misc]  # a lambda with a bound default
        ]
        bodies = {
            name: self._body(snapshot.parts[name], snapshot.id, following, fences, wrong) for name in snapshot.parts
        }
        bodies[self.gym.agent.name]["results"] = kept
        if policy is not None:
            for body in bodies.values():
                body["policy"] = self.case.witness.policy(policy)
        id = names.parse_checkpoint_id(self.controller.next_id())
        deserves = {"digest": "checkpoint_corrupt", "checkpoint": "state_mismatch"}.get(wrong or "")
        self.restorations[id] = Restoration(
            bodies, snapshot.id, deserves, _words(snapshot, following, kept, policy, wrong)
        )
        if wrong is None:
            for key, attempt in following.items():
                self._used(key, attempt)
                self.floors[key, attempt] = rows[self.gym.agent.name][key]["turns_done"]
        return id

    def _body(
        self, part: Part, id: CheckpointId, following: Mapping[str, int], fences: list[Json], wrong: str | None
    ) -> Json:
        lists = [self._line(key, row, following[key]) for key, row in part.rows.items() if key in following]
        if wrong in ("turns", "attempt", "task") and lists:
            line = lists[-1]
            changed = {
                "turns": {"turns_done": line["turns_done"] + 1},
                "attempt": {"attempt": line["attempt"] + 1, "next_attempt": line["next_attempt"] + 1},
                "task": {"task_digest": _DIGEST},
            }
            lists[-1] = {**line, **changed[wrong]}
        elif wrong == "unknown":
            digest = names.bytes_digest(b"unknown")
            key = f"{self.case.prefix}nobody"
            lists.append({"rollout_id": key, "attempt": 0, "next_attempt": 1, "turns_done": 0, "task_digest": digest})
        source = part.source(str(id))
        if wrong == "digest":
            source["manifest_digest"] = _DIGEST
        elif wrong == "checkpoint":
            source["checkpoint_id"] = f"{id.epoch}-{id.sequence + 99}"
        return {"source": source, "rollouts": lists, "results": [], "fences": fences}

    def _line(self, key: str, row: Json, next_attempt: int) -> Json:
        return {
            "rollout_id": key,
            "attempt": row["attempt"],
            "next_attempt": next_attempt,
            "turns_done": row["turns_done"],
            "task_digest": row["task_digest"] or self.pieces[key].item["task_digest"],
        }

    def _used(self, rollout_id: str, attempt: int) -> None:
        piece = self.pieces[rollout_id]
        piece.attempt = max(piece.attempt, attempt)
        self.case.attempts[rollout_id] = piece.attempt

    def _restoration(self, participant: Participant, id: CheckpointId, how: How, call: Call) -> tuple[Json, Call]:
        found = self.restorations.setdefault(id, Restoration({p.name: _nothing() for p in self.everyone}))
        body = dict(found.bodies[participant.name])
        if how.other:
            body["policy"] = self.case.witness.policy("elsewhere")
        plan = Plan(
            tuple(
                Resumed(r["rollout_id"], r["attempt"], r["next_attempt"], r["turns_done"], r["task_digest"])
                for r in body["rollouts"]
            ),
            tuple(Receipt(r["rollout_id"], r["attempt"], r["digest"]) for r in body["results"]),
            tuple(Retire(r["rollout_id"], r["through_attempt"]) for r in body["fences"]),
        )
        given = body.get("policy")
        address = None if given is None else self._address(given)
        call = replace(
            call,
            run_id=RUN,
            arguments=json.dumps(body, sort_keys=True),
            source=found.source,
            plan=plan,
            policy=address,
            deserves=found.deserves,
        )
        return body, call

    def _address(self, policy: Json) -> str:
        for name in ("main", "second", "elsewhere"):
            if self.case.witness.address(name) == policy["base_url"]:
                return name
        raise AssertionError(f"no address of the witness is {policy}")

    # --- what was written ---

    def _written(self, participant: Participant, call: Call, reply: Reply) -> None:
        id = call.id
        parts = self._parts.setdefault(id, {})
        if participant.name in parts:
            return
        target, directory = target_for(self.case, participant, str(id))
        if target["scheme"] == "file" and not (directory / reply["manifest"]["name"]).exists():
            # Which of two targets the first commit named is not known where a reply was lost.
            target, directory = target_for(self.case, participant, f"{id}-other")
        part = parts[participant.name] = read_part(self.case, participant, str(id), target, directory, reply)
        watch = self.watches[participant.name]
        ours = {key: row for key, row in part.rows.items() if key in self.pieces}
        if watch is self.agent:
            watch.indexed(id, ours)
            self._count_rows(reply, part)
        else:
            watch.taken(id, ours, {key: piece.item["task_digest"] for key, piece in self.pieces.items()})
        if len(parts) == len(self.watches):
            self.snapshots.append(Snapshot(id, dict(parts)))

    def _count_rows(self, reply: Reply, part: Part) -> None:
        counts = reply["counts"]
        for state in ("turn", "finished", "restart"):
            number = sum(1 for row in part.rows.values() if row["state"] == state)
            self.case.equal(number, counts[state], f"counts.{state} of a commit", "CKPT-COMMIT-020")

    # --- starts, ACKs, retires ---

    def start(self, items: Sequence[tuple[Piece, int]], *, how: How | None = None, **variation: Any) -> Reply | None:
        """Send a batch of starts: pieces and attempts."""
        call, send = self.compose_start(items, how or How(), **variation)
        shown = ", ".join(f"{piece.rollout_id}/a{attempt}" for piece, attempt in items)
        words = f"start {shown}{(how or How()).words}"
        reply = self.agent.call(call, lambda: send(variation.get("fault")), words)
        if reply is not None and reply.ok:
            for (piece, attempt), entry in zip(items, reply["outcomes"], strict=True):
                if entry["outcome"] == "started":
                    self._used(piece.rollout_id, attempt)
                self._receipt_in(entry)
        else:
            for piece, attempt in items:
                self._used(piece.rollout_id, attempt)
        self.settle()
        return reply

    def _receipt_in(self, entry: Json) -> None:
        """An outcome that names a result says so (CKPT-ROLL-016, CKPT-RETIRE-007)."""
        if entry["outcome"] in ("already_finished", "finished"):
            self.case.true("receipt" in entry, "the outcome carries the receipt", "CKPT-ROLL-016", got=entry)

    def compose_start(
        self,
        items: Sequence[tuple[Piece, int]],
        how: How,
        *,
        address: str = "main",
        other_task: bool = False,
        unfit: Literal["invalid", "unknown_environment"] | None = None,
        fault: Fault | None = None,
    ) -> tuple[Call, Send]:
        """Return a batch of starts as the model's value and as what is sent."""
        digest = _DIGEST if other_task else None
        rows, wanted = [], []
        for piece, attempt in items:
            row = {**piece.item, "attempt": attempt}
            if other_task:
                row["task_digest"] = digest
            if unfit == "invalid":
                row["task"] = {"seed": -1}
            elif unfit == "unknown_environment":
                row["environment"] = "no-such-environment"
            rows.append(row)
            wanted.append(replace(piece.start(attempt, address, digest=digest), unfit=unfit))
        participant = self.gym.agent
        controller, headers, call = self._identity(participant, "start", _ANY, how)
        call = replace(call, checkpoint_id=None, items=tuple(wanted))
        policy = self.case.witness.policy(address)
        return call, lambda fault: controller.start(participant, rows, policy=policy, headers=headers, fault=fault)

    def ack(self, receipts: Sequence[Receipt], how: How | None = None, fault: Fault | None = None) -> Reply | None:
        """Send a batch of receipts."""
        call, send = self.compose_ack(receipts, how or How())
        shown = ", ".join(f"{r.rollout_id}/a{r.attempt} {r.digest[7:11]}" for r in receipts)
        return self.agent.call(call, lambda: send(fault), f"ACK {shown}{(how or How()).words}")

    def compose_ack(self, receipts: Sequence[Receipt], how: How) -> tuple[Call, Send]:
        """Return a batch of receipts as the model's value and as what is sent."""
        participant = self.gym.agent
        controller, headers, call = self._identity(participant, "ack", _ANY, how)
        call = replace(call, checkpoint_id=None, items=tuple(receipts))
        rows = [{"rollout_id": r.rollout_id, "attempt": r.attempt, "digest": r.digest} for r in receipts]
        return call, lambda fault: controller.ack(participant, rows, headers=headers, fault=fault)

    def retire(self, through: Mapping[str, int], how: How | None = None, fault: Fault | None = None) -> None:
        """Retire rollouts at every participant, the owner of rollouts first."""
        how = how or How()
        for participant in self.everyone:
            call, send = self.compose_retire(participant, through, how)
            shown = ", ".join(f"{key} through {attempt}" for key, attempt in through.items())
            watch = self.watches[participant.name]
            reply = watch.call(call, lambda: send(fault), f"retire {shown}{how.words} at {participant.name}")  # noqa: B023  # called at once
            for entry in reply["outcomes"] if reply is not None and reply.ok else ():
                self._receipt_in(entry)
                watch.change(lambda state, key=entry["rollout_id"]: _without_guest(state, key))  # type: ignore[misc]  # a lambda with a bound default
        for key, attempt in through.items():
            piece = self.pieces.get(key)
            if piece is not None and not how.stale and attempt >= piece.attempt and not self.lives(piece):
                self.unstick(piece)
        self.settle()

    def compose_retire(self, participant: Participant, through: Mapping[str, int], how: How) -> tuple[Call, Send]:
        """Return a batch of retires as the model's value and as what is sent."""
        controller, headers, call = self._identity(participant, "retire", _ANY, how)
        items = tuple(Retire(key, attempt) for key, attempt in through.items())
        call = replace(call, checkpoint_id=None, items=items, patient=not how.impatient)
        timeout = 0 if how.impatient else PATIENT_MS
        return call, lambda fault: controller.retire(
            participant, through, timeout_ms=timeout, headers=headers, fault=fault
        )


_EXPECT = names.HEADER_EXPECT_INCARNATION
_DIGEST = names.bytes_digest(b"another")
_ANY = CheckpointId(1, 0)


def _words(
    snapshot: Snapshot, following: Mapping[str, int], kept: list[Json], policy: str | None, wrong: str | None
) -> str:
    lists = [f"{key} as a{attempt}" for key, attempt in following.items()]
    lists += [f"result of {receipt['rollout_id']}" for receipt in kept]
    extra = (f", policy {policy}" if policy else "") + (f", wrong {wrong}" if wrong else "")
    return f" (of {snapshot.id}: {', '.join(lists) or 'nothing'}{extra})"


def _nothing() -> Json:
    return {"source": None, "rollouts": [], "results": [], "fences": []}


def _unfinished(state: Any, key: str) -> bool:
    held = state.rollouts.get(key)
    return held is not None and held.state in ("live", "retired", "failed")


def _without_guest(state: Any, key: str) -> Any:
    return replace(state, guests=MappingProxyType({name: kind for name, kind in state.guests.items() if name != key}))


__all__ = ["Driver", "How", "Restoration", "Snapshot", "Start"]
