# SPDX-License-Identifier: Apache-2.0
"""The report on a terminal: one line per check while it runs, then failures and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from conformance.verdict import Outcome

MARKS: Mapping[str, str] = {
    "passed": "[green]✓[/]",
    "failed": "[red]✗[/]",
    "flaky": "[yellow]≈[/]",
    "not_applicable": "[dim]–[/]",
    "fault": "[magenta]![/]",
}


def line(outcome: Outcome) -> str:
    """Return one line about a check."""
    where = f" at {outcome.participant}" if outcome.participant else ""
    tail = f" [dim]{escape(outcome.reason.splitlines()[-1][:120])}[/]" if outcome.reason else ""
    return (
        f"{MARKS[outcome.status]} {escape(outcome.check.name)}{escape(where)} [dim]{outcome.seconds:.2f} s[/]"
        f"{tail} [dim cyan]{escape(' '.join(outcome.check.requirements[:4]))}[/]"
    )


def failures(console: Console, report: Mapping[str, Any]) -> None:
    """Print every failure: id and sentence, the steps, expected, got, the exchanges, how to see it again."""
    for row in report["checks"]:
        for failure in row["failures"]:
            console.print(f"\n[bold red]{escape(row['name'])}[/] {escape(row['sentence'])}")
            for item in failure["requirements"]:
                console.print(f"  [cyan]{escape(item['id'])}[/] {escape(item['text'])}")
            for number, step in enumerate(failure["steps"], 1):
                console.print(f"  {number}. {escape(step)}")
            console.print(f"  judged    {escape(failure['what'])}")
            console.print(f"  expected  {escape(failure['expected'])}")
            console.print(f"  got       [red]{escape(failure['got'])}[/]")
            for item in failure["exchanges"][-5:]:
                console.print(f"  [dim]$ {escape(item['curl'])}[/]")
                console.print(f"  [dim]→ {escape(item['answer'])}[/]")
            console.print(f"  again     {escape(failure['replay'])}")
            for item in failure["requirements"]:
                console.print(f"  chapter   {escape(item['link'])}")
        if row["status"] == "fault":
            console.print(f"\n[bold magenta]{escape(row['name'])}: fault of the suite[/]\n{escape(row['reason'])}")


def verdict(console: Console, report: Mapping[str, Any]) -> None:
    """Print the verdict per profile, the counts and the headline."""
    console.print()
    for name, value in report["verdict"]["profiles"].items():
        tone = {"conformant": "green", "not_offered": "dim"}.get(value, "red")
        console.print(f"  {name:<14} [{tone}]{value.replace('_', ' ')}[/]")
    counts = report["verdict"]["requirements"]
    shown = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in counts.items() if n)
    console.print(f"  requirements   {shown}")
    found, suite = report["implementation"], report["suite"]
    tone = "green" if report["verdict"]["exit_code"] == 0 else "red"
    console.print(
        f"[bold {tone}]{escape(found['name'])} {escape(found['version'])}: {escape(report['headline'])}[/] "
        f"[dim](seed {suite['seed']}, {suite['seconds']} s)[/]"
    )
