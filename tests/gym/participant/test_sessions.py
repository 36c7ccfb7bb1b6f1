# SPDX-License-Identifier: Apache-2.0
"""Effects: judged in order, run once, recorded, held at the gate, lost or uncertain when they must be."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reference_gym.participant import EffectCall
from reference_gym.participant.errors import ArgumentConflict, Internal, SessionLost, StaleAttempt
from spec import wire
from tests.gym.participant.kit import Counter, Gym, settle, until


@pytest.fixture
def owner(tmp_path: Path) -> Gym:
    """A participant that owns sessions and no rollouts."""
    return Gym(tmp_path, rollouts=False)


def effect(turn: int = 1, number: int = 1, *, n: int = 1, done: int | None = None, **more: Any) -> EffectCall:
    """Return one effect on the session of `a`."""
    call = EffectCall("a", 0, turn, wire.request_id("a", turn, number), "add", {"n": n}, done)
    return replace(call, **more)


async def opened(owner: Gym, attempt: int = 0) -> Counter:
    """Open the session of `a`."""
    counter = Counter(owner.world)
    await owner.sessions.open("a", attempt, "counter", "task", counter)
    return counter


async def test_equal_effects_run_once_and_see_one_reply(owner: Gym) -> None:
    """C32: three tries of a slow effect, two of which gave up: it happened once, all see one result."""
    await opened(owner)
    owner.world.hold("a/1/1")
    tries = [asyncio.ensure_future(owner.sessions.effect(effect(done=0))) for _ in range(3)]
    await until(lambda: owner.world.begun)
    for gave_up in tries[:2]:
        gave_up.cancel()
    owner.world.release("a/1/1")
    assert {"value": 1} == await tries[2] == await owner.sessions.effect(effect(done=0))
    assert ["a/1/1"] == owner.world.done


async def test_replies_are_kept_until_a_later_turn_begins(owner: Gym) -> None:
    """A repeat of the present turn is answered, one of an earlier turn has lost its reply and its place."""
    await opened(owner)
    await owner.sessions.effect(effect(1, 1, done=0))
    await owner.sessions.effect(effect(1, 2, done=1))
    assert {"value": 1} == await owner.sessions.effect(effect(1, 1, done=0))
    await owner.sessions.effect(effect(2, 1, done=2))
    with pytest.raises(SessionLost):
        await owner.sessions.effect(effect(1, 1, done=0))
    assert ["a/1/1", "a/1/2", "a/2/1"] == owner.world.done


@pytest.mark.parametrize("changed", [{"args": {"n": True}}, {"args": {"n": 2}}, {"tool": "other"}])
async def test_another_input_under_a_known_request_id_makes_the_session_uncertain(
    owner: Gym, changed: dict[str, Any]
) -> None:
    """CKPT-EFFECT-003, CKPT-EFFECT-004: a conflict; true is not 1."""
    await opened(owner)
    await owner.sessions.effect(effect())
    with pytest.raises(ArgumentConflict):
        await owner.sessions.effect(effect(**changed))
    with pytest.raises(Internal):
        await owner.sessions.effect(effect(1, 2))
    reply = await owner.snapshot("1-1")
    assert (0, 1) == (reply["counts"]["turn"], reply["counts"]["restart"])


async def test_an_uncertain_session_stays_until_its_rollout_is_retired(tmp_path: Path) -> None:
    """CKPT-EFFECT-018: an agent loop that closes its session however it ends closes no uncertain one."""
    gym = Gym(tmp_path)
    await gym.start("a")
    await gym.waiting("a")
    await gym.sessions.effect(effect(9))
    with pytest.raises(ArgumentConflict):
        await gym.sessions.effect(effect(9, n=77))
    await gym.sessions.close("a", 0)
    with pytest.raises(Internal):
        await gym.sessions.effect(effect(9, 2))
    await gym.retire(("a", 0))
    assert 0 == len(gym.sessions)
    await gym.participant.close()


async def test_whoever_closes_a_session_that_is_gone_waits_for_no_gate(tmp_path: Path) -> None:
    """CKPT-RETIRE-001: an agent loop that closes its session where it is cancelled holds up no retire."""
    gym = Gym(tmp_path)
    await gym.start("a")
    await gym.waiting("a")
    await gym.prepare("1-1")
    closing = asyncio.create_task(gym.sessions.close("a", 0))
    await settle()
    assert not closing.done(), "nothing changes while the gate is closed"
    await gym.retire(("a", 0))
    await asyncio.wait_for(closing, 5)
    await asyncio.wait_for(gym.sessions.close("a", 0), 5)
    await gym.participant.close()


async def test_refusals_come_in_the_order_attempt_repeat_session_gate(owner: Gym) -> None:
    """CKPT-EFFECT-007: also behind a closed gate, where a fresh effect is held and a repeat is answered."""
    await opened(owner, attempt=2)
    await owner.sessions.effect(effect(attempt=2))
    await owner.prepare("1-1")
    with pytest.raises(StaleAttempt) as stale:
        await owner.sessions.effect(effect(attempt=1))
    assert [{"rollout_id": "a", "through_attempt": 1}] == stale.value.extra["rollouts"]
    assert {"value": 1} == await owner.sessions.effect(effect(attempt=2, effects_done=99))
    with pytest.raises(SessionLost):
        await owner.sessions.effect(effect(2, 1, attempt=2, done=0))
    with pytest.raises(SessionLost):
        await owner.sessions.effect(effect(attempt=3))
    held = asyncio.ensure_future(owner.sessions.effect(effect(2, 1, attempt=2, done=1)))
    await settle()
    assert not held.done()
    await owner.abort("1-1")
    assert {"value": 2} == await held


async def test_while_preparing_only_effects_of_a_begun_turn_are_admitted(owner: Gym) -> None:
    """CKPT-GATE-011 to -013: the turn that has run an effect goes on, another is held; from prepared on all are."""
    await opened(owner)
    await owner.sessions.open("b", 0, "counter", "task", Counter(owner.world))
    await owner.sessions.effect(effect(1, 1))
    owner.world.hold("b/1/1")
    slow = replace(effect(), rollout_id="b", request_id="b/1/1")
    running = asyncio.ensure_future(owner.sessions.effect(slow))
    await until(lambda: "b/1/1" in owner.world.begun)
    reply = await owner.prepare("1-1", timeout_ms=1)
    assert [("effect", "b")] == [(blocker["kind"], blocker["rollout_id"]) for blocker in reply["blockers"]]
    assert {"value": 2} == await owner.sessions.effect(effect(1, 2))
    next_turn = asyncio.ensure_future(owner.sessions.effect(effect(2, 1)))
    await settle()
    owner.world.release("b/1/1")
    assert {"value": 1} == await running
    assert (await owner.prepare("1-1"))["ready"]
    same_turn = asyncio.ensure_future(owner.sessions.effect(effect(1, 3)))
    await settle()
    assert (False, False) == (next_turn.done(), same_turn.done())
    await owner.abort("1-1")
    await asyncio.gather(next_turn, same_turn)


async def test_a_higher_attempt_replaces_the_session(owner: Gym) -> None:
    """CKPT-FENCE-001: opened by the higher attempt; the lower one is stale from then on, its state is freed."""
    lower = await opened(owner)
    await opened(owner, attempt=3)
    assert lower.closed
    with pytest.raises(StaleAttempt):
        await owner.sessions.effect(effect())
    with pytest.raises(StaleAttempt):
        await opened(owner, attempt=2)


async def test_an_effect_never_opens_a_session_and_an_open_never_resets_one(owner: Gym) -> None:
    """CKPT-ENV-011: unknown is lost; a session in which something happened is not replaced at the same attempt."""
    with pytest.raises(SessionLost):
        await owner.sessions.effect(effect())
    unused = await opened(owner)
    await opened(owner)
    assert unused.closed
    await owner.sessions.effect(effect())
    with pytest.raises(SessionLost):
        await opened(owner)


async def test_a_handler_that_runs_while_its_session_is_dropped_touches_nothing(owner: Gym) -> None:
    """Its caller is told that it is stale; the session is closed when the handler has ended, not before."""
    counter = await opened(owner)
    owner.world.hold("a/1/1")
    running = asyncio.ensure_future(owner.sessions.effect(effect()))
    await until(lambda: owner.world.begun)
    await owner.retire(("a", 0), timeout_ms=0)
    assert not counter.closed
    owner.world.release("a/1/1")
    with pytest.raises(StaleAttempt):
        await running
    assert (True, 0) == (counter.closed, len(owner.sessions))


async def test_sessions_are_opened_and_verified_only_while_the_gate_is_open(owner: Gym) -> None:
    """Both are held; a close is held only while nothing may change."""
    await opened(owner)
    await owner.prepare("1-1")
    opening = asyncio.ensure_future(owner.sessions.open("b", 0, "counter", "task", Counter(owner.world)))

    async def verify() -> Any:
        async with owner.sessions.verification("a", 0) as state:
            return state.save()

    verifying = asyncio.ensure_future(verify())
    closing = asyncio.ensure_future(owner.sessions.close("a", 0))
    await settle()
    assert [False] * 3 == [task.done() for task in (opening, verifying, closing)]
    await owner.abort("1-1")
    await asyncio.gather(opening, closing, verifying, return_exceptions=True)
    assert 1 == len(owner.sessions)


async def test_a_probe_that_counts_elsewhere_loses_the_agents_session(tmp_path: Path) -> None:
    """CKPT-CONF-040: an effect that the agent did not record makes its next one session_lost, not terminal."""
    gym = Gym(tmp_path)
    await gym.start("a")
    await gym.waiting("a")
    assert {"value": 5} == await gym.sessions.effect(effect(1, 9, n=5))
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: gym.state("a") == "failed")
    (served,) = (await gym.results()).results
    assert '"kind":"session_lost"' in served.result
    assert '"terminal":false' in served.result
