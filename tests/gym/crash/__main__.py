# SPDX-License-Identifier: Apache-2.0
"""The whole crash test, as a table: ``python -m tests.gym.crash [--seed N] [--kills N]``; bounded.

Every fail point is visited with SIGKILL, then a busy Gym is killed at random instants. Exit code 1 if a point was never
reached with an unfinished rollout holding a turn, or if anything that was acknowledged is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.gym.crash.points import all_points, visit_all
from tests.gym.crash.soak import soak


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds for everything")
    options = parser.parse_args()
    console = Console(width=160)
    with tempfile.TemporaryDirectory(prefix="crash-") as name:
        verdicts, lives = asyncio.run(asyncio.wait_for(_run(Path(name), options), options.limit))
    table = Table("fail point", "hit", "held a turn", "incarnation", "verdict")
    for verdict in verdicts:
        kept = {True: "kept", False: "new", None: "?"}[verdict.kept]
        fault = "ok" if verdict.sound else f"RED {verdict.fault or ''}"
        table.add_row(verdict.point, str(verdict.hit), str(verdict.held_turn), kept, fault)
    console.print(table)
    console.print(
        f"{lives.kills} kills at random instants: {lives.turns} finished turns, {lives.lost} lost; {lives.fault}"
    )
    red = [verdict.point for verdict in verdicts if not verdict.sound]
    if options.json is not None:
        options.json.write_text(json.dumps({"red": red, "kills": lives.kills, "lost": lives.lost}), encoding="utf-8")
    return 1 if red or lives.fault else 0


async def _run(directory: Path, options: argparse.Namespace):  # type: ignore[no-untyped-def]  # Two lists, right below.
    verdicts = await visit_all(directory, all_points(options.seed))
    return verdicts, await soak(directory / "soak", options.kills, options.seed)


if __name__ == "__main__":
    raise SystemExit(main())
