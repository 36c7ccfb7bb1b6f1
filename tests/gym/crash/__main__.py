# SPDX-License-Identifier: Apache-2.0
"""The whole crash test, as a table: ``python -m tests.gym.crash [--seed N] [--kills N] [--form one|three]``; bounded.

Every fail point of every process is visited with SIGKILL, and those of one process fail or take long instead; then a
busy Gym is killed at random instants. Exit code 1 if a point was never reached with an unfinished rollout holding a
turn, if anything that was acknowledged is missing, or if the time was over before the end. Then the directories of the
Gyms stay, with their logs and what they have not believed, and their place is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table

from reference_gym.participant.failpoints import points_of
from tests.gym.crash.endure import endure
from tests.gym.crash.lives import ROLES
from tests.gym.crash.points import Verdict, Visit, all_visits, visit_all
from tests.gym.crash.soak import Lives, soak


@dataclass(slots=True)
class Found:
    """What has come of it so far."""

    verdicts: list[Verdict] = field(default_factory=list)
    faults: dict[str, list[Verdict]] = field(default_factory=dict)
    lives: dict[str, Lives] = field(default_factory=dict)
    complete: bool = False

    def red(self) -> list[Verdict]:
        """Those that are not sound."""
        return [verdict for verdict in (*self.verdicts, *chain(*self.faults.values())) if not verdict.sound]


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=200, help="kills at random instants, of each form")
    parser.add_argument("--form", choices=[*ROLES], default=None, help="one form alone")
    parser.add_argument("--points", default="", help="only points that begin so")
    parser.add_argument("--actions", nargs="*", default=["kill", "raise", "delay"], choices=["kill", "raise", "delay"])
    parser.add_argument("--at-once", type=int, default=2, help="how many visits at the same time")
    parser.add_argument("--json", type=Path, default=Path("build/gym-crash.json"))
    parser.add_argument("--limit", type=float, default=3000.0, help="seconds for everything")
    options = parser.parse_args()
    began = time.monotonic()
    found = Found()
    directory = Path(tempfile.mkdtemp(prefix="crash-"))
    with contextlib.suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(_run(directory, options, found), options.limit))
    _show(found)
    told = {
        "complete": found.complete,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
        "points": [asdict(verdict) | {"word": verdict.word} for verdict in found.verdicts],
        "red": [asdict(verdict) for verdict in found.red()],
        "faults": {
            action: [asdict(verdict) | {"word": verdict.word} for verdict in each]
            for action, each in found.faults.items()
        },
        "soaks": {form: asdict(life) for form, life in found.lives.items()},
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(told, indent=1), encoding="utf-8")
    sound = found.complete and not found.red() and not any(life.fault for life in found.lives.values())
    if sound:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"kept: {directory}")  # noqa: T201 - its output
    return 0 if sound else 1


def _show(found: Found) -> None:
    console = Console(width=160)
    table = Table("fail point", "form", "process", "visit", "hit", "held a turn", "incarnation", "verdict")
    for verdict in sorted(found.verdicts, key=lambda each: each.sound):
        at = verdict.visit
        kept = {True: "kept", False: "new", None: "?"}[verdict.kept]
        cells = (at.point, at.form, at.victim, str(at.nth), str(verdict.hit), str(verdict.held_turn), kept)
        table.add_row(*cells, verdict.word)
    console.print(table)
    red = sum(not verdict.sound for verdict in found.verdicts)
    points = {each.visit.point for each in found.verdicts}
    console.print(f"{len(found.verdicts)} visits of {len(points)} points, {red} red")
    for action, each in found.faults.items():
        wrong = [f"{verdict.visit.point}: {verdict.word}" for verdict in each if not verdict.sound]
        console.print(f"{action}: {len(each)} points of one process, {len(wrong)} red", *wrong, sep="\n  ")
    for form, life in found.lives.items():
        fault = "" if life.fault is None else f": {life.fault}"
        done = f"{life.turns} finished turns, {life.cuts} cuts"
        told = f"{life.kills} kills, {done}, {life.lost} lost, {life.renewed} new incarnations"
        console.print(f"{form}: {told}{fault}")
    if not found.complete:
        console.print("NOT COMPLETE: the time was over")


def _say(verdict: Verdict) -> None:
    at = verdict.visit
    print(f"{at.form} {at.victim} {at.point}:{at.nth} {verdict.word}", file=sys.stderr, flush=True)  # noqa: T201 - progress


def _say_life(form: str, lives: Lives) -> None:
    told = f"{form} {lives.kills} kills {lives.turns} turns {lives.cuts} cuts {lives.lost} lost"
    print(told, file=sys.stderr, flush=True)  # noqa: T201 - progress


async def _run(directory: Path, options: argparse.Namespace, found: Found) -> None:
    visits = [
        at
        for at in all_visits(options.seed)
        if options.form in (None, at.form) and at.point.startswith(options.points or "")
    ]
    random.Random(options.seed).shuffle(visits)  # So that a run that is broken off has seen a bit of everything.

    def visited(verdict: Verdict) -> None:
        _say(verdict)
        found.verdicts.append(verdict)

    def lived(form: str, lives: Lives) -> None:
        _say_life(form, lives)
        found.lives[form] = lives

    if "kill" in options.actions:
        await visit_all(directory, visits, options.at_once, visited)
    for action in [each for each in options.actions if each != "kill"]:
        found.faults[action] = []
        for point in [each for each in points_of("all") if each.startswith(options.points or "")]:
            verdict = await endure(directory / f"{action}-{point}", Visit("one", "all", point), action)
            _say(verdict)
            found.faults[action].append(verdict)
    for form in ([options.form] if options.form else [*ROLES]) if options.kills else []:
        lived(
            form, await soak(directory / f"soak-{form}", form, options.kills, options.seed, seen=partial(lived, form))
        )
    found.complete = True


if __name__ == "__main__":
    raise SystemExit(main())
