# SPDX-License-Identifier: Apache-2.0
"""Every operation of the model: from a state and an accepted call to the outcomes that the specification allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from conformance import model_moves as moves
from conformance import model_rollouts as book
from conformance.model_moves import answer, refused, relation
from conformance.model_rollouts import Receipt, Retire, Rollouts, Start
from conformance.model_values import Call, Checkpoint, Ending, Last, Outcome, State


def _usable(state: State) -> Checkpoint | None:
    """Return the open checkpoint, unless it is already ending (CKPT-PHASE-006)."""
    return state.open if state.open is not None and state.open.ending is None else None


def _over(state: State, call: Call) -> frozenset[Outcome]:
    """Return the refusal of an id that is neither the open one nor usable: higher while one is open, or over."""
    higher = state.open is not None and relation(state, call.id) == "unseen"
    return refused(state, "checkpoint_conflict" if higher else "stale_checkpoint")


def _ended(state: State, *ways: Ending) -> bool:
    return state.open is None and state.last is not None and state.last.ended_as in ways


# --- saving -------------------------------------------------------------------------------------------------------


def prepare(state: State, call: Call) -> frozenset[Outcome]:
    """Close the gate; ready, or what blocks."""
    match relation(state, call.id):
        case "unseen" if state.phase == "idle":
            return _readiness(moves.opened(state, call), call)
        case "open" if (checkpoint := _usable(state)) is not None:
            if state.phase in ("restoring", "restored"):
                return refused(state, "invalid_phase")
            if call.run_id != checkpoint.run_id:
                return refused(state, "argument_conflict")
            if state.gate == "open":
                return refused(state, "invalid_phase")
            return _readiness(state, call)
    return _over(state, call)


def _readiness(state: State, call: Call) -> frozenset[Outcome]:
    if state.phase != "preparing":
        return answer(state, phase={state.phase}, ready={True}, blocker_count={0})
    answers: set[Outcome] = set()
    if state.perhaps_blocked or not call.patient:
        answers |= answer(state, phase={"preparing"}, ready={False})
    if not state.blocked:
        answers |= answer(replace(state, phase="prepared"), phase={"prepared"}, ready={True}, blocker_count={0})
    return frozenset(answers)


def commit(state: State, call: Call) -> frozenset[Outcome]:
    """Capture the cut, write it."""
    match relation(state, call.id):
        case "last" if _ended(state, "committed"):
            return answer(state, phase={"idle"}, captured={True}, durable={True})
        case "open" if (checkpoint := _usable(state)) is not None:
            return _commit_open(state, checkpoint, call)
    return _over(state, call)


def _commit_open(state: State, checkpoint: Checkpoint, call: Call) -> frozenset[Outcome]:
    if state.phase in ("restoring", "restored"):
        return refused(state, "invalid_phase")
    arguments = (call.arguments, call.leave_out_blocked)
    if checkpoint.arguments not in (None, arguments):
        return refused(state, "argument_conflict")
    if state.phase == "committed":
        return answer(state, phase={"committed"}, captured={True}, durable={True})
    if state.phase == "committing":
        return _committing(state, call)
    answers: set[Outcome] = set()
    if call.deserves:
        answers |= refused(state, call.deserves)
    if state.phase == "preparing" and not call.leave_out_blocked:
        # Whether a target is looked at before or after the phase is not said: either refusal changes nothing.
        return frozenset(answers) | refused(state, "not_ready")
    if call.deserves:
        return frozenset(answers)
    for cut in moves.capture(state) if checkpoint.cut is None else (checkpoint.cut,):
        begun = replace(checkpoint, arguments=arguments, cut=cut, failing=call.failing)
        marked = _left_out(state, cut) if checkpoint.cut is None else state
        answers |= _committing(replace(marked, phase="committing", open=begun), call)
    return frozenset(answers)


def _left_out(state: State, cut: Rollouts) -> State:
    """Mark what the cut leaves out: its running effects end, nothing else of it goes on (CKPT-COMMIT-034 … 037)."""
    names = {name for name, rollout in cut.known.items() if rollout.left_out}
    return replace(state, rollouts=state.rollouts.each(lambda name, one: replace(one, left_out=name in names)))


def _committing(state: State, call: Call) -> frozenset[Outcome]:
    answers: set[Outcome] = set()
    if call.wait == "captured":
        answers |= answer(state, phase={"committing"}, captured={True}, durable={False})
    if not call.patient:
        answers |= refused(state, "deadline_exceeded")
    for done in moves.durable(state):
        answers |= answer(done, phase={done.phase}, captured={True}, durable={True})
    if state.open is not None and state.open.failing:
        failed = moves.write_fails(state)
        answers |= {replace(outcome, after=failed) for outcome in refused(state, "insufficient_storage")}
    return frozenset(answers)


def resume(state: State, call: Call) -> frozenset[Outcome]:
    """Open the gate after capture or restore."""
    match relation(state, call.id):
        case "last" if _ended(state, "committed", "restored"):
            assert state.last is not None
            return answer(state, phase={"idle"}, ended_as={state.last.ended_as})
        case "open" if _usable(state) is not None:
            if state.phase in ("preparing", "prepared", "restoring"):
                return refused(state, "invalid_phase")
            if state.phase == "committing":
                return _resume_committing(moves.open_gate(state))
            how: Ending = "committed" if state.phase == "committed" else "restored"
            return answer(moves.idle(state, how), phase={"idle"}, ended_as={how})
    return _over(state, call)


def _resume_committing(state: State) -> frozenset[Outcome]:
    answers = set(answer(state, phase={"committing"}, ended_as={None}))
    for done in moves.written(state):
        assert done.last is not None
        answers |= answer(done, phase={"idle"}, ended_as={None, done.last.ended_as})
    return frozenset(answers)


# --- ending -------------------------------------------------------------------------------------------------------


def abort(state: State, call: Call) -> frozenset[Outcome]:
    """Open the gate; this id can never publish."""
    kind = relation(state, call.id)
    if state.open is None:
        if kind == "last" and state.last is not None:
            return answer(state, phase={"idle"}, ended_as={state.last.ended_as})
        if kind == "unseen":
            return answer(replace(state, last=Last(call.id, "aborted")), phase={"idle"}, ended_as={"aborted"})
    elif kind in ("open", "unseen"):
        return _abort_open(state, call, higher=kind == "unseen")
    return _over(state, call)


def _abort_open(state: State, call: Call, *, higher: bool) -> frozenset[Outcome]:
    answers: set[Outcome] = set()
    for ended in moves.end(state, "aborted", committed="aborted"):
        if ended.open is not None:  # The work has not stopped; only an impatient call is answered before it has.
            if not call.patient:
                answers |= refused(ended, "deadline_exceeded")
            continue
        done = replace(ended, last=Last(call.id, "aborted")) if higher else ended
        assert done.last is not None
        answers |= answer(done, phase={"idle"}, ended_as={done.last.ended_as})
    return frozenset(answers)


def renew(state: State, call: Call) -> frozenset[Outcome]:
    """Extend the lease."""
    if relation(state, call.id) == "open" and _usable(state) is not None:
        return answer(state)
    return _over(state, call)


# --- restoring ----------------------------------------------------------------------------------------------------


def restore(state: State, call: Call) -> frozenset[Outcome]:
    """Verify everything, then install; stays paused."""
    match relation(state, call.id):
        case "unseen" if state.phase == "idle":
            if state.draining:
                return refused(state, "unavailable")
            # Whether what needs no file is refused before the checkpoint opens, or makes it fail, is not said.
            early = refused(state, call.deserves) if call.deserves == "forbidden_target" else frozenset()
            if book.stale_in(state.rollouts, call.plan):
                early |= refused(state, "stale_attempt")
            return early | restoring(moves.opened(state, call), call)
        case "last" if _ended(state, "restored"):
            return answer(state, phase={"idle"})
        case "open" if (checkpoint := _usable(state)) is not None:
            if state.phase not in ("restoring", "restored"):
                return refused(state, "invalid_phase")
            if call.arguments != checkpoint.arguments:
                return refused(state, "argument_conflict")
            if state.phase == "restored":
                return answer(state, phase={"restored"}, restored_count={len(call.plan.rollouts)})
            return restoring(state, call)
    return _over(state, call)


def restoring(state: State, call: Call) -> frozenset[Outcome]:
    """Return how a restore that has been accepted may be answered."""
    answers: set[Outcome] = set()
    if not call.patient:
        answers |= refused(state, "deadline_exceeded")
    for code in moves.failures(state):
        answers |= {replace(outcome, after=moves.idle(outcome.after, "failed")) for outcome in refused(state, code)}
    for done in moves.installed(state):
        count = {len(call.plan.rollouts)}
        answers |= answer(done, phase={"restored"}, restored_count=count)
    return frozenset(answers)


# --- items --------------------------------------------------------------------------------------------------------


def start(state: State, call: Call) -> frozenset[Outcome]:
    """Start a batch of rollouts."""
    twice = {name for name, count in Counter(item.rollout_id for item in call.items).items() if count > 1}

    def one(rollouts: Rollouts, item: Any) -> Iterable[tuple[str, Rollouts]]:
        assert isinstance(item, Start)
        fit = replace(item, unfit="invalid") if item.rollout_id in twice else item
        live = sum(1 for _ in rollouts.in_state("live"))
        gate = "closed" if state.draining else state.gate
        for name, left in book.start(rollouts, fit, gate, state.room - live):
            held = left.get(item.rollout_id)
            if name == "started" and held is not None:
                yield name, left.put(item.rollout_id, moves.loosen(state, item.rollout_id, held))
            else:
                yield name, left

    return _items(state, call, one)


def acknowledge(state: State, call: Call) -> frozenset[Outcome]:
    """Release results by their receipts."""

    def one(rollouts: Rollouts, item: Any) -> Iterable[tuple[str, Rollouts]]:
        assert isinstance(item, Receipt)
        return book.acknowledge(rollouts, item)

    return _items(state, call, one)


def retire(state: State, call: Call) -> frozenset[Outcome]:
    """Fence attempts, stop them, free them."""

    def one(rollouts: Rollouts, item: Any) -> Iterable[tuple[str, Rollouts]]:
        assert isinstance(item, Retire)
        return book.retire(rollouts, item, hosted=item.rollout_id in state.sessions)

    late = frozenset() if call.patient else refused(state, "deadline_exceeded")
    done = _items(state, call, one)
    # An impatient retire has fenced although it is answered 504 (CKPT-TIME-007, 008).
    return done | {replace(outcome, after=other.after) for outcome in late for other in done}


def _items(
    state: State, call: Call, one: Callable[[Rollouts, Any], Iterable[tuple[str, Rollouts]]]
) -> frozenset[Outcome]:
    ways: set[tuple[tuple[frozenset[str], ...], Rollouts]] = {((), state.rollouts)}
    for item in call.items:
        ways = {((*names, name), left) for names, rollouts in ways for left, name in _named(one(rollouts, item))}
    return frozenset(Outcome(200, None, replace(state, rollouts=rollouts), outcomes=names) for names, rollouts in ways)


def _named(ways: Iterable[tuple[str, Rollouts]]) -> Iterable[tuple[Rollouts, frozenset[str]]]:
    """Put the outcomes together that leave the same, so that many items do not multiply."""
    found: dict[Rollouts, frozenset[str]] = {}
    for name, left in ways:
        found[left] = found.get(left, frozenset()) | {name}
    return found.items()


VERBS: Mapping[str, Callable[[State, Call], frozenset[Outcome]]] = {
    "prepare": prepare,
    "commit": commit,
    "resume": resume,
    "abort": abort,
    "renew": renew,
    "restore": restore,
    "start": start,
    "ack": acknowledge,
    "retire": retire,
}
