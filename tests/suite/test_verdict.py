# SPDX-License-Identifier: Apache-2.0
"""From outcomes to verdicts, and what the reports say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conformance import report
from conformance.registry import Check
from conformance.report import text
from conformance.report.facts import headline
from conformance.runner import Settings
from conformance.verdict import Failure, Outcome, Summary, judge
from spec import Requirement, load


def requirement(key: str, **changed: Any) -> Requirement:
    """A requirement that binds a Gym."""
    fields = {"level": "MUST", "binds": "gym", "scope": "results", "chapter": "results", "text": "It MUST."}
    return Requirement(key, **{**fields, "checks": ("c",), **changed})


def check(name: str, *keys: str, profile: str = "results") -> Check:
    """A check that does nothing."""
    return Check(name, "results", keys, profile, "gym", 0, (), False, False, False, ("default",), lambda case: None)


def failing(name: str, *keys: str, broken: str) -> Outcome:
    """A failed outcome that names one requirement."""
    return Outcome(check(name, *keys), None, "failed", (Failure((broken,), "w", "e", "g", ("step",)),))


A, B, C = requirement("CKPT-X-001"), requirement("CKPT-X-002"), requirement("CKPT-X-003")
ALL = {found.id: found for found in (A, B, C)}


def test_all_passed_is_conformant() -> None:
    """Every requirement is exercised and nothing failed."""
    summary = judge(ALL, [Outcome(check("c", *ALL), None, "passed")], {"results"})
    assert summary.exit_code == 0
    assert summary.profiles["results"] == "conformant"
    assert summary.profiles["checkpoint"] == "not_offered"
    assert headline(summary) == "conformant in results"


def test_a_failure_counts_against_the_requirement_that_it_names() -> None:
    """The others of that check were not reached, unless another check shows them."""
    outcomes = [failing("c", A.id, B.id, C.id, broken=B.id), Outcome(check("d", C.id), None, "passed")]
    summary = judge(ALL, outcomes, {"results"})
    assert dict(summary.requirements) == {A.id: "not_run", B.id: "failed", C.id: "passed"}
    assert (summary.exit_code, summary.profiles["results"]) == (1, "not_conformant")


def test_a_requirement_without_a_check_run_keeps_a_profile_incomplete() -> None:
    """A requirement that claims a check which did not run is not silently passed."""
    summary = judge(ALL, [Outcome(check("c", A.id, B.id), None, "passed")], {"results"})
    assert summary.requirements[C.id] == "not_run"
    assert summary.profiles["results"] == "partial"


def test_planned_and_not_applicable_are_never_a_success_without_saying_so() -> None:
    """The headline counts what was not judged."""
    planned = requirement("CKPT-X-004", checks=(), planned="later")
    outcomes = [
        Outcome(check("c", A.id), None, "passed"),
        Outcome(check("d", B.id), None, "not_applicable", reason="no"),
    ]
    summary = judge({A.id: A, B.id: B, planned.id: planned}, outcomes, {"results"})
    assert dict(summary.requirements) == {A.id: "passed", B.id: "not_applicable", planned.id: "planned"}
    assert headline(summary) == "nothing failed in results; not judged: 1 planned, 1 not applicable"


def test_what_there_was_no_occasion_to_judge_is_not_passed() -> None:
    """A check that passed may leave a requirement out, with the reason."""
    outcome = Outcome(check("c", A.id, B.id), None, "passed", left_out={B.id: "it never happened"})
    summary = judge({A.id: A, B.id: B}, [outcome], {"results"})
    assert dict(summary.requirements) == {A.id: "passed", B.id: "not_applicable"}


def test_flaky_is_a_red_verdict_of_its_own() -> None:
    """A check that failed and then passed is neither."""
    flaky = Outcome(check("c", A.id), None, "flaky", (Failure((A.id,), "w", "e", "g"),))
    summary = judge({A.id: A}, [flaky], {"results"})
    assert (summary.requirements[A.id], summary.exit_code, summary.profiles["results"]) == ("flaky", 4, "flaky")


def test_a_fault_of_the_suite_wins() -> None:
    """Exit code 3, and no profile is called conformant."""
    outcomes = [failing("c", A.id, broken=A.id), Outcome(check("d", B.id), None, "fault", reason="boom")]
    assert judge(ALL, outcomes, {"results"}).exit_code == 3


class _Participant:
    url = "http://127.0.0.1:1"
    capabilities = {  # noqa: RUF012 - a constant of the test
        "name": "gym",
        "role": "agent",
        "owns": ["rollouts"],
        "profiles": ["results"],
        "features": [],
        "storage": ["file"],
        "stage": 10,
        "implementation": {"name": "Some Gym <1>", "version": "0.9"},
    }


class _Gym:
    participants = [_Participant()]  # noqa: RUF012 - as above


@pytest.fixture
def made() -> report.Report:
    """The report of a run in which one check failed."""
    key = "CKPT-COMMIT-003"
    step = Failure((key,), "commit while preparing", "409 not_ready", "200", ("hold",), (("curl -s x", "200 {}"),))
    outcomes = [Outcome(check("commit_while_preparing", key), "gym", "failed", (step,))]
    specification = load()
    summary: Summary = judge(specification.requirements, outcomes, {"results"})
    return report.build(
        specification=specification,
        gym=_Gym(),  # type: ignore[arg-type]  # only its participants are read
        settings=Settings(urls=("http://127.0.0.1:1",), seed=5),
        outcomes=outcomes,
        summary=summary,
        checks={"commit_while_preparing": check("commit_while_preparing", key)},
        started="2026-01-01T00:00:00+00:00",
        seconds=1.0,
    )


def test_the_json_report_has_everything_a_newcomer_needs(made: report.Report) -> None:
    """Id and sentence, the steps, expected, got, the exchanges, the replay command, the link."""
    data = json.loads(json.dumps(made.data))
    (row,) = [found for found in data["checks"] if found["failures"]]
    failure = row["failures"][0]
    assert failure["requirements"][0]["id"] == "CKPT-COMMIT-003"
    assert "not_ready" in failure["requirements"][0]["text"]
    assert failure["requirements"][0]["link"].endswith("lifecycle.html#ckpt-commit-003")
    assert failure["steps"] == ["hold"]
    assert failure["replay"] == "gym-conformance run --url http://127.0.0.1:1 --seed 5 --only commit_while_preparing"
    assert data["verdict"]["exit_code"] == 1
    assert data["implementation"]["name"] == "Some Gym <1>"


def test_the_page_is_self_contained_and_escaped(made: report.Report) -> None:
    """No script, no request to anywhere, no unescaped text; both colour schemes."""
    html = report.page(made.data)
    assert "Some Gym &lt;1&gt;" in html
    assert "prefers-color-scheme: dark" in html
    assert "<script" not in html
    assert "src=" not in html
    assert "@import" not in html
    assert "CKPT-COMMIT-003" in html


def test_the_terminal_shows_the_failure(made: report.Report) -> None:
    """The same facts in text."""
    from rich.console import Console

    console = Console(record=True, width=200)
    text.failures(console, made.data)
    text.verdict(console, made.data)
    shown = console.export_text()
    for part in ("CKPT-COMMIT-003", "1. hold", "expected  409 not_ready", "got       200", "--only", "not conformant"):
        assert part in shown


@pytest.mark.parametrize(
    ("budget", "said"), [("default", "never visited: idle × renew"), ("quick", "1 cells were not visited")]
)
def test_a_cell_that_was_not_visited_is_red_only_where_all_are_promised(
    made: report.Report, budget: str, said: str
) -> None:
    """A shorter budget says so, and blames nobody."""
    machine = {"visits": {"idle × prepare": 2, "idle × renew": 0}, "unvisited": ["idle × renew"]}
    html = report.page({**made.data, "machine": machine, "suite": {**made.data["suite"], "budget": budget}})
    assert "1 of 2 cells visited, 2 times" in html
    assert said in html
