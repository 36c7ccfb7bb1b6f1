# SPDX-License-Identifier: Apache-2.0
"""From what each check saw to a verdict per requirement and per profile; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from conformance.registry import PROFILES, Check
from spec import Requirement

Status = Literal["passed", "failed", "flaky", "not_applicable", "fault"]
Judgement = Literal["passed", "failed", "flaky", "not_run", "not_applicable", "planned", "excluded"]
Verdict = Literal["conformant", "partial", "not_conformant", "flaky", "incomplete", "not_offered"]


@dataclass(frozen=True)
class Failure:
    """Why a check failed, in the parts that the reports show.

    Args:
        requirements: ids that are broken.
        what: what was judged, one sentence.
        expected: what the specification says.
        got: what was observed.
        steps: the story so far.
        exchanges: `(curl line, answer)` of the last exchanges.
    """

    requirements: tuple[str, ...]
    what: str
    expected: str
    got: str
    steps: tuple[str, ...] = ()
    exchanges: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Outcome:
    """What came of one check at one participant.

    Args:
        check: the check.
        participant: the participant under study, or None for the whole Gym.
        status: `fault` means that the suite itself went wrong.
        failures: one per broken judgement; of a flaky check those of every run that failed.
        reason: why it is not applicable, or what the fault was.
        left_out: requirements of the check that there was no occasion to judge, with the reason.
        seconds: how long it took.
        exchanges: how many exchanges it made.
    """

    check: Check
    participant: str | None
    status: Status
    failures: tuple[Failure, ...] = ()
    reason: str = ""
    seconds: float = 0.0
    exchanges: int = 0
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """The verdict of a run.

    Args:
        requirements: judgement by requirement id, for every requirement of the specification that binds a Gym.
        profiles: verdict by profile.
        counts: number of requirements by judgement.
        exit_code: 0 conformant · 1 a requirement failed · 3 fault of the suite · 4 flaky.
    """

    requirements: Mapping[str, Judgement]
    profiles: Mapping[str, Verdict]
    counts: Mapping[str, int]
    exit_code: int


def judge(requirements: Mapping[str, Requirement], outcomes: Sequence[Outcome], offered: set[str]) -> Summary:
    """Return the verdict of a run.

    Args:
        requirements: of the specification.
        outcomes: of the checks that were run, and of those that did not apply.
        offered: the profiles that the Gym says it has.

    A requirement fails if a failure names it. It passes if a check that exercises it passed and none failed on it. If
    every check that exercises it failed on something else before, it is `not_run`, which no profile passes with.
    """
    gym = {key: found for key, found in requirements.items() if found.binds == "gym"}
    judged: dict[str, Judgement] = {key: _judge_one(found, outcomes) for key, found in gym.items()}
    for outcome in outcomes:
        for failure in outcome.failures:
            for key in failure.requirements:
                judged[key] = "flaky" if outcome.status == "flaky" else "failed"
    profiles = {profile: _profile(profile, gym, judged, outcomes, offered) for profile in PROFILES}
    counts = {name: sum(1 for value in judged.values() if value == name) for name in Judgement.__args__}  # type: ignore[attr-defined]  # typing gives Literal this attribute at run time
    return Summary(judged, profiles, counts, _exit_code(judged, outcomes))


def _judge_one(requirement: Requirement, outcomes: Sequence[Outcome]) -> Judgement:
    statuses = {
        "not_applicable" if outcome.status == "passed" and requirement.id in outcome.left_out else outcome.status
        for outcome in outcomes
        if requirement.id in outcome.check.requirements
    }
    if "passed" in statuses:
        return "passed"
    if statuses == {"not_applicable"}:
        return "not_applicable"
    if statuses:
        return "not_run"
    if requirement.excluded:
        return "excluded"
    if requirement.planned:
        return "planned"
    return "not_run"


def _profile(
    profile: str,
    requirements: Mapping[str, Requirement],
    judged: Mapping[str, Judgement],
    outcomes: Sequence[Outcome],
    offered: set[str],
) -> Verdict:
    if profile not in offered:
        return "not_offered"
    mine = [judged[key] for key, found in requirements.items() if found.scope == profile and key in judged]
    mine += [judged[key] for key in _touched(profile, outcomes) if key in judged]
    statuses = {outcome.status for outcome in outcomes if outcome.check.profile == profile}
    if "failed" in mine or "failed" in statuses:
        return "not_conformant"
    if "flaky" in mine or "flaky" in statuses:
        return "flaky"
    if "fault" in statuses or not statuses:
        return "incomplete"
    # Something of the profile has no check yet, or its check was not in this run: nothing failed, and no more is said.
    return "partial" if {"not_run", "planned"} & set(mine) else "conformant"


def _touched(profile: str, outcomes: Sequence[Outcome]) -> set[str]:
    return {key for outcome in outcomes if outcome.check.profile == profile for key in outcome.check.requirements}


def _exit_code(judged: Mapping[str, Any], outcomes: Sequence[Outcome]) -> int:
    statuses = {outcome.status for outcome in outcomes}
    if "fault" in statuses:
        return 3
    if "failed" in statuses:
        return 1
    if "flaky" in statuses:
        return 4
    return 0
