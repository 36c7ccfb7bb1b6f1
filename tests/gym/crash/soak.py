# SPDX-License-Identifier: Apache-2.0
"""A busy Gym that is killed at random instants: no finished turn is lost, and the incarnation is never kept wrongly."""

from __future__ import annotations

import asyncio
import math
import random
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests.gym.crash.known import RUN_TURNS, Known, begin, judge, release, see_progress, see_results
from tests.gym.crash.lives import GONE, MortalGym, Refused
from tests.gym.running import task_of
from tests.gym.stubs import PolicyStub, until

SCRIPT: list[Any] = [[("add", {"n": 1}), ("grow", {"bytes": 200})], *[[("add", {"n": 2})]] * (RUN_TURNS - 2), "done"]
LOG = {"sync": "commit", "segment_bytes": 65_536}
AT_ONCE = 12
STARTED = 4
A_GYM = 20
"""How many lives one Gym has: what is known of it grows, and is compared whole after each."""
MOST_CALLS = 40


@dataclass
class Lives:
    """What came of a soak; ``turns`` are those on which something outside depended, ``cuts`` what was committed."""

    kills: int = 0
    turns: int = 0
    cuts: int = 0
    lost: int = 0
    renewed: int = 0
    fault: str | None = None


async def soak(
    directory: Path,
    form: str,
    kills: int,
    seed: int,
    *,
    limit_s: float = math.inf,
    broken: str | None = None,
    seen: Callable[[Lives], None] = lambda _: None,
) -> Lives:
    """Kill a busy Gym that often; the incarnation has to be kept, because no effect reaches outside.

    Args:
        directory: does not exist yet.
        form: `one` or `three` processes; all of them are killed.
        kills: how often.
        seed: of the instants.
        limit_s: after so many seconds no further life is begun.
        broken: what is wrong with the Gym, a key of ``zygote.BROKEN``.
        seen: told after each life.
    """
    directory.mkdir()  # noqa: ASYNC240 - a test that waits for its own disk
    chosen = random.Random(seed)
    lives, end = Lives(), time.monotonic() + limit_s
    for first in range(0, kills, A_GYM):
        numbers = takewhile(lambda _: time.monotonic() < end, range(first, min(first + A_GYM, kills)))
        if lives.fault is None and time.monotonic() < end:
            await _gym(directory / str(first), form, numbers, chosen, lives, broken, seen)
    return lives


async def _gym(
    directory: Path,
    form: str,
    numbers: Iterable[int],
    chosen: random.Random,
    lives: Lives,
    broken: str | None,
    seen: Callable[[Lives], None],
) -> None:
    """Some lives of one Gym, whose directory stays if something was wrong."""
    directory.mkdir()  # noqa: ASYNC240 - a test that waits for its own disk
    async with PolicyStub(SCRIPT) as policy:
        gym = MortalGym(directory, form, limits={"policy_retry_ms": 60_000}, log=LOG, broken=broken)
        known = Known(policy)
        turns, cuts = lives.turns, lives.cuts
        try:
            await gym.start()
            await gym.adopt()
            known.incarnations = dict(gym.incarnations)
            for number in numbers:
                await _life(gym, known, lives, number, chosen)
                lives.turns, lives.cuts = turns + sum(known.turns().values()), cuts + gym.cuts
                seen(lives)
        except (AssertionError, TimeoutError) as fault:
            lives.fault = (str(fault)[:1000] or repr(fault)) + gym.refusals()
            lives.lost += 1
        finally:
            await gym.close()
    if lives.fault is None:
        shutil.rmtree(directory)


async def _life(gym: MortalGym, known: Known, lives: Lives, number: int, chosen: random.Random) -> None:
    """One life: busy for some policy calls and some milliseconds, killed, started again, judged."""
    asked = len(known.policy.asked) + chosen.randint(0, MOST_CALLS)
    work = asyncio.create_task(busy(gym, known, number))
    await until(lambda: len(known.policy.asked) >= asked or work.done(), "the Gym is busy")
    await asyncio.sleep(chosen.uniform(0.0, 0.05))
    await gym.kill()
    await asyncio.wait([work])
    if (error := work.exception()) is not None and not isinstance(error, (*GONE, Refused)):
        raise error
    known.proved = known.turns()
    await gym.start()
    lives.kills += 1
    if not await judge(gym, known):
        lives.renewed += 1
        raise AssertionError(f"life {number}: a new incarnation, although nothing was lost")


async def busy(gym: MortalGym, known: Known, life: int) -> None:
    """Keep the Gym busy until it is gone: starts, results, ACKs, checkpoints."""
    number = 0
    while True:
        number += 1
        running = known.started - known.results.keys()
        for more in range(min(AT_ONCE - len(running), STARTED)):
            await begin(gym, known, f"r{life}-{number}-{more}", task_of())
        await see_results(gym, known)
        for rollout in [each for each in known.results if each not in known.doubtful][:3]:
            await release(gym, known, rollout)
        checkpoint_id = gym.next_id()
        await gym.prepare(checkpoint_id)
        await gym.commit(checkpoint_id)
        gym.cuts += 1
        await gym.resume(checkpoint_id)
        await see_progress(gym, known)
