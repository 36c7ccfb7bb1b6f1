# SPDX-License-Identifier: Apache-2.0
"""The moves of the model that several verbs and events share: the gate opens, a checkpoint ends, a cut is durable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from conformance import model_rollouts as book
from conformance.model_rollouts import START, Rollout, Rollouts, Stand
from conformance.model_values import STATUS, Call, Checkpoint, Ending, Last, Outcome, Relation, State
from spec.wire import CheckpointId


def relation(state: State, id: CheckpointId) -> Relation:
    """Return how ``id`` relates to the open checkpoint and to `last`."""
    if state.open is not None and id == state.open.id:
        return "open"
    highest = max((c.id for c in (state.open, state.last) if c is not None), default=None)
    if highest is None or id > highest:
        return "unseen"
    return "last" if state.last is not None and id == state.last.id else "lower"


def refused(state: State, code: str) -> frozenset[Outcome]:
    """Return the refusal with ``code``, which changes nothing (CKPT-CKID-031, CKPT-ERR-021)."""
    fields: dict[str, frozenset[Any]] = {}
    if code == "invalid_phase":
        fields["phase"] = frozenset({state.phase})
    if code in ("invalid_phase", "checkpoint_conflict") and state.open is not None:
        fields["checkpoint_id"] = frozenset({str(state.open.id)})
    return frozenset({Outcome(STATUS.get(code, 409), code, state, fields)})


def answer(state: State, **fields: Iterable[Any]) -> frozenset[Outcome]:
    """Return the answer 200 with these fields, and ``state`` after it."""
    return frozenset({Outcome(200, None, state, {name: frozenset(values) for name, values in fields.items()})})


# --- the gate ------------------------------------------------------------------------------------------------------


def open_gate(state: State) -> State:
    """Return ``state`` with an open gate: every rollout that was held may move on."""
    return replace(state, gate="open", rollouts=state.rollouts.each(lambda name, one: loosen(state, name, one)))


def loosen(state: State, name: str, rollout: Rollout) -> Rollout:
    """Return a rollout that may move, with the gate open, as far as the outside lets it."""
    goal = state.outside.get(name, START)
    if rollout.state != "live" or rollout.uncertain or (rollout.loose is None and rollout.stand == goal):
        return replace(rollout, left_out=False)
    return replace(rollout, loose=goal, left_out=False)


def let_go(state: State, name: str, goal: Stand, boundary: Stand) -> State:
    """Return ``state`` after the outside lets a rollout get further.

    Args:
        state: any state.
        name: the rollout.
        goal: where it gets when the gate is open.
        boundary: where a turn or verification that is under way ends by itself while the gate is closed.
    """
    moved = replace(state, outside=MappingProxyType({**state.outside, name: goal}))
    if boundary.busy == "no":
        moved = replace(moved, guests=MappingProxyType({k: v for k, v in state.guests.items() if k != name}))
    held = state.rollouts.get(name)
    if held is None or held.state != "live" or held.uncertain:
        return moved
    if state.gate == "open":
        return replace(moved, rollouts=state.rollouts.put(name, replace(held, loose=goal)))
    if held.may_block:
        limit = replace(boundary, end=None) if held.left_out else boundary
        return replace(moved, rollouts=state.rollouts.put(name, replace(held, loose=limit)))
    return moved


# --- ends ----------------------------------------------------------------------------------------------------------


def idle(state: State, how: Ending) -> State:
    """Return ``state`` after its checkpoint has ended: idle, the gate open, recorded in `last`."""
    assert state.open is not None
    # Uploads are kept until a restore has ended, and nobody knows how long from then on (CKPT-ART-009).
    uploads = frozenset[CheckpointId]() if state.open.restore is not None else state.uploads
    done = replace(state, phase="idle", open=None, last=Last(state.open.id, how), uploads=uploads)
    return open_gate(done)


def end(state: State, how: Ending, committed: Ending) -> frozenset[State]:
    """Return what ending the open checkpoint makes of ``state``: at once, or when its writer or builder has stopped.

    Args:
        state: any state.
        how: how it ends.
        committed: how it ends where the cut is durable already.
    """
    if state.open is None:
        return frozenset({state})
    if state.open.ending is not None:
        return frozenset({state}) | stopped(state)
    found: set[State] = set()
    if state.phase in ("committing", "restoring"):
        stopping = open_gate(replace(state, open=replace(state.open, ending=how)))
        found |= {stopping} | stopped(stopping)
        if state.phase == "restoring":
            # The installing step may have begun: what ends the restore then takes effect after it (CKPT-RESTORE-018).
            for current in installed(state):
                found |= discarded(current, how)
        return frozenset(found)
    if state.phase == "restored":
        return discarded(state, how)
    return frozenset({idle(state, committed if state.phase == "committed" else how)})


def stopped(state: State) -> frozenset[State]:
    """Return ``state`` after its writer or builder has stopped."""
    assert state.open is not None and state.open.ending is not None
    return frozenset({idle(state, state.open.ending)})


def discarded(state: State, how: Ending) -> frozenset[State]:
    """Return a restored state after it was given up."""
    return frozenset(idle(replace(state, rollouts=left), how) for left in book.discard(state.rollouts))


# --- commit and restore --------------------------------------------------------------------------------------------


def capture(state: State) -> frozenset[Rollouts]:
    """Return the cuts that a commit may capture: without what blocks, where it blocks."""
    return frozenset(_without(state.rollouts, names) for names in (state.perhaps_blocked, state.blocked))


def _without(rollouts: Rollouts, names: frozenset[str]) -> Rollouts:
    return rollouts.each(lambda name, one: replace(one, left_out=name in names))


def durable(state: State) -> Iterator[State]:
    """Yield what the end of the writing makes of a state in ``committing`` (CKPT-COMMIT-024, 025)."""
    assert state.open is not None and state.open.cut is not None
    kept = replace(state, cuts=MappingProxyType({**state.cuts, state.open.id: state.open.cut}))
    yield replace(kept, phase="committed") if state.gate == "closed" else idle(kept, "committed")


def write_fails(state: State) -> State:
    """Return what a failed writing makes of a state in ``committing`` (CKPT-COMMIT-026, 028)."""
    return replace(state, phase="prepared") if state.gate == "closed" else idle(state, "failed")


def written(state: State) -> Iterator[State]:
    """Yield what the end of the writing makes of a state in ``committing``, however it ends."""
    yield from durable(state)
    if state.open is not None and state.open.failing:
        yield write_fails(state)


def installed(state: State) -> Iterator[State]:
    """Yield what the installing step makes of a state in ``restoring``; nothing, where the restore must fail."""
    call = _restore(state)
    source = source_of(state, call)
    if call.deserves or book.stale_in(state.rollouts, call.plan) or book.mismatched(source, call.plan):
        return
    if state.blocked and state.runs_effects:
        return
    current = book.install(state.rollouts, source, call.plan, call.policy)
    sessions = frozenset(item.rollout_id for item in call.plan.rollouts)
    installed = replace(state, phase="restored", gate="closed", rollouts=current, feed=None)
    yield replace(installed, guests=MappingProxyType({}), sessions=sessions)


def failures(state: State) -> frozenset[str]:
    """Return the codes with which a restore in ``restoring`` may fail."""
    call = _restore(state)
    codes = set()
    if call.deserves:
        codes.add(call.deserves)
    if book.stale_in(state.rollouts, call.plan):
        codes.add("stale_attempt")
    if book.mismatched(source_of(state, call), call.plan):
        codes.add("state_mismatch")
    # Whether held work runs in *this* participant is not always known: an agent apart from its sessions need not wait.
    if not codes and state.perhaps_blocked:
        codes.add("not_ready")
    if call.uploaded and call.source not in state.uploads:
        codes.add("checkpoint_corrupt")
    return frozenset(codes)


def source_of(state: State, call: Call) -> Rollouts:
    """Return what the source of a restore holds."""
    return state.cuts.get(call.source, Rollouts()) if call.source is not None else Rollouts()


def _restore(state: State) -> Call:
    assert state.open is not None and state.open.restore is not None
    return state.open.restore


def opened(state: State, call: Call) -> State:
    """Return ``state`` after a prepare or restore has opened its checkpoint."""
    if call.operation == "prepare":
        return replace(state, phase="preparing", gate="closed", open=Checkpoint(call.id, call.run_id))
    checkpoint = Checkpoint(call.id, call.run_id, call.arguments, restore=call)
    return replace(state, phase="restoring", open=checkpoint)
