# SPDX-License-Identifier: Apache-2.0
"""Snapshots that meet slow tools, faults and deaths, with a real Gym in three processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.crash_matrix import judge
from tests.crash_matrix.bench import BOUND_S
from tests.crash_matrix.forks import ForkServer
from tests.rl.harness import until
from tests.rl.policy import Policy
from tests.rl.real import PROCESSES, A, B, all_open, any_end, begin, bench_of, ended_well, hows, snapshot, until_true
from tests.rl.relay import Asked, relaying
from tests.rl.world import World, world_server

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

SLOW = A
"""Whose tool takes ten minutes."""


def outside(seed: int, turn: int) -> tuple[str, dict[str, Any]]:
    """Ask the world in the second turn, count in the others."""
    return ("world", {"tag": "t"}) if turn == 2 else ("add", {"n": seed % 1000})


def conformance(world: World, **changes: Any) -> dict[str, Any]:
    """Return tasks in the conformance environment."""
    task = {"seed": 7, "world_url": world.url, "verify_in_world": False}
    return {"name": "c", "environment": "conformance", "max_turns": 5, "task": task} | changes


async def test_one_slow_tool_among_many_rollouts(tmp_path: Path, forks: ForkServer) -> None:
    """N13: a tool that does not return: it alone is left out, the snapshot is published while it still runs.

    Agent and resources agree about the 39 others, which continue after everything was lost; the blocked one starts
    again.
    """
    seeds = [1000 * group + sibling for group in range(10) for sibling in range(4)]
    policy = Policy(hold_from=dict.fromkeys(seeds, 4), tool=outside)
    async with world_server() as world:
        world.held = (SLOW,)
        tasks = conformance(world, groups=10, siblings=4)
        wish: dict[str, Any] = {"snapshot": {"timeout_ms": 300, "leave_out_blocked": True}}
        gym = {"conformance": {"world_url": world.url}}
        async with bench_of(forks, tmp_path / "b", policy, tasks, parts=PROCESSES, gym=gym, **wish) as bench:
            await bench.start_gym()
            await bench.start_rl()
            last = policy.last_asked
            await until(lambda: sorted(last().values()) == [2, *[4] * 39], "39 hold three turns", BOUND_S)
            published = await snapshot(bench)
            assert (SLOW,) == world.held, "the tool still runs"
            # One limit for each of the stages that it blocks, and the writing; a machine under load is slow.
            assert published["prepared_ms"] < 5_000
            newest = bench.newest()
            assert newest is not None
            lines = (newest / "restarts.jsonl").read_text().splitlines()
            assert [(SLOW, "blocked")] == [(row["rollout_id"], row["reason"]) for row in map(json.loads, lines)]
            saved = judge.store_of(bench).verify(judge.store_of(bench).ids()[0])
            agent, resources = saved.index("gym", "agent"), saved.index("gym", "resources")
            assert ("restart", "blocked") == (agent[SLOW].state, agent[SLOW].reason)
            others = agent.keys() - {SLOW}
            assert {("turn", 3)} == {(agent[name].state, agent[name].turns_done) for name in others}
            assert {name: agent[name].effects for name in others} == {name: resources[name].effects for name in others}
            await bench.kill({"all"}, "quiet", lose_disk=True)
            await world.let_go()
            at = len(bench.all_events())
            await bench.bring_back()
            found = hows(await bench.event("restarted", after=at))
            assert {("continued", 3)} == {found[name] for name in others}
            assert ("restarted", 0) == found[SLOW]
            samples = await ended_well(bench)
            assert 40 == len(samples)
            assert [] == judge.regenerated(bench)
            assert 41 == len(world.asked), "nobody but the blocked one asked the world again"


async def test_a_tool_that_blocks_leads_to_column_2_and_back(tmp_path: Path, forks: ForkServer) -> None:
    """C21: three prepares time out in a row: the last good snapshot loads, column 2; the next try is normal."""
    policy = Policy(hold_from={0: 2, 1: 2}, tool=outside)
    async with world_server() as world:
        world.held = (A,)
        tasks = conformance(world, groups=1, siblings=2)
        wish: dict[str, Any] = {"snapshot": {"timeout_ms": 300}}
        gym = {"conformance": {"world_url": world.url}}
        async with bench_of(forks, tmp_path / "b", policy, tasks, parts=PROCESSES, gym=gym, **wish) as bench:
            await bench.start_gym()
            await bench.start_rl()
            await until(lambda: policy.was_asked(A, 2) and policy.was_asked(B, 2), "both hold a turn", BOUND_S)
            good = (await snapshot(bench))["checkpoint_id"]
            await policy.let({0: 99})
            await until(lambda: world.asked, "the tool is under way", BOUND_S)
            assert [1, 2, 3] == [(await snapshot(bench, "failed"))["consecutive"] for _ in range(3)]
            assert ["column 2"] == [event["mode"] for event in bench.events("snapshot_mode")]
            store = judge.store_of(bench)
            held = {str(one): store.verify(one).manifest.gyms[0].included for one in store.ids()}
            assert [good] == [name for name, there in held.items() if there], "the last full one is still there"
            assert await all_open(bench)
            await world.let_go()
            await until(lambda: policy.was_asked(A, 3), "the tool is done", BOUND_S)
            while len(bench.events("snapshot_mode")) < 2:  # a machine under load may need more than one try
                await any_end(bench)
            assert ["column 2", "full"] == [event["mode"] for event in bench.events("snapshot_mode")]
            await ended_well(bench)


async def test_a_target_that_is_not_empty(tmp_path: Path, forks: ForkServer) -> None:
    """C23: somebody wrote into the directory of one of three: it refuses, all three end idle and open, nothing is kept.

    What was written there is not touched by the participant; the next snapshot is good.
    """
    policy = Policy(hold_from={1: 3, 2: 5})
    async with (
        bench_of(forks, tmp_path / "b", policy, parts=PROCESSES) as bench,
        relaying(lambda: bench.urls()["model"]) as relay,
    ):

        async def write(asked: Asked) -> None:
            if asked.operation == "commit":
                (Path(asked.body["target"]["path"]) / "rollouts.jsonl").write_bytes(b"somebody's\n")

        bench.through = {"model": relay.url}
        await begin(bench)
        relay.before = write
        failed = await snapshot(bench, "failed")
        assert "target_exists" in failed["reason"]
        assert "gym/model" == failed["participant"]
        assert await all_open(bench)
        assert [] == judge.store_of(bench).ids()
        relay.before = None
        await snapshot(bench)
        await ended_well(bench)


async def test_a_controller_that_dies_with_everything_prepared(tmp_path: Path, forks: ForkServer) -> None:
    """C26: RL dies at `snapshot.prepared`: after the lease every gate is open, and the rollouts finish without it.

    The next RL finds their results.
    """
    policy = Policy(hold_from={1: 3, 2: 5})
    wish: dict[str, Any] = {"snapshot": {"lease_ms": 1000}, "trainer": {"survives": True}}
    async with bench_of(forks, tmp_path / "b", policy, parts=PROCESSES, **wish) as bench:
        await begin(bench, "snapshot.prepared:1")
        assert bench.client is not None
        bench.client.send(signal.SIGUSR1)
        await bench.stopped_at("snapshot.prepared")
        gates = {status["gate"] for status in (await bench.statuses()).values()}
        await bench.kill({"rl"}, "snapshot.prepared")
        assert {"closed"} == gates
        await policy.let_all()

        async def both_finished() -> bool:
            return bool((await bench.ask("agent", "checkpoint"))["counts"]["finished_unreleased"] == 2)

        await until_true(lambda: all_open(bench), "the lease opened every gate")
        await until_true(both_finished, "both finish with nobody there")
        lines = len(bench.all_events())
        await bench.bring_back()
        assert {"gym": "adopted"} == (await bench.event("restarted", after=lines))["gyms"]
        samples = await ended_well(bench)
        assert [0, 0, 0] == [row["attempt"] for row in samples]
