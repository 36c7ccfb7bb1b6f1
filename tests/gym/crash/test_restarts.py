# SPDX-License-Identifier: Apache-2.0
"""A Gym with a boundary log that is killed and started again: what was acknowledged is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.gym.crash.lives import ROOT, MortalGym
from tests.gym.running import FORMS, RunningGym, environment, task_of
from tests.gym.stubs import PolicyStub, WorldStub, until, until_async

SCRIPT = [
    [("add", {"n": 5}), ("add", {"n": -3})],
    [("world", {"tag": "x"})],
    [("grow", {"bytes": 1000}), ("refuse", {})],
    [("add", {"n": 0})],
    "done",
]


@contextlib.asynccontextmanager
async def gym_at(directory: Path, processes: str, **more: Any) -> AsyncIterator[MortalGym]:
    """A Gym that can die, with an adopted controller."""
    gym = MortalGym(directory, processes, judged=False, **more)
    try:
        await gym.start()
        await gym.adopt()
        yield gym
    finally:
        await gym.close()


@pytest.mark.parametrize(("processes", "sync"), [("one", "commit"), ("one", "group"), ("three", "commit")])
async def test_a_killed_gym_goes_on_where_it_stood(processes: str, sync: str, tmp_path: Path) -> None:
    """C25: SIGKILL, start: same incarnation, every finished turn, the same attempt, the same body, result and feed."""
    async with (
        PolicyStub(SCRIPT) as policy,
        WorldStub() as world,
        gym_at(tmp_path, processes, world_url=world.url, log={"sync": sync}) as gym,
    ):
        task = task_of(world.url, verify_in_world=True)
        await gym.begin_rollout("whole", task, policy.address)
        whole = await gym.result_of("whole")
        for turn in (3, 4):
            policy.hold("cut", turn)
        await gym.begin_rollout("cut", task, policy.address)
        before = dict(gym.incarnations)
        feed = (await gym.raw("agent", "GET", "/results"))["feed"]
        for turn in (3, 4):
            await until(lambda turn=turn: str(turn) in policy.turns_of("cut"), f"turn {turn} is asked")
            status = await gym.raw("agent", "GET", "/checkpoint")
            await gym.kill()
            await gym.start()
            again = await gym.raw("agent", "GET", "/checkpoint")
            assert [status[key] for key in ("controller", "last", "counts", "fresh", "feed")] == [
                again[key] for key in ("controller", "last", "counts", "fresh", "feed")
            ]
            assert status["progress"] <= again["progress"]
            policy.release("cut", turn)
        found = await gym.result_of("cut")
        for role in gym.roles:
            await gym.raw(role, "GET", "/capabilities")
        assert before == gym.incarnations
        assert feed == (await gym.raw("agent", "GET", "/results"))["feed"]
        assert whole["receipt"] == (await gym.results())["whole"]["receipt"]
    assert whole["body"] == found["body"]
    assert 0 == found["info"]["attempt"]
    assert ["1", "2", "3", "3", "4", "4", "5"] == policy.turns_of("cut")
    assert ["whole/2/1", "cut/2/1"] == [each["request_id"] for each in world.effects]


@pytest.mark.parametrize("processes", FORMS)
async def test_an_effect_outside_that_nobody_recorded_makes_a_new_incarnation(processes: str, tmp_path: Path) -> None:
    """CKPT-ID-023: the kill hits while the outside is asked: nothing of the earlier life goes on (CKPT-ID-039)."""
    async with (
        PolicyStub(SCRIPT) as policy,
        WorldStub() as world,
        gym_at(tmp_path, processes, world_url=world.url, log={}) as gym,
    ):
        owner = "resources" if processes == "three" else "agent"
        world.hold("x")
        await gym.begin_rollout("r", task_of(world.url), policy.address)
        await until(lambda: world.count["x"] == 1, "the effect has begun")
        before = dict(gym.incarnations)
        await gym.kill()
        world.release("x")
        await gym.start()
        statuses = {role: await gym.raw(role, "GET", "/checkpoint") for role in gym.roles}
        assert {owner} == {role for role in gym.roles if before[role] != gym.incarnations[role]}
        status = statuses[owner]
        assert (0, None, None) == (status["counts"]["live"], status["last"], status["controller"])
        assert "has begun and is not recorded" in gym.refused(owner)


@pytest.mark.parametrize("processes", FORMS)
async def test_a_rollout_that_cannot_continue_is_in_state_restart(processes: str, tmp_path: Path) -> None:
    """CKPT-PHASE-018: the incarnation is kept, and what only starts again says so and blocks nothing."""
    async with (
        PolicyStub([[("add", {"n": 5})], [("add", {"n": 1})], "done"]) as policy,
        gym_at(tmp_path, processes, log={}) as gym,
    ):
        policy.hold("r", 2)
        await gym.begin_rollout("r", task_of(), policy.address, environment="conformance-restart")
        await until(lambda: "2" in policy.turns_of("r"), "turn 2 is asked")
        before = dict(gym.incarnations)
        await gym.kill()
        policy.release("r", 2)
        await gym.start()

        async def restarts() -> bool:
            return bool((await gym.rollouts())["r"]["state"] == "restart")

        await until_async(restarts, "the rollout is in state restart")
        assert before == gym.incarnations
        assert all(reply["ready"] for reply in (await gym.prepare(gym.next_id())).values())


@pytest.mark.parametrize("processes", FORMS)
async def test_a_cut_of_linked_segments_restores_like_any_other(processes: str, tmp_path: Path) -> None:
    """C46: cuts that share segments of the log, restored where the log is gone: the same body, no kept turn redone."""
    async with (
        PolicyStub(SCRIPT) as policy,
        WorldStub() as world,
        gym_at(tmp_path, processes, world_url=world.url, log={"segment_bytes": 8192}) as gym,
    ):
        task = task_of(world.url)
        await gym.begin_rollout("whole", task, policy.address)
        whole = await gym.result_of("whole")
        for turn in (2, 4):
            policy.hold("cut", turn)
        await gym.begin_rollout("cut", task, policy.address)
        await until(lambda: "2" in policy.turns_of("cut"), "turn 2 is asked")
        for _ in range(3):
            cuts = await gym.snapshot()
        policy.release("cut", 2)
        await until(lambda: "4" in policy.turns_of("cut"), "turn 4 is asked")
        cuts = await gym.snapshot()
        linked = [path for path in cuts["agent"].path.iterdir() if path.suffix == ".log"]
        assert linked
        assert not (cuts["agent"].path / "state.jsonl").exists()
        await gym.kill()
        shutil.rmtree(tmp_path / "data")
        policy.release("cut", 4)
        await gym.start()
        await gym.adopt()
        await gym.restore(cuts, attempt=1)
        found = await gym.result_of("cut")
    assert whole["body"] == found["body"]
    assert ["1", "2", "3", "4", "4", "5"] == policy.turns_of("cut")


@pytest.mark.parametrize("role", ["model", "resources"])
async def test_a_server_that_dies_alone_loses_nothing(role: str, tmp_path: Path) -> None:
    """N8: it comes back with what it held while the agent waits for it; nothing is lost and nothing is done twice."""
    script = [[("add", {"n": 5})], [("add", {"n": 1}), ("grow", {"bytes": 9})], "done"]
    async with PolicyStub(script) as policy, gym_at(tmp_path, "three", log={}) as gym:
        await gym.begin_rollout("whole", task_of(), policy.address)
        whole = await gym.result_of("whole")
        policy.hold("r", 2)
        await gym.begin_rollout("r", task_of(), policy.address)
        await until(lambda: "2" in policy.turns_of("r"), "turn 2 is asked")
        before = dict(gym.incarnations)
        await gym.kill_one(role)
        policy.release("r", 2)
        await gym.begin_life(role)
        found = await gym.result_of("r")
        for each in gym.roles:
            await gym.raw(each, "GET", "/capabilities")
        assert before == gym.incarnations
    assert whole["body"] == found["body"]


async def test_a_gym_of_its_own_kind_survives_with_the_kit(tmp_path: Path) -> None:
    """C25: the FastAPI example started with `--log` is killed: its rollout goes on, and no finished turn is redone."""
    async with PolicyStub([[("roll", {})], [("roll", {})], [("bank", {})], "done"]) as policy:
        gym = ExampleGym(tmp_path, "one")
        try:
            await gym.start()
            await gym.adopt()
            policy.hold("r", 3)
            await gym.begin_rollout("r", {"seed": 7, "goal": 20}, policy.address, environment="pig")
            await until(lambda: "3" in policy.turns_of("r"), "turn 3 is asked")
            before = dict(gym.incarnations)
            await gym.kill()
            policy.release("r", 3)
            await gym.start()
            await gym.result_of("r")
            assert before == gym.incarnations
        finally:
            await gym.close()
    assert ["1", "2", "3", "3"] == policy.turns_of("r")[:4]


class ExampleGym(RunningGym):
    """The FastAPI example in its own process."""

    async def start(self, *more: str) -> None:
        """Start it and wait until it listens."""
        self.announce_file.unlink(missing_ok=True)
        told = {"--storage": "snapshots", "--data": "uploads", "--log": "log", "--announce": self.announce_file.name}
        words = [word for key, name in told.items() for word in (key, str(self.directory / name))]
        command = [sys.executable, "-m", "examples.fastapi_gym", *words, *more]
        with self.log_file.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(*command, stderr=log, env=environment(), cwd=ROOT)
        await until(self.announce_file.exists, "the example listens")
        self.announced = json.loads(self.announce_file.read_text())
        self.http = self.http or aiohttp.ClientSession()
