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
        what: what was judged, of its first failure.
        seconds: how long it took.
    """

    check: str
    machine: bool
    named: frozenset[str]
    what: str
    seconds: float


@dataclass(frozen=True)
class Run:
    """What came of one run of the suite.

    Args:
        name: of the mutant, or of the control.
        exit_code: of the suite; None when it was ended because of its time limit.
        seconds: how long it took.
        found: its red checks; None when it wrote no report.
        log: the end of what it printed.
    """

    name: str
    exit_code: int | None
    seconds: float
    found: tuple[Finding, ...] | None
    log: str


@dataclass(frozen=True)
class Verdict:
    """What a run of the suite came to for one mutant.

    Args:
        killed_by: the red checks that name something of what the mutant says that it breaks.
        collateral: the requirements that are red although the mutant does not say that it breaks them, each with the
            checks that name it.
    """

    killed_by: tuple[Finding, ...]
    collateral: Mapping[str, tuple[Finding, ...]]

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
            what=outcome["failures"][0]["what"] if outcome["failures"] else outcome["reason"],
            seconds=outcome["seconds"],
        )
        for outcome in report["checks"]
        if outcome["status"] in RED
    ]


def judge(mutant: Mutant, found: Sequence[Finding], clean: Collection[str]) -> Verdict:
    """Judge a mutant by the red checks of its run.

    The state machine compares whole answers with the model and mostly names what it compares, not what is behind it: it
    kills a mutant, too, and what it names is no collateral.

    Args:
        mutant: what it says that it breaks.
        found: the red checks.
        clean: the names of the checks that are red on the unmutated Gym; they say nothing about a mutant.
    """
    breaks = frozenset(mutant.breaks)
    counted = [finding for finding in found if finding.check not in clean]
    exact = [finding for finding in counted if breaks & finding.named]
    loose = [finding for finding in counted if finding.machine and not breaks & finding.named]
    others = sorted({key for finding in counted if not finding.machine for key in finding.named - breaks})
    by = {key: tuple(finding for finding in counted if key in finding.named) for key in others}
    return Verdict((*exact, *loose), by)
