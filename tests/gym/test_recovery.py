# SPDX-License-Identifier: Apache-2.0
"""Rollouts that live through kills, in both process forms, against real servers."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.gym.running import FORMS, RunningGym, gym_at, task_of, texts_of
from tests.gym.stubs import PolicyStub, WorldStub, until, until_async

SCRIPT = [
    [("add", {"n": 5}), ("add", {"n": -3})],
    [("world", {"tag": "x"})],
    [("grow", {"bytes": 1000}), ("refuse", {})],
    [("add", {"n": 0})],
    "done",
]
WORDS_OF_THE_PROTOCOL = (
    "stale_attempt",
    "session_lost",
    "admission_closed",
    "unavailable",
    "gate",
    "attempt",
    "uncertain",
)


async def turns_done(gym: RunningGym, rollout_id: str, count: int) -> None:
    """Wait until a rollout has crossed so many boundaries."""

    async def reached() -> bool:
        return bool((await gym.rollouts())[rollout_id]["turns_done"] >= count)

    await until_async(reached, f"{rollout_id} has done {count} turns")


async def state_of(gym: RunningGym, rollout_id: str, state: str) -> None:
    """Wait until a rollout shows a state."""

    async def reached() -> bool:
        return bool((await gym.rollouts())[rollout_id]["state"] == state)

    await until_async(reached, f"{rollout_id} is {state}")


@pytest.mark.parametrize("processes", FORMS)
async def test_a_killed_rollout_ends_like_one_that_never_was(processes: str, tmp_path: Path) -> None:
    """The acid test, two full cycles: kept turns are not generated again, the body is equal (CKPT-ENV-006, -026)."""
    async with PolicyStub(SCRIPT) as policy, WorldStub() as world:
        task = task_of(world.url, verify_in_world=True)
        async with gym_at(tmp_path, processes, world_url=world.url) as gym:
            await gym.begin_rollout("whole", task, policy.address)
            expected = (await gym.result_of("whole"))["body"]
            for turn in (3, 4):
                policy.hold("cut", turn)
            await gym.begin_rollout("cut", task, policy.address)
            for attempt, turn in ((1, 3), (2, 4)):
                await until(lambda turn=turn: str(turn) in policy.turns_of("cut"), f"turn {turn} is asked")
                await turns_done(gym, "cut", turn - 1)
                cuts = await gym.snapshot()
                assert [turn - 1] * len(gym.roles) == [cuts[role].row("cut")["turns_done"] for role in gym.roles]
                await gym.kill()
                policy.release("cut", turn)
                await gym.start()
                await gym.adopt()
                await gym.restore(cuts, attempt=attempt)
            found = await gym.result_of("cut")
    assert expected == found["body"]
    assert 2 == found["info"]["attempt"]
    assert ["1", "2", "3", "3", "4", "4", "5"] == policy.turns_of("cut")
    assert {"whole/2/1": 1, "cut/2/1": 1} == {each["request_id"]: 1 for each in world.effects}
    assert 2 == len(world.effects)


async def test_a_restore_into_a_busy_gym_does_not_starve(tmp_path: Path) -> None:
    """N22: the sessions are restored and held; live rollouts then send effects there; the agent restores at once."""
    async with (
        PolicyStub(SCRIPT) as policy,
        WorldStub() as world,
        gym_at(tmp_path, "three", world_url=world.url) as gym,
    ):
        names = [f"r{number}" for number in range(5)]
        for name in names:
            policy.hold(name, 2)
            await gym.begin_rollout(name, task_of(world.url), policy.address)
        for name in names:
            await until(lambda name=name: "2" in policy.turns_of(name), "turn 2 is asked")
            await turns_done(gym, name, 1)
        cuts = await gym.snapshot()

        async def let_go(role: str) -> None:
            if role == "resources":
                for name in names:
                    policy.release(name, 2)

        await gym.restore(cuts, attempt=1, after=let_go)
        found = [await gym.result_of(name) for name in names]
    assert [("completed", 1)] * 5 == [(each["body"]["outcome"], each["info"]["attempt"]) for each in found]


@pytest.mark.parametrize("processes", FORMS)
async def test_a_turn_with_three_calls_runs_to_its_boundary_while_the_gate_closes(
    processes: str, tmp_path: Path
) -> None:
    """N1: the gate closes during the first of three calls; the turn ends, the next does not open, nothing differs."""
    script = [[("world", {"tag": "first"}), ("add", {"n": 1}), ("add", {"n": 2})], [("add", {"n": 3})], "done"]
    async with PolicyStub(script) as policy, WorldStub() as world:
        task = task_of(world.url)
        async with gym_at(tmp_path, processes, world_url=world.url) as gym:
            await gym.begin_rollout("whole", task, policy.address)
            expected = (await gym.result_of("whole"))["body"]
            world.hold("first")
            await gym.begin_rollout("cut", task, policy.address)
            await until(lambda: world.count["first"] == 2, "the first effect has begun")
            checkpoint_id = gym.next_id()
            prepare = asyncio.create_task(gym.prepare(checkpoint_id, timeout_ms=15_000))
            await until_async(lambda: phase_is(gym, "preparing"), "the gate is closing")
            world.release("first")
            replies = await prepare
            assert all(reply["ready"] for reply in replies.values())
            await until(lambda: "2" in policy.turns_of("cut"), "the next generation goes on")
            await state_of(gym, "cut", "parked")
            assert 1 == (await gym.rollouts())["cut"]["turns_done"]
            cuts = await gym.commit(checkpoint_id)
            await gym.kill()
            await gym.start()
            await gym.adopt()
            await gym.restore(cuts, attempt=1)
            found = await gym.result_of("cut")
    assert expected == found["body"]
    assert {"conformance": 3} == cuts["agent"].row("cut")["effects"]
    assert ["1", "2", "2", "3"] == policy.turns_of("cut")


async def phase_is(gym: RunningGym, phase: str) -> bool:
    """Whether the agent's participant is in a phase."""
    return bool((await gym.raw("agent", "GET", "/checkpoint"))["phase"] == phase)


async def test_a_restored_rollout_calls_the_policy_that_the_restore_names(
    gym: RunningGym, world: WorldStub, rollout: str
) -> None:
    """N3: after a restore with another policy address the old one is never called again; restoring twice is no harm."""
    async with PolicyStub(SCRIPT) as old, PolicyStub(SCRIPT) as new:
        old.hold(rollout, 4)
        await gym.begin_rollout(rollout, task_of(world.url), old.address)
        await until(lambda: "4" in old.turns_of(rollout), "turn 4 is asked")
        await turns_done(gym, rollout, 3)
        cuts = await gym.snapshot()
        asked = len(old.asked)
        await gym.restore(cuts, attempt=1, policy=new.address)
        first = await gym.result_of(rollout)
        await gym.restore(cuts, attempt=2, policy=new.address)
        second = await gym.result_of(rollout)
        old.release(rollout, 4)
    assert asked == len(old.asked)
    assert first["body"] == second["body"]
    assert [("1", "4"), ("1", "5"), ("2", "4"), ("2", "5")] == [(each.attempt, each.turn) for each in new.asked]


async def test_a_rollout_that_was_cut_before_its_first_turn_begins_again(gym: RunningGym, rollout: str) -> None:
    """A cut without a boundary: the opened session is found, or opened, and the body is that of any other run."""
    async with PolicyStub([[("add", {"n": 5})], "done"]) as policy:
        await gym.begin_rollout(f"{rollout}-whole", task_of(), policy.address)
        expected = (await gym.result_of(f"{rollout}-whole"))["body"]
        policy.hold(rollout, 1)
        await gym.begin_rollout(rollout, task_of(), policy.address)
        await until(lambda: "1" in policy.turns_of(rollout), "turn 1 is asked")
        cuts = await gym.snapshot()
        assert ("turn", 0) == (cuts["agent"].row(rollout)["state"], cuts["agent"].row(rollout)["turns_done"])
        await gym.restore(cuts, attempt=1)
        await until(lambda: ["1", "1"] == policy.turns_of(rollout), "turn 1 is asked again")
        policy.release(rollout, 1)
        found = await gym.result_of(rollout)
    assert expected == found["body"]


async def test_a_large_blob_survives_to_the_byte(gym_of_one: RunningGym, rollout: str) -> None:
    """C49: a record of more than 6 MB is byte-exact after a restore."""
    async with PolicyStub([[("grow", {"bytes": 6_000_001})], [("grow", {"bytes": 0})], "done"]) as policy:
        policy.hold(rollout, 2)
        await gym_of_one.begin_rollout(rollout, task_of(), policy.address)
        await until(lambda: "2" in policy.turns_of(rollout), "turn 2 is asked")
        await turns_done(gym_of_one, rollout, 1)
        cuts = await gym_of_one.snapshot()
        policy.release(rollout, 2)
        await gym_of_one.restore(cuts, attempt=1)
        found = await gym_of_one.result_of(rollout)
    blob = bytes(i % 251 for i in range(6_000_001))
    assert (6_000_001, hashlib.sha256(blob).hexdigest()) == tuple(
        found["body"]["final"][key] for key in ("blob_bytes", "blob_sha256")
    )


async def test_two_gyms_from_one_snapshot_share_the_draws_and_not_the_names(tmp_path: Path) -> None:
    """C16: the random numbers of the environment continue identically, incarnations and feeds differ."""
    bodies, names = [], []
    async with PolicyStub([[("add", {"n": 1})]] * 6) as policy:
        policy.hold("r", 4)
        (tmp_path / "a").mkdir()
        async with gym_at(tmp_path / "a", "one") as gym:
            await gym.begin_rollout("r", task_of(), policy.address)
            await until(lambda: "4" in policy.turns_of("r"), "turn 4 is asked")
            await turns_done(gym, "r", 3)
            cuts = await gym.snapshot()
        policy.release("r", 4)
        for name in ("b", "c"):
            shutil.copytree(tmp_path / "a" / "snapshots", tmp_path / name / "snapshots")
            async with gym_at(tmp_path / name, "one") as gym:
                moved = {
                    role: type(cut)(
                        cut.checkpoint_id, tmp_path / name / cut.path.relative_to(tmp_path / "a"), cut.digest
                    )
                    for role, cut in cuts.items()
                }
                await gym.restore(moved, attempt=1)
                bodies.append((await gym.result_of("r"))["body"])
                page = await gym.raw("agent", "GET", "/results")
                names += [page["feed"], gym.incarnations["agent"]]
    assert bodies[0] == bodies[1]
    assert 4 == len(set(names))


async def test_a_handler_that_raises_stops_its_rollout_and_blocks_nobody(
    gym: RunningGym, world: WorldStub, rollout: str
) -> None:
    """C62: the session is uncertain, the rollout is in state restart, prepare is ready, retire frees it."""
    script = [[("add", {"n": 1})], [("world", {"tag": "x"}), ("add", {"n": 1})]]
    world.status = 500
    async with PolicyStub(script) as policy:
        await gym.begin_rollout(rollout, task_of(world.url), policy.address)
        await state_of(gym, rollout, "restart")
        cuts = await gym.snapshot()
        row = cuts["agent"].row(rollout)
        assert ("restart", "uncertain") == (row["state"], row["reason"])
        for role in gym.roles:
            body = {"rollouts": [{"rollout_id": rollout, "through_attempt": 0}], "timeout_ms": 5_000}
            await gym.post(role, "/retire", body)
        status = await gym.raw("agent", "GET", "/checkpoint")
    assert (0, 1) == (status["counts"]["live"], status["counts"]["retired"])
    assert 1 == world.count["x"]
    assert ["1", "2"] == policy.turns_of(rollout)


async def test_an_effect_that_was_not_recorded_is_asked_again_under_its_own_name(tmp_path: Path) -> None:
    """C61: the kill hits between an effect and its record; after the restore the outside sees the same request id."""
    script = [[("add", {"n": 1})], [("world", {"tag": "x"})], "done"]
    async with PolicyStub(script) as policy, WorldStub() as world, gym_at(tmp_path, "one", world_url=world.url) as gym:
        policy.hold("r", 2)
        await gym.begin_rollout("r", task_of(world.url), policy.address)
        await until(lambda: "2" in policy.turns_of("r"), "turn 2 is asked")
        await turns_done(gym, "r", 1)
        cuts = await gym.snapshot()
        world.hold("x")
        policy.release("r", 2)
        await until(lambda: world.count["x"] == 1, "the effect has begun")
        await gym.kill()
        world.release("x")
        await gym.start()
        await gym.adopt()
        await gym.restore(cuts, attempt=1)
        found = await gym.result_of("r")
    assert "completed" == found["body"]["outcome"]
    assert ["r/2/1", "r/2/1"] == [each["request_id"] for each in world.effects]


async def test_a_resources_server_that_dies_alone_ends_its_rollouts(tmp_path: Path) -> None:
    """N8, N7: each affected rollout ends as session_lost, none gets a fresh session, the policy hears nothing."""
    async with (
        PolicyStub(SCRIPT) as policy,
        WorldStub() as world,
        gym_at(tmp_path, "three", world_url=world.url) as gym,
    ):
        for name in ("a", "b"):
            policy.hold(name, 3)
            await gym.begin_rollout(name, task_of(world.url), policy.address)
            await until(lambda name=name: "3" in policy.turns_of(name), "turn 3 is asked")
            await turns_done(gym, name, 2)
        (victim,) = [each["pid"] for each in gym.announced["participants"] if each["role"] == "resources"]
        before = gym.incarnations["resources"]
        os.kill(victim, signal.SIGKILL)
        for name in ("a", "b"):
            policy.release(name, 3)
        failures = [(await gym.result_of(name))["failure"] for name in ("a", "b")]
        await gym.raw("resources", "GET", "/capabilities")
        assert before != gym.incarnations["resources"]
    assert [("session_lost", False, 2)] * 2 == [(each["kind"], each["terminal"], each["turns"]) for each in failures]
    assert ["1", "2", "3"] == policy.turns_of("a")
    assert_the_policy_heard_nothing(policy)


async def test_a_fenced_attempt_ends_without_a_word(gym: RunningGym, world: WorldStub, rollout: str) -> None:
    """N7, C10: a higher attempt starts while an effect of the lower runs; that ends, the policy hears nothing."""
    world.hold("x")
    async with PolicyStub(SCRIPT) as policy:
        await gym.begin_rollout(rollout, task_of(world.url), policy.address)
        await until(lambda: world.count["x"] == 1, "the effect has begun")
        await gym.begin_rollout(rollout, task_of(world.url), policy.address, attempt=1)
        await until(lambda: world.count["x"] == 2, "the effect of the next attempt has begun")
        world.release("x")
        found = await gym.result_of(rollout)
        rollouts = await gym.rollouts()
    assert ("completed", 1) == (found["body"]["outcome"], found["info"]["attempt"])
    assert [rollout] == list(rollouts)
    assert ["0", "0"] == [each.attempt for each in policy.asked if each.attempt == "0"]
    assert_the_policy_heard_nothing(policy)


def assert_the_policy_heard_nothing(policy: PolicyStub) -> None:
    """No tool message that the policy ever got holds a word of the protocol."""
    heard = [text for asked in policy.asked for text in texts_of(asked.conversation)]
    assert [] == [text for text in heard if any(word in text for word in WORDS_OF_THE_PROTOCOL)]


async def test_a_parked_rollout_keeps_its_time(tmp_path: Path) -> None:
    """C28: a rollout waits for the policy and is parked for longer than its budget, is killed, and still ends well."""
    async with (
        PolicyStub([[("add", {"n": 1})], [("add", {"n": 1})], "done"]) as policy,
        gym_at(tmp_path, "one") as gym,
    ):
        for name in ("parked", "asking"):
            policy.hold(name, 2)
            limits = {"max_turns": 5, "episode_ms": 1_500}
            await gym.begin_rollout(name, task_of(), policy.address, limits=limits)
            await until(lambda name=name: "2" in policy.turns_of(name), "turn 2 is asked")
            await turns_done(gym, name, 1)
        checkpoint_id = gym.next_id()
        await gym.prepare(checkpoint_id)
        policy.release("parked", 2)
        await state_of(gym, "parked", "parked")
        cuts = await gym.commit(checkpoint_id)
        # The time itself is what is tested here: longer than the whole budget.
        await asyncio.sleep(1.7)
        shown = await gym.rollouts()
        assert ["waiting_policy", "parked"] == [shown[name]["state"] for name in ("asking", "parked")]
        await gym.kill()
        await gym.start()
        await gym.adopt()
        policy.release("asking", 2)
        await gym.restore(cuts, attempt=1)
        found = [await gym.result_of(name) for name in ("asking", "parked")]
    assert ["completed"] * 2 == [each.get("body", each)["outcome"] for each in found]


async def test_an_episode_that_used_up_its_time_fails(gym_of_one: RunningGym, rollout: str) -> None:
    """CKPT-ROLL-037, CKPT-ROLL-064: a used up budget is a failure, a body holds nothing that depends on time."""
    async with PolicyStub([[("add", {"n": 1})]] * 3) as policy:
        policy.hold(rollout, 2)
        limits = {"max_turns": 5, "episode_ms": 300}
        await gym_of_one.begin_rollout(rollout, task_of(), policy.address, limits=limits)
        found = await gym_of_one.result_of(rollout)
        policy.release(rollout, 2)
    assert ("episode_timeout", False, 1) == tuple(found["failure"][key] for key in ("kind", "terminal", "turns"))


async def test_a_policy_that_stays_away_ends_the_rollout(gym: RunningGym, rollout: str) -> None:
    """CKPT-GATE-018 to -021: tried again within policy_retry_ms, off the budget, then policy_unavailable."""
    async with PolicyStub([[("add", {"n": 1})]]) as policy:
        limits = {"max_turns": 5, "episode_ms": 1_000}
        policy.hold(rollout, 2)
        await gym.begin_rollout(rollout, task_of(), policy.address, limits=limits)
        await until(lambda: "2" in policy.turns_of(rollout), "turn 2 is asked")
        policy.refuse += [(503, {})] * 1_000
        policy.fail(rollout, 2)
        found = await gym.result_of(rollout)
    assert ("policy_unavailable", False, 1) == tuple(found["failure"][key] for key in ("kind", "terminal", "turns"))
    assert {"1", "2"} == set(policy.turns_of(rollout))


async def test_a_reply_that_utf_8_cannot_hold_fails_its_rollout_alone(gym: RunningGym, rollout: str) -> None:
    """N10: a lone surrogate in the policy's text is a failure of its own kind, and the feed goes on."""
    async with PolicyStub([[("add", {"n": 1})], "half \ud83d of a pair"]) as odd, PolicyStub(SCRIPT) as even:
        await gym.begin_rollout(f"{rollout}-odd", task_of(), odd.address)
        failure = (await gym.result_of(f"{rollout}-odd"))["failure"]
        await gym.begin_rollout(
            f"{rollout}-even", task_of(), even.address, limits={"max_turns": 1, "episode_ms": 60_000}
        )
        body = (await gym.result_of(f"{rollout}-even"))["body"]
    assert ("result_not_representable", True) == (failure["kind"], failure["terminal"])
    assert "truncated" == body["outcome"]


async def test_a_taxi_ride_survives_a_kill(tmp_path: Path) -> None:
    """C60 end to end: a ride with several steps per turn goes on from its boundary."""
    actions = ["south", "north", "east", "west", "pickup", "dropoff"]
    script: list[Any] = [[("step", {"action": actions[(turn + n) % 6]}) for n in range(2)] for turn in range(5)]
    async with PolicyStub(script) as policy:
        limits = {"max_turns": 5, "episode_ms": 600_000}
        ride: dict[str, Any] = {"environment": "taxi", "limits": limits, "seed": 3}
        async with gym_at(tmp_path, "one") as gym:
            await gym.begin_rollout("whole", {"seed": 11}, policy.address, **ride)
            expected = (await gym.result_of("whole"))["body"]
            policy.hold("cut", 4)
            await gym.begin_rollout("cut", {"seed": 11}, policy.address, **ride)
            await until(lambda: "4" in policy.turns_of("cut"), "turn 4 is asked")
            await turns_done(gym, "cut", 3)
            cuts = await gym.snapshot()
            await gym.kill()
            policy.release("cut", 4)
            await gym.start()
            await gym.adopt()
            await gym.restore(cuts, attempt=1)
            found = (await gym.result_of("cut"))["body"]
    assert expected == found
    assert ("truncated", 5) == (found["outcome"], found["turns"])
    assert ["1", "2", "3", "4", "4", "5"] == policy.turns_of("cut")
    assert {3} == {asked.body["seed"] for asked in policy.asked}
