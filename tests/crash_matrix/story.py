# SPDX-License-Identifier: Apache-2.0
"""What happens in a cell: the same work every time, with one or two crashes in it.

Four siblings on Taxi, three at a time. The first snapshot holds A with 4 turns, B with 2 and C with 4. Then A
finishes, is trained and released, D starts, and B moves on; then comes the second snapshot.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash_matrix import judge
from tests.crash_matrix.bench import BOUND_S, Bench, NotReached
from tests.crash_matrix.cells import WORK, Cell
from tests.crash_matrix.forks import ForkServer
from tests.crash_matrix.policy import MatrixPolicy, serving
from tests.rl.harness import until

TASKS = {"environment": "taxi", "groups": 1, "siblings": 4, "max_turns": 5, "task": {"seed": 7}}
MORE = {"max_live": 3}
A, B, C, D = 0, 1, 2, 3
FIRST_HOLD = {A: 5, B: 3, C: 5, D: 2}


@dataclass
class Verdict:
    """What became of one cell.

    Attributes:
        outcome: `held`, `violated`, or `not reached` (which is a failure, too).
        holding: unfinished rollouts that held a turn at each crash.
        kept: turns of the snapshot in use after the last restore.
        seconds: of the whole cell.
    """

    name: str
    outcome: str = "held"
    violations: list[str] = field(default_factory=list)
    holding: list[int] = field(default_factory=list)
    kept: int = 0
    seconds: float = 0.0


async def uninterrupted(forks: ForkServer, directory: Path) -> dict[tuple[int, int], Any]:
    """Return the bodies of the same work without a crash."""
    async with serving(MatrixPolicy()) as policy:
        bench = Bench(forks, directory, policy, TASKS, MORE)
        bench.prepare()
        try:
            await bench.start_gym()
            await bench.start_rl()
            await to_the_end(bench)
        finally:
            await bench.close()
        return {(row["group"], row["sibling"]): row["body"] for row in judge.results_of(bench.run_dir)}


async def run_cell(forks: ForkServer, cell: Cell, directory: Path, yardstick: judge.Bodies) -> Verdict:
    """Run one cell and judge it."""
    verdict = Verdict(cell.name)
    began = time.monotonic()
    async with serving(MatrixPolicy(hold_from=dict(FIRST_HOLD))) as policy:
        bench = Bench(forks, directory, policy, TASKS, MORE)
        bench.prepare()
        try:
            await _crash(bench, cell)
            verdict.violations += judge.after_a_crash(bench)
            await policy.let_all()
            await to_the_end(bench)
            verdict.violations += judge.regenerated(bench) + judge.newest_was_used(bench)
            verdict.violations += judge.after_a_crash(bench)
            verdict.violations += judge.at_the_end(bench, await bench.statuses(), yardstick)
            verdict.kept = judge.kept_turns(bench)
        except NotReached as missing:
            verdict.outcome = "not reached"
            verdict.violations.append(f"not reached: {missing}: {bench.rl_log()[-300:]}")
        except AssertionError as error:
            verdict.violations.append(f"I7: {error}")
        finally:
            await bench.close()
    verdict.holding = [kill.holding for kill in bench.kills]
    if verdict.outcome == "held" and verdict.violations:
        verdict.outcome = "violated"
    elif verdict.outcome == "held" and not (verdict.holding and all(verdict.holding)):
        verdict.outcome = "not reached"
        verdict.violations.append(f"not reached: unfinished rollouts that held a turn: {verdict.holding}")
    verdict.seconds = round(time.monotonic() - began, 1)
    return verdict


async def _crash(bench: Bench, cell: Cell) -> None:
    """Do the work up to the last crash of the cell and start again what is dead."""
    visits = WORK | {cell.first: 2} if cell.kind.startswith("save") else dict(WORK)
    points = [f"{cell.first}:{visits[cell.first]}"] if cell.kind != "restart" else []
    if cell.kind == "save+restore":
        points.append(f"{cell.second}:1")
    await bench.start_gym()
    await bench.start_rl(*points)
    await first_snapshot(bench)
    await bench.policy.let({A: 99, B: 4})
    if cell.kind == "work":
        await bench.stopped_at(cell.first)
        await _kill(bench, cell.victim, cell.first)
        return
    await until(lambda: bench.policy.was_asked("_s1", 4) and bench.policy.was_asked("_s3", 2), "D has a turn", BOUND_S)
    await bench.event("acked")
    if cell.kind == "restart":
        await bench.kill({"all"}, "quiet", lose_disk=True)
        await bench.bring_back(f"{cell.first}:1")
        await bench.stopped_at(cell.first)
        await _kill(bench, cell.victim, cell.first)
        return
    assert bench.client is not None
    bench.client.send(signal.SIGUSR1)
    await bench.stopped_at(cell.first)
    if cell.second is None:
        await _kill(bench, cell.victim, cell.first)
        return
    await bench.kill({"all" if cell.kind == "save+restart" else "gym"}, cell.first, lose_disk=True)
    await bench.bring_back(f"{cell.second}:1")
    await bench.stopped_at(cell.second)
    await _kill(bench, cell.victim, cell.second)


async def first_snapshot(bench: Bench) -> None:
    """Wait until A, B and C hold 4, 2 and 4 turns, and take the first snapshot."""
    asked = bench.policy.was_asked
    await until(lambda: asked("_s0", 5) and asked("_s1", 3) and asked("_s2", 5), "three rollouts hold turns", BOUND_S)
    assert bench.client is not None
    bench.client.send(signal.SIGUSR1)
    await bench.event("snapshot_published")


async def _kill(bench: Bench, victim: str, point: str) -> None:
    await bench.kill({victim}, point)
    await bench.bring_back()


async def to_the_end(bench: Bench) -> None:
    """Wait until the run is done.

    Raises:
        AssertionError: it ended otherwise than done.
    """
    assert bench.client is not None
    await until(lambda: bench.state() == "Z", "the run is done", BOUND_S)
    code = await bench.client.wait()
    assert code == 0, f"RL ended with code {code}: {bench.rl_log()}"
