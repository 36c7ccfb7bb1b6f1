# SPDX-License-Identifier: Apache-2.0
"""The sessions of the Gym's environments in the kit's store."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from reference_gym.environments import StateInvalid, build
from reference_gym.participant.config import EnvironmentInfo, ParticipantConfig
from reference_gym.participant.errors import ArgumentConflict, Internal, SessionLost, StaleAttempt, Unavailable
from reference_gym.participant.service import Participant
from reference_gym.participant.sessions import Sessions
from reference_gym.participant.state import EffectCall, Restored
from reference_gym.ports import SessionSpec
from reference_gym.resources.handle import SessionFactory
from reference_gym.resources.shared import SharedResources
from tests.gym.stubs import until

TASK = {"seed": 7, "world_url": None, "verify_in_world": False}
SPEC = SessionSpec("conformance", TASK, "task", None)


class Store:
    """A session owner by itself, with a clock that the test moves."""

    def __init__(self, most: int = 1_000, idle_s: float = 0.2) -> None:
        self.now = 0.0
        config = ParticipantConfig(
            "resources",
            "resources",
            30,
            environments=[EnvironmentInfo("conformance", "export_restore", "wait", "1")],
        )
        self.participant = Participant(config)
        environments = build([], conformance=True, world_url=None)
        self.factory = SessionFactory(environments, lambda: self.now)
        self.sessions = Sessions(self.participant, load=self.factory.load)
        self.shared = SharedResources(self.sessions, self.factory, most=most, idle_s=idle_s)

    def effect(self, rollout_id: str, number: int = 1, *, attempt: int = 0, turn: int = 1, **more: Any) -> Any:
        """One effect on a session."""
        given: dict[str, Any] = {"tool": "add", "args": {"n": 5}, "effects_done": None} | more
        return self.shared.effect(EffectCall(rollout_id, attempt, turn, f"{rollout_id}/{turn}/{number}", **given))


async def test_a_restore_with_one_bad_session_of_ten_installs_none() -> None:
    """C63: the seventh of ten sessions cannot be built; what lives stays, nothing of the others is left."""
    store = Store()
    await store.shared.open("living", 0, SPEC)
    for name in range(10):
        await store.shared.open(f"r{name}", 0, SPEC)
        await store.effect(f"r{name}")
    rows = []
    for name in range(10):
        captured = store.sessions.capture(f"r{name}")
        assert captured is not None
        data = json.loads(json.dumps(captured.data))
        if name == 6:
            data["state"]["state"]["counter"] = -1
        rows.append(Restored(f"r{name}", attempt=1, saved_attempt=0, turns_done=1, data=data, task_digest="task"))
        store.sessions.drop(f"r{name}")
    assert 1 == len(store.factory.handles)
    with pytest.raises(StateInvalid):
        await store.sessions.build(rows)
    assert 1 == len(store.factory.handles) == len(store.sessions)
    del rows[6]
    store.sessions.install(await store.sessions.build(rows))
    await asyncio.sleep(0)  # The earlier ones are closed after the step that replaced them.
    assert 9 == len(store.factory.handles) == len(store.sessions)
    with pytest.raises(SessionLost):
        await store.effect("living")


async def test_sessions_whose_callers_vanish_free_their_slots() -> None:
    """C64: 64 sessions are left without a close; after their idle limit the slots are free, a used one stays."""
    store = Store(most=64)
    for name in range(64):
        await store.shared.open(f"r{name}", 0, SPEC)
    with pytest.raises(Unavailable):
        await store.shared.open("late", 0, SPEC)
    reaping = asyncio.create_task(store.shared.reap())
    store.now = 0.19
    await store.effect("r0")
    store.now = 0.3
    await until(lambda: len(store.sessions) == 1, "63 sessions are freed")
    assert [("r0", 0)] == [handle.key for handle in store.factory.handles]
    assert [{"role": "user", "content": "conformance seed=7"}] == await store.shared.open("late", 0, SPEC)
    reaping.cancel()


async def test_an_effect_is_judged_by_attempt_then_repeat_then_session() -> None:
    """CKPT-EFFECT-001, -003, -007, -010, -011: each refusal has its own error, a repeat its recorded reply."""
    store = Store()
    await store.shared.open("r", 1, SPEC)
    first = await store.effect("r", attempt=1, effects_done=0)
    assert first == await store.effect("r", attempt=1, effects_done=99)
    with pytest.raises(SessionLost):
        await store.effect("r", 2, attempt=1, effects_done=0)
    with pytest.raises(SessionLost):
        await store.effect("other")
    with pytest.raises(StaleAttempt):
        await store.effect("r", attempt=0)
    with pytest.raises(ArgumentConflict):
        await store.effect("r", attempt=1, args={"n": 6})
    with pytest.raises(Internal):
        await store.effect("r", 2, attempt=1)
    assert "uncertain" == getattr(store.sessions.capture("r"), "restart", None)


async def test_a_session_that_stands_elsewhere_is_not_judged() -> None:
    """CKPT-ENV-032: with another number of effects than the caller's the session is lost; a verdict is made once."""
    store = Store()
    await store.shared.open("r", 0, SPEC)
    await store.effect("r")
    with pytest.raises(SessionLost):
        await store.shared.verify("r", 0, 0)
    verdict = await store.shared.verify("r", 0, 1)
    assert 15653 % 1024 / 1024 == verdict.reward
    assert verdict is await store.shared.verify("r", 0, 1)


async def test_opening_twice_finds_the_session_open() -> None:
    """A repeated open changes nothing, also after effects."""
    store = Store()
    first = await store.shared.open("r", 0, SPEC)
    await store.effect("r")
    assert first == await store.shared.open("r", 0, SPEC)
    assert '{"counter":75524,"draw":59866,"effects":2}' == (await store.effect("r", 2))["text"]


async def test_equal_effects_that_arrive_together_run_once() -> None:
    """CKPT-EFFECT-005: fifty times the same effect is one effect."""
    store = Store()
    await store.shared.open("r", 0, SPEC)
    replies = await asyncio.gather(*(store.effect("r", effects_done=0) for _ in range(50)))
    assert [replies[0]] * 50 == replies
    captured = store.sessions.capture("r")
    assert captured is not None
    assert 1 == captured.effects
