# SPDX-License-Identifier: Apache-2.0
"""What a run over the mutants came to, as JSON and on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.mutants.catalogue import Mutant, mutants
from tests.mutants.judging import Finding, Run, Verdict

if TYPE_CHECKING:
    from tests.mutants.runner import Plan

Row = tuple[Mutant, Run, Verdict]


def summary(controls: Sequence[Run], rows: Sequence[Row], plan: Plan) -> dict[str, Any]:
    """Return the content of `mutants.json`.

    Args:
        controls: the runs on clean Gyms.
        rows: mutants with their runs and verdicts.
        plan: what was run.
    """
    return {
        **plan.key,
        "seconds": round(sum(found.seconds for found in [*controls, *(found for _, found, _ in rows)]), 1),
        "clean": {
            control.name: {
                "exit_code": control.exit_code,
                "seconds": round(control.seconds, 1),
                "red": [_told(finding) for finding in control.found or ()],
            }
            for control in controls
        },
        "mutants": len(rows),
        "killed": sum(verdict.killed for _, _, verdict in rows),
        "survivors": [mutant.name for mutant, _, verdict in rows if not verdict.killed],
        "collateral": {
            mutant.name: {key: [_told(finding) for finding in found] for key, found in verdict.collateral.items()}
            for mutant, _, verdict in rows
            if verdict.collateral
        },
        "runs": [_row(*row) for row in rows],
    }


def _told(finding: Finding) -> dict[str, Any]:
    return {"check": finding.check, "requirements": sorted(finding.named), "what": finding.what}


def _row(mutant: Mutant, found: Run, verdict: Verdict) -> dict[str, Any]:
    return {
        "name": mutant.name,
        "targets": mutant.targets,
        "shows": mutant.shows,
        "from_the_text": mutant.from_the_text,
        "log": mutant.log,
        "sentence": mutant.sentence,
        "breaks": list(mutant.breaks),
        "killed": verdict.killed,
        "killed_by": [_told(finding) for finding in verdict.killed_by],
        "named": any(finding.named & set(mutant.breaks) for finding in verdict.killed_by),
        "exit_code": found.exit_code,
        "timed_out": found.exit_code is None,
        "reported": found.found is not None,
        "seconds": round(found.seconds, 1),
    }


def print_progress(console: Console, found: Run) -> None:
    """Print one line about a run."""
    if found.found is None:
        text = f"{found.name}: no report, exit code {found.exit_code}; it ended with:\n{found.log}"
    else:
        text = f"{found.name}: {len(found.found)} red, {found.seconds:.0f} s"
    console.print(text, markup=False)


def print_table(console: Console, controls: Sequence[Run], rows: Sequence[Row], seconds: float) -> None:
    """Print a line per mutant, and the sum."""
    table = Table(title="Broken Gyms", show_lines=False)
    for column in ("mutant", "area", "killed by", "collateral", "s"):
        table.add_column(column, overflow="fold")
    for mutant, found, verdict in rows:
        killed = ", ".join(finding.check for finding in verdict.killed_by[:3])
        more = len(verdict.killed_by) - 3
        table.add_row(
            mutant.name,
            mutant.targets,
            killed + (f" and {more} more" if more > 0 else "") if killed else "[red]SURVIVED[/]",
            ", ".join(verdict.collateral),
            f"{found.seconds:.0f}",
        )
    console.print(table)
    for control in controls:
        for finding in control.found or ():
            console.print(
                f"{control.name} is red: {finding.check}: {finding.what} ({' '.join(sorted(finding.named))})",
                style="red",
                markup=False,
            )
        state = "green" if control.exit_code == 0 else f"red (exit code {control.exit_code})"
        console.print(f"{control.name} is {state} in {control.seconds:.0f} s")
    killed = sum(verdict.killed for _, _, verdict in rows)
    collateral = sum(bool(verdict.collateral) for _, _, verdict in rows)
    console.print(f"{killed} of {len(rows)} killed, {collateral} with collateral, {seconds:.0f} s of runs")


def print_list(console: Console) -> None:
    """Print the mutants with what they break."""
    for mutant in mutants().values():
        marks = [mutant.shows, *(["from the text"] if mutant.from_the_text else []), *(["log"] if mutant.log else [])]
        console.print(f"{mutant.targets:<11} {mutant.name:<36} {mutant.sentence}", markup=False)
        console.print(f"{'':<48} {', '.join(marks)}: {' '.join(mutant.breaks)}", style="dim", markup=False)
