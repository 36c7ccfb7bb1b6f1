# SPDX-License-Identifier: Apache-2.0
"""The report as JSON: everything that the page and the terminal show is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.gym import Gym
from conformance.registry import Check
from conformance.replay import command
from conformance.runner import Settings
from conformance.verdict import Failure, Outcome, Summary
from spec import Requirement, Specification

Json = dict[str, Any]

FORMAT = 1
VERDICT_WORDS: Mapping[int, str] = {
    0: "conformant",
    1: "not conformant",
    3: "the suite itself went wrong",
    4: "flaky",
}
STATUS_ORDER = ("failed", "flaky", "passed", "not_run", "not_applicable", "planned", "excluded")


@dataclass(frozen=True)
class Report:
    """A run as JSON.

    Args:
        data: the report.
        summary: its verdict.
    """

    data: Json
    summary: Summary


def headline(summary: Summary) -> str:
    """Return the verdict in words; it names whatever was left out."""
    text = VERDICT_WORDS[summary.exit_code]
    if summary.exit_code != 0:
        return text
    conformant = [name for name, verdict in summary.profiles.items() if verdict in ("conformant", "partial")]
    if not conformant:
        return "incomplete: no profile was judged whole"
    text = f"nothing failed in {', '.join(conformant)}"
    left = [
        f"{summary.counts[name]} {words}"
        for name, words in (("planned", "planned"), ("not_applicable", "not applicable"), ("not_run", "not run"))
        if summary.counts[name]
    ]
    return f"{text}; not judged: {', '.join(left)}" if left else f"conformant in {', '.join(conformant)}"


def build(
    *,
    specification: Specification,
    gym: Gym,
    settings: Settings,
    outcomes: Sequence[Outcome],
    summary: Summary,
    checks: Mapping[str, Check],
    started: str,
    seconds: float,
    machine: Json | None = None,
) -> Report:
    """Build the report of a run.

    Args:
        specification: that the run judged by.
        gym: that was judged.
        settings: of the run.
        outcomes: of its checks.
        summary: the verdict.
        checks: the whole registry, to say which check shows which requirement.
        started: UTC time in ISO 8601.
        seconds: duration.
        machine: what the state machine visited, or None if it did not run.
    """
    exercised: dict[str, list[str]] = {}
    for check in checks.values():
        for key in check.requirements:
            exercised.setdefault(key, []).append(check.name)
    data: Json = {
        "format": FORMAT,
        "headline": headline(summary),
        "verdict": {
            "exit_code": summary.exit_code,
            "profiles": dict(summary.profiles),
            "requirements": dict(summary.counts),
            "checks": _count(outcomes),
        },
        "implementation": _implementation(gym),
        "suite": {
            "specification": specification.version,
            "budget": settings.budget,
            "seed": settings.seed,
            "time_scale": settings.time_scale,
            "level": 1 if settings.target_file else 0,
            "only": list(settings.only),
            "skip": list(settings.skip),
            "started": started,
            "seconds": round(seconds, 1),
        },
        "requirements": [
            _requirement(found, summary, exercised.get(key, []), outcomes)
            for key, found in sorted(specification.requirements.items())
            if found.binds == "gym"
        ],
        "checks": [_outcome(outcome, settings, specification) for outcome in outcomes],
        "machine": machine,
    }
    return Report(data, summary)


def _implementation(gym: Gym) -> Json:
    first = gym.participants[0].capabilities["implementation"]
    return {
        "name": first["name"],
        "version": first["version"],
        "participants": [
            {key: p.capabilities[key] for key in ("name", "role", "owns", "profiles", "features", "storage", "stage")}
            | {"url": p.url}
            for p in gym.participants
        ],
    }


def _count(outcomes: Sequence[Outcome]) -> Json:
    found: dict[str, int] = {}
    for outcome in outcomes:
        found[outcome.status] = found.get(outcome.status, 0) + 1
    return found


def _requirement(found: Requirement, summary: Summary, checks: Sequence[str], outcomes: Sequence[Outcome]) -> Json:
    reasons = {
        outcome.left_out.get(found.id, outcome.reason)
        for outcome in outcomes
        if found.id in outcome.check.requirements and summary.requirements[found.id] == "not_applicable"
    }
    return {
        "id": found.id,
        "level": found.level,
        "scope": found.scope,
        "chapter": found.chapter,
        "text": found.text,
        "status": summary.requirements[found.id],
        "checks": list(checks),
        "planned": found.planned,
        "excluded": found.excluded,
        "not_applicable": "; ".join(sorted(reasons)),
    }


def _outcome(outcome: Outcome, settings: Settings, specification: Specification) -> Json:
    check = outcome.check
    return {
        "name": check.name,
        "chapter": check.chapter,
        "sentence": check.sentence,
        "profile": check.profile,
        "participant": outcome.participant,
        "requirements": list(check.requirements),
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds": round(outcome.seconds, 2),
        "exchanges": outcome.exchanges,
        "failures": [_failure(failure, outcome, settings, specification) for failure in outcome.failures],
    }


def _failure(failure: Failure, outcome: Outcome, settings: Settings, specification: Specification) -> Json:
    return {
        "requirements": [
            {
                "id": key,
                "text": specification.requirements[key].text if key in specification.requirements else "",
                "link": link(specification, key),
            }
            for key in failure.requirements
        ],
        "what": failure.what,
        "expected": failure.expected,
        "got": failure.got,
        "steps": list(failure.steps),
        "exchanges": [{"curl": line, "answer": answer} for line, answer in failure.exchanges],
        "replay": command(settings, outcome.check.name),
    }


def link(specification: Specification, key: str) -> str:
    """Return the place of a requirement in the chapters, relative to the site of the specification."""
    found = specification.requirements.get(key)
    return f"spec/{found.chapter}.html#{key.lower()}" if found else ""
