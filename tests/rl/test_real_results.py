# SPDX-License-Identifier: Apache-2.0
"""Results and their ACKs through the death of either side, with a real Gym."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.crash_matrix import judge
from tests.crash_matrix.bench import BOUND_S
from tests.crash_matrix.forks import ForkServer
from tests.rl.harness import until
from tests.rl.policy import Policy
from tests.rl.real import PROCESSES, SURVIVES, TAXI, A, B, C, begin, bench_of, ended_well, hows, snapshot
from tests.rl.relay import PASS, Asked, relaying
from tests.rl.world import world_server

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]


async def test_results_survive_a_client_that_never_sent_an_ack(tmp_path: Path, forks: ForkServer) -> None:
    """C01, C07: five finish, the first page of results is lost on its way, RL dies before its first ACK.

    The Gym lives and is adopted: its feed serves exactly these five again, all are released, and then it is empty.
    """
    dropped: list[Asked] = []

    def lose_the_first(asked: Asked) -> str:
        if asked.operation != "results" or dropped or len(finished) < 5:
            return "503" if asked.operation == "acks" else PASS
        dropped.append(asked)
        return "reset_after"

    finished: list[str] = []
    policy = Policy(hold_from=dict.fromkeys(range(5), 5))
    tasks = TAXI | {"siblings": 5}
    async with (
        bench_of(forks, tmp_path / "b", policy, tasks, **SURVIVES) as bench,
        relaying(lambda: bench.urls()["gym"]) as relay,
    ):
        relay.rule = lose_the_first
        bench.through = {"gym": relay.url}
        await bench.start_gym()
        await bench.start_rl()
        await until(
            lambda: all(policy.was_asked(f"_s{n}", 5) for n in range(5)), "five are at their last turn", BOUND_S
        )
        finished += [f"m_g0_s{n}" for n in range(5)]
        await policy.let_all()
        await until(lambda: dropped and len(bench.saved()) == 5, "lost once, then five are saved", BOUND_S)
        await bench.kill({"rl"}, "quiet")
        assert [] == bench.events("acked")
        feed = await bench.ask("gym", "results")
        assert sorted(finished) == sorted(entry["receipt"]["rollout_id"] for entry in feed["results"])
        relay.rule = lambda asked: PASS
        lines = len(bench.all_events())
        await bench.bring_back()
        samples = await ended_well(bench)
        assert {"gym": "adopted"} == (await bench.event("restarted", after=lines))["gyms"]
        assert finished == [row["rollout_id"] for row in samples]
        assert [] == (await bench.ask("gym", "results"))["results"]
        assert 5 == (await bench.ask("gym", "checkpoint"))["counts"]["released"]
        assert [] == [asked for asked in relay.seen if asked.operation == "restore"]


async def test_an_unacknowledged_sibling_is_in_the_cut(tmp_path: Path, forks: ForkServer) -> None:
    """C02: one of three siblings finished and no ACK gets through: prepare is ready, the result is in the snapshot.

    The other two are parked with their turns. After everything is lost all three are accounted for, and training takes
    the group whole.
    """
    policy = Policy(hold_from={1: 3, 2: 5})
    async with (
        bench_of(forks, tmp_path / "b", policy, parts=PROCESSES, granularity="prompt_group") as bench,
        relaying(lambda: bench.urls()["agent"]) as relay,
    ):
        relay.rule = lambda asked: "503" if asked.operation in ("acks", "results") else PASS
        bench.through = {"agent": relay.url}
        await bench.start_gym()
        await bench.start_rl()
        asked = policy.was_asked
        await until(lambda: asked(A, 5) and asked(B, 3) and asked(C, 5), "all hold turns", BOUND_S)

        async def finished() -> bool:
            return bool((await bench.ask("agent", "checkpoint"))["counts"]["finished_unreleased"])

        while not await finished():
            await until(lambda: bench.state() != "Z", "RL lives")
        published = await snapshot(bench)
        assert (2, 1) == (published["turn"], published["finished"])
        await bench.kill({"all"}, "quiet", lose_disk=True)
        relay.rule = lambda asked: PASS
        lines = len(bench.all_events())
        await bench.bring_back()
        restarted = await bench.event("restarted", after=lines)
        assert {A: "kept", B: "continued", C: "continued"} == {name: how for name, (how, _) in hows(restarted).items()}
        samples = await ended_well(bench)
        assert [(A, 0), (B, 1), (C, 1)] == [(row["rollout_id"], row["attempt"]) for row in samples]
        assert [3] == [len(event["rollouts"]) for event in bench.events("trained")]
        assert [] == judge.regenerated(bench)


async def test_every_rollout_is_counted_once_through_a_restore(tmp_path: Path, forks: ForkServer) -> None:
    """C08: of 32 ten are released, 15 can be captured and 7 start again: 10 + 15 + 7, and no rollout twice."""
    seeds = [1000 * group for group in range(32)]
    policy = Policy(hold_from=dict.fromkeys(seeds[10:], 3), tool=lambda seed, turn: ("add", {"n": turn}))
    async with world_server() as world:
        task = {"seed": 7, "world_url": world.url, "verify_in_world": False}
        one = {"siblings": 1, "max_turns": 4, "task": task}
        tasks = [
            one | {"name": "continues", "environment": "conformance", "groups": 25},
            one | {"name": "restarts", "environment": "conformance-restart", "groups": 7},
        ]
        gym = {"conformance": {"world_url": world.url}}
        async with bench_of(forks, tmp_path / "b", policy, tasks, parts=PROCESSES, gym=gym) as bench:
            await bench.start_gym()
            await bench.start_rl()
            last = policy.last_asked
            await until(lambda: sorted(last().values()) == [*[3] * 22, *[4] * 10], "22 hold two turns", BOUND_S)
            await until(lambda: sum(e.get("released", 0) for e in bench.events("acked")) == 10, "10 released", BOUND_S)
            published = await snapshot(bench)
            assert (15, 0, 7) == tuple(published[name] for name in ("turn", "finished", "restart"))
            await bench.kill({"all"}, "quiet", lose_disk=True)
            lines, calls = len(bench.all_events()), len(policy.calls)
            await bench.bring_back()
            found = hows(await bench.event("restarted", after=lines))
            sets = {
                how: {name for name, fate in found.items() if fate == how}
                for how in (("reused", 0), ("continued", 2), ("restarted", 0))
            }
            assert [10, 15, 7] == [len(names) for names in sets.values()]
            samples = await ended_well(bench)
            assert sorted(found) == sorted(row["rollout_id"] for row in samples)
            again = {(call.rollout_id, call.turn) for call in policy.calls[calls:] if call.turn < 3}
            assert {(name, turn) for name in sets["restarted", 0] for turn in (1, 2)} == again
            assert 32 == len({json.dumps(row["rollout_id"]) for row in samples})


async def test_a_gym_full_of_effects_under_way_is_restored(tmp_path: Path, forks: ForkServer) -> None:
    """N22: RL alone dies while effects of 24 rollouts are under way: the living Gym is restored within its limit.

    The calls of the agent that are dropped with their work, or held by the resources server that is restored first,
    starve nobody. One rollout is trained after the snapshot, so that RL goes back.
    """
    policy = Policy(hold_from={0: 1}, tool=lambda seed, turn: ("world", {"tag": "t"}) if seed else ("add", {"n": 1}))
    async with world_server() as world:
        world.pause_s = 0.6
        task = {"seed": 7, "world_url": world.url, "verify_in_world": False}
        one = {"environment": "conformance", "task": task}
        tasks = [
            one | {"name": "first", "groups": 1, "siblings": 1, "max_turns": 1},
            one | {"name": "others", "groups": 6, "siblings": 4, "max_turns": 20},
        ]
        gym = {"conformance": {"world_url": world.url}}
        async with bench_of(forks, tmp_path / "b", policy, tasks, parts=PROCESSES, gym=gym) as bench:
            await bench.start_gym()
            await bench.start_rl()
            await until(lambda: len(world.asked) == 24, "24 first effects are under way", BOUND_S)
            await snapshot(bench)
            await policy.let_all()
            await until(lambda: len(world.asked) >= 48, "24 second effects are under way", BOUND_S)
            await bench.event("trained")
            await bench.kill({"rl"}, "quiet")
            assert 1 == len(bench.events("finished"))
            lines = len(bench.all_events())
            await bench.bring_back()
            restarted = await bench.event("restarted", after=lines)
            world.pause_s = 0.0  # until here no rollout could have come to its end, however slow this machine is
            assert {"gym": "restored"} == restarted["gyms"]
            assert {("continued", 1): 24, ("reused", 0): 1} == Counter(hows(restarted).values())
            samples = await ended_well(bench)
            assert 25 == len(samples)
            assert [] == judge.regenerated(bench)


async def test_a_page_from_before_a_restore_comes_after_it(tmp_path: Path, forks: ForkServer) -> None:
    """N19: the page with C's result is on its way while the Gym is restored: read after that it is discarded.

    C goes on after the four turns that the snapshot holds, and is trained with the result that it has then.
    """
    policy = Policy(hold_from={1: 3, 2: 5})
    gym = {"limits": {"max_wait_ms": 200}}
    async with (
        bench_of(forks, tmp_path / "b", policy, parts=PROCESSES, gym=gym) as bench,
        relaying(lambda: bench.urls()["agent"]) as relay,
    ):
        bench.through = {"agent": relay.url}
        await begin(bench)
        await snapshot(bench)
        relay.rule = lambda asked: "503" if asked.operation == "results" else PASS
        await until(lambda: not relay.unanswered("results"), "nothing of RL waits for results", BOUND_S)
        await policy.let({2: 99})
        poll = next(asked for asked in reversed(relay.seen) if asked.operation == "results")
        late = await relay.send(poll)
        while not json.loads(late[2])["results"]:
            late = await relay.send(poll)
        (entry,) = json.loads(late[2])["results"]
        assert (C, 0) == (entry["receipt"]["rollout_id"], entry["receipt"]["attempt"])
        await policy.let({2: 5})
        await bench.kill({"resources"}, "quiet")
        await bench.bring_back()
        assert ("continued", 4) == hows(await bench.event("gym_recovered"))[C]
        pages = [late]
        relay.instead = lambda asked: pages.pop() if pages and asked.operation == "results" else None
        relay.rule = lambda asked: PASS
        discarded = await bench.event("page_discarded")
        assert json.loads(late[2])["feed"] == discarded["feed"]
        await until(lambda: policy.last_asked()[C] == 5, "C goes on", BOUND_S)
        assert C not in bench.saved()
        samples = await ended_well(bench)
        assert [(A, 0), (B, 1), (C, 1)] == [(row["rollout_id"], row["attempt"]) for row in samples]
        assert [] == bench.events("surplus")
        assert [] == judge.regenerated(bench)
