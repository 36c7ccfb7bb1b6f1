# SPDX-License-Identifier: Apache-2.0
"""One fail point: a busy Gym is killed there, started again, and compared with what was acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_gym.participant.failpoints import POINTS
from tests.gym.crash.lives import GONE, Known, MortalGym, Zygote, judge, release, retire, see_results
from tests.gym.running import task_of
from tests.gym.stubs import PolicyStub, until

SCRIPT: list[Any] = [
    [("add", {"n": 5}), ("add", {"n": -3})],
    [("grow", {"bytes": 3000})],
    [("grow", {"bytes": 10})],
    [("add", {"n": 0})],
    "done",
]
HELD = ("h1", "h2")
LOG = {"sync": "commit", "segment_bytes": 16_384}


@dataclass(frozen=True)
class Verdict:
    """What came of one fail point."""

    point: str
    hit: bool
    held_turn: bool
    kept: bool | None
    fault: str | None

    @property
    def sound(self) -> bool:
        """Whether it was reached while an unfinished rollout held a turn, and nothing acknowledged was missing."""
        return self.hit and self.held_turn and self.kept is True and self.fault is None


async def visit(zygote: Zygote, directory: Path, point: str, nth: int) -> Verdict:
    """Kill a busy Gym at one fail point and judge its next life."""
    directory.mkdir()  # noqa: ASYNC240 - a test that waits for its own disk
    async with PolicyStub(SCRIPT) as policy:
        gym = MortalGym(directory, "one", log=LOG, zygote=zygote, failpoint=f"{point}:{nth}:kill")
        known = Known(policy)
        try:
            await _set_up(gym, known)
            gym.arm()
            with contextlib.suppress(*GONE):
                await _work(gym, known)
            hit = gym.hits.exists()
            held = known.held_turn()
            await gym.kill()
            for rollout in HELD:
                policy.release(rollout, 3)
            asked, known.proved = len(policy.asked), known.turns()
            await gym.start()
            kept = await judge(gym, known, replaced=point.startswith("restore."))
            if kept and not point.startswith("restore."):
                await _finish(gym, known, asked)
        except AssertionError as fault:
            return Verdict(point, gym.hits.exists(), known.held_turn(), None, str(fault)[:300])
        finally:
            await gym.close()
    return Verdict(point, hit, held, kept, None)


async def _set_up(gym: MortalGym, known: Known) -> None:
    """Two rollouts that hold two turns, and one seen result."""
    policy = known.policy
    await gym.start()
    await gym.adopt()
    known.incarnation = gym.incarnations["agent"]
    for rollout in HELD:
        policy.hold(rollout, 3)
        await _begin(gym, known, rollout)
    await _begin(gym, known, "seen")
    for rollout in HELD:
        await until(lambda rollout=rollout: "3" in policy.turns_of(rollout), "turn 3 is asked")
    await gym.result_of("seen")
    await see_results(gym, known)


async def _begin(gym: MortalGym, known: Known, rollout: str) -> None:
    await gym.begin_rollout(rollout, task_of(), known.policy.address)
    known.started.add(rollout)


async def _work(gym: MortalGym, known: Known) -> None:
    """Everything that a Gym does; the life ends somewhere in here, by GONE."""
    for rollout in ("a", "b"):
        await _begin(gym, known, rollout)
    for rollout in ("a", "b"):
        await _result(gym, known, rollout)
    await release(gym, known, "a")
    known.policy.hold("gone", 2)
    await _begin(gym, known, "gone")
    await _until_asked(gym, known, "gone", "2")
    await retire(gym, known, "gone", 3)
    for number in range(4):
        cuts = await _snapshot(gym, known)
        for rollout in (f"c{number}", f"d{number}"):
            await _begin(gym, known, rollout)
            await _result(gym, known, rollout)
        await release(gym, known, f"c{number}")
    checkpoint_id = gym.next_id()
    await gym.prepare(checkpoint_id)
    await gym.post("agent", "/checkpoint/abort", {"checkpoint_id": checkpoint_id, "timeout_ms": 5_000})
    known.ended.append((checkpoint_id, "aborted"))
    known.progress = (await gym.raw("agent", "GET", "/checkpoint"))["progress"]
    await gym.restore(cuts, attempt=1)


async def _snapshot(gym: MortalGym, known: Known) -> Any:
    checkpoint_id = gym.next_id()
    await gym.prepare(checkpoint_id)
    cuts = await gym.commit(checkpoint_id)
    await gym.resume(checkpoint_id)
    known.ended.append((checkpoint_id, "committed"))
    known.progress = (await gym.raw("agent", "GET", "/checkpoint"))["progress"]
    return cuts


async def _result(gym: MortalGym, known: Known, rollout: str) -> None:
    await gym.result_of(rollout)
    await see_results(gym, known)


async def _until_asked(gym: MortalGym, known: Known, rollout: str, turn: str) -> None:
    """Wait for a policy call, or for the end of this life."""
    await until(lambda: gym.dead or turn in known.policy.turns_of(rollout), f"{turn} of {rollout} is asked")
    if gym.dead:
        raise ConnectionResetError


async def _finish(gym: MortalGym, known: Known, asked: int) -> None:
    """Let everything end: no finished turn is asked again, and every body is the same."""
    going_on = known.started - known.doubtful
    bodies = {rollout: (await gym.result_of(rollout)).get("body") for rollout in sorted(going_on)}
    again = {
        (each.rollout_id, each.turn)
        for each in known.policy.asked[asked:]
        if each.rollout_id in going_on and int(each.turn or 0) <= known.proved.get(each.rollout_id or "", 0)
    }
    assert set() == again, f"finished turns were asked again: {again}"
    assert all(body == bodies["seen"] for body in bodies.values()), bodies


async def visit_all(directory: Path, points: list[tuple[str, int]]) -> list[Verdict]:
    """Visit fail points one after the other."""
    async with Zygote() as zygote:
        return [
            await asyncio.wait_for(visit(zygote, directory / f"{number}-{point}", point, nth), 120)
            for number, (point, nth) in enumerate(points)
        ]


def all_points(seed: int) -> list[tuple[str, int]]:
    """Every fail point once at its first hit, and those that are hit often once more at a later one."""
    chosen = random.Random(seed)
    often = ("boundary.", "effect.", "turn.", "finish.", "log.append", "log.half", "part.", "start.")
    later = [(point, chosen.randint(2, 5)) for point in POINTS if point.startswith(often)]
    return [(point, 1) for point in POINTS] + later
