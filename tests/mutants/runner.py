# SPDX-License-Identifier: Apache-2.0
"""Runs the suite on the clean Gym and on every mutant, each run a process of its own, and says which ones it missed.

Written: `build/mutants.json` with `mutants, killed, survivors, collateral`, and the report of each run in
`build/mutants/`. The exit code is 0 when every mutant was killed without collateral and the clean Gym is green.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from conformance import registry
from tests.mutants.catalogue import CLEAN, Mutant, mutants
from tests.mutants.judging import Finding, Verdict, findings, judge
from tests.mutants.seam import NoSeam

TARGETS = Path(__file__).parents[1] / "suite" / "targets"
END_WITHIN_S = 30.0

console = Console(soft_wrap=True, highlight=False)


@dataclass(frozen=True)
class Plan:
    """What is run.

    Args:
        only: these mutants alone; empty: all.
        jobs: how many runs at a time.
        budget: of the suite.
        processes: the process form of the Gym, `one` or `three`.
        machine: whether the state machine runs too.
        narrow: whether only the checks of what each mutant breaks run, all of these on the clean Gym; there is no
            collateral then.
        seed: of the suite.
        timeout_s: how long one run may take, in seconds.
        output: the directory of the reports.
    """

    only: tuple[str, ...] = ()
    jobs: int = 2
    budget: str = "default"
    processes: str = "one"
    machine: bool = True
    narrow: bool = False
    seed: int = 1
    timeout_s: float = 420.0
    output: Path = Path("build")


@dataclass(frozen=True)
class Run:
    """One run of the suite.

    Args:
        name: of the mutant, or `clean`.
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


def run(plan: Plan) -> int:
    """Run everything, write the summary and print the table; the exit code."""
    known = mutants()
    if unknown := sorted(set(plan.only) - known.keys()):
        console.print(f"there is no mutant {', '.join(unknown)}")
        return 2
    chosen = [mutant for name, mutant in known.items() if not plan.only or name in plan.only]
    keys = {mutant.name: mutant.breaks for mutant in chosen}
    control, *runs = run_all({CLEAN: sorted({*itertools.chain(*keys.values())}), **keys}, plan)
    clean = {finding.check for finding in control.found or ()}
    verdicts = [judge(mutant, found.found or (), clean) for mutant, found in zip(chosen, runs, strict=True)]
    rows = list(zip(chosen, runs, verdicts, strict=True))
    summary = _summary(control, rows, plan)
    plan.output.mkdir(parents=True, exist_ok=True)
    (plan.output / "mutants.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _print(control, rows)
    good = control.exit_code == 0 and not summary["survivors"] and not summary["collateral"]
    return 0 if good else 1


def run_all(breaks: Mapping[str, Sequence[str]], plan: Plan) -> list[Run]:
    """Run the suite on each of these Gyms, `jobs` at a time, in their order.

    Args:
        breaks: by name, the requirements whose checks a narrow run is about.
        plan: how.
    """
    checks = registry.all_checks()
    shown = {key for check in checks.values() for key in check.requirements}

    def one(name: str) -> Run:
        selection = [key for key in breaks[name] if key in shown] if plan.narrow else []
        found = run_one(name, plan, checks=checks, selection=selection)
        _progress(found)
        return found

    with ThreadPoolExecutor(max_workers=max(1, plan.jobs)) as pool:
        return list(pool.map(one, breaks))


def run_one(name: str, plan: Plan, *, checks: Collection[str] = (), selection: Sequence[str] = ()) -> Run:
    """Run the suite once.

    Args:
        name: of the mutant, or `clean`.
        plan: how.
        checks: the names of the registered checks.
        selection: these checks, chapters or requirements alone; empty: the whole budget.
    """
    reports = (plan.output / "mutants").resolve()
    reports.mkdir(parents=True, exist_ok=True)
    report = reports / f"{name}.json"
    report.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"mutant-{name}-") as directory:
        target = Path(directory) / "target.yaml"
        target.write_text(target_of(name, plan.processes), encoding="utf-8")
        arguments = ["run", "--target", str(target), "--budget", plan.budget, "--seed", str(plan.seed)]
        arguments += ["--json", str(report), "--quiet"]
        arguments += [word for item in selection for word in ("--only", item)]
        arguments += [] if plan.machine else ["--skip", "machine"]
        started = time.monotonic()
        code, log = _suite(arguments, plan.timeout_s)
    found = None
    if report.exists():
        found = tuple(findings(json.loads(report.read_text(encoding="utf-8")), checks or registry.all_checks()))
    return Run(name, code, time.monotonic() - started, found, log)


def target_of(name: str, processes: str) -> str:
    """Return the target file of a mutant: that of the reference Gym, started with the mutant in it.

    Args:
        name: of the mutant, or `clean`.
        processes: the process form of the Gym, `one` or `three`.

    Raises:
        NoSeam: the reference Gym is started in another way than `reference-gym serve …`.
    """
    target = yaml.safe_load((TARGETS / f"reference-{processes}.yaml").read_text(encoding="utf-8"))
    command, arguments = target["start"][:2], target["start"][2:]
    if command != ["reference-gym", "serve"]:
        raise NoSeam(f"the reference Gym is started by {command}")
    target["start"] = ["{python}", "-m", "tests.mutants", "serve", name, "--", *arguments]
    return yaml.safe_dump(target, sort_keys=False)


def _suite(arguments: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Run the suite's command; its exit code, None when it took too long, and the end of what it printed."""
    with subprocess.Popen(
        [sys.executable, "-m", "conformance.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "160"},
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # A terminated suite ends the Gym that it started.
            try:
                output, _ = process.communicate(timeout=END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            return None, output.decode(errors="replace")[-2000:]
        return process.returncode, output.decode(errors="replace")[-2000:]


def _summary(control: Run, rows: Sequence[tuple[Mutant, Run, Verdict]], plan: Plan) -> dict[str, Any]:
    def told(finding: Finding) -> dict[str, Any]:
        return {"check": finding.check, "requirements": sorted(finding.named), "what": finding.what}

    return {
        "budget": plan.budget,
        "processes": plan.processes,
        "machine": plan.machine,
        "narrow": plan.narrow,
        "seed": plan.seed,
        "clean": {
            "exit_code": control.exit_code,
            "seconds": round(control.seconds, 1),
            "red": [told(finding) for finding in control.found or ()],
        },
        "mutants": len(rows),
        "killed": sum(verdict.killed for _, _, verdict in rows),
        "survivors": [mutant.name for mutant, _, verdict in rows if not verdict.killed],
        "collateral": {
            mutant.name: [told(finding) for finding in verdict.collateral]
            for mutant, _, verdict in rows
            if verdict.collateral
        },
        "runs": [
            {
                "name": mutant.name,
                "targets": mutant.targets,
                "sentence": mutant.sentence,
                "breaks": list(mutant.breaks),
                "killed": verdict.killed,
                "killed_by": [told(finding) for finding in verdict.killed_by],
                "named": any(finding.named & set(mutant.breaks) for finding in verdict.killed_by),
                "exit_code": found.exit_code,
                "timed_out": found.exit_code is None,
                "reported": found.found is not None,
                "seconds": round(found.seconds, 1),
            }
            for mutant, found, verdict in rows
        ],
    }


def _progress(found: Run) -> None:
    if found.found is None:
        console.print(
            f"{found.name}: no report, exit code {found.exit_code}; it ended with:\n{found.log}", markup=False
        )
    else:
        console.print(f"{found.name}: {len(found.found)} red, {found.seconds:.0f} s", markup=False)


def _print(control: Run, rows: Sequence[tuple[Mutant, Run, Verdict]]) -> None:
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
            ", ".join(finding.check for finding in verdict.collateral),
            f"{found.seconds:.0f}",
        )
    console.print(table)
    for finding in control.found or ():
        console.print(f"the clean Gym is red: {finding.check}: {finding.what}", style="red", markup=False)
    killed = sum(verdict.killed for _, _, verdict in rows)
    state = "green" if control.exit_code == 0 else f"red (exit code {control.exit_code})"
    console.print(f"{killed} of {len(rows)} killed; the clean Gym is {state} in {control.seconds:.0f} s")


def print_list() -> None:
    """Print the mutants with what they break."""
    for mutant in mutants().values():
        console.print(f"{mutant.targets:<11} {mutant.name:<34} {mutant.sentence}", markup=False)
        console.print(f"{'':<46} {' '.join(mutant.breaks)}", style="dim", markup=False)
