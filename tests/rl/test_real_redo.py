# SPDX-License-Identifier: Apache-2.0
"""Whole groups redone at a restart, with a real Gym."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.crash_matrix.bench import BOUND_S, Bench
from tests.crash_matrix.forks import ForkServer
from tests.rl.harness import until
from tests.rl.policy import Policy
from tests.rl.real import TAXI, bench_of, ended_well, hows, snapshot
from tests.rl.relay import relaying

pytestmark = pytest.mark.asyncio(loop_scope="session")

GROUPS = TAXI | {"groups": 2}
REDO = {"granularity": "prompt_group", "gateway": True, "recovery": {"redo_groups": True}}
A, B, C = "m_g0_s0", "m_g0_s1", "m_g0_s2"


def rows_of(bench: Bench) -> set[tuple[str, int, int]]:
    """Return (rollout, attempt, turn) of every token row in the data plane."""
    with contextlib.closing(
        sqlite3.connect(f"{(bench.run_dir / 'dataplane.sqlite').as_uri()}?mode=ro", uri=True)
    ) as con:
        return set(con.execute("SELECT rollout_id, attempt, turn FROM rows"))


async def stale(bench: Bench, rollout_id: str, attempt: int) -> str:
    """Send the Gym a late start of an attempt that is over; return its outcome."""
    async with bench.http() as http:
        url = f"{bench.urls()['gym']}/gym-checkpoint/v1"
        async with http.get(f"{url}/checkpoint") as reply:
            status, incarnation = await reply.json(), reply.headers["Gym-Incarnation"]
        headers = {
            "Gym-Controller-Id": status["controller"]["id"],
            "Gym-Controller-Epoch": str(status["controller"]["epoch"]),
            "Gym-Expect-Incarnation": incarnation,
        }
        start = {"rollout_id": rollout_id, "attempt": attempt, "environment": "taxi", "task": {"seed": 7}}
        policy = {"base_url": bench.policy.url, "model": "m", "api": "chat_completions"}
        body = {"policy": policy, "rollouts": [start | {"task_digest": "late"}]}
        async with http.post(f"{url}/rollouts", json=body, headers=headers) as reply:
            return str((await reply.json())["outcomes"][0]["outcome"])


async def uninterrupted(forks: ForkServer, directory: Path) -> dict[tuple[int, int], Any]:
    """Return the bodies of the same work without a crash."""
    async with bench_of(forks, directory, Policy(), GROUPS, **REDO) as bench:
        await bench.start_gym()
        await bench.start_rl()
        return {(row["group"], row["sibling"]): row["body"] for row in await ended_well(bench)}


@pytest.mark.timeout(120)
async def test_whole_groups_are_redone_against_a_real_gym(tmp_path: Path, forks: ForkServer) -> None:
    """CKPT-RESTART-060, CKPT-RESTART-065: twice, with the Gym alive and with everything lost: new ids, trained once.

    Of group 0 A has finished and is released, B has 2 turns, C has 4 when RL dies; group 1 is whole and stays. The Gym
    lives: all three are retired there, and late calls are stale. Then everything dies: no name is used again. Training
    sees each sibling once, with the body of an uninterrupted run and a token row for each of its turns.
    """
    wanted = await uninterrupted(forks, tmp_path / "whole")
    policy = Policy(hold_from={1: 3, 2: 5, 1000: 2, 1001: 2, 1002: 2})
    async with (
        bench_of(forks, tmp_path / "killed", policy, GROUPS, **REDO) as bench,
        relaying(lambda: bench.urls()["gym"]) as relay,
    ):
        bench.through = {"gym": relay.url}
        await bench.start_gym()
        await bench.start_rl()
        asked = policy.was_asked
        await until(lambda: asked(B, 3) and asked(C, 5) and asked("_g1_s0", 2), "B and C hold turns", BOUND_S)
        await bench.event("acked")
        await snapshot(bench)
        await policy.let({1000: 99, 1001: 99, 1002: 99})
        await bench.event("trained")  # ahead of the snapshot: the next RL goes back and adopts nothing
        await policy.let({0: 2, 1: 2, 2: 2})
        await bench.kill({"rl"}, "quiet")
        calls, lines = len(policy.calls), len(bench.all_events())
        await bench.bring_back()
        restarted = await bench.event("restarted", after=lines)
        assert {A: f"{A}.r1", B: f"{B}.r1", C: f"{C}.r1"} == restarted["redone"]
        assert {"gym": "restored"} == restarted["gyms"]
        assert {("restarted", 0)} == {how for name, how in hows(restarted).items() if "_g0_" in name}
        await until(lambda: all(asked(f"{name}.r1", 2) for name in (A, B, C)), "all three run anew", BOUND_S)
        retired = [row for asked in relay.seen if asked.operation == "retire" for row in asked.body["rollouts"]]
        assert [{"rollout_id": name, "through_attempt": 0} for name in (A, B, C)] == retired
        assert {"not_found"} == {(await bench.ask("gym", f"rollouts/{name}"))["code"] for name in (B, C)}
        assert ["stale_attempt"] * 2 == [await stale(bench, name, 0) for name in (B, C)]
        assert {f"{name}.r1" for name in (A, B, C)} == {call.rollout_id for call in policy.calls[calls:]}
        await snapshot(bench)
        await bench.kill({"all"}, "quiet", lose_disk=True)
        calls, lines = len(policy.calls), len(bench.all_events())
        await bench.bring_back()
        restarted = await bench.event("restarted", after=lines)
        assert {f"{name}.r1": f"{name}.r2" for name in (A, B, C)} == restarted["redone"]
        await until(lambda: all(asked(f"{name}.r2", 2) for name in (A, B, C)), "all three run anew", BOUND_S)
        assert "stale_attempt" == await stale(bench, f"{B}.r1", 1), "the new Gym has never seen it"
        samples = await ended_well(bench)
        assert {f"{name}.r2" for name in (A, B, C)} == {call.rollout_id for call in policy.calls[calls:]}
        assert wanted == {(row["group"], row["sibling"]): row["body"] for row in samples}
        names = [f"{name}.r2" for name in (A, B, C)] + [f"m_g1_s{n}" for n in range(3)]
        assert names == [row["rollout_id"] for row in samples]
        used = {(row["rollout_id"], row["attempt"], turn) for row in samples for turn in range(1, 6)}
        assert used <= rows_of(bench), "every turn that is trained has its row"
        assert {3} == {len(event["rollouts"]) for event in bench.events("trained")}, "groups are trained whole"
