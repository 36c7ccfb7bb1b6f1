# SPDX-License-Identifier: Apache-2.0
"""Broken Gyms: each still fits the reference Gym; the suite finds eight of them here, and all in `make mutants`."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import spec
from conformance import registry
from tests.mutants import catalogue, judging, runner, seam
from tests.mutants.catalogue import CLEAN, Mutant
from tests.mutants.serve import hand_on

MUTANTS = catalogue.mutants()
AREAS = {"fencing", "gate", "lease", "durability", "restore", "ack", "effects"}
QUICK = (
    ("fence_off_by_one", "effects_are_refused_for_what_they_name", "three"),
    ("verification_not_waited_for", "a_running_verification_blocks", "one"),
    ("refused_calls_renew", "a_lease_ends_by_itself", "one"),
    ("incarnation_survives_loss", "state_lost_between_commit_and_resume", "one"),
    ("restore_forgets_tombstones", "tombstones_come_from_the_cut", "one"),
    ("ack_is_no_progress", "progress_rises_with_every_change", "one"),
    ("replies_keyed_by_attempt", "recorded_replies_are_in_the_cut", "one"),
    ("result_written_anew", "a_kept_result_is_the_same_string", "one"),
)
"""Eight that are found quickly, from all areas: mutant, the check that finds it, process form."""


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_every_mutant_still_fits_the_reference_gym(mutant: Mutant) -> None:
    """What it wraps is there, with the parameters that it was written for."""
    with seam.undone():
        catalogue.apply(mutant.name)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_every_mutant_says_what_it_breaks(mutant: Mutant) -> None:
    """One sentence, and requirements that exist and bind a Gym, none of them twice."""
    requirements = spec.load("1.0").requirements
    assert mutant.sentence.endswith(".")
    assert mutant.breaks
    assert [] == [key for key in mutant.breaks if key not in requirements or requirements[key].binds != "gym"]
    assert len(mutant.breaks) == len(set(mutant.breaks))


def test_the_mutants_cover_every_area() -> None:
    """25 at least, two at least of each area that matters most; not a few that no single answer shows."""
    counts = Counter(mutant.targets for mutant in MUTANTS.values())
    assert len(MUTANTS) >= 25
    assert set() == {area for area in AREAS if counts[area] < 2}
    assert sum(mutant.shows in ("state", "race", "crash") for mutant in MUTANTS.values()) >= 12
    assert sum(mutant.from_the_text for mutant in MUTANTS.values()) >= 8


def test_a_name_that_is_gone_is_an_error() -> None:
    """A mutant never passes silently beside the code that it was written for."""
    with pytest.raises(seam.NoSeam, match="not defined any more"):
        seam.wrap(Broken, "gone")
    with pytest.raises(seam.NoSeam, match="no function any more"):
        seam.wrap(Broken, "value")
    with pytest.raises(seam.NoSeam, match="written for"):

        @seam.wrap(Broken, "method")
        def method(original: Any, self: Broken, other: int) -> int:
            return other

    with seam.undone():

        @seam.wrap(Broken, "method")
        def method_with_the_same_parameters(original: Any, self: Broken, number: int) -> int:
            doubled: int = 2 * original(self, number)
            return doubled

        assert 4 == Broken().method(1)
    assert 2 == Broken().method(1)


class Broken:
    """Something to wrap."""

    value = 1

    def method(self, number: int) -> int:
        """Add one."""
        return number + 1


async def test_a_process_that_would_not_be_mutated_is_an_error() -> None:
    """The processes that a Gym starts get the mutant too; one that would not is refused."""
    with seam.undone():
        hand_on(CLEAN)
        with pytest.raises(seam.NoSeam, match="would not be in that process"):
            await asyncio.create_subprocess_exec("python", "-m", "reference_gym.another", "serve")


def test_red_checks_are_kills_or_collateral() -> None:
    """A red check kills by naming what a mutant breaks; what else it names is collateral; the machine may be loose."""
    mutant = Mutant("m", "It breaks.", ("CKPT-ACK-006",), "ack", "state", False, False, lambda: None)
    report = {
        "checks": [
            outcome("beside_it", "failed", ["CKPT-ACK-001"]),
            outcome("names_it", "flaky", ["CKPT-ACK-006"]),
            outcome("names_more", "failed", ["CKPT-ACK-006", "CKPT-FEED-001"]),
            outcome("red_anyway", "failed", ["CKPT-FEED-002"]),
            outcome("the_machine", "failed", ["CKPT-FEED-003"]),
            outcome("green", "passed", []),
        ]
    }
    found = judging.findings(report, {"beside_it", "names_it", "names_more", "red_anyway", "green"})
    verdict = judging.judge(mutant, found, {"red_anyway"})
    assert ["names_it", "names_more", "the_machine"] == [finding.check for finding in verdict.killed_by]
    collateral = {key: [finding.check for finding in by] for key, by in verdict.collateral.items()}
    assert {"CKPT-ACK-001": ["beside_it"], "CKPT-FEED-001": ["names_more"]} == collateral
    assert not judging.judge(mutant, [finding for finding in found if finding.check == "beside_it"], ()).killed


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--resume` only what is missing is run, as long as commit and plan are the same."""
    ran: list[str] = []

    def run_one(job: runner.Job, plan: runner.Plan, **_: object) -> judging.Run:
        ran.append(job.label)
        (tmp_path / "mutants").mkdir(exist_ok=True)
        red = [] if job.name == CLEAN else [outcome("a_check", "failed", ["CKPT-ACK-001"])]
        (tmp_path / "mutants" / f"{job.label}.json").write_text(json.dumps({"checks": red}))
        return judging.Run(job.label, 0, 1.0, tuple(judging.findings({"checks": red}, {"a_check"})), "")

    monkeypatch.setattr(runner, "run_one", run_one)
    monkeypatch.setattr(runner, "_commit", lambda: "c1")
    first, second = sorted(MUTANTS)[:2]
    runner.run(runner.Plan(only=(first,), output=tmp_path))
    both = runner.Plan(only=(first, second), resume=True, output=tmp_path)
    runner.run(both)
    assert [first, second] == [name for name in ran if name in MUTANTS]
    told = json.loads((tmp_path / "mutants.json").read_text())
    assert (2, True, "c1") == (told["mutants"], told["complete"], told["commit"])
    monkeypatch.setattr(runner, "_commit", lambda: "c2")
    ran.clear()
    runner.run(both)
    assert {first, second} == {name for name in ran if name in MUTANTS}


def outcome(name: str, status: str, named: list[str]) -> dict[str, Any]:
    """Return one outcome of a report."""
    failures = [{"requirements": [{"id": key} for key in named], "what": "it is so"}] if named else []
    return {"name": name, "status": status, "reason": "", "seconds": 0.1, "failures": failures}


@pytest.mark.parametrize(("name", "check", "processes"), QUICK, ids=[name for name, *_ in QUICK])
def test_the_suite_finds_a_broken_gym(name: str, check: str, processes: str, tmp_path: Path) -> None:
    """A check of what it breaks is red, and names that."""
    mutant = MUTANTS[name]
    assert set(mutant.breaks) & set(registry.all_checks()[check].requirements)
    plan = runner.Plan(budget="quick", processes=processes, machine=False, timeout_s=110, output=tmp_path)
    run = runner.run_one(runner.Job(name, mutant.log, (check,)), plan)
    assert run.found is not None, run.log
    verdict = judging.judge(mutant, run.found, ())
    assert verdict.killed, run.log
    assert {} == verdict.collateral, run.log


@pytest.mark.parametrize("processes", ["one", "three"])
def test_the_unmutated_gym_passes_the_same_checks(processes: str, tmp_path: Path) -> None:
    """What finds the broken Gyms finds nothing in the one that is whole."""
    checks = tuple(check for _, check, form in QUICK if form == processes)
    plan = runner.Plan(budget="quick", processes=processes, machine=False, timeout_s=110, output=tmp_path)
    run = runner.run_one(runner.Job(CLEAN, selection=checks), plan)
    assert (0, ()) == (run.exit_code, run.found), run.log
