# SPDX-License-Identifier: Apache-2.0
"""What happens in a cell: the same work every time, with one or two crashes in it.

Four siblings on Taxi, three at a time. The first snapshot holds A with 4 turns, B with 2 and C with 4. Then A
finishes, is trained and released, D starts, and B moves on; then comes the second snapshot.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash_matrix import judge
from tests.crash_matrix.bench import BOUND_S, Bench, NotReached
from tests.crash_matrix.cells import ONE, SAVE, WORK, Cell, point_of, role_of
from tests.crash_matrix.forks import ForkServer
from tests.rl.harness import until
from tests.rl.policy import Policy, serving

TASKS = {"environment": "taxi", "groups": 1, "siblings": 4, "max_turns": 5, "task": {"seed": 7}}
MORE = {"max_live": 3}
A, B, C, D = 0, 1, 2, 3
FIRST_HOLD = {A: 5, B: 3, C: 5, D: 2}
CLOSED = ("snapshot.prepared", "snapshot.captured")
"""Steps at which every gate is closed and RL sleeps."""

LATE = ("log.compacted",)
"""Points that come only when a segment of the log holds much that is dead and something that lives."""

MORE_AND_MORE = ({A: 99, B: 4}, {B: 5}, {C: 99}, {B: 99}, {D: 3}, {D: 4}, {D: 5})
"""What brings such a point about, together with snapshots: one turn after the other; D stays to hold turns."""

SNAPSHOT_ENDS = ("snapshot_published", "snapshot_failed", "snapshot_skipped")

WHILE_STARTING = "recover."
"""Points that a process of the Gym passes before it serves anybody."""

LOST = {"restart": ("all", True), "adopt": ("all", False), "restore": (ONE, True)}
"""What happens before a crash in one of these operations: who is killed, and whether the Gym's disk is lost."""


@dataclass
class Verdict:
    """What became of one cell.

    Attributes:
        outcome: `held`, `violated`, or `not reached` (which is a failure, too).
        holding: unfinished rollouts that held a turn at each crash.
        kept: turns of the snapshot in use after the last restore.
        how: what each recovery did.
        excused: rollouts that may have begun again because they failed or became uncertain by themselves.
        seconds: of the whole cell.
    """

    name: str
    outcome: str = "held"
    violations: list[str] = field(default_factory=list)
    holding: list[int] = field(default_factory=list)
    kept: int = 0
    how: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)
    seconds: float = 0.0


async def uninterrupted(forks: ForkServer, directory: Path) -> dict[tuple[int, int], Any]:
    """Return the bodies of the same work without a crash."""
    async with serving(Policy()) as policy:
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
    async with serving(Policy(hold_from=dict(FIRST_HOLD))) as policy:
        # A trainer that lives on does not go back to a snapshot, and neither does a Gym that lost nothing.
        more = MORE | {"trainer": {"survives": _must_adopt(cell)}}
        bench = Bench(forks, directory, policy, TASKS, more, cell.log, cell.roles)
        bench.prepare()
        try:
            verdict.violations += await _crash(bench, cell)
            await bench.observe("after the last crash")
            verdict.violations += judge.published(bench)
            await policy.let_all()
            await to_the_end(bench)
            statuses = await bench.statuses()
            verdict.violations += judge.of_the_run(bench, statuses, yardstick, must_adopt=_must_adopt(cell))
            verdict.violations += await judge.of_the_stale(bench)
            verdict.kept, verdict.how = judge.kept_turns(bench), judge.recoveries(bench)
            verdict.excused = sorted(judge.excused(bench))
        except NotReached as missing:
            verdict.outcome = "not reached"
            verdict.violations.append(f"not reached: {missing}: {bench.rl_log()[-300:]}")
        except (AssertionError, TimeoutError) as error:
            verdict.violations.append(f"I7: {error!r}")
        except Exception as error:  # whatever a cell breaks is a verdict on it alone
            verdict.violations.append(f"error: {error!r}")
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


def _must_adopt(cell: Cell) -> bool:
    """Return whether every participant has to come back with its incarnation: nothing of its disk was ever lost."""
    return cell.log and cell.kind in ("work", "save", "adopt", "save+adopt", "save+abort")


async def _crash(bench: Bench, cell: Cell) -> list[str]:
    """Do the work up to the last crash, start again what is dead, and return what was violated till then."""
    begins, _, goes_on = cell.kind.partition("+")
    operation = begins if goes_on == "abort" else goes_on or begins
    steps = {begins: cell.first, goes_on or begins: cell.last}
    arms = _arms(cell.first, cell.last) if goes_on == "abort" else _arms(cell.last)
    await bench.start_gym(_arms(cell.first) if goes_on != "abort" else arms)
    await bench.start_rl(*_stops(steps, "work", "save", "restore"))
    await first_snapshot(bench)
    if begins == "work":
        await bench.arm(*_arms(cell.first))
        late = point_of(cell.first) in LATE
        for changes in MORE_AND_MORE if late else MORE_AND_MORE[:1]:
            await bench.policy.let(changes)
            if late and await _provoked(bench, role_of(cell.first)):
                break
        await _reached(bench, cell.first)
        await _struck(bench, cell)
        return []
    await bench.policy.let({A: 99, B: 4})
    await until(lambda: bench.policy.was_asked("_s1", 4) and bench.policy.was_asked("_s3", 2), "D has a turn", BOUND_S)
    await bench.event("acked")
    await bench.event("trained")
    found = []
    if begins == "save":
        await bench.arm(*(arms if goes_on == "abort" else _arms(cell.first)))
        assert bench.client is not None
        bench.client.send(signal.SIGUSR1)
        await _reached(bench, cell.first)
        if cell.first in CLOSED:
            found += await judge.while_closed(bench, lambda: bench.policy.let({C: 99}))
    if operation in LOST:
        who, lost = LOST[operation]
        await bench.kill({who}, cell.first if begins == "save" else "quiet", lose_disk=lost)
        if point_of(cell.last).startswith(WHILE_STARTING):
            await bench.start_gym(dying=arms)
            await bench.fallen(role_of(cell.last), point_of(cell.last), alone=True)
        else:
            await bench.bring_back(*_stops(steps, "restart", "adopt"), armed=arms)
            if goes_on == "abort":
                await _reached(bench, cell.first)
            await _reached(bench, cell.last)
    elif goes_on == "abort":
        await _reached(bench, cell.last)
    await _struck(bench, cell)
    return found


async def _provoked(bench: Bench, role: str) -> bool:
    """Ask for a snapshot, which begins a new segment; return whether a process of the Gym has died of it."""
    assert bench.client is not None
    events = len(bench.all_events())
    bench.client.send(signal.SIGUSR1)
    died = bench.roles[role]
    await until(
        lambda: (
            died.returncode is not None
            or bench.events("snapshot_published", "snapshot_failed", "snapshot_skipped", after=events)
        ),
        "a snapshot",
        BOUND_S,
    )
    with contextlib.suppress(TimeoutError):
        await died.wait(0.5)
    return died.returncode is not None


def _stops(steps: dict[str, str], *operations: str) -> list[str]:
    """Return where RL stops itself in some operations, as it is told: the point and the visit that counts."""
    visits = WORK | dict.fromkeys(SAVE, 2)
    wanted = [step for operation, step in steps.items() if operation in operations and not role_of(step)]
    return [f"{step}:{visits.get(step, 1)}" for step in wanted]


def _arms(*steps: str) -> dict[str, str]:
    """Return which process of the Gym kills itself where."""
    return {role_of(step): point_of(step) for step in steps if role_of(step)}


async def _reached(bench: Bench, step: str) -> None:
    """Wait until RL has stopped at a step of its own, or a process of the Gym has killed itself at one."""
    if role_of(step):
        await bench.fallen(role_of(step), point_of(step))
    else:
        await bench.stopped_at(step)


async def _struck(bench: Bench, cell: Cell) -> None:
    """Kill the victim, unless it has done so itself, and start again what is dead."""
    if not role_of(cell.last):
        await bench.kill({cell.victim}, cell.last)
    await bench.bring_back()


async def first_snapshot(bench: Bench) -> None:
    """Wait until A, B and C hold 4, 2 and 4 turns, and take the first snapshot."""
    asked = bench.policy.was_asked
    await until(lambda: asked("_s0", 5) and asked("_s1", 3) and asked("_s2", 5), "three rollouts hold turns", BOUND_S)
    assert bench.client is not None
    bench.client.send(signal.SIGUSR1)
    await bench.event("snapshot_published")


async def to_the_end(bench: Bench) -> None:
    """Wait until the run is done.

    Raises:
        AssertionError: it ended otherwise than done.
    """
    assert bench.client is not None
    await until(lambda: bench.state() == "Z", "the run is done", BOUND_S)
    code = await bench.client.wait()
    assert code == 0, f"RL ended with code {code}: {bench.rl_log()}"
