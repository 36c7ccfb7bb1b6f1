# SPDX-License-Identifier: Apache-2.0
"""The calls of the machine with items: starts, ACKs and retires, usual or wrong in one way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from conformance.controller import Controller, Json, Participant
from conformance.machine_outside import Piece
from conformance.machine_walk import Walk
from conformance.model_rollouts import Busy, Receipt, Retire
from conformance.model_values import Call, State
from conformance.wire import Fault, Reply
from spec import wire as names
from spec.wire import CheckpointId, ControllerPair

PATIENT_MS = 8_000
NAMED = 6
Stale = Literal["controller", "epoch", "incarnation", "id-epoch"]
Send = Callable[[Fault | None], Reply]


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
        http: of a commit: its files are to be fetched, where the participant can do that.
        failing: of a commit: its writing fails for lack of space where the participant has that fail point.
    """

    stale: Stale | None = None
    impatient: bool = False
    other: bool = False
    target: Literal["usual", "forbidden", "taken"] = "usual"
    wait: Literal["captured", "durable"] = "durable"
    leave_out: bool = False
    lease_ms: int = 60_000
    http: bool = False
    failing: bool = False

    @property
    def words(self) -> str:
        """The differences, for the story."""
        usual = How()
        shown = [f"{key} {value}" for key, value in vars(self).items() if value != getattr(usual, key)]
        return f" ({', '.join(shown)})" if shown else ""


class ItemCalls(Walk):
    """A walk that can start, acknowledge and retire rollouts."""

    # --- starts, ACKs, retires ---

    def start(self, items: Sequence[tuple[Piece, int]], *, how: How | None = None, **variation: Any) -> Reply | None:
        """Send a batch of starts: pieces and attempts."""
        call, send = self.compose_start(items, how or How(), **variation)
        shown = _named(f"{piece.rollout_id}/a{attempt}" for piece, attempt in items)
        words = f"start {shown}{(how or How()).words}"
        reply = self.agent.call(call, lambda: send(variation.get("fault")), words)
        if reply is not None and reply.ok:
            for (piece, attempt), entry in zip(items, reply["outcomes"], strict=True):
                if entry["outcome"] == "started":
                    self._used(piece.rollout_id, attempt)
                    self.hosted(piece)
                self._receipt_in(entry)
        else:
            for piece, attempt in items:
                self._used(piece.rollout_id, attempt)
                self.hosted(piece)
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
        digest = ANOTHER_DIGEST if other_task else None
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
        above = {key: self._above(key, attempt) for key, attempt in through.items()}
        for participant in self.everyone:
            call, send = self.compose_retire(participant, through, how)
            shown = _named(f"{key} through {attempt}" for key, attempt in through.items())
            watch = self.watches[participant.name]
            reply = watch.call(call, lambda: send(fault), f"retire {shown}{how.words} at {participant.name}")  # noqa: B023  # called at once
            for entry in reply["outcomes"] if reply is not None and reply.ok else ():
                self._receipt_in(entry)
                key, freed = entry["rollout_id"], entry["outcome"] == "retired"
                watch.change(lambda state: after_retire(state, key, above=above[key], freed=freed))  # noqa: B023  # called at once
        for key in through:
            piece = self.pieces.get(key)
            if piece is not None and not how.stale and not self.lives(piece):
                self.unstick(piece)
        self.settle()

    def _above(self, key: str, through: int) -> bool | None:
        """Return whether a rollout lives as an attempt above what is retired; ``None``: perhaps."""
        found: bool | None = self.agent.all(lambda state: _lives_above(state, key, through))
        return found

    def compose_retire(self, participant: Participant, through: Mapping[str, int], how: How) -> tuple[Call, Send]:
        """Return a batch of retires as the model's value and as what is sent."""
        controller, headers, call = self._identity(participant, "retire", _ANY, how)
        items = tuple(Retire(key, attempt) for key, attempt in through.items())
        call = replace(call, checkpoint_id=None, items=items, patient=not how.impatient)
        timeout = 0 if how.impatient else PATIENT_MS
        return call, lambda fault: controller.retire(
            participant, through, timeout_ms=timeout, headers=headers, fault=fault
        )

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

    def _used(self, rollout_id: str, attempt: int) -> None:
        piece = self.pieces[rollout_id]
        piece.attempt = max(piece.attempt, attempt)
        self.case.attempts[rollout_id] = piece.attempt


_EXPECT = names.HEADER_EXPECT_INCARNATION
ANOTHER_DIGEST = names.bytes_digest(b"another")
_ANY = CheckpointId(1, 0)


def _named(rows: Iterable[str]) -> str:
    """Return the rows in one line, cut where there are many."""
    found = list(rows)
    return ", ".join(found[:NAMED]) + (f" … {len(found)} in all" if len(found) > NAMED else "")


def _lives_above(state: State, key: str, through: int) -> bool:
    held = state.rollouts.get(key)
    return held is not None and held.state == "live" and held.attempt > through


def after_retire(state: State, key: str, *, above: bool | None, freed: bool) -> State:
    """Return what a retire leaves at a participant that owns sessions and no rollouts.

    Args:
        state: what was true there.
        key: the rollout.
        above: whether it lives as a higher attempt than was retired; ``None``: perhaps.
        freed: whether nothing is left of what was retired.
    """
    if above or key not in state.sessions | set(state.guests):
        return state
    guests: dict[str, Busy] = {name: kind for name, kind in state.guests.items() if name != key}
    if above is None and key in state.guests:
        guests[key] = "verification"  # What is kept there counts as what may block.
    sessions = state.sessions - {key} if freed and above is False else state.sessions
    return replace(state, guests=MappingProxyType(guests), sessions=sessions)
