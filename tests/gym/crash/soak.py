# SPDX-License-Identifier: Apache-2.0
"""A busy Gym that is killed at random instants: no finished turn is lost, and the incarnation is never kept wrongly."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gym.crash.lives import GONE, Known, MortalGym, Refused, Zygote, judge, release, see_results
from tests.gym.running import task_of
from tests.gym.stubs import PolicyStub

SCRIPT: list[Any] = [[("add", {"n": 1}), ("grow", {"bytes": 200})], [("add", {"n": 2})]] * 6 + ["done"]
LOG = {"sync": "commit", "segment_bytes": 65_536}
AT_ONCE = 12


@dataclass
class Lives:
    """What came of a soak."""

    kills: int = 0
    turns: int = 0
    lost: int = 0
    fault: str | None = None


async def soak(directory: Path, kills: int, seed: int, *, broken: str | None = None) -> Lives:
    """Kill a busy Gym that often; the incarnation has to be kept, because no effect reaches outside.

    Args:
        directory: does not exist yet.
        kills: how often.
        seed: of the instants.
        broken: what is wrong with the Gym, a key of ``zygote.BROKEN``.
    """
    directory.mkdir()  # noqa: ASYNC240 - a test that waits for its own disk
    chosen = random.Random(seed)
    lives = Lives()
    async with PolicyStub(SCRIPT) as policy, Zygote() as zygote:
        gym = MortalGym(directory, "one", log=LOG, zygote=zygote, broken=broken)
        known = Known(policy)
        try:
            await gym.start()
            await gym.adopt()
            known.incarnation = gym.incarnations["agent"]
            for number in range(kills):
                work = asyncio.create_task(_work(gym, known, number))
                await asyncio.sleep(chosen.uniform(0.05, 0.5))
                await gym.kill()
                await asyncio.wait([work])
                if (error := work.exception()) is not None and not isinstance(error, (*GONE, Refused)):
                    raise error
                known.proved = known.turns()
                await gym.start()
                lives.kills += 1
                assert await judge(gym, known), f"life {number}: a new incarnation"
                for role in gym.roles:
                    await gym.raw(role, "GET", "/capabilities")
        except AssertionError as fault:
            lives.fault = str(fault)[:500] or repr(fault)
            lives.lost += 1
        finally:
            await gym.close()
        lives.turns = sum(known.turns().values())
    return lives


async def _work(gym: MortalGym, known: Known, life: int) -> None:
    """Keep the Gym busy until it is gone: starts, results, ACKs, checkpoints."""
    number = 0
    while True:
        number += 1
        await see_results(gym, known)
        for rollout in [each for each in known.results if each not in known.doubtful][:3]:
            await release(gym, known, rollout)
        running = known.started - known.results.keys()
        for more in range(AT_ONCE - len(running)):
            rollout = f"r{life}-{number}-{more}"
            await gym.begin_rollout(rollout, task_of(), known.policy.address)
            known.started.add(rollout)
        if number % 3 == 0:
            checkpoint_id = gym.next_id()
            await gym.prepare(checkpoint_id)
            await gym.commit(checkpoint_id)
            await gym.resume(checkpoint_id)
            known.ended.append((checkpoint_id, "committed"))
        known.progress = (await gym.raw("agent", "GET", "/checkpoint"))["progress"]
