# SPDX-License-Identifier: Apache-2.0
"""The protocol as a pure value: ``step(state, call)`` gives every outcome that the specification allows.

A `State` is what may be true of one participant. What a caller cannot know (has the writing ended? was the lost call
executed?) makes several states possible at once; a caller keeps the set, and each answer filters it:

* ``step`` gives the allowed outcomes of a call, each with the state that it leaves;
* ``filter_by`` keeps the states that allow the answer that came; an empty set is a failure of the participant;
* ``unknown`` gives the states that are possible when no answer came (time-out, reset, kill);
* ``together`` judges two answers of calls that were under way at the same time, in either order or interleaved;
* ``unfold`` adds what the participant may have done by itself in the meantime.

It works in both directions: it judges a Gym, and it can pick the answer of a scripted one. No I/O, no clock.
The values are in `model_values`, the rollouts in `model_rollouts`, every verb in `model_verbs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from conformance import model_moves as moves
from conformance.model_moves import let_go, refused, relation, write_fails
from conformance.model_values import Call, Outcome, State
from conformance.model_verbs import VERBS
from spec.wire import ControllerPair


def step(state: State, call: Call) -> frozenset[Outcome]:
    """Return every outcome that the specification allows for ``call`` in ``state``.

    Args:
        state: one state that may be true when the call is judged; events before that are the caller's (`unfold`).
        call: any call; what its form earns is in `Call.unfit`.

    Requirements: CKPT-ORDER-001, CKPT-ORDER-004, CKPT-CKID-002, CKPT-CTRL-002 … 005.
    """
    if call.unfit:
        return refused(state, call.unfit)
    if call.checkpoint_id is not None and call.checkpoint_id.epoch != call.controller.epoch:
        return refused(state, "invalid_request")
    if not call.expects:
        return refused(state, "stale_incarnation")
    if state.controller is not None and call.controller < state.controller:
        return refused(state, "stale_controller")
    verb = VERBS[call.operation]
    return frozenset(outcome for adopted in adopt(state, call.controller) for outcome in verb(adopted, call))


def adopt(state: State, controller: ControllerPair) -> frozenset[State]:
    """Return what a higher pair's first well-formed call makes of ``state`` before the call itself is judged.

    Requirements: CKPT-CTRL-002, CKPT-CTRL-003, CKPT-CTRL-004, CKPT-LEASE-014.
    """
    if state.controller is not None and controller <= state.controller:
        return frozenset({state})
    return frozenset(replace(done, controller=controller) for done in moves.end(state, "aborted", "committed"))


# --- what happens without a call -----------------------------------------------------------------------------------


def unfold(states: Iterable[State]) -> frozenset[State]:
    """Return ``states`` and all that a participant may reach from them by its own progress (not: a lease that ends)."""
    seen: set[State] = set()
    waiting = list(states)
    while waiting:
        state = waiting.pop()
        if state not in seen:
            seen.add(state)
            waiting.extend(_progress(state))
    return frozenset(seen)


def _progress(state: State) -> Iterator[State]:
    if state.late is not None:
        arrived = replace(state, late=None)
        yield from (outcome.after for outcome in step(arrived, replace(state.late, patient=False)))
        yield from (outcome.after for outcome in step(arrived, replace(state.late, patient=True)))
    if state.open is not None and state.open.ending is not None:
        yield from moves.stopped(state)
    elif state.phase == "preparing" and not state.blocked:
        yield replace(state, phase="prepared")
    elif state.phase == "committing":
        yield from moves.written(state)
    elif state.phase == "restoring":
        if state.gate == "open":
            yield replace(state, gate="closed")
        yield from moves.installed(state)
        if moves.failures(state):
            yield moves.idle(state, "failed")


def lease_ends(state: State) -> frozenset[State]:
    """Return what the end of the lease makes of ``state`` (CKPT-LEASE-009 … 013)."""
    if state.phase == "idle" or (state.phase == "committing" and state.gate == "open"):
        return frozenset({state})
    return moves.end(state, "expired", committed="committed")


def restarts(state: State, *, manifest_complete: bool = False) -> frozenset[State]:
    """Return what a restart of the process leaves where the incarnation is kept (CKPT-PHASE-008 … 017).

    Args:
        state: what was true when the process ended.
        manifest_complete: in ``committing``, whether the manifest was complete by then.
    """
    stays = moves.open_gate(replace(state, late=None, draining=False, guests=MappingProxyType({})))
    if stays.open is None:
        return frozenset({stays})
    if stays.open.ending is not None:
        return moves.stopped(stays)
    if state.phase == "restored":
        return moves.discarded(stays, "aborted")
    if state.phase == "committing" and manifest_complete:
        return frozenset(moves.idle(done, "committed") if done.open else done for done in moves.durable(stays))
    return frozenset({moves.idle(stays, "committed" if state.phase == "committed" else "failed")})


def loses_everything(state: State) -> State:
    """Return what is true after a restart with a new incarnation: nothing is known, the cuts on disk are there."""
    kept = State(cuts=state.cuts, outside=state.outside, runs_effects=state.runs_effects, room=state.room)
    return replace(kept, sessions=state.sessions)


# --- answers, and none ---------------------------------------------------------------------------------------------


def filter_by(states: Iterable[State], call: Call, status: int, body: Any) -> frozenset[State]:
    """Return what may be true after ``call`` was answered so; empty: the specification does not allow that answer."""
    allowed = (outcome for state in unfold(states) for outcome in step(state, call))
    return frozenset(outcome.after for outcome in allowed if outcome.fits(status, body))


def unknown(states: Iterable[State], call: Call) -> frozenset[State]:
    """Return what may be true when no answer came: the call was not executed, or it was, whole or up to its limit."""
    found = set(states)
    for state in unfold(states):
        found |= done_by(state, call)
    return frozenset(found)


def done_by(state: State, call: Call) -> frozenset[State]:
    """Return what ``call`` may have made of ``state``, answered or still under way."""
    eager, patient = step(state, replace(call, patient=False)), step(state, replace(call, patient=True))
    return frozenset(outcome.after for outcome in eager | patient)


def on_its_way(states: Iterable[State], call: Call) -> frozenset[State]:
    """Return what may be true when a call was sent whole and the connection reset: it may be executed at any time."""
    return frozenset(states) | {replace(state, late=call) for state in states}


Answer = tuple[int, Any]

JOINS = ("prepare", "commit", "restore")
"""The operations of which a repeat may join work that then fails."""


def together(states: Iterable[State], first: Call, second: Call, answers: tuple[Answer, Answer]) -> frozenset[State]:
    """Return what may be true after two calls that were under way at the same time were answered so.

    One may be done before the other begins, either way round; or one is under way while the other is done, and is
    then answered as its repeat would be (CKPT-PHASE-002, CKPT-PHASE-005, CKPT-REPEAT-014); or both are the same, and
    the second joins and is answered as the first.
    """
    before = frozenset(states)
    found: set[State] = set()
    if first == second and first.operation in JOINS:
        found |= filter_by(before, first, *answers[0]) & filter_by(before, first, *answers[1])
    for (one, said), (other, replied) in (
        ((first, answers[0]), (second, answers[1])),
        ((second, answers[1]), (first, answers[0])),
    ):
        found |= filter_by(filter_by(before, one, *said), other, *replied)
        begun = {state for start in unfold(before) for state in done_by(start, one)}
        found |= filter_by(filter_by(begun, other, *replied), one, *said)
    return frozenset(found)


__all__ = [
    "Answer",
    "Call",
    "Outcome",
    "State",
    "adopt",
    "done_by",
    "filter_by",
    "lease_ends",
    "let_go",
    "loses_everything",
    "on_its_way",
    "relation",
    "restarts",
    "step",
    "together",
    "unfold",
    "unknown",
    "write_fails",
]
