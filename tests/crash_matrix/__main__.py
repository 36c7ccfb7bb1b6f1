# SPDX-License-Identifier: Apache-2.0
"""The command line of the matrix; it goes on where it was stopped."""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.crash_matrix import report
from tests.crash_matrix.cells import Cell, every_cell, part, seeded
from tests.crash_matrix.forks import ForkServer, fork_server
from tests.crash_matrix.judge import Bodies
from tests.crash_matrix.story import Verdict, run_cell, uninterrupted


def main(arguments: list[str] | None = None) -> int:
    """Run cells and write the report; 0 when every cell of the matrix has held."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash_matrix", description="Kills at every named step.")
    parser.add_argument("--seed", type=int, default=1, help="draws pairs and gives the order of the cells")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th cell, from the I-th")
    parser.add_argument("--jobs", type=int, default=3, help="cells at a time; 3 keep 2 cores busy")
    parser.add_argument("--minutes", type=float, default=58.0, help="no cell is begun after so many minutes")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cells in whose name this is found")
    parser.add_argument("--fresh", action="store_true", help="run again what is recorded")
    parser.add_argument("--retry", action="store_true", help="run again what did not hold")
    parser.add_argument("--keep", action="store_true", help="keep the directories of cells that did not hold")
    parser.add_argument("--output", type=Path, default=Path("build"))
    options = parser.parse_args(arguments)
    number, _, of = options.part.partition("/")
    cells = [cell for cell in seeded(every_cell(options.seed), options.seed) if re.search(options.only, cell.name)]
    record = report.Record(options.output / "crash-matrix.jsonl")
    if options.fresh:
        record.clear()
    done = {name for name, verdict in record.verdicts().items() if verdict.outcome == "held" or not options.retry}
    wanted = [cell for cell in part(cells, int(number), int(of)) if cell.name not in done]
    end = time.monotonic() + options.minutes * 60
    with tempfile.TemporaryDirectory(prefix="crash-matrix-") as directory:
        asyncio.run(_run(wanted, Path(directory), record, options.jobs, end, options.output, keep=options.keep))
    return report.write(every_cell(options.seed), record.verdicts(), options.output, sys.stdout)


async def _run(
    cells: list[Cell], directory: Path, record: report.Record, jobs: int, end: float, output: Path, *, keep: bool
) -> None:
    if not cells:
        return
    async with fork_server() as forks:
        yardstick = await uninterrupted(forks, _fresh(directory / "uninterrupted"))
        queue = list(reversed(cells))
        workers = (_work(queue, forks, directory, yardstick, record, end, output, keep=keep) for _ in range(jobs))
        await asyncio.gather(*workers)


async def _work(
    queue: list[Cell],
    forks: ForkServer,
    directory: Path,
    yardstick: Bodies,
    record: report.Record,
    end: float,
    output: Path,
    *,
    keep: bool,
) -> None:
    while queue and time.monotonic() < end:
        cell = queue.pop()
        place = _fresh(directory / cell.name.replace(":", "_"))
        verdict = await run_cell(forks, cell, place, yardstick)
        record.add(verdict)
        _say(verdict, len(queue))
        if keep and verdict.outcome != "held":
            shutil.copytree(place, output / "crash-matrix" / place.name, dirs_exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)


def _fresh(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def _say(verdict: Verdict, left: int) -> None:
    line = f"{verdict.outcome:12} {verdict.seconds:5.1f} s  {left:4} left  {verdict.name}"
    sys.stdout.write("\n".join([line, *(f"    {text}" for text in verdict.violations)]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
