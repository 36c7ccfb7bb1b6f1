# SPDX-License-Identifier: Apache-2.0
"""The calls of the machine that name a checkpoint: each as the model's value and as what is sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from conformance import model
from conformance.controller import Json, Participant
from conformance.cuts import target_for
from conformance.errors import NotOffered
from conformance.machine_items import PATIENT_MS, How, Send, Stale
from conformance.machine_outside import Piece
from conformance.machine_plans import RUN, Plans, Restoration, Snapshot
from conformance.machine_watch import Watch
from conformance.model_values import Call, State
from conformance.wire import Fault, Reply
from spec.wire import CheckpointId

SHORT_MS = 60


ORDER: Mapping[str, Literal["ascending", "descending"]] = {
    "prepare": "ascending",
    "resume": "descending",
    "restore": "descending",
}
"""In which order of stages an operation goes to the participants; every other one ascending."""


class Driver(Plans):
    """A walk that can send every call of a controller to every participant."""

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
        if operation == "restore":
            self.upload(participant, id)
        call, send = self.compose(participant, operation, id, how)
        lists = self.restorations[id].words if operation == "restore" and id in self.restorations else ""
        words = f"{operation} {id}{lists}{how.words} at {participant.name}"
        watch = self.watches[participant.name]
        lost = model.on_its_way if fault is not None and fault.kind == "disconnect" else model.unknown
        reply = watch.call(call, lambda: send(fault), words, lost)
        if reply is not None:
            self.answered(participant, call, reply)
        return reply

    def answered(
        self, participant: Participant, call: Call, reply: Reply, before: frozenset[State] = frozenset()
    ) -> None:
        """Note what an answered call wrote; judge what its body says beyond the outcome.

        Args:
            participant: who answered.
            call: what was asked.
            reply: what came.
            before: states in which it may have been answered as well: others were under way at the same time.
        """
        if call.operation == "prepare" and reply.ok:
            self.watches[participant.name].readiness(reply.json, before)
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
            call = replace(call, leave_out_blocked=how.leave_out, failing=how.failing)
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

    def _target(self, participant: Participant, id: CheckpointId, how: How) -> tuple[Json, str | None]:
        if how.target == "forbidden":
            return {"scheme": "file", "path": "/nowhere/gym-conformance"}, "forbidden_target"
        if how.target == "taken" and self.snapshots:
            target = self.snapshots[-1].parts[participant.name].target
            if target["scheme"] == "file":
                return target, "target_exists" if self.snapshots[-1].id != id else None
        label = f"{id}-other" if how.other else str(id)
        target, _ = target_for(self.case, participant, label, http=how.http)
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
            for operation, id in (one, other):
                if operation == "restore":
                    self.upload(participant, id)
            (first, send), (second, send_too) = (self.compose(participant, *call, How()) for call in (one, other))
            before = model.unfold(watch.states)
            replies = self.case.wire.together([lambda: send(None), lambda: send_too(None)])  # noqa: B023  # called at once
            words = f"{one[0]} {one[1]} and {other[0]} {other[1]} at once at {participant.name}"
            self.case.step(f"{words} → {' and '.join(reply.brief[:60] for reply in replies)}")
            watch.together((first, second), (replies[0], replies[1]), words)
            for call, reply in zip((first, second), replies, strict=True):
                self.answered(participant, call, reply, before)
        self.settle()

    def items_at_once(self, one: tuple[str, CheckpointId], call: Call, send: Send, words: str) -> Reply:
        """Make a call that names a checkpoint, and one with items, at the same time at the owner of rollouts."""
        owner = self.gym.agent
        named, send_named = self.compose(owner, *one, How())
        before = model.unfold(self.agent.states)
        replies = self.case.wire.together([lambda: send_named(None), lambda: send(None)])
        words = f"{one[0]} {one[1]} and {words} at once at {owner.name}"
        self.case.step(f"{words} → {' and '.join(reply.brief[:60] for reply in replies)}")
        self.agent.together((named, call), (replies[0], replies[1]), words)
        self.answered(owner, named, replies[0], before)
        for participant in self.everyone:
            if participant is not owner:
                self.send(participant, *one, How())
        return replies[1]

    def start_during(self, one: tuple[str, CheckpointId], piece: Piece) -> None:
        """Start a fresh rollout while a call that names a checkpoint is under way."""
        call, send = self.compose_start([(piece, 0)], How())
        self.hosted(piece)
        self.items_at_once(one, call, send, f"start {piece.rollout_id}")
        self.settle()

    def retire_during(self, one: tuple[str, CheckpointId], through: Mapping[str, int]) -> None:
        """Retire a rollout while a call that names a checkpoint is under way, then everywhere."""
        call, send = self.compose_retire(self.gym.agent, through, How())
        self.items_at_once(one, call, send, f"retire {', '.join(through)}")
        self.retire(through)

    def until_written(self) -> None:
        """Wait until no participant writes any more, however its writing ends."""
        for watch in self.watches.values():
            status = watch.participant.status
            self._until(lambda: status()["phase"] != "committing", f"{watch.name} has written")  # noqa: B023  # called at once
        self.look()

    def certainly(self, phase: str) -> bool:
        """Return whether every participant is certainly in a phase."""
        return all(watch.phase == phase for watch in self.watches.values())

    def during(self, call: tuple[str, CheckpointId], other: Callable[[], None]) -> None:
        """Make a call everywhere, and something else that changes nothing while it is under way."""
        done = self.case.wire.background(lambda: self.drive(*call))
        other()
        done.result(self.case.patience.seconds(30.0))


__all__ = ["Driver", "How", "Restoration", "Snapshot", "Stale"]
