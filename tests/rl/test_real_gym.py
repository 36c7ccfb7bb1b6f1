# SPDX-License-Identifier: Apache-2.0
"""Both commands as processes over loopback: the worked example in every column."""

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.rl.harness import events_of, results_of, until
from tests.rl.policy import Policy, serving
from tests.rl.processes import Process, event, gym_process, rl_process

TURNS = 5
REDONE = {0: 6, 1: 6, 2: 6, 3: 0}


def settings(column: int, policy: Policy) -> dict[str, Any]:
    """Return run.yaml for one group of three on Taxi."""
    return {
        "run_id": "worked",
        "run_dir": "run",
        "column": column,
        "gyms": [{"alias": "gym", "announce": "announce.json"}],
        "policy": {"base_url": policy.url, "model": "m", "api": "chat_completions"},
        "tasks": {"environment": "taxi", "groups": 1, "siblings": 3, "max_turns": TURNS, "task": {"seed": 7}},
    }


async def crash(directory: Path, client: Process, policy: Policy, gym: Process) -> None:
    """Wait for A finished, B 2 turns, C 4 turns; snapshot; kill everything."""
    await event(directory, "trained", client)
    await until(lambda: policy.asked[1, 3] and policy.asked[2, 5], "B's third and C's fifth turn are asked for")
    client.send(signal.SIGUSR1)
    await event(directory, "snapshot_published", client)
    await client.kill()
    await gym.kill()


@pytest.mark.parametrize(("column", "processes"), [(0, "one"), (1, "one"), (2, "one"), (3, "one"), (3, "three")])
async def test_the_worked_example(tmp_path: Path, column: int, processes: str) -> None:
    """A has finished, B has 2 turns and C has 4 at the crash: 6 turns are redone in columns 0 to 2, 0 in column 3."""
    (tmp_path / "run" / "snapshots").mkdir(parents=True)
    async with serving(Policy()) as policy:
        policy.hold_from = {1: 3, 2: 5}
        async with (
            gym_process(tmp_path, processes) as gym,
            rl_process(tmp_path, **settings(column, policy)) as client,
        ):
            await crash(tmp_path, client, policy, gym)
        before = policy.completed.copy()
        await policy.let_all()
        lines = len(events_of(tmp_path / "run"))
        async with (
            gym_process(tmp_path, processes),
            rl_process(tmp_path, **settings(column, policy)) as client,
        ):
            assert await client.wait() == 0, client.output.read_text()
        redone = sum(policy.completed[key] - 1 for key in before if policy.completed[key] > 1)
        assert REDONE[column] == redone, events_of(tmp_path / "run")[lines:]
        assert [(s, TURNS) for s in range(3)] == [
            (r["sibling"], r["body"]["turns"]) for r in results_of(tmp_path / "run")
        ]
        protocol = [c for c in policy.calls if any(name.lower().startswith("gym-") for name in c.headers)]
        assert (column >= 2) == bool(protocol)


@pytest.mark.parametrize("also_rl", [False, True])
async def test_a_gym_that_keeps_its_incarnation_goes_on(tmp_path: Path, also_rl: bool) -> None:
    """C25, N18: SIGKILL of a Gym with its own log, and of RL with it: adopted at its new address, nothing restored.

    Every finished turn is there, live rollouts go on as the same attempt, nothing is doubled: the turns that were
    held are asked for again, and no other.
    """
    (tmp_path / "run" / "snapshots").mkdir(parents=True)
    config = settings(3, Policy()) | {"trainer": {"survives": True}, "recovery": {"health_s": 0.3}}
    async with serving(Policy()) as policy, contextlib.AsyncExitStack() as clients:
        config["policy"]["base_url"] = policy.url
        policy.hold_from = {1: 3, 2: 5}
        async with gym_process(tmp_path, data_dir="data") as gym:
            client = await clients.enter_async_context(rl_process(tmp_path, **config))
            await event(tmp_path, "acked", client)
            await until(lambda: policy.asked[1, 3] and policy.asked[2, 5], "B's third and C's fifth turn are asked for")
            await gym.kill()
            if also_rl:
                await client.kill()
        before = policy.completed.copy()
        lines = len(events_of(tmp_path / "run"))
        async with gym_process(tmp_path, data_dir="data"):
            if also_rl:
                client = await clients.enter_async_context(rl_process(tmp_path, **config))
            found = await event(tmp_path, "restarted" if also_rl else "gym_recovered", client, after=lines)
            assert "adopted" == (found["gyms"]["gym"] if also_rl else found["how"])
            assert {1: 2, 2: 4} == {r["sibling"]: r["turns_done"] for r in found["rollouts"] if r["how"] == "adopted"}
            await until(lambda: policy.asked[1, 3] > 1 and policy.asked[2, 5] > 1, "both go on")
            client.send(signal.SIGUSR1)
            saved = await event(tmp_path, "snapshot_published", client, after=lines)
            assert 2 == saved["turn"]
            await policy.let_all()
            assert 0 == await client.wait(), client.output.read_text()
        assert [] == [key for key in before if policy.completed[key] > 1]
        assert {(s, t): 1 for s in range(3) for t in range(1, TURNS + 1)} | {(1, 3): 2, (2, 5): 2} == policy.asked
        assert [(s, 0) for s in range(3)] == [(r["sibling"], r["attempt"]) for r in results_of(tmp_path / "run")]
        assert not [e for e in events_of(tmp_path / "run") if e["event"] in ("restore_failed", "surplus", "retried")]
