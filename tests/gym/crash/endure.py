# SPDX-License-Identifier: Apache-2.0
"""One fail point that raises or delays: whatever fails there, the Gym goes on, and nothing acknowledged is missing."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path

from tests.gym.controller import Refused
from tests.gym.crash.known import Known, begin, see_results
from tests.gym.crash.lives import GONE, MortalGym
from tests.gym.crash.points import HELD, Verdict, Visit, set_up, verdict, work
from tests.gym.running import task_of
from tests.gym.stubs import until, until_async

COSTS_THE_LOG = ("log.appended", "log.named")
"""What fails here has been written and is not known to be: the log is given up, and the next life is a new one."""
ENDS_THE_START = ("recover.listening",)
"""What fails here lets the whole start fail, a moment after it already listens."""
WAITED_S = 3.0


async def endure(directory: Path, at: Visit, action: str) -> Verdict:
    """Let a step of a busy Gym fail or take long; then everything works, and the next life holds what was finished.

    Args:
        directory: does not exist yet.
        at: where.
        action: `raise` or `delay`.
    """
    return await verdict(directory, at, action, partial(_endured, point=at.point, action=action), judged=False)


async def _endured(gym: MortalGym, known: Known, *, point: str, action: str) -> tuple[bool, bool]:
    await set_up(gym, known)
    if point.startswith("recover."):
        await _recover(gym, point, action)
    else:
        await _work(gym, known)
    kept = await _is_well(gym, known)
    assert kept or (action, point) in [("raise", each) for each in COSTS_THE_LOG], "a new incarnation"
    return True, True


async def _work(gym: MortalGym, known: Known) -> None:
    """Do everything until the point was reached, and whatever came of that for a moment."""
    gym.arm()
    working = asyncio.create_task(work(gym, known))
    await until(lambda: gym.hits.exists() or working.done(), "the point is reached")
    await asyncio.wait([working], timeout=WAITED_S)
    working.cancel()
    with contextlib.suppress(Refused, AssertionError, asyncio.CancelledError, *GONE):
        await working


async def _recover(gym: MortalGym, point: str, action: str) -> None:
    """Start it with the point armed: a start that fails is made again."""
    await gym.kill()
    await gym.start("armed")
    await until(gym.hits.exists, "the point is reached")
    if action == "raise" and point in ENDS_THE_START:
        await until(lambda: gym.dead, "the start has failed")
    if action == "raise" and gym.dead:
        await gym.kill()
        await gym.start()


async def _is_well(gym: MortalGym, known: Known) -> bool:
    """See that a Gym starts, checkpoints and finishes rollouts, now and in its next life; whether that is the same."""

    async def idle() -> bool:
        status = await gym.raw("agent", "GET", "/checkpoint")
        return (status["phase"], status["gate"]) == ("idle", "open")

    await gym.adopt()
    await until_async(idle, "the Gym is idle and open")
    seen = (await gym.results()).get("seen")
    await begin(gym, known, "after", task_of())
    after = await gym.result_of("after")
    assert seen is None or seen["body"] == after["body"], after
    await gym.snapshot()
    await see_results(gym, known)
    before = dict(gym.incarnations)
    await gym.kill()
    for rollout in HELD:
        known.policy.release(rollout, 3)
    await gym.start()
    results = await gym.results()
    if gym.incarnations["agent"] == before["agent"]:
        assert after["receipt"] == results["after"]["receipt"]
    for role in gym.roles:
        await gym.raw(role, "GET", "/capabilities")
    return gym.incarnations == before
