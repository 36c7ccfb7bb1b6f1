# SPDX-License-Identifier: Apache-2.0
"""The protocol as a pure value: ``step(state, call)`` gives every outcome that the specification allows.

A `State` is what may be true of one participant. What a caller cannot know (has the writing ended? was the lost call
executed?) makes several states possible at once; a caller keeps the set, and each answer filters it:

* ``step`` gives the allowed outcomes of a call, each with the state that it leaves;
* ``filter_by`` keeps the states that allow the answer that came; an empty set is a failure of the participant;
* ``unknown`` gives the states that are possible when no answer came (time-out, reset, kill);
* ``unfold`` adds what the participant may have done by itself in the meantime.

It works in both directions: it judges a Gym, and it can pick the answer of a scripted one. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from conformance import model_rollouts as book
from conformance.model_rollouts import Plan, Receipt, Retire, Rollouts, Start
from spec.wire import CheckpointId, ControllerPair

Phase = Literal["idle", "preparing", "prepared", "committing", "committed", "restoring", "restored"]
Gate = Literal["open", "closed"]
Ending = Literal["committed", "restored", "aborted", "expired", "failed"]
Relation = Literal["open", "last", "unseen", "lower"]

CHECKPOINT_OPERATIONS = frozenset({"prepare", "commit", "resume", "abort", "renew", "restore"})
"""The operations that name a checkpoint."""


@dataclass(frozen=True, slots=True)
class Last:
    """The record of the checkpoint that ended most recently."""

    id: CheckpointId
    ended_as: Ending


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The open checkpoint.

    Args:
        arguments: what the first commit or restore that was not refused was called with, as far as it is compared.
        cut: what was captured; ``None``: nothing yet.
        ending: how it will end once its writer has stopped.
    """

    id: CheckpointId
    run_id: str
    arguments: Hashable | None = None
    cut: Rollouts | None = None
    ending: Ending | None = None


@dataclass(frozen=True)
class State:
    """What may be true of one participant.

    Args:
        busy: the rollouts that the outside keeps from their boundary: an effect or a verification of them is held.
        cuts: what each cut that may be restored holds.
        room: how many rollouts may be live at once.
    """

    phase: Phase = "idle"
    gate: Gate = "open"
    open: Checkpoint | None = None
    last: Last | None = None
    controller: ControllerPair | None = None
    rollouts: Rollouts = field(default_factory=Rollouts)
    busy: frozenset[str] = frozenset()
    cuts: Mapping[CheckpointId, Rollouts] = field(default_factory=lambda: MappingProxyType({}))
    room: int = 2**31

    def __hash__(self) -> int:
        return hash((self.phase, self.gate, self.open, self.last, self.controller, self.rollouts, self.busy))

    @property
    def blocked(self) -> frozenset[str]:
        """Return the live rollouts that the outside keeps from their boundary."""
        return frozenset(name for name, _ in self.rollouts.in_state("live") if name in self.busy)


@dataclass(frozen=True, slots=True)
class Call:
    """One mutating call of a controller.

    Args:
        operation: one of those that name a checkpoint, or ``start``, ``ack``, ``retire``.
        expects: whether the incarnation that the call names is the participant's.
        arguments: what a repeat of commit or restore must equal.
        wait: of a commit, what it waits for.
        deserves: the error that its target, source or lists earn by themselves (``forbidden_target``, …).
        source: of a restore, the checkpoint whose cut is restored; ``None``: none (``source: null``).
        policy: of a restore, where restored rollouts call; ``None``: their saved one.
        patient: whether its time limit is long enough for everything that the outside does not hold.
        items: of a start, an ACK or a retire.
    """

    operation: str
    controller: ControllerPair
    expects: bool = True
    checkpoint_id: CheckpointId | None = None
    run_id: str = ""
    arguments: Hashable | None = None
    leave_out_blocked: bool = False
    wait: Literal["captured", "durable"] = "durable"
    deserves: str | None = None
    source: CheckpointId | None = None
    plan: Plan = field(default_factory=Plan)
    policy: str | None = None
    patient: bool = True
    items: tuple[Start | Receipt | Retire, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """One answer that the specification allows, and what is true after it.

    ``fields`` are the fields of the body that are determined, each with the values that it may have; ``outcomes`` is,
    for a call with items, what each item may get.
    """

    status: int
    code: str | None
    after: State
    fields: Mapping[str, frozenset[Any]] = field(default_factory=dict)
    outcomes: tuple[frozenset[str], ...] | None = None

    def __hash__(self) -> int:
        return hash((self.status, self.code, self.after, self.outcomes))

    def fits(self, status: int, body: Any) -> bool:
        """Return whether an answer is this outcome."""
        if status != self.status or not isinstance(body, Mapping):
            return False
        if self.code is not None:
            return body.get("code") == self.code
        if self.outcomes is not None:
            given = [entry.get("outcome") for entry in body.get("outcomes", ())]
            if len(given) != len(self.outcomes):
                return False
            return all(one in allowed for one, allowed in zip(given, self.outcomes, strict=True))
        return all(body.get(name) in allowed for name, allowed in self.fields.items())


_STATUS = {
    "forbidden_target": 403,
    "payload_too_large": 413,
    "checkpoint_corrupt": 422,
    "state_incompatible": 422,
    "state_mismatch": 422,
    "unsupported": 501,
    "deadline_exceeded": 504,
    "insufficient_storage": 507,
}


def step(state: State, call: Call) -> frozenset[Outcome]:
    """Return every outcome that the specification allows for ``call`` in ``state``.

    Args:
        state: one state that may be true when the call is judged; events before that are the caller's (`unfold`).
        call: a well-formed call. What is malformed never reaches the machine.
    """
    if not call.expects:
        return _refused(state, "stale_incarnation")
    if state.controller is not None and call.controller < state.controller:
        return _refused(state, "stale_controller")
    found: set[Outcome] = set()
    for adopted in adopt(state, call.controller):
        found |= _VERBS[call.operation](adopted, call)
    return frozenset(found)


def adopt(state: State, controller: ControllerPair) -> frozenset[State]:
    """Return what a higher pair's first well-formed call makes of ``state`` before the call itself is judged.

    Requirements: CKPT-CTRL-002, CKPT-CTRL-003, CKPT-CTRL-004.
    """
    if state.controller is not None and controller <= state.controller:
        return frozenset({state})
    return frozenset(replace(done, controller=controller) for done in _end(state, "aborted", committed="committed"))


def relation(state: State, id: CheckpointId) -> Relation:
    """Return how ``id`` relates to the open checkpoint and to `last`."""
    if state.open is not None and id == state.open.id:
        return "open"
    highest = max((c.id for c in (state.open, state.last) if c is not None), default=None)
    if highest is None or id > highest:
        return "unseen"
    return "last" if state.last is not None and id == state.last.id else "lower"


# --- verbs -----------------------------------------------------------------------------------------------------------


def _prepare(state: State, call: Call) -> frozenset[Outcome]:
    match _relation(state, call):
        case "unseen" if state.phase == "idle":
            opened = Checkpoint(_id(call), call.run_id)
            return _readiness(replace(state, phase="preparing", gate="closed", open=opened), call)
        case "open" if state.open is not None and state.open.ending is None:
            if state.phase in ("restoring", "restored"):
                return _refused(state, "invalid_phase")
            if call.run_id != state.open.run_id:
                return _refused(state, "argument_conflict")
            if state.gate == "open":
                return _refused(state, "invalid_phase")
            return _readiness(state, call)
    return _over(state, call)


def _readiness(state: State, call: Call) -> frozenset[Outcome]:
    if state.phase != "preparing":
        return _answer(state, phase={state.phase}, ready={True})
    answers: set[Outcome] = set()
    if state.blocked or not call.patient:
        answers |= _answer(state, phase={"preparing"}, ready={False})
    if not state.blocked:
        answers |= _answer(replace(state, phase="prepared"), phase={"prepared"}, ready={True})
    return frozenset(answers)


def _commit(state: State, call: Call) -> frozenset[Outcome]:
    match _relation(state, call):
        case "last" if state.open is None and state.last is not None and state.last.ended_as == "committed":
            return _answer(state, phase={"idle"}, captured={True}, durable={True})
        case "open" if state.open is not None and state.open.ending is None:
            return _commit_open(state, state.open, call)
    return _over(state, call)


def _commit_open(state: State, checkpoint: Checkpoint, call: Call) -> frozenset[Outcome]:
    if state.phase in ("restoring", "restored"):
        return _refused(state, "invalid_phase")
    arguments = (call.arguments, call.leave_out_blocked)
    if checkpoint.arguments not in (None, arguments):
        return _refused(state, "argument_conflict")
    if state.phase == "committed":
        return _answer(state, phase={"committed"}, captured={True}, durable={True})
    if state.phase == "preparing" and not call.leave_out_blocked:
        return _refused(state, "not_ready")
    if state.phase != "committing":
        if call.deserves:
            return _refused(state, call.deserves)
        cut = checkpoint.cut if checkpoint.cut is not None else state.rollouts.without(state.blocked)
        checkpoint = replace(checkpoint, arguments=arguments, cut=cut)
        state = replace(state, phase="committing", open=checkpoint)
    answers: set[Outcome] = set()
    if call.wait == "captured" or not call.patient:
        answers |= _answer(state, phase={"committing"}, captured={True}, durable={False})
    if not call.patient:
        answers |= _refused(state, "deadline_exceeded")
    for done in _durable(state):
        answers |= _answer(done, phase={done.phase}, captured={True}, durable={True})
    return frozenset(answers)


def _resume(state: State, call: Call) -> frozenset[Outcome]:
    match _relation(state, call):
        case "last" if (
            state.open is None and state.last is not None and state.last.ended_as in ("committed", "restored")
        ):
            return _answer(state, phase={"idle"}, ended_as={state.last.ended_as})
        case "open" if state.open is not None and state.open.ending is None:
            if state.phase in ("preparing", "prepared", "restoring"):
                return _refused(state, "invalid_phase")
            if state.phase == "committing":
                opened = replace(state, gate="open")
                return _answer(opened, phase={"committing"}, ended_as={None}) | frozenset(
                    one
                    for done in _durable(opened)
                    for one in _answer(done, phase={"idle"}, ended_as={None, "committed"})
                )
            ended: Ending = "committed" if state.phase == "committed" else "restored"
            return _answer(_idle(state, ended), phase={"idle"}, ended_as={ended})
    return _over(state, call)


def _abort(state: State, call: Call) -> frozenset[Outcome]:
    kind = _relation(state, call)
    if state.open is None:
        if kind == "last" and state.last is not None:
            return _answer(state, phase={"idle"}, ended_as={state.last.ended_as})
        if kind == "unseen":
            return _answer(replace(state, last=Last(_id(call), "aborted")), phase={"idle"}, ended_as={"aborted"})
    elif kind in ("open", "unseen"):
        answers: set[Outcome] = set()
        for ended in _end(state, "aborted", committed="aborted"):
            if ended.open is not None:  # The writer has not stopped; only an impatient call is answered before it has.
                if not call.patient:
                    answers |= _refused(ended, "deadline_exceeded")
                continue
            done = replace(ended, last=Last(_id(call), "aborted")) if kind == "unseen" else ended
            how = done.last.ended_as if done.last is not None else None
            answers |= _answer(done, phase={"idle"}, ended_as={how})
        return frozenset(answers)
    return _over(state, call)


def _renew(state: State, call: Call) -> frozenset[Outcome]:
    if state.open is None:
        return _refused(state, "stale_checkpoint")
    if _relation(state, call) == "open" and state.open.ending is None:
        return _answer(state)
    return _over(state, call)


def _restore(state: State, call: Call) -> frozenset[Outcome]:
    match _relation(state, call):
        case "unseen" if state.phase == "idle":
            checkpoint = Checkpoint(_id(call), call.run_id, call.arguments)
            return _restoring(replace(state, phase="restoring", open=checkpoint), call)
        case "last" if state.open is None and state.last is not None and state.last.ended_as == "restored":
            return _answer(state, phase={"idle"})
        case "open" if state.open is not None and state.open.ending is None:
            if state.phase not in ("restoring", "restored"):
                return _refused(state, "invalid_phase")
            if call.arguments != state.open.arguments:
                return _refused(state, "argument_conflict")
            if state.phase == "restored":
                return _answer(state, phase={"restored"})
            return _restoring(state, call)
    return _over(state, call)


def _restoring(state: State, call: Call) -> frozenset[Outcome]:
    """Return how a restore that has been accepted may be answered."""
    answers: set[Outcome] = set()
    if not call.patient:
        answers |= _refused(state, "deadline_exceeded")
    failed = _idle(state, "failed")
    if call.deserves:
        return frozenset(answers | _refused(failed, call.deserves))
    if book.stale_in(state.rollouts, call.plan):
        return frozenset(answers | _refused(failed, "stale_attempt"))
    if state.blocked:
        # Whether held work runs in *this* participant is not known: an agent apart from its sessions need not wait.
        answers |= _refused(failed, "not_ready")
    source = state.cuts.get(call.source, Rollouts()) if call.source is not None else Rollouts()
    current = book.install(state.rollouts, source, call.plan, call.policy)
    installed = replace(state, phase="restored", gate="closed", rollouts=current, busy=frozenset())
    answers |= _answer(installed, phase={"restored"}, restored_count={len(call.plan.rollouts)})
    return frozenset(answers)


def _start(state: State, call: Call) -> frozenset[Outcome]:
    rollouts, names = state.rollouts, []
    for item in call.items:
        assert isinstance(item, Start)
        room = state.room - sum(1 for _ in rollouts.in_state("live"))
        name, rollouts = book.start(rollouts, item, state.gate, room)
        names.append(frozenset({name}))
    return frozenset({Outcome(200, None, replace(state, rollouts=rollouts), outcomes=tuple(names))})


def _acknowledge(state: State, call: Call) -> frozenset[Outcome]:
    rollouts, names = state.rollouts, []
    for item in call.items:
        assert isinstance(item, Receipt)
        name, rollouts = book.acknowledge(rollouts, item)
        names.append(frozenset({name}))
    return frozenset({Outcome(200, None, replace(state, rollouts=rollouts), outcomes=tuple(names))})


def _retire(state: State, call: Call) -> frozenset[Outcome]:
    rollouts, names = state.rollouts, []
    for item in call.items:
        assert isinstance(item, Retire)
        allowed, rollouts = book.retire(rollouts, item)
        names.append(allowed)
    return frozenset({Outcome(200, None, replace(state, rollouts=rollouts), outcomes=tuple(names))})


_VERBS = {
    "prepare": _prepare,
    "commit": _commit,
    "resume": _resume,
    "abort": _abort,
    "renew": _renew,
    "restore": _restore,
    "start": _start,
    "ack": _acknowledge,
    "retire": _retire,
}


# --- what happens without a call -----------------------------------------------------------------------------------


def unfold(states: Iterable[State]) -> frozenset[State]:
    """Return ``states`` and all that a participant may reach from them by its own progress (not: a lease that ends)."""
    seen: set[State] = set()
    waiting = list(states)
    while waiting:
        state = waiting.pop()
        if state not in seen:
            seen.add(state)
            waiting.extend(_events(state))
    return frozenset(seen)


def _events(state: State) -> Iterator[State]:
    if state.open is not None and state.open.ending is not None:
        yield _ended(state, state.open.ending)
    elif state.phase == "preparing" and not state.blocked:
        yield replace(state, phase="prepared")
    elif state.phase == "committing":
        yield from _durable(state)


def lease_ends(state: State) -> frozenset[State]:
    """Return what the end of the lease makes of ``state`` (CKPT-LEASE-009 … 013)."""
    if state.phase == "idle" or (state.phase == "committing" and state.gate == "open"):
        return frozenset({state})
    return _end(state, "expired", committed="committed")


def write_fails(state: State) -> State:
    """Return what a failed writing makes of a state in ``committing`` (CKPT-COMMIT-026, 028)."""
    if state.gate == "closed":
        return replace(state, phase="prepared")
    return _idle(state, "failed")


def restarts(state: State, manifest_complete: bool = False) -> State:
    """Return what a restart of the process leaves where the incarnation is kept."""
    if state.open is None:
        return state
    if state.phase == "restored":
        return next(iter(_end(state, "aborted", committed="aborted")))
    committed = state.phase == "committed" or (state.phase == "committing" and manifest_complete)
    return _idle(state, "committed" if committed else "failed")


def loses_everything(state: State) -> State:
    """Return what is true after a restart with a new incarnation: nothing is known, the cuts on disk are there."""
    return State(cuts=state.cuts, room=state.room)


# --- answers, and none ---------------------------------------------------------------------------------------------


def filter_by(states: Iterable[State], call: Call, status: int, body: Any) -> frozenset[State]:
    """Return what may be true after ``call`` was answered so; empty: the specification does not allow that answer."""
    allowed = (outcome for state in unfold(states) for outcome in step(state, call))
    return frozenset(outcome.after for outcome in allowed if outcome.fits(status, body))


def unknown(states: Iterable[State], call: Call) -> frozenset[State]:
    """Return what may be true when no answer came: the call was not executed, or it was, whole or up to its limit."""
    found = set(states)
    for state in unfold(states):
        for patient in (True, False):
            found |= {outcome.after for outcome in step(state, replace(call, patient=patient))}
    return frozenset(found)


def sees(state: State, status: Mapping[str, Any]) -> bool:
    """Return whether a status response may have come from ``state``."""
    shown = state.open.id if state.open is not None else None
    pair = None if state.controller is None else {"id": state.controller.name, "epoch": state.controller.epoch}
    last = status.get("last")
    return (
        status["phase"] == state.phase
        and status["gate"] == state.gate
        and status["checkpoint_id"] == (None if shown is None else str(shown))
        and status["controller"] == pair
        and (None if last is None else (last["checkpoint_id"], last["ended_as"]))
        == (None if state.last is None else (str(state.last.id), state.last.ended_as))
    )


# --- pieces --------------------------------------------------------------------------------------------------------


def _relation(state: State, call: Call) -> Relation:
    return relation(state, _id(call))


def _id(call: Call) -> CheckpointId:
    assert call.checkpoint_id is not None, f"{call.operation} needs a checkpoint id"
    return call.checkpoint_id


def _over(state: State, call: Call) -> frozenset[Outcome]:
    """Return the refusal of an id that is neither the open one nor usable: higher while one is open, or over."""
    higher = state.open is not None and _relation(state, call) == "unseen"
    return _refused(state, "checkpoint_conflict" if higher else "stale_checkpoint")


def _refused(state: State, code: str) -> frozenset[Outcome]:
    return frozenset({Outcome(_STATUS.get(code, 409), code, state)})


def _answer(state: State, **fields: Iterable[Any]) -> frozenset[Outcome]:
    return frozenset({Outcome(200, None, state, {name: frozenset(values) for name, values in fields.items()})})


def _durable(state: State) -> Iterator[State]:
    """Yield what the end of the writing makes of a state in ``committing`` (CKPT-COMMIT-024, 025)."""
    assert state.open is not None and state.open.cut is not None
    kept = replace(state, cuts=MappingProxyType({**state.cuts, state.open.id: state.open.cut}))
    yield replace(kept, phase="committed") if state.gate == "closed" else _idle(kept, "committed")


def _end(state: State, how: Ending, committed: Ending) -> frozenset[State]:
    """Return what ends the open checkpoint makes of ``state``: at once, or when its writer has stopped.

    Args:
        state: any state.
        how: how it ends.
        committed: how it ends where the cut is durable already.
    """
    if state.open is None:
        return frozenset({state})
    if state.open.ending is not None:
        return frozenset({state, _ended(state, state.open.ending)})
    if state.phase == "committing":
        stopping = replace(state, gate="open", open=replace(state.open, ending=how))
        return frozenset({stopping, _ended(stopping, how)})
    return frozenset({_ended(state, committed if state.phase == "committed" else how)})


def _ended(state: State, how: Ending) -> State:
    if state.phase == "restored":
        return _idle(replace(state, rollouts=book.discard(state.rollouts)), how)
    return _idle(state, how)


def _idle(state: State, how: Ending) -> State:
    assert state.open is not None
    return replace(state, phase="idle", gate="open", open=None, last=Last(state.open.id, how))
