# SPDX-License-Identifier: Apache-2.0
"""The environments by themselves: the published vector, random generators as state, data-only exports."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from reference_gym.environments import EffectContext, StateInvalid, TaskInvalid, build
from reference_gym.participant.conformance_core import CoreState, fits

CONTEXT = EffectContext("r", 0, 1, "r/1/0")
CONFORMANCE_TASK = {"seed": 7, "world_url": None, "verify_in_world": False}
SECOND_HALF = """
import asyncio, json, sys
sys.path.insert(0, {tests!r})
from test_environments import advance
print(json.dumps(asyncio.run(advance({name!r}, json.loads(sys.stdin.read()), {actions!r}))))
"""


async def advance(name: str, state: dict[str, Any], actions: list[str]) -> dict[str, Any]:
    """Restore `state`, take `actions`, and return the observations and the state after them."""
    session = build([name], conformance=False, world_url=None)[name].restore({"seed": 3}, state)
    texts = [(await session.call("step", {"action": action}, CONTEXT)).text for action in actions]
    return {"texts": texts, "state": session.export()}


def test_the_conformance_core_follows_the_published_vector() -> None:
    """The vector of the conformance environment, seed 7."""
    core = CoreState(7)
    seen = [json.loads(core.add(5)), json.loads(core.add(-3)), json.loads(core.world(11))]
    assert [15653, 75516, 75527] == [observation["counter"] for observation in seen]
    assert [15648, 59866] == [observation["draw"] for observation in seen[:2]]
    blob = "4e4c294b331f7a2099a379bec34b9f9fc03dc46ab465d998f4d683da53487e6d"
    assert f'{{"blob_sha256":"{blob}","counter":75527,"effects":4}}' == core.grow(1000)
    assert '{"counter":115667,"draw":40140,"effects":5}' == core.add(0)
    expected = {"blob_bytes": 1000, "blob_sha256": blob, "counter": 115667, "effects": 5, "rng": 2630631676}
    assert expected == core.final()
    assert 0.9560546875 == core.reward()


@pytest.mark.parametrize("cuts", [[0, 1], [250, 2], [251, 252], [1000, 0, 7]])
def test_a_blob_that_grows_in_pieces_is_the_blob_that_grew_at_once(cuts: list[int]) -> None:
    """Byte i of the blob is i modulo 251, however it came about, and an export keeps each byte."""
    pieces, whole = CoreState(0), CoreState(0)
    for cut in cuts:
        pieces.grow(cut)
    whole.grow(sum(cuts))
    assert bytes(i % 251 for i in range(sum(cuts))) == bytes(pieces.blob)
    assert whole.blob_sha256 == pieces.blob_sha256
    assert pieces.final() == CoreState.restore(json.loads(json.dumps(pieces.export()))).final()


@pytest.mark.parametrize(
    ("tool", "args", "expected"),
    [
        ("add", {"n": 1_000_000}, True),
        ("add", {"n": 1_000_001}, False),
        ("add", {"n": True}, False),
        ("add", {"n": "1"}, False),
        ("add", {"n": 1, "m": 2}, False),
        ("add", {}, False),
        ("add", [1], False),
        ("world", {"tag": "x" * 64}, True),
        ("world", {"tag": "x" * 65}, False),
        ("grow", {"bytes": 67_108_864}, True),
        ("grow", {"bytes": -1}, False),
        ("refuse", {}, True),
        ("refuse", {"x": 1}, False),
        ("drop", {}, False),
    ],
)
def test_arguments_that_do_not_fit_are_told_apart(tool: str, args: object, expected: bool) -> None:
    """Only exactly the arguments of the table fit."""
    assert expected is fits(tool, args)


@pytest.mark.asyncio
async def test_invalid_and_refused_calls_change_nothing() -> None:
    """`invalid` and `refused` leave the state as it was; a world that does not exist kills the handler."""
    session = build([], conformance=True, world_url=None)["conformance"].open(CONFORMANCE_TASK, None)
    assert [{"role": "user", "content": "conformance seed=7"}] == session.opening()
    before = session.export()
    assert '{"error":"invalid"}' == (await session.call("nothing", {}, CONTEXT)).text
    assert '{"error":"refused"}' == (await session.call("refuse", {}, CONTEXT)).text
    with pytest.raises(Exception, match="no world"):
        await session.call("world", {"tag": "a"}, CONTEXT)
    assert before == session.export()


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"seed": 7, "world_url": None},
        {"seed": -1, "world_url": None, "verify_in_world": False},
        {"seed": 2**32, "world_url": None, "verify_in_world": False},
        {"seed": True, "world_url": None, "verify_in_world": False},
        {"seed": 7, "world_url": "http://elsewhere", "verify_in_world": False},
        {"seed": 7, "world_url": None, "verify_in_world": 0},
        {"seed": 7, "world_url": None, "verify_in_world": False, "x": 1},
    ],
)
def test_tasks_that_do_not_fit_are_refused(task: dict[str, Any]) -> None:
    """A world other than the Gym's own, missing members and wrong types are no tasks."""
    with pytest.raises(TaskInvalid):
        build([], conformance=True, world_url="http://world")["conformance"].open(task, 7)


@pytest.mark.parametrize("name", ["taxi", "frozen_lake"])
@pytest.mark.asyncio
async def test_twenty_steps_equal_ten_and_a_new_process_and_ten(name: str) -> None:
    """C60: observations, rewards and random generator are equal when a really new process takes the second half."""
    environment = build([name], conformance=False, world_url=None)[name]
    tools = environment.tools[0].parameters["properties"]["action"]["enum"]
    # Episodes on the lake are short: walking into the western wall keeps it alive while the ice draws random numbers.
    actions = [tools[i % 4] for i in range(20)] if name == "taxi" else ["left"] * 20
    seed = 0
    while not await survives(name, seed, actions):
        seed += 1
    straight = environment.open({"seed": seed}, None)
    texts = [(await straight.call("step", {"action": action}, CONTEXT)).text for action in actions]
    first = environment.open({"seed": seed}, None)
    for action in actions[:10]:
        await first.call("step", {"action": action}, CONTEXT)
    script = SECOND_HALF.format(tests=str(__file__).rpartition("/")[0], name=name, actions=actions[10:])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(json.dumps(first.export()).encode()), 60)
    second = json.loads(out)
    assert texts[10:] == second["texts"]
    assert straight.export() == second["state"]
    assert straight.export() != first.export()


async def survives(name: str, seed: int, actions: list[str]) -> bool:
    """Whether the episode from `seed` is still going on after `actions`."""
    session = build([name], conformance=False, world_url=None)[name].open({"seed": seed}, None)
    for action in actions:
        ended = (await session.call("step", {"action": action}, CONTEXT)).ended
    return ended is None


@pytest.mark.asyncio
async def test_sessions_that_share_a_simulator_do_not_meet() -> None:
    """Two episodes step by step in turn give what each gives alone."""
    environment = build(["frozen_lake"], conformance=False, world_url=None)["frozen_lake"]
    alone = environment.open({"seed": 1}, None)
    expected = [(await alone.call("step", {"action": "down"}, CONTEXT)).text for _ in range(6)]
    mixed, other = environment.open({"seed": 1}, None), environment.open({"seed": 2}, None)
    seen = []
    for _ in range(6):
        seen.append((await mixed.call("step", {"action": "down"}, CONTEXT)).text)
        await other.call("step", {"action": "right"}, CONTEXT)
    assert expected == seen


@pytest.mark.asyncio
async def test_an_episode_that_is_over_takes_no_more_steps() -> None:
    """After the end an effect is answered and changes nothing."""
    environment = build(["frozen_lake"], conformance=False, world_url=None)["frozen_lake"]
    session = environment.open({"seed": 0}, None)
    for step in range(100):
        ended = (await session.call("step", {"action": ("down", "right")[step % 2]}, CONTEXT)).ended
        if ended is not None:
            break
    assert "completed" == ended
    before = session.export()
    assert "completed" == (await session.call("step", {"action": "up"}, CONTEXT)).ended
    assert before == session.export()


@pytest.mark.parametrize(
    "damage",
    [
        {"position": 500},
        {"position": "1"},
        {"rng": {}},
        {"rng": {"bit_generator": "PCG64", "state": "x", "inc": "1", "has_uint32": 0, "uinteger": 0}},
        {"reward": float("nan")},
        {"elapsed": -1},
    ],
)
def test_damaged_states_are_refused(damage: dict[str, Any]) -> None:
    """A saved state that does not fit is told apart before anything uses it."""
    environment = build(["taxi"], conformance=False, world_url=None)["taxi"]
    state = environment.open({"seed": 0}, None).export()
    with pytest.raises(StateInvalid):
        environment.restore({"seed": 0}, state | damage)


def test_the_seed_of_the_start_call_counts_only_without_one_in_the_task() -> None:
    """A task's own seed goes first; without either the task is invalid."""
    environment = build(["taxi"], conformance=False, world_url=None)["taxi"]
    assert environment.open({"seed": 3}, None).opening() == environment.open({"seed": 3}, 9).opening()
    assert environment.open({}, 3).opening() == environment.open({"seed": 3}, None).opening()
    with pytest.raises(TaskInvalid):
        environment.check({}, None)
