# SPDX-License-Identifier: Apache-2.0
"""What holds of the model whatever is called, in whatever order, and whichever allowed outcome comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from conformance import model, model_looks
from conformance import model_rollouts as book
from conformance.model_rollouts import Plan, Receipt, Resumed, Retire, Rollouts, Stand, Start
from conformance.model_values import CHECKPOINT_OPERATIONS, Call, Outcome, State
from spec import load
from spec.wire import CheckpointId, ControllerPair

PHASES = load().machine.phases
NAMES = ("a", "b")


@dataclass(frozen=True)
class Move:
    """One step of a history: a call, or something that happens; and which of the allowed outcomes comes."""

    what: str
    epoch: int
    sequence: int
    name: str
    attempt: int
    flag: bool
    choice: int


moves = st.builds(
    Move,
    what=st.sampled_from((*CHECKPOINT_OPERATIONS, "start", "ack", "retire", "go", "look", "lease", "restart", "stale")),
    epoch=st.integers(1, 2),
    sequence=st.integers(0, 4),
    name=st.sampled_from(NAMES),
    attempt=st.integers(0, 3),
    flag=st.booleans(),
    choice=st.integers(0, 50),
)
histories = st.lists(moves, max_size=14)


def call_of(state: State, move: Move) -> Call:
    """Return the call of a move; a restore lists what its source holds."""
    pair = ControllerPair.of(move.epoch, "trainer")
    items: tuple[Start | Receipt | Retire, ...] = ()
    if move.what == "start":
        items = (Start(move.name, move.attempt, "other" if move.flag else "task"),)
    elif move.what == "ack":
        items = (Receipt(move.name, move.attempt, "wrong" if move.flag else "digest"),)
    elif move.what == "retire":
        items = (Retire(move.name, move.attempt),)
    if items:
        return Call(move.what, pair, items=items, patient=not move.flag)
    source = max(state.cuts, default=None)
    plan = plan_of(state.cuts[source], move.attempt) if source is not None else Plan()
    return Call(
        "commit" if move.what == "stale" else move.what,
        pair,
        expects=move.what != "stale",
        checkpoint_id=CheckpointId(move.epoch, move.sequence),
        arguments="same",
        leave_out_blocked=move.what == "commit" and move.flag,
        patient=not move.flag,
        source=source,
        plan=plan,
    )


def plan_of(cut: Rollouts, above: int) -> Plan:
    """Return the lists of a restore of all that a cut holds."""
    turns = [(name, one) for name, one in cut.known.items() if book.index_state(one) == "turn"]
    done = [(name, one) for name, one in cut.known.items() if book.index_state(one) == "finished"]
    return Plan(
        tuple(Resumed(name, o.attempt, o.attempt + 1 + above, o.stand.turns, o.task) for name, o in turns),
        tuple(Receipt(name, one.attempt, one.digest or "") for name, one in done),
    )


def happen(state: State, move: Move) -> tuple[State, Call | None, Outcome | None]:
    """Return what one move makes of a state, and for a call, which outcome came."""
    if move.what in ("lease", "restart", "look", "go"):
        return pick(events(state, move), move.choice), None, None
    asked = call_of(state, move)
    outcome = pick(model.step(state, asked), move.choice)
    return outcome.after, asked, outcome


def events(state: State, move: Move) -> frozenset[State]:
    """Return what may be after something happens without a call."""
    if move.what == "lease":
        return model.lease_ends(state)
    if move.what == "restart":
        return model.restarts(state, manifest_complete=move.flag)
    if move.what == "go":
        goal = Stand(2, "effect") if move.flag else Stand(3, "no", "success")
        return frozenset({model.let_go(state, move.name, goal, Stand(2))})
    return frozenset(seen(one) for one in model.unfold([state]))


def seen(state: State) -> State:
    """Return a state after its rollouts were looked at: what may have ended has, and its digest is known."""
    known = {name: max(book.possible(one), key=str) for name, one in state.rollouts.known.items()}
    named = {
        name: replace(one, digest="digest") if one.state in ("finished", "failed") else one
        for name, one in known.items()
    }
    return replace(state, rollouts=state.rollouts.each(lambda name, one: named[name]))


def pick(choices: Any, number: int) -> Any:
    """Return one of several values, the same each time."""
    ordered = sorted(choices, key=repr)
    assert ordered, "something is always allowed"
    return ordered[number % len(ordered)]


def walked(history: list[Move]) -> Iterator[tuple[State, State, Move, Call | None, Outcome | None]]:
    """Yield each step of a history: the states before and after it, and what it was."""
    state = State()
    for move in history:
        after, asked, outcome = happen(state, move)
        yield state, after, move, asked, outcome
        state = after


@settings(max_examples=50)
@given(histories)
def test_fences_the_controller_and_last_never_fall(history: list[Move]) -> None:
    """N21: whatever happens within one incarnation, these three only rise."""
    for before, after, *_ in walked(history):
        for name in NAMES:
            assert before.rollouts.fenced(name) <= after.rollouts.fenced(name)
        if before.controller is not None:
            assert after.controller is not None
            assert before.controller <= after.controller
        if before.last is not None:
            assert after.last is not None
            assert before.last.id <= after.last.id


@settings(max_examples=50)
@given(histories)
def test_a_refused_call_changes_nothing(history: list[Move]) -> None:
    """C11: a refusal leaves the state, except that a higher controller is adopted, or that a restore has failed."""
    begun = {"deadline_exceeded", "state_mismatch", "stale_attempt", "not_ready"}
    for before, after, _, asked, outcome in walked(history):
        if asked is None or outcome is None or outcome.code is None:
            continue
        if outcome.code in ("stale_incarnation", "stale_controller", "invalid_request"):
            assert before == after
        elif outcome.code not in begun:
            assert after in model.adopt(before, asked.controller)


@settings(max_examples=50)
@given(histories)
def test_phase_gate_and_open_id_agree(history: list[Move]) -> None:
    """The gate is one that the phase has, and a checkpoint is open exactly where the table says so."""
    for _, after, *_ in walked(history):
        ending = after.open is not None and after.open.ending is not None
        assert after.gate in PHASES[after.phase]["gate"] or ending
        assert PHASES[after.phase]["open_id"] == (after.open is not None)


REPEATS: dict[str, frozenset[str]] = {"start": frozenset({"already_started"}), "ack": frozenset({"already_released"})}


@settings(max_examples=50)
@given(histories)
def test_a_repeat_of_an_accepted_call_is_answered_alike(history: list[Move]) -> None:
    """C31: the same call once more is answered 200 as well, and does its work no second time."""
    for _, after, _, asked, outcome in walked(history):
        if asked is None or outcome is None or outcome.status != 200:
            continue
        again = model.step(after, replace(asked, patient=True))
        if asked.operation in ("start", "ack"):
            named = {name for one in again for names in one.outcomes or () for name in names}
            assert "started" not in named
            assert "released" not in named or asked.operation == "start"
            if outcome.outcomes in ((frozenset({"started"}),), (frozenset({"released"}),)):
                assert named <= REPEATS[asked.operation] | {"already_finished"}
        elif asked.operation in ("commit", "resume", "abort", "restore", "prepare"):
            assert 200 in {one.status for one in again}


@settings(max_examples=50)
@given(histories)
def test_what_is_unknown_holds_both_executed_and_not(history: list[Move]) -> None:
    """A lost reply leaves possible that the call was not executed, and each way in which it may have been."""
    for before, after, _, asked, outcome in walked(history):
        if asked is None or outcome is None:
            continue
        possible = model.unknown([before], asked)
        assert before in possible
        assert after in possible
        assert after in model.filter_by([before], asked, outcome.status, body_of(outcome))


@settings(max_examples=50)
@given(histories, moves, st.integers(0, 50))
def test_two_calls_at_once_may_come_in_either_order(history: list[Move], extra: Move, choice: int) -> None:
    """Whatever two calls give one after the other, in either order, is allowed when they come together."""
    state = State()
    for _, after, *_ in walked(history):
        state = after
    calls = [call_of(state, move) for move in (history[-1] if history else extra, extra) if is_call(move)]
    if len(calls) < 2:
        return
    for one, other in (calls, calls[::-1]):
        first = pick(model.step(state, one), choice)
        second = pick(model.step(first.after, other), choice)
        answers = (answer_of(first), answer_of(second))
        assert second.after in model.together([state], one, other, answers)


@settings(max_examples=50)
@given(histories)
def test_every_rollout_is_counted_once(history: list[Move]) -> None:
    """I1: the counts that a state shows sum up, and another sum is not accepted."""
    for _, after, *_ in walked(history):
        counts = counted(after)
        assert model_looks.counts_fit(after.rollouts, counts)
        assert not model_looks.counts_fit(after.rollouts, {**counts, "admitted": counts["admitted"] + 1})


def counted(state: State) -> dict[str, int]:
    """Return the counts of a state in which nothing has moved since it was looked at."""
    kinds = {"live": "live", "finished": "finished_unreleased", "failed": "failed_unreleased"}
    counts = dict.fromkeys(("live", "restart", "finished_unreleased", "failed_unreleased", "released", "retired"), 0)
    for rollout in state.rollouts.known.values():
        counts[kinds.get(rollout.state, rollout.state)] += 1
        counts["restart"] += rollout.state == "live" and rollout.uncertain
    return {**counts, "admitted": len(state.rollouts.known)}


def is_call(move: Move) -> bool:
    """Say whether a move is a call."""
    return move.what not in ("lease", "restart", "look", "go")


def body_of(outcome: Outcome) -> dict[str, Any]:
    """Return a body that shows an outcome."""
    shown = {name: sorted(values, key=str)[0] for name, values in outcome.fields.items()}
    if outcome.code is not None:
        return {"code": outcome.code, **shown}
    return {**shown, "outcomes": [{"outcome": min(names)} for names in outcome.outcomes or ()]}


def answer_of(outcome: Outcome) -> model.Answer:
    """Return the answer that shows an outcome."""
    return outcome.status, body_of(outcome)


# --- the properties themselves can fail ---


def _lowers_fences(rollouts: Rollouts, item: Retire, *, hosted: bool = False) -> Any:
    return frozenset({("retired", replace(rollouts, fences={item.rollout_id: item.through_attempt}))})


def _starts_again(rollouts: Rollouts, item: Start, gate: str, room: int) -> Any:
    return frozenset({("started", rollouts)})


@pytest.mark.parametrize(
    ("name", "mutant", "broken"),
    [
        ("retire", _lowers_fences, test_fences_the_controller_and_last_never_fall),
        ("start", _starts_again, test_a_repeat_of_an_accepted_call_is_answered_alike),
    ],
)
def test_a_mutant_of_the_book_is_caught(
    name: str, mutant: Any, broken: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fence that falls and a start that runs twice are found."""
    monkeypatch.setattr(book, name, mutant)
    body = broken.hypothesis.inner_test  # type: ignore[attr-defined]  # what Hypothesis puts on a test
    hunt = settings(max_examples=300, database=None, derandomize=True, phases=[Phase.generate])(given(histories)(body))
    with pytest.raises(AssertionError):
        hunt()
