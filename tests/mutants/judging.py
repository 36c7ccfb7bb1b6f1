# SPDX-License-Identifier: Apache-2.0
"""What a report of the suite says about a mutant; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.mutants.catalogue import Mutant

RED = ("failed", "flaky")


@dataclass(frozen=True)
class Finding:
    """One red check of a report.

    Args:
        check: its name.
        machine: whether it is the state machine's and not a check's.
        named: the requirements that its failures name.
        exercised: those that it is registered with.
        what: what was judged, of its first failure.
        seconds: how long it took.
    """

    check: str
    machine: bool
    named: frozenset[str]
    exercised: frozenset[str]
    what: str
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """What a run of the suite came to for one mutant.

    Args:
        killed_by: the red checks that show what the mutant says that it breaks, those first that name it.
        collateral: the red checks none of whose requirements it says that it breaks.
    """

    killed_by: tuple[Finding, ...]
    collateral: tuple[Finding, ...]

    @property
    def killed(self) -> bool:
        """Whether the suite found it."""
        return bool(self.killed_by)


def findings(report: Mapping[str, Any], checks: Collection[str]) -> list[Finding]:
    """Return the red checks of a report.

    Args:
        report: the JSON report of the suite.
        checks: the names of the registered checks; everything else comes from the state machine.
    """
    return [
        Finding(
            check=outcome["name"],
            machine=outcome["name"] not in checks,
            named=frozenset(found["id"] for failure in outcome["failures"] for found in failure["requirements"]),
            exercised=frozenset(outcome["requirements"]),
            what=outcome["failures"][0]["what"] if outcome["failures"] else outcome["reason"],
            seconds=outcome["seconds"],
        )
        for outcome in report["checks"]
        if outcome["status"] in RED
    ]


def judge(mutant: Mutant, found: Sequence[Finding], clean: Collection[str]) -> Verdict:
    """Judge a mutant by the red checks of its run.

    Args:
        mutant: what it says that it breaks.
        found: the red checks.
        clean: the names of the checks that are red on the unmutated Gym; they say nothing about a mutant.
    """
    breaks = frozenset(mutant.breaks)
    counted = [finding for finding in found if finding.check not in clean]
    shows = [finding for finding in counted if finding.machine or breaks & (finding.named | finding.exercised)]
    exact = sorted(shows, key=lambda finding: not breaks & finding.named)
    return Verdict(tuple(exact), tuple(finding for finding in counted if finding not in shows))
