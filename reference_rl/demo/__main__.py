# SPDX-License-Identifier: Apache-2.0
"""Command line of the demo: `python -m reference_rl.demo`.

Exit codes: 0 everything is as promised, 1 a number is not, 2 usage, 3 the demo itself could not be shown, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from reference_rl.demo.chaos import Chaos
from reference_rl.demo.errors import DemoError, PromiseBrokenError, UsageError
from reference_rl.demo.page import Facts, render
from reference_rl.demo.policy import TOKEN_ENV
from reference_rl.demo.processes import Processes
from reference_rl.demo.scenario import COLUMNS, Scenario
from reference_rl.demo.show import LiveShow, PlainShow, Show
from reference_rl.demo.stage import CONTROL_ENV, DATA_ENV
from reference_rl.demo.story import Column, Policy, Teller
from reference_rl.demo.suite import Suite, run_suite


@dataclass(frozen=True)
class Options:
    """The command line."""

    scenario: Scenario
    columns: tuple[int, ...]
    gym_form: str
    out: Path
    latency_s: float
    with_suite: bool
    chaos: int
    seed: int
    command: str


@dataclass
class Clock:
    """Seconds of each part."""

    began: float = field(default_factory=time.monotonic)
    parts: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.monotonic)

    def lap(self, part: str) -> None:
        """The part that has just ended."""
        now = time.monotonic()
        self.parts[part], self._last = now - self._last, now

    def all(self) -> dict[str, float]:
        """Every part, and the whole."""
        return {**self.parts, "in all": time.monotonic() - self.began}


def parse(argv: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        UsageError: if the numbers make no example.
    """
    parser = argparse.ArgumentParser(
        prog="python -m reference_rl.demo",
        description="Kill a Gym and an RL client in the middle of a prompt group, in every column of the capability "
        "table, and count in the policy's log which turns had to be generated twice.",
    )
    parser.add_argument("--siblings", type=int, default=3, help="rollouts in the prompt group (default 3)")
    parser.add_argument("--turns", type=int, default=5, help="turns per rollout (default 5)")
    parser.add_argument("--columns", type=int, nargs="+", choices=COLUMNS, default=None, help="only these columns")
    parser.add_argument("--all-columns", action="store_true", help="columns 0, 1, 2 and 3 (the default)")
    parser.add_argument("--gym", choices=("one", "three"), default="three", help="processes of the Gym (default three)")
    parser.add_argument("--latency", type=float, default=0.25, help="seconds per generation (default 0.25)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="output directory (default build/demo)")
    parser.add_argument("--no-suite", action="store_true", help="leave out the conformance run at the end")
    parser.add_argument(
        "--chaos", type=int, default=0, metavar="N", help="instead: column 3, N SIGKILLs at random moments"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the random moments (default 1)")
    given = parser.parse_args(argv)
    if given.columns and given.all_columns:
        raise UsageError("--columns and --all-columns exclude each other")
    if given.chaos < 0 or not 0 < given.latency <= 10:
        raise UsageError("--chaos must be at least 0, --latency above 0 and at most 10")
    return Options(
        scenario=Scenario(given.siblings, given.turns),
        columns=tuple(sorted(set(given.columns or COLUMNS))),
        gym_form=given.gym,
        out=given.out,
        latency_s=given.latency,
        with_suite=not given.no_suite,
        chaos=given.chaos,
        seed=given.seed,
        command="make demo" + (f' ARGS="{" ".join(argv)}"' if argv else ""),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        return _run(options, Console())
    except DemoError as error:
        _complain(str(error))
        return {UsageError: 2, PromiseBrokenError: 1}.get(type(error), 3)
    except KeyboardInterrupt:
        _complain("interrupted; every process that it started has ended")
        return 130


def _complain(text: str) -> None:
    Console(stderr=True).print(f"demo: {text}", highlight=False, markup=False, soft_wrap=True)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _run(options: Options, console: Console) -> int:
    directory = _fresh(options.out)
    tokens = {name: secrets.token_urlsafe(24) for name in (CONTROL_ENV, DATA_ENV, TOKEN_ENV)}
    scenario = options.scenario
    is_live = console.is_terminal and not console.is_dumb_terminal and not options.chaos
    show = LiveShow(scenario, options.columns, console) if is_live else PlainShow(console)
    with Processes() as processes, show:
        show.begin("policy")
        policy = Policy(processes, directory, options.latency_s, tokens)
        teller = Teller(processes, policy, directory, scenario, options.gym_form, tokens, options.latency_s, show.say)
        teller.look = show.look
        if options.chaos:
            Chaos(teller, options.chaos, options.seed).run()
            return 0
        told = _tell(options, processes, teller, show)
    summary = _summary(options, told)
    _write(options, told, summary, directory)
    _conclude(show, told, directory / "index.html")
    return 0 if summary["ok"] else 1


@dataclass(frozen=True)
class Told:
    """Everything that was shown."""

    yardstick: dict[int, Any]
    columns: list[Column]
    suite: Suite | None
    seconds: dict[str, float]


def _tell(options: Options, processes: Processes, teller: Teller, show: Show) -> Told:
    clock = Clock()
    show.begin("uninterrupted run")
    show.say("the yardstick: no crash, no checkpoint protocol")
    yardstick = teller.uninterrupted()
    clock.lap("uninterrupted run")
    columns: list[Column] = []
    for number in options.columns:
        show.begin(f"column {number}", number)
        columns.append(teller.column(number, yardstick))
        show.column_done(columns[-1])
        clock.lap(f"column {number}")
    suite = None
    if options.with_suite:
        show.begin("conformance suite")
        show.say("a short run against a second Gym of the same build")
        suite = run_suite(processes, teller.directory, options.gym_form, teller.secrets)
        clock.lap("conformance suite")
    return Told(yardstick, columns, suite, clock.all())


def _write(options: Options, told: Told, summary: dict[str, Any], directory: Path) -> None:
    facts = Facts(options.command, options.gym_form, told.seconds, f"{sys.platform}, {os.cpu_count()} cores")
    page = render(told.columns, told.yardstick, told.suite, facts)
    (directory / "index.html").write_text(page, encoding="utf-8")
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def _summary(options: Options, told: Told) -> dict[str, Any]:
    columns, suite = told.columns, told.suite
    passed = suite is None or suite.passed
    return {
        "ok": all(column.as_promised for column in columns) and passed,
        "turns_thrown_away": {str(column.column): column.thrown_away for column in columns},
        "expected": {str(column.column): column.scenario.expected(column.column) for column in columns},
        "bodies_equal_to_uninterrupted": all(column.bodies_equal for column in columns),
        "siblings": options.scenario.siblings,
        "turns": options.scenario.turns,
        "held_at_turn": {options.scenario.name(s): turn for s, turn in options.scenario.held.items()},
        "gym_processes": options.gym_form,
        "columns": {str(column.column): column.summary() for column in columns},
        "suite": None if suite is None else suite.summary(),
        "seconds": {part: round(value, 2) for part, value in told.seconds.items()},
    }


def _conclude(show: Show, told: Told, page: Path) -> None:
    columns = told.columns
    show.print("")
    plural = "s" if len(columns) > 1 else ""
    show.print(f"turns thrown away in column{plural} {_join(c.column for c in columns)}, by the policy's log:")
    show.print(f"  {_join(column.thrown_away for column in columns)}")
    promised = _join(column.scenario.expected(column.column) for column in columns)
    if promised != _join(column.thrown_away for column in columns):
        show.print(f"  NOT what the example promises: {promised}")
    equal = all(column.bodies_equal for column in columns)
    show.print(f"bodies equal to the uninterrupted run: {'yes' if equal else 'NO'}")
    if told.suite is not None:
        show.print(f"conformance suite: {told.suite.verdict} ({told.suite.seconds:.0f} s)")
    show.print(f"{told.seconds['in all']:.0f} s in all; the page: {_relative(page)}")


def _join(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _fresh(out: Path) -> Path:
    """An empty output directory; only a directory that an earlier demo made is emptied.

    Raises:
        UsageError: if the directory holds something else.
    """
    directory = out.resolve()
    marker = directory / ".demo-output"
    if directory.exists() and any(directory.iterdir()):
        if not marker.exists():
            raise UsageError(f"{directory} is not empty and no demo made it")
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    marker.touch()
    return directory


if __name__ == "__main__":
    sys.exit(main())
