# SPDX-License-Identifier: Apache-2.0
"""Runs the suite on the clean Gym and on every mutant, each run a process of its own, and says which ones it missed.

A mutant of the boundary log runs on a Gym that keeps one, and has a clean Gym of that form as its control. Written:
`build/mutants.json` with `mutants, killed, survivors, collateral`, and the report of each run in `build/mutants/`. The
exit code is 0 when every mutant was killed without collateral and the clean Gyms are green.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from conformance import registry
from tests.mutants import telling
from tests.mutants.catalogue import CLEAN, Mutant, mutants
from tests.mutants.judging import Run, findings, judge
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
        resume: whether runs that `mutants.json` holds already, of this commit and of this plan, are not made again.
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
    resume: bool = False
    output: Path = Path("build")

    @property
    def key(self) -> dict[str, Any]:
        """What has to be equal for the runs of two plans to belong together."""
        return {name: getattr(self, name) for name in ("budget", "processes", "machine", "narrow", "seed")}


@dataclass(frozen=True)
class Job:
    """One run of the suite.

    Args:
        name: of the mutant, or `clean`.
        log: whether the Gym keeps a boundary log.
        selection: these checks, chapters or requirements alone; empty: the whole budget.
    """

    name: str
    log: bool = False
    selection: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What it is called in reports."""
        return f"{self.name}-log" if self.name == CLEAN and self.log else self.name


def run(plan: Plan) -> int:
    """Run everything, write the summary and print the table; the exit code."""
    known = mutants()
    if unknown := sorted(set(plan.only) - known.keys()):
        console.print(f"there is no mutant {', '.join(unknown)}")
        return 2
    chosen = [mutant for name, mutant in known.items() if not plan.only or name in plan.only]
    jobs, commit = _jobs(chosen, plan), _commit()
    earlier = _earlier(plan, commit) if plan.resume else []
    left = [job for job in jobs if job.label not in {found.name for found in earlier}]
    runs = run_all(left, plan, lambda done: _tell(chosen, [*earlier, *done], plan, commit, complete=False))
    summary, controls, rows = _tell(chosen, [*earlier, *runs], plan, commit, complete=True)
    telling.print_table(console, controls, rows, summary["seconds"])
    green = all(control.exit_code == 0 for control in controls)
    return 0 if green and not summary["survivors"] and not summary["collateral"] else 1


def _tell(
    chosen: Sequence[Mutant], runs: Sequence[Run], plan: Plan, commit: str | None, *, complete: bool
) -> tuple[dict[str, Any], list[Run], list[telling.Row]]:
    """Judge what has run and write `mutants.json`, after each run: one that is cut short has told something."""
    by_name = {found.name: found for found in runs}
    controls = [found for name, found in by_name.items() if name in (CLEAN, f"{CLEAN}-log")]
    clean = {finding.check for control in controls for finding in control.found or ()}
    rows = [
        (mutant, found, judge(mutant, found.found or (), clean))
        for mutant in chosen
        if (found := by_name.get(mutant.name)) is not None
    ]
    summary = {"commit": commit, "complete": complete, **telling.summary(controls, rows, plan)}
    plan.output.mkdir(parents=True, exist_ok=True)
    (plan.output / "mutants.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary, controls, rows


def _earlier(plan: Plan, commit: str | None) -> list[Run]:
    """Return the runs that an earlier call, of the same commit and plan, has made."""
    try:
        told = json.loads((plan.output / "mutants.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    if (
        commit is None
        or commit.endswith("-dirty")
        or told["commit"] != commit
        or {name: told[name] for name in plan.key} != plan.key
    ):
        return []
    rows = [*({"name": name, **row} for name, row in told["clean"].items()), *told["runs"]]
    checks = registry.all_checks()
    found = []
    for row in rows:
        report = plan.output / "mutants" / f"{row['name']}.json"
        if row["exit_code"] is not None and report.exists():
            read = tuple(findings(json.loads(report.read_text(encoding="utf-8")), checks))
            found.append(Run(row["name"], row["exit_code"], row["seconds"], read, ""))
    return found


def _commit() -> str | None:
    """Return the commit that is checked out, with a mark if the working tree differs; None outside of a repository."""
    told = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude", "*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip() or None


def _jobs(chosen: Iterable[Mutant], plan: Plan) -> list[Job]:
    """Return the control of each form that is needed, and then the mutants."""
    shown = {key for check in registry.all_checks().values() for key in check.requirements}

    def selection(mutants: Iterable[Mutant]) -> tuple[str, ...]:
        keys = {key for mutant in mutants for key in mutant.breaks if key in shown}
        return tuple(sorted(keys)) if plan.narrow else ()

    forms = {log: [mutant for mutant in chosen if mutant.log == log] for log in (False, True)}
    controls = [Job(CLEAN, log, selection(some)) for log, some in forms.items() if some]
    return [*controls, *(Job(mutant.name, mutant.log, selection([mutant])) for mutant in chosen)]


def run_all(jobs: Sequence[Job], plan: Plan, on_run: Callable[[Sequence[Run]], object]) -> list[Run]:
    """Run the suite on each of these Gyms, `plan.jobs` at a time, in their order.

    Args:
        jobs: what is run.
        plan: how.
        on_run: called with all runs so far, after each.
    """
    checks, lock, done = registry.all_checks(), threading.Lock(), list[Run]()

    def one(job: Job) -> Run:
        found = run_one(job, plan, checks=checks)
        with lock:
            done.append(found)
            telling.print_progress(console, found)
            on_run(done)
        return found

    with ThreadPoolExecutor(max_workers=max(1, plan.jobs)) as pool:
        return list(pool.map(one, jobs))


def run_one(job: Job, plan: Plan, *, checks: Collection[str] = ()) -> Run:
    """Run the suite once.

    Args:
        job: on which Gym, and which checks.
        plan: how.
        checks: the names of the registered checks.
    """
    reports = (plan.output / "mutants").resolve()
    reports.mkdir(parents=True, exist_ok=True)
    report = reports / f"{job.label}.json"
    report.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"mutant-{job.name}-") as directory:
        target = Path(directory) / "target.yaml"
        target.write_text(target_of(job.name, plan.processes, log=job.log), encoding="utf-8")
        arguments = ["run", "--target", str(target), "--budget", plan.budget, "--seed", str(plan.seed)]
        arguments += ["--json", str(report), "--quiet"]
        arguments += [word for item in job.selection for word in ("--only", item)]
        arguments += [] if plan.machine else ["--skip", "machine"]
        started = time.monotonic()
        code, log = _suite(arguments, plan.timeout_s)
    found = None
    if report.exists():
        found = tuple(findings(json.loads(report.read_text(encoding="utf-8")), checks or registry.all_checks()))
    return Run(job.label, code, time.monotonic() - started, found, log)


def target_of(name: str, processes: str, *, log: bool = False) -> str:
    """Return the target file of a mutant: that of the reference Gym, started with the mutant in it.

    Args:
        name: of the mutant, or `clean`.
        processes: the process form of the Gym, `one` or `three`.
        log: whether the Gym keeps a boundary log.

    Raises:
        NoSeam: the reference Gym is started in another way than `reference-gym serve …`.
    """
    file = TARGETS / f"reference-{'log-' if log else ''}{processes}.yaml"
    target = yaml.safe_load(file.read_text(encoding="utf-8"))
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
