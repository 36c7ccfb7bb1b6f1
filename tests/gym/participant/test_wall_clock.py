# SPDX-License-Identifier: Apache-2.0
"""The clock that a participant really has: the event loop's, which no step of the wall clock moves."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.gym.participant.kit import Gym, until


@pytest.mark.parametrize("step_s", [-3_600, 3_600, 600])
async def test_a_step_of_the_wall_clock_leaves_prepare_its_budget_and_the_lease_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    """C27: an hour behind, an hour ahead, ten minutes on; while a prepare polls, and while it is prepared."""
    gym, real = Gym(tmp_path), time.time
    gym.world.hold("a/1/1")
    await gym.start("a")
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: gym.world.begun)
    begun = time.perf_counter()
    preparing = asyncio.ensure_future(gym.prepare("1-1", timeout_ms=300))
    await until(lambda: gym.status["phase"] == "preparing")
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    async with asyncio.timeout(30):
        assert not (await preparing)["ready"]
    assert 0.29 <= time.perf_counter() - begun, "the whole budget"
    gym.world.release("a/1/1")
    async with asyncio.timeout(30):
        assert (await gym.prepare("1-1", timeout_ms=20_000))["ready"]
    monkeypatch.setattr(time, "time", lambda: real() + 2 * step_s)
    assert 30_000 < gym.status["lease_remaining_ms"] <= 60_000
    await gym.renew("1-1", 60_000)
    assert ("prepared", "closed") == (gym.status["phase"], gym.status["gate"])
    await gym.abort("1-1")
    await gym.participant.close()


@pytest.mark.parametrize("step_s", [-3_600, 3_600])
async def test_a_lease_ends_in_its_own_time_whatever_the_wall_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    """C27: the lease of a silent controller is neither longer nor shorter."""
    gym, real = Gym(tmp_path), time.time
    await gym.prepare("1-1", lease_ms=300)
    begun = time.perf_counter()
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    await until(lambda: gym.status["gate"] == "open", 10)
    assert 0.25 <= time.perf_counter() - begun
    assert "expired" == gym.status["last"]["ended_as"]
    await gym.participant.close()
