# SPDX-License-Identifier: Apache-2.0
"""What the runner makes of a check that passes, fails, wavers, does not apply or is itself wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conformance.case import Bench, Case
from conformance.errors import Failed, LostReply, NotOffered
from conformance.gym import Gym
from conformance.machine_checks import MACHINE_CHECKS
from conformance.patience import Patience
from conformance.registry import Check
from conformance.runner import FAILURES_RUN_AGAIN, Runner, Settings, choose, narrowed
from conformance.verdict import Outcome
from conformance.wire import Wire
from conformance.witness import Witness
from conformance.world import World
from spec import load


class _Target:
    level = 0
    shared_dir = None


@pytest.fixture
def bench(witness: Witness, world: World, patience: Patience, tmp_path: Path) -> Iterator[Bench]:
    """A bench on which nothing is called: its Gym has a participant and offers the profile results."""
    wire = Wire(None, patience)
    gym: Any = SimpleNamespace(participants=[], profiles={"results"}, features=set(), environments=dict)
    target: Any = _Target()
    yield Bench(load(), target, gym, wire, witness, world, patience, "c0", False, tmp_path)
    wire.close()


def check(body: Callable[[Case], None], **changed: Any) -> Check:
    """A check with a body."""
    fields = {"profile": "results", "each": "gym", "level": 0, "features": (), "budgets": ("default",)}
    fields |= {"needs_world": False, "needs_storage": False, "needs_shared_dir": False, **changed}
    return Check(
        name=body.__name__, chapter="lifecycle_gate", requirements=("CKPT-A-001", "CKPT-A-002"), body=body, **fields
    )


def run(bench: Bench, body: Callable[[Case], None], **changed: Any) -> Outcome:
    """Run one check."""
    return Runner(bench)._judged(check(body, **changed), None)


def test_a_check_that_judges_nothing_wrong_passes(bench: Bench) -> None:
    """Its requirements may be left out with a reason."""

    def fine(case: Case) -> None:
        case.equal(1, 1, "one is one")
        case.leave_out("it never happened", "CKPT-A-002")

    outcome = run(bench, fine)
    assert (outcome.status, outcome.left_out) == ("passed", {"CKPT-A-002": "it never happened"})


def test_a_failure_names_what_it_names_or_the_main_subject(bench: Bench) -> None:
    """A judgement with ids breaks these; one without breaks the first of the check."""

    def named(case: Case) -> None:
        case.step("look")
        case.equal(1, 2, "one is two", "CKPT-A-002")

    def unnamed(case: Case) -> None:
        case.true(False, "a prerequisite")

    (failure,) = run(bench, named).failures
    assert (failure.requirements, failure.expected, failure.got, failure.steps) == (
        ("CKPT-A-002",),
        "1",
        "2",
        ("look",),
    )
    assert run(bench, unnamed).failures[0].requirements == ("CKPT-A-001",)


def test_a_check_that_fails_once_and_then_passes_is_flaky(bench: Bench) -> None:
    """It is run again, and keeps the failure."""
    runs = iter([True, False])

    def wavers(case: Case) -> None:
        if next(runs):
            raise Failed("now and then", expected="always", got="not this time")

    outcome = run(bench, wavers)
    assert (outcome.status, len(outcome.failures)) == ("flaky", 1)


def test_a_gym_that_fails_everywhere_is_not_waited_for_twice(bench: Bench) -> None:
    """Only the first failures are run again."""
    seen = []

    def fails(case: Case) -> None:
        seen.append(case.prefix)
        raise LostReply("nobody answers")

    runner = Runner(bench)
    outcomes = [runner._judged(check(fails), None) for _ in range(FAILURES_RUN_AGAIN + 2)]
    assert {outcome.status for outcome in outcomes} == {"failed"}
    assert len(seen) == 2 * FAILURES_RUN_AGAIN + 2
    assert len(set(seen)) == len(seen), "every run has a namespace of its own"


def test_a_mistake_in_a_check_is_the_suites_fault(bench: Bench) -> None:
    """Not a failure of the Gym; the traceback is shown."""

    def wrong(case: Case) -> None:
        raise KeyError("oops")

    outcome = run(bench, wrong)
    assert outcome.status == "fault"
    assert "KeyError: 'oops'" in outcome.reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"profile": "checkpoint"}, "profile checkpoint is not offered"),
        ({"features": ("artifacts_http",)}, "feature artifacts_http is not offered"),
        ({"level": 1}, "process control (level 1) is not offered"),
        ({"needs_world": True}, "the Gym was not started with the suite's world URL"),
        ({"needs_shared_dir": True}, "no directory that both sides see was given"),
    ],
)
def test_what_is_not_offered_does_not_apply(bench: Bench, changed: dict[str, Any], reason: str) -> None:
    """The reason is told, and the body is not run."""

    def never(case: Case) -> None:
        raise AssertionError

    outcome = run(bench, never, **changed)
    assert (outcome.status, outcome.reason) == ("not_applicable", reason)


def test_a_check_can_find_out_that_it_does_not_apply(bench: Bench) -> None:
    """With the reason that it gives."""

    def finds_out(case: Case) -> None:
        raise NotOffered("no participant owns sessions")

    assert run(bench, finds_out).reason == "no participant owns sessions"


def test_checks_are_chosen_by_budget_name_chapter_and_requirement() -> None:
    """A chapter is chosen by its own name and by that of its file; what owns the process comes last."""

    def one(case: Case) -> None: ...

    def two(case: Case) -> None: ...

    checks = {"one": check(one, budgets=("quick", "default"), level=1), "two": check(two)}
    assert ["one"] == [found.name for found in choose(checks, Settings(budget="quick"))]
    assert ["two", "one"] == [found.name for found in choose(checks, Settings())]
    for word in ("lifecycle", "lifecycle_gate", "CKPT-A-002"):
        assert len(choose(checks, Settings(only=(word,)))) == 2
    assert ["two"] == [found.name for found in choose(checks, Settings(skip=("one",)))]


def test_a_gym_that_ends_ends_the_run(bench: Bench) -> None:
    """At level 0 nobody can start it again: what comes after the check is not judged, and nothing is blamed for it."""
    gone: Any = SimpleNamespace(url="http://127.0.0.1:9", name="gym")
    seen = []

    def fails(case: Case) -> None:
        seen.append(case.name)
        bench.gym.participants = [gone]
        raise LostReply("nobody answers")

    def after(case: Case) -> None:
        seen.append(case.name)

    runner = Runner(bench)
    outcomes = runner.run([check(fails), check(after)])
    assert (["failed"], "fails") == ([outcome.status for outcome in outcomes], runner.gone)
    assert {"fails"} == set(seen)


def test_parts_of_the_machine_are_chosen_as_checks_are() -> None:
    """By name, as the command that repeats a failure does, by chapter, and by requirement."""
    names = [
        [one.name for one in narrowed(MACHINE_CHECKS, Settings(only=(word,)))] for word in ("machine_walk", "machine")
    ]
    assert [["machine_walk"], [one.name for one in MACHINE_CHECKS]] == names
    assert "machine_process" in [one.name for one in narrowed(MACHINE_CHECKS, Settings(only=("CKPT-PHASE-013",)))]
    assert [] == narrowed(MACHINE_CHECKS, Settings(skip=("machine",)))


def test_no_epoch_is_used_twice_on_a_gym_that_has_lost_what_it_knew() -> None:
    """Two lives of a Gym never see one checkpoint id: what the first has written would be in the way of the second."""
    status: dict[str, Any] = {"controller": {"id": "suite", "epoch": 6}}
    there: Any = SimpleNamespace(stage=0, name="gym", status=lambda: status)
    gym = Gym(cast(Wire, None), [there])
    assert 7 == gym.controller("suite").epoch
    status["controller"] = None
    assert 8 == gym.controller("suite").epoch
