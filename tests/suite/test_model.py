# SPDX-License-Identifier: Apache-2.0
"""The model held against state-machine.yaml: every cell in every situation, every event; and that this can fail."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from conformance import model, model_verbs
from conformance.model_rollouts import Plan, Receipt, Resumed, Retire, Rollout, Rollouts, Stand, Start
from conformance.model_values import (
    CHECKPOINT_OPERATIONS,
    PHASES,
    RELATIONS,
    Call,
    Checkpoint,
    Last,
    Outcome,
    Phase,
    State,
)
from spec import load
from spec.wire import CheckpointId, ControllerPair

MACHINE = load().machine
PAIR = ControllerPair.of(7, "trainer")
OPEN, LAST, UNSEEN, LOWER = (CheckpointId(7, sequence) for sequence in (5, 4, 9, 2))
SOURCE = CheckpointId(7, 1)
ENDINGS = ("committed", "restored", "aborted", "expired", "failed")

LIVE = Rollout(0, "task", policy="main", stand=Stand(2))
BUSY = Rollout(0, "task", policy="main", stand=Stand(1, "effect"))
DONE = Rollout(0, "task", state="finished", digest="d")
CUT = Rollouts(MappingProxyType({"r": LIVE}))


def rollouts(*, busy: bool = False) -> Rollouts:
    """Return a participant's rollouts: one live, one finished, and perhaps one whose effect the outside holds."""
    known = {"r": LIVE, "done": DONE} | ({"busy": BUSY} if busy else {})
    return Rollouts(MappingProxyType(known))


def state(phase: Phase, gate: str, *, last: str | None = "committed", busy: bool = False) -> State:
    """Return a state in a phase, a checkpoint open where the phase has one."""
    restore = Call("restore", PAIR, checkpoint_id=OPEN, source=SOURCE, arguments="first")
    checkpoint = Checkpoint(OPEN, "run")
    if phase in ("restoring", "restored"):
        checkpoint = replace(checkpoint, arguments="first", restore=restore)
    elif phase in ("committing", "committed"):
        checkpoint = replace(checkpoint, arguments=("first", False), cut=rollouts())
    return State(
        phase=phase,
        gate=gate,  # type: ignore[arg-type]  # one of the two
        open=None if phase == "idle" else checkpoint,
        last=None if last is None else Last(LAST, last),  # type: ignore[arg-type]  # one of ENDINGS
        controller=PAIR,
        rollouts=rollouts(busy=busy),
        outside=MappingProxyType({"r": LIVE.stand, "busy": BUSY.stand}),
        cuts=MappingProxyType({SOURCE: CUT}),
    )


def call(operation: str, id: CheckpointId | None = None, **fields: Any) -> Call:
    """Return a call of the present controller."""
    arguments: Any = "first" if operation in ("commit", "restore") else None
    source = SOURCE if operation == "restore" else None
    made = Call(operation, PAIR, checkpoint_id=id, run_id="run", arguments=arguments, source=source)
    return replace(made, **fields)


IDS = {"open": OPEN, "last": LAST, "unseen": UNSEEN, "lower": LOWER}


def situations() -> Iterator[tuple[Phase, str, str, bool]]:
    """Yield every phase with each gate that it may have, each ending of `last`, and leave_out_blocked."""
    for phase, facts in MACHINE.phases.items():
        yield from itertools.product([phase], facts["gate"], ENDINGS, (False, True))


def faults(step: Callable[[State, Call], frozenset[Outcome]] = model.step) -> list[str]:
    """Return where the model and the table disagree, one sentence each."""
    found = []
    for phase, gate, last, leave_out in situations():
        for operation, relation in itertools.product(CHECKPOINT_OPERATIONS, RELATIONS):
            if relation == "open" and phase == "idle":
                continue
            before = state(phase, gate, last=last, busy=phase == "preparing")
            asked = call(operation, IDS[relation])
            arguments = ("first", leave_out)
            if before.open is not None and before.open.cut is not None:
                before = replace(before, open=replace(before.open, arguments=arguments))
            asked = replace(asked, leave_out_blocked=leave_out) if operation == "commit" else asked
            cell = MACHINE.cell(operation, phase, relation, gate=gate, last=last, leave_out_blocked=leave_out)
            where = f"{operation} of the {relation} id in {phase}, gate {gate}, last {last}, leave out {leave_out}"
            outcomes = step(before, asked) | step(before, replace(asked, patient=False))
            found += [f"{where}: {fault}" for fault in cell_faults(cell, before, outcomes)]
    return found


def cell_faults(cell: Any, before: State, outcomes: frozenset[Outcome]) -> Iterator[str]:
    """Yield where the outcomes of one cell disagree with it."""
    if not outcomes:
        yield "no outcome is allowed"
    for outcome in outcomes:
        if cell.answer == "refused":
            if outcome.code != cell.error:
                yield f"{cell.error} is expected, {outcome.brief} allowed"
            if outcome.after != before:
                yield f"a refusal changes {before.phase}"
        elif outcome.status != 200 and outcome.code not in ("not_ready", "deadline_exceeded"):
            yield f"200 is expected, {outcome.brief} allowed"
        elif cell.answer == "replies" and outcome.after not in model.unfold([before]):
            yield f"a reply changes {visible(before)} to {visible(outcome.after)}"
    if cell.answer == "accepted":
        yield from accepted_faults(cell, outcomes)


def accepted_faults(cell: Any, outcomes: frozenset[Outcome]) -> Iterator[str]:
    """Yield where what an accepted call leads to is not the next phase, or what follows it by itself."""
    afters = [outcome.after for outcome in outcomes if outcome.code != "not_ready"]
    immediate = [after for after in afters if after.phase == cell.next and cell.gate in (None, after.gate)]
    if cell.ends is not None:
        immediate = [after for after in immediate if after.last is not None and after.last.ended_as == cell.ends]
    if not immediate:
        yield f"{cell.next} (gate {cell.gate}, ends {cell.ends}) is never reached"
    for after in afters:
        ending = after.open is not None and after.open.ending is not None
        if after.phase not in follows(cell.next) and not ending:
            yield f"{after.phase} does not follow {cell.next}"
        if cell.ends is not None and not ending and (after.last is None or after.last.ended_as != cell.ends):
            yield f"ended as {cell.ends} is expected, {after.last} allowed"


def follows(phase: str) -> set[str]:
    """Return a phase and those that the participant reaches from it by its own progress, as the table says."""
    found, waiting = set[str](), [phase]
    while waiting:
        one = waiting.pop()
        found.add(one)
        progress = ("quiescent", "durable", "verified", "installed", "restore_failed")
        waiting += [e.next for e in MACHINE.events if e.event in progress and e.phase == one and e.next not in found]
    return found


def visible(one: State) -> tuple[Any, ...]:
    """Return what a status shows of a state."""
    return one.phase, one.gate, one.open.id if one.open else None, one.last


def test_every_cell_of_the_phase_table_is_the_models() -> None:
    """Each operation in each phase, with each relation of its id and each condition, answers as the table says."""
    assert [] == faults()


def test_every_legal_cell_is_tried() -> None:
    """No row of the table is left out of the comparison."""
    compared = {(phase, op, rel) for phase in PHASES for op in CHECKPOINT_OPERATIONS for rel in RELATIONS}
    assert {(c.phase, c.operation, c.id) for c in MACHINE.cells if c.id is not None} <= compared


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("operation", ["retire", "ack"])
def test_retire_and_ack_are_accepted_in_every_phase(operation: str, phase: Phase) -> None:
    """The table accepts both in every phase, and neither moves it."""
    item = Retire("r", 0) if operation == "retire" else Receipt("done", 0, "d")
    for gate in MACHINE.phases[phase]["gate"]:
        before = state(phase, gate)
        outcomes = model.step(before, call(operation, items=(item,)))
        assert {200} == {outcome.status for outcome in outcomes}
        assert {visible(before)} == {visible(outcome.after) for outcome in outcomes}
        assert "accepted" == MACHINE.cell(operation, phase).answer


@pytest.mark.parametrize("phase", PHASES)
def test_a_new_rollout_is_started_exactly_while_the_gate_is_open(phase: Phase) -> None:
    """The item of a start gets what its cell says."""
    for gate in MACHINE.phases[phase]["gate"]:
        outcomes = model.step(state(phase, gate), call("start", items=(Start("new", 0, "task"),)))
        item = MACHINE.cell("start", phase, gate=gate).item
        assert {(frozenset({item}),)} == {outcome.outcomes for outcome in outcomes}


# --- events ---

Event = Callable[[State], frozenset[State]]


def manifest_complete(one: State) -> frozenset[State]:
    """Restart the process with a complete manifest in the target."""
    return model.restarts(one, manifest_complete=True)


EVENTS: Mapping[str, Event] = {
    "lease_end": model.lease_ends,
    "higher_controller": lambda one: model.adopt(one, ControllerPair.of(8, "next")),
    "process_restart": model.restarts,
    "write_failed": lambda one: frozenset({model.write_fails(one)}),
    "quiescent": lambda one: model.unfold([one]) - {one},
    "durable": lambda one: model.unfold([one]) - {one},
    "verified": lambda one: frozenset(s for s in model.unfold([one]) if (s.phase, s.gate) == ("restoring", "closed")),
    "installed": lambda one: frozenset(s for s in model.unfold([one]) if s.phase == "restored"),
}


def event_faults(events: Mapping[str, Event] = EVENTS) -> list[str]:
    """Return where an event of the model does something else than the table says."""
    found = []
    for (name, happen), phase in itertools.product(events.items(), PHASES):
        for gate in MACHINE.phases[phase]["gate"]:
            for manifest in ("absent", "complete"):
                row = MACHINE.on(name, phase, gate=gate, manifest=manifest)
                if row is None:
                    continue
                before = state(phase, gate)
                chosen = manifest_complete if (name, manifest) == ("process_restart", "complete") else happen
                found += [f"{name} in {phase}, gate {gate}: {fault}" for fault in row_faults(row, chosen(before))]
    return found


def row_faults(row: Any, after: frozenset[State]) -> Iterator[str]:
    """Yield where what an event leaves disagrees with its row; work that has still to stop may lie between."""
    settled = {one for one in after if one.open is None or one.open.ending is None}
    if not settled:
        yield "nothing is left"
    for one in settled:
        if one.phase != row.next:
            yield f"{row.next} is expected, {one.phase} reached"
        if row.gate is not None and one.gate != row.gate:
            yield f"gate {row.gate} is expected, {one.gate} reached"
        if row.ends is not None and (one.last is None or one.last.ended_as != row.ends):
            yield f"ended as {row.ends} is expected, {one.last} reached"


def test_every_event_of_the_phase_table_is_the_models() -> None:
    """Progress, the end of a lease, a higher controller, a failed write and a restart move as the table says."""
    assert [] == event_faults()


def test_a_restore_that_fails_leaves_everything_as_before() -> None:
    """C63: the event restore_failed ends as failed, with the same rollouts and an open gate."""
    before = state("idle", "open")
    asked = call("restore", UNSEEN, deserves="checkpoint_corrupt")
    (outcome,) = model.step(before, asked)
    row = MACHINE.on("restore_failed", "restoring")
    assert row is not None
    assert (row.next, row.gate, row.ends) == (outcome.after.phase, outcome.after.gate, outcome.after.last.ended_as)  # type: ignore[union-attr]  # it has ended
    assert before.rollouts.known.keys() == outcome.after.rollouts.known.keys()


def test_the_lease_does_not_run_once_the_gate_is_open() -> None:
    """The one impossible event of the table changes nothing."""
    before = state("committing", "open")
    assert frozenset({before}) == model.lease_ends(before)


# --- the comparison itself can fail ---


def _mutant(**verbs: Any) -> Callable[[State, Call], frozenset[Outcome]]:
    """Return `step` with some verbs replaced."""

    def step(one: State, asked: Call) -> frozenset[Outcome]:
        if asked.operation in verbs:
            return verbs[asked.operation](one, asked)  # type: ignore[no-any-return]  # a verb
        return model.step(one, asked)

    return step


def _commits_while_preparing(one: State, asked: Call) -> frozenset[Outcome]:
    waits = replace(one, phase="prepared") if one.phase == "preparing" else one
    return model_verbs.commit(waits, asked)


def _keeps_the_gate_closed(one: State, asked: Call) -> frozenset[Outcome]:
    closed = (replace(o, after=replace(o.after, gate="closed")) for o in model_verbs.abort(one, asked))
    return frozenset(closed)


def _forgets_last(one: State, asked: Call) -> frozenset[Outcome]:
    return model_verbs.resume(replace(one, last=None), asked)


def _renews_when_idle(one: State, asked: Call) -> frozenset[Outcome]:
    return frozenset({Outcome(200, None, one)})


def _takes_over_an_open_one(one: State, asked: Call) -> frozenset[Outcome]:
    return model_verbs.prepare(one if one.phase != "prepared" else replace(one, phase="idle", open=None), asked)


@pytest.mark.parametrize(
    ("operation", "mutant"),
    [
        ("commit", _commits_while_preparing),
        ("abort", _keeps_the_gate_closed),
        ("resume", _forgets_last),
        ("renew", _renews_when_idle),
        ("prepare", _takes_over_an_open_one),
    ],
)
def test_a_mutant_of_a_verb_is_caught_by_the_table(operation: str, mutant: Any) -> None:
    """Each wrong verb makes the comparison name cells of that verb, and no other."""
    found = faults(_mutant(**{operation: mutant}))
    assert found
    assert {operation} == {fault.split()[0] for fault in found}


def test_a_mutant_of_an_event_is_caught_by_the_table() -> None:
    """A lease whose end throws a durable cut away is named."""

    def expires(one: State) -> frozenset[State]:
        changed = replace(one, phase="prepared") if one.phase == "committed" else one
        return model.lease_ends(changed)

    found = event_faults({**EVENTS, "lease_end": expires})
    assert found
    assert all("lease_end in committed" in fault for fault in found)


def test_a_plan_that_disagrees_with_the_cut_is_a_mismatch() -> None:
    """C15: another attempt, number of turns or task than the cut holds is refused, and so is a stranger."""
    good = Resumed("r", 0, 1, 2, "task")
    for item in (
        dataclasses.replace(good, turns=3),
        dataclasses.replace(good, attempt=1, next_attempt=2),
        dataclasses.replace(good, task="other"),
        dataclasses.replace(good, rollout_id="stranger"),
    ):
        outcomes = model.step(state("idle", "open"), call("restore", UNSEEN, plan=Plan(rollouts=(item,))))
        assert {"state_mismatch"} == {outcome.code for outcome in outcomes}
    outcomes = model.step(state("idle", "open"), call("restore", UNSEEN, plan=Plan(rollouts=(good,))))
    assert {200} == {outcome.status for outcome in outcomes}


# --- writings that fail ---


@pytest.mark.parametrize(("gate", "phase", "last"), [("closed", "prepared", LAST), ("open", "idle", OPEN)])
def test_a_writing_that_fails_keeps_its_capture_or_ends_the_checkpoint(
    gate: str, phase: Phase, last: CheckpointId
) -> None:
    """C44: before the gate has opened it leads back to prepared, the cut kept; afterwards the checkpoint has failed."""
    begun = state("committing", gate)
    assert begun.open is not None
    writing = replace(begun, open=replace(begun.open, failing=True))
    failed = [one for one in model.step(writing, call("commit", OPEN)) if one.code == "insufficient_storage"]
    assert [(507, phase, last)] == [
        (one.status, one.after.phase, one.after.last and one.after.last.id) for one in failed
    ]
    assert all(one.after.open is None or one.after.open.cut == begun.open.cut for one in failed)
    assert {phase, "committing", "committed" if gate == "closed" else "idle"} == {
        one.phase for one in model.unfold({writing})
    }


def test_no_writing_fails_for_lack_of_space_that_there_is() -> None:
    """Without the fail point, 507 is no answer of a commit."""
    assert not any(
        one.code == "insufficient_storage" for one in model.step(state("prepared", "closed"), call("commit", OPEN))
    )


def test_a_call_that_was_cut_off_may_come_at_any_time_or_never() -> None:
    """C33: after a prepare whose connection was reset, the participant is idle, or preparing, or prepared."""
    late = model.on_its_way({state("idle", "open")}, call("prepare", UNSEEN))
    assert {"idle", "prepared"} <= {one.phase for one in model.unfold(late)}
    assert any(one.late is not None for one in model.unfold(late))
