# SPDX-License-Identifier: Apache-2.0
"""One fail point: a busy Gym is killed there, started again, and compared with what was acknowledged and the model."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reference_gym.participant.failpoints import POINTS, points_of
from tests.gym.controller import Refused
from tests.gym.crash.known import Known, begin, judge, release, retire, see_progress, see_results
from tests.gym.crash.lives import GONE, ROLES, MortalGym
from tests.gym.running import task_of
from tests.gym.stubs import PolicyStub, until, until_async

SCRIPT: list[Any] = [
    [("add", {"n": 5}), ("add", {"n": -3})],
    [("grow", {"bytes": 3000})],
    [("grow", {"bytes": 10})],
    [("add", {"n": 0})],
    "done",
]
HELD = ("h1", "h2")
LOG = {"sync": "commit", "segment_bytes": 16_384}
LIMITS = {"min_lease_ms": 200, "policy_retry_ms": 60_000}
VISIT_S = 120.0
OFTEN = ("boundary.", "effect.", "part.", "call.", "turn.", "finish.", "log.", "start.", "commit.")
"""What is reached often is visited at a later hit as well, in one process."""


@dataclass(frozen=True)
class Visit:
    """Where a Gym of one form is killed: the process, the point, and which of its visits."""

    form: str
    victim: str
    point: str
    nth: int = 1


@dataclass(frozen=True)
class Verdict:
    """What came of one visit."""

    visit: Visit
    hit: bool
    held_turn: bool
    kept: bool | None
    fault: str | None

    @property
    def sound(self) -> bool:
        """Whether it was reached while an unfinished rollout held a turn, and nothing acknowledged was missing."""
        return self.hit and self.held_turn and self.kept is True and self.fault is None

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        if not self.hit:
            return "not reached"
        if self.fault is not None:
            return f"RED {self.fault}"
        return "ok" if self.sound else "RED no turn was held" if not self.held_turn else "RED a new incarnation"


async def verdict(
    directory: Path,
    at: Visit,
    action: str,
    story: Callable[[MortalGym, Known], Awaitable[tuple[bool, bool]]],
    *,
    judged: bool = True,
) -> Verdict:
    """Run a story with a Gym whose fail point does something; what came of it.

    Args:
        directory: does not exist yet; it stays if something was missing.
        at: where.
        action: what the point does.
        story: returns whether an unfinished rollout held a turn, and whether the incarnations were kept.
        judged: whether the suite's model follows every call.
    """
    directory.mkdir()  # noqa: ASYNC240 - a test that waits for its own disk
    async with PolicyStub(SCRIPT) as policy:
        point = f"{at.point}:{at.nth}:{action}"
        gym = MortalGym(directory, at.form, limits=LIMITS, log=LOG, failpoint=point, victim=at.victim, judged=judged)
        held, kept, fault = False, None, None
        try:
            held, kept = await story(gym, Known(policy))
        except (AssertionError, Refused, *GONE) as error:
            fault = f"{error!r}"[:500]
        finally:
            await gym.close()
        hit = gym.hits.exists()
    if fault is None:
        shutil.rmtree(directory)
    return Verdict(at, hit, held, kept, fault)


async def visit(directory: Path, at: Visit) -> Verdict:
    """Kill a busy Gym at one fail point and judge its next life."""
    return await verdict(directory, at, "kill", partial(_killed, point=at.point))


async def _killed(gym: MortalGym, known: Known, *, point: str) -> tuple[bool, bool]:
    await set_up(gym, known)
    held = known.held_turn()
    if point.startswith("recover."):
        await gym.kill()
        await gym.start("armed")
        await until(lambda: gym.dead, "the recovery is cut off")
    else:
        gym.arm()
        await _until_dead(gym, asyncio.create_task(work(gym, known)))
        held = held and known.held_turn()
    await gym.kill()
    return held, await go_on(gym, known)


async def _until_dead(gym: MortalGym, working: asyncio.Task[None]) -> None:
    """Return when the work is done, or a process has died: the others are killed at once, for all of it goes down."""
    while not working.done() and not gym.dead:
        await asyncio.wait([working], timeout=0.005)
    if gym.dead:
        await gym.kill()
    with contextlib.suppress(*GONE):
        await working


async def go_on(gym: MortalGym, known: Known) -> bool:
    """Start a Gym again that was killed, judge it, and let everything end; whether its incarnations are kept."""
    held = dict.fromkeys(HELD, 3)
    if "gone" in known.started - known.doubtful:  # It was killed before that one was retired.
        held["gone"] = 2
    for rollout, turn in held.items():
        known.policy.release(rollout, turn)
    asked, known.proved = len(known.policy.asked), known.turns()
    await gym.start()
    for rollout in held:
        gym.watched["agent"].allow(rollout, 5, ends=True)
    kept = await judge(gym, known)
    if kept and not known.replaced:
        await _finish(gym, known, asked)
    return kept


async def set_up(gym: MortalGym, known: Known) -> None:
    """Two rollouts that hold two turns, and one seen result."""
    await gym.start()
    await gym.adopt()
    known.incarnations = dict(gym.incarnations)
    for rollout in HELD:
        await begin(gym, known, rollout, task_of(), held_at=3)
    await begin(gym, known, "seen", task_of())
    for rollout in HELD:
        await until(lambda rollout=rollout: "3" in known.policy.turns_of(rollout), "turn 3 is asked")
    await gym.result_of("seen")
    await see_results(gym, known)
    await see_progress(gym, known)


async def work(gym: MortalGym, known: Known) -> None:
    """Everything that a Gym does; the life ends somewhere in here, by GONE."""
    for rollout in ("a", "b"):
        await begin(gym, known, rollout, task_of())
    for rollout in ("a", "b"):
        await _result(gym, known, rollout)
    await release(gym, known, "a")
    await begin(gym, known, "gone", task_of(), held_at=2)
    await _until_asked(gym, known, "gone", "2")
    await retire(gym, known, "gone", 3)
    for number in range(4):
        cuts = await _snapshot(gym, known)
        for rollout in (f"c{number}", f"d{number}"):
            await begin(gym, known, rollout, task_of())
            await _result(gym, known, rollout)
        await release(gym, known, f"c{number}")
    await _end_otherwise(gym, known)
    await gym.adopt()
    await _upload(gym)
    known.replaced = True
    await gym.restore(cuts, attempt=1)
    for rollout in HELD:
        gym.watched["agent"].allow(rollout, 2, ends=False)
    await _restore_and_abort(gym, cuts)


async def _snapshot(gym: MortalGym, known: Known) -> Any:
    checkpoint_id = gym.next_id()
    await gym.prepare(checkpoint_id)
    for role in gym.roles:
        await gym.post(role, "/checkpoint/renew", {"checkpoint_id": checkpoint_id, "lease_ms": 60_000})
    cuts = await gym.commit(checkpoint_id)
    await gym.resume(checkpoint_id)
    gym.watched["agent"].committed(checkpoint_id, cuts["agent"].index())
    await see_progress(gym, known)
    return cuts


async def _end_otherwise(gym: MortalGym, known: Known) -> None:
    """A checkpoint that is aborted, and one whose lease ends."""
    checkpoint_id = gym.next_id()
    await gym.prepare(checkpoint_id)
    for role in gym.roles:
        await gym.post(role, "/checkpoint/abort", {"checkpoint_id": checkpoint_id, "timeout_ms": 5_000})
    checkpoint_id = gym.next_id()
    for role in gym.roles:
        body = {"checkpoint_id": checkpoint_id, "run_id": "run", "timeout_ms": 5_000, "lease_ms": 200}
        await gym.post(role, "/checkpoint/prepare", body)
    for role in gym.roles:
        gym.watched[role].lease_ended()
    for role in gym.roles:
        await until_async(partial(_idle, gym, role), "the lease has ended")
    await see_progress(gym, known)


async def _idle(gym: MortalGym, role: str) -> bool:
    return bool((await gym.raw(role, "GET", "/checkpoint"))["phase"] == "idle")


async def _upload(gym: MortalGym) -> None:
    """An artifact for each participant, of a cut that nobody restores."""
    for role in gym.roles:
        await gym.upload(role, "1-1", "some.bin", b"bytes")


async def _restore_and_abort(gym: MortalGym, cuts: Any) -> None:
    """Restore a second time, and give it up before it is resumed."""

    async def stop() -> None:
        checkpoint_id = f"{gym.epoch}-{gym.sequence}"
        for role in gym.roles:
            await gym.post(role, "/checkpoint/abort", {"checkpoint_id": checkpoint_id, "timeout_ms": 5_000})

    await gym.restore(cuts, attempt=2, then=stop)


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
    bodies = {}
    for rollout in sorted(going_on):
        try:
            bodies[rollout] = (await gym.result_of(rollout)).get("body")
        except TimeoutError:
            row = (await gym.rollouts()).get(rollout)
            raise AssertionError(f"{rollout} never ended: {row}, asked {known.policy.turns_of(rollout)}") from None
    again = {
        (each.rollout_id, each.turn)
        for each in known.policy.asked[asked:]
        if each.rollout_id in going_on and int(each.turn or 0) <= known.proved.get(each.rollout_id or "", 0)
    }
    assert set() == again, f"finished turns were asked again: {again}"
    assert all(body == bodies["seen"] for body in bodies.values()), bodies


async def visit_all(
    directory: Path, visits: list[Visit], at_once: int = 1, seen: Callable[[Verdict], None] = lambda _: None
) -> list[Verdict]:
    """Visit fail points, a few at the same time; `seen` is told of each verdict."""
    few = asyncio.Semaphore(at_once)

    async def one(number: int, at: Visit) -> Verdict:
        async with few:
            name = f"{number}-{at.form}-{at.victim}-{at.point}"
            found = await asyncio.wait_for(visit(directory / name, at), VISIT_S)
            seen(found)
            return found

    return list(await asyncio.gather(*(one(number, at) for number, at in enumerate(visits))))


def all_visits(seed: int) -> list[Visit]:
    """Every fail point of every process of both forms at its first hit, and what is hit often at a later one too."""
    chosen = random.Random(seed)
    visits = []
    for form, roles in ROLES.items():
        for role in roles:
            for point in points_of(role):
                visits.append(Visit(form, role, point))
                if form == "one" and point.startswith(OFTEN):
                    visits.append(Visit(form, role, point, chosen.randint(2, 3)))
    return visits


__all__ = ["POINTS", "Verdict", "Visit", "all_visits", "go_on", "set_up", "verdict", "visit", "visit_all", "work"]
