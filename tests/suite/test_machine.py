# SPDX-License-Identifier: Apache-2.0
"""The state machine against a Gym whose body is the model, straight and bent: it is green, and it catches mutants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import machine_run, machine_tour
from conformance.case import Bench
from conformance.gym import Gym
from conformance.judge import Judge
from conformance.loopback import Loopback
from conformance.machine import CheckpointMachine
from conformance.machine_checks import BY_CHANCE, WALK
from conformance.machine_orders import Driver
from conformance.machine_run import Allowance, Run
from conformance.model_values import Call, Outcome, State
from conformance.patience import Patience
from conformance.target import Target
from conformance.verdict import Outcome as Verdict
from conformance.wire import Wire
from conformance.witness import Witness
from conformance.world import World
from spec import load
from tests.suite.scripted_gym import ScriptedGym, Twist

pytestmark = pytest.mark.timeout(240)

Open = Callable[[Twist | None], Bench]


@pytest.fixture
def opened(loopback: Loopback, witness: Witness, world: World, patience: Patience, tmp_path: Path) -> Iterator[Open]:
    """Open a bench around a scripted Gym, bent by a twist or straight."""
    closers: list[Callable[[], None]] = []
    with Loopback() as apart:

        def open_bench(twist: Twist | None) -> Bench:
            shared = tmp_path / "shared"
            shared.mkdir()
            scripted = ScriptedGym(apart, shared, world.url, twist)
            specification = load()
            wire = Wire(Judge(specification.openapi, specification.errors), patience)
            closers.extend((wire.close, scripted.close))
            gym = Gym.discover(wire, [scripted.url])
            target = Target([scripted.url], {}, shared, patience)
            return Bench(specification, target, gym, wire, witness, world, patience, "ctest", True, tmp_path)

        yield open_bench
        for close in closers:
            close()


def caught(bench: Bench) -> Verdict:
    """Run cycles, and random walks if these find nothing, and return the verdict that is not green."""
    run = Run(bench, CheckpointMachine, seed=1, budget="quick")
    run.allowance = Allowance(60.0, 8, tours=False)
    outcome = run.cycles()
    return outcome if outcome.status != "passed" else run.walks()


def verdicts(bench: Bench, seconds: float, seed: int = 1) -> dict[str, Verdict]:
    """Run cycles and random walks for some time, and return the verdicts by name."""
    run = Run(bench, CheckpointMachine, seed=seed, budget="quick")
    run.allowance = Allowance(seconds, 8, tours=False)
    return {outcome.check.name: outcome for outcome in run.report().outcomes}


def test_a_gym_that_answers_as_the_model_does_is_green(opened: Open) -> None:
    """C46: cycles and random walks find nothing."""
    found = verdicts(opened(None), 4.0)
    assert {"machine_cycles": "passed", "machine_walk": "passed"} == {n: o.status for n, o in found.items()}


def test_what_no_walk_came_to_is_left_out(opened: Open) -> None:
    """A requirement that is judged only where chance leads is passed where it was visited, and nowhere else."""
    run = Run(opened(None), CheckpointMachine, seed=1, budget="quick")
    run.visits["CKPT-EFFECT-001"] += 1
    run.allowance = Allowance(0.0, 1, tours=False)
    missed = BY_CHANCE & set(WALK.requirements) - {"CKPT-EFFECT-001"}
    assert dict.fromkeys(missed, "no walk came to it") == run.walks().left_out


def test_the_tour_visits_the_cells_that_it_is_given(opened: Open) -> None:
    """Whatever random steps have left out is tried: here a part of the table, from an empty count."""
    chosen = machine_tour.cells(load().machine, artifacts=False)[::5]
    visits: Counter[str] = Counter()
    walk = Driver(opened(None), 1, visits, {})
    walk.begin()
    machine_tour.tour(walk, chosen)
    walk.close()
    assert [] == [name for name in chosen if not visits[name]]


def test_a_cell_that_is_never_visited_is_red_in_the_default_budget(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tour that goes nowhere leaves a failure that names cells."""
    monkeypatch.setattr(machine_tour, "tour", lambda walk, missing: None)
    run = Run(opened(None), CheckpointMachine, seed=1, budget="default")
    run.allowance = Allowance(0.1, 1, tours=True)
    report = run.report()
    (table,) = (outcome for outcome in report.outcomes if outcome.check.name == "machine_table")
    assert "failed" == table.status
    assert report.unvisited
    assert report.unvisited[0] in table.failures[0].got


# --- mutants ---


def _twisted(operation: str, change: Callable[[State, Call, Outcome], Outcome]) -> Twist:
    def twist(state: State, call: Call, outcome: Outcome) -> Outcome:
        return change(state, call, outcome) if call.operation == operation else outcome

    return twist


def _gate_stays_closed(state: State, call: Call, outcome: Outcome) -> Outcome:
    """An abort ends the checkpoint and forgets to open the gate."""
    return replace(outcome, after=replace(outcome.after, gate=state.gate)) if outcome.code is None else outcome


def _last_is_lost(state: State, call: Call, outcome: Outcome) -> Outcome:
    """A resume does not record how the checkpoint ended."""
    return replace(outcome, after=replace(outcome.after, last=state.last)) if outcome.code is None else outcome


def _any_digest(state: State, call: Call, outcome: Outcome) -> Outcome:
    """An ACK with a wrong digest is called released."""
    wrong = frozenset({"released"})
    names = tuple(wrong if "mismatch" in name else name for name in outcome.outcomes or ())
    return replace(outcome, outcomes=names) if outcome.outcomes else outcome


def _old_controller(state: State, call: Call, outcome: Outcome) -> Outcome:
    """A prepare of a controller that was replaced is refused with the wrong code."""
    return replace(outcome, code="stale_checkpoint") if outcome.code == "stale_controller" else outcome


def _unfenced(state: State, call: Call, outcome: Outcome) -> Outcome:
    """A retire leaves no fence, so that the attempt can be started again."""
    kept = replace(outcome.after.rollouts, fences=state.rollouts.fences)
    return replace(outcome, after=replace(outcome.after, rollouts=kept)) if outcome.code is None else outcome


def _forgets_rollouts(state: State, call: Call, outcome: Outcome) -> Outcome:
    """A restore that installs counts everything double by keeping what was there."""
    if outcome.after.phase != "restored" or state.phase == "restored":
        return outcome
    both = {**state.rollouts.known, **outcome.after.rollouts.known}
    rollouts = replace(outcome.after.rollouts, known=both)
    return replace(outcome, after=replace(outcome.after, rollouts=rollouts))


@pytest.mark.parametrize(
    ("operation", "mutant"),
    [
        ("abort", _gate_stays_closed),
        ("resume", _last_is_lost),
        ("ack", _any_digest),
        ("prepare", _old_controller),
        ("retire", _unfenced),
        ("restore", _forgets_rollouts),
    ],
)
def test_a_mutant_is_caught_and_explained(
    operation: str, mutant: Callable[[State, Call, Outcome], Outcome], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wrong answer is found, with the story that led to it and the last exchanges as curl lines."""
    monkeypatch.setattr(machine_run, "SHRINKS_FOR_S", 1.5)
    outcome = caught(opened(_twisted(operation, mutant)))
    assert "failed" == outcome.status, outcome.reason
    failures = outcome.failures
    for failure in failures:
        assert failure.steps
        assert failure.expected
        assert failure.got
        assert any(line.startswith("curl ") for line, _ in failure.exchanges)
        assert set(failure.requirements) <= set(load().requirements)


def test_what_fails_once_and_then_not_is_flaky_with_both_transcripts(opened: Open) -> None:
    """A Gym that is wrong a single time gets a red verdict of its own."""
    wrong = iter([True])

    def once(state: State, call: Call, outcome: Outcome) -> Outcome:
        if call.operation == "renew" and outcome.code == "stale_checkpoint" and next(wrong, False):
            return replace(outcome, code="invalid_phase")
        return outcome

    found = caught(opened(once))
    assert "flaky" == found.status
    assert 2 == len(found.failures)
    assert all(failure.steps for failure in found.failures)


def test_the_checks_of_the_machine_name_requirements_that_exist() -> None:
    """Every id that a verdict of the machine can name is one of the specification."""
    known = load().requirements
    for check in (machine_run.CYCLES, machine_run.WALK, machine_run.TABLE):
        assert set(check.requirements) <= set(known)
