# SPDX-License-Identifier: Apache-2.0
"""Every call of a real RL client × every fault, before one participant of a real Gym.

One test goes through every call, each with another fault; which one it is with, the seed of the test run says. With
the variable `EVERY_FAULT` there are as many tests as faults: between them each call meets each fault.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.crash_matrix import judge
from tests.crash_matrix.bench import BOUND_S, Bench
from tests.crash_matrix.forks import ForkServer
from tests.rl.harness import until
from tests.rl.policy import Policy
from tests.rl.real import PROCESSES, A, B, C, all_open, any_end, bench_of, ended_well, hows, until_true
from tests.rl.relay import PASS, Asked, relaying
from tests.rl.scripted import FAULTS
from tests.rl.world import world_server

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

OF_WORK = ("start", "results", "acks", "listing", "retire")
OF_A_SNAPSHOT = ("prepare", "commit", "abort", "resume", "renew", "status")
OF_A_RESTART = ("capabilities", "restore")
CALLS = (*OF_WORK, *OF_A_SNAPSHOT, *OF_A_RESTART)
SPOILED = {"prepare", "commit", "abort"}
"""Whose fault costs the snapshot; with the others it is published all the same."""

ALWAYS = 1_000_000


@dataclass
class Faults:
    """Which fault meets which call, and how often."""

    rotation: int
    left: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)

    def of(self, call: str) -> str:
        """Return the fault of a call in this rotation."""
        return FAULTS[(CALLS.index(call) + self.rotation) % len(FAULTS)]

    def rule(self, asked: Asked) -> str:
        """Spoil a call for as long as its fault lasts."""
        call = _call(asked)
        if self.left[call] <= 0:
            return PASS
        self.left[call] -= 1
        self.met[call] += 1
        return self.of(call)


def _call(asked: Asked) -> str:
    if asked.operation == "rollouts":
        return "start" if asked.method == "POST" else "listing"
    return "status" if asked.operation == "checkpoint" else asked.operation


def outside(seed: int, turn: int) -> tuple[str, dict[str, Any]]:
    """Ask the world in the second turn of B, count otherwise."""
    return ("world", {"tag": "t"}) if (seed, turn) == (1, 2) else ("add", {"n": turn})


@pytest.mark.parametrize("rotation", range(len(FAULTS)) if os.environ.get("EVERY_FAULT") else [None])
async def test_no_fault_of_any_call_ends_the_run(tmp_path: Path, forks: ForkServer, rotation: int | None) -> None:
    """C20: the run goes on, the snapshot before is in use, the counter says 1, every gate is open, the next is good.

    Faults of starts, results, ACKs and of the retiring of a stopped rollout lose and double nothing; those of a restart
    are tried again.
    """
    faults = Faults(random.randrange(len(FAULTS)) if rotation is None else rotation)
    faults.left.update(dict.fromkeys(OF_WORK, 1))
    policy = Policy(hold_from={1: 3, 2: 3}, tool=outside)
    wish: dict[str, Any] = {
        "snapshot": {"timeout_ms": 800, "durable_timeout_ms": 1500, "lease_ms": 1200, "backoff_s": 0.01},
        "client": {"attempts": 2, "first_wait_s": 0.01, "longest_wait_s": 0.02, "call_ms": 800, "grace_s": 0.3},
        "recovery": {"restore_tries": 20},
    }
    async with world_server() as world:
        world.failing = {B}
        task = {"seed": 7, "world_url": world.url, "verify_in_world": False}
        tasks = {"environment": "conformance", "groups": 1, "siblings": 3, "max_turns": 12, "task": task}
        gym = {"conformance": {"world_url": world.url}, "limits": {"max_wait_ms": 500}}
        async with (
            bench_of(forks, tmp_path / "b", policy, tasks, parts=PROCESSES, gym=gym, **wish) as bench,
            relaying(lambda: bench.urls()["agent"]) as relay,
        ):

            async def renewed(asked: Asked) -> None:
                if asked.operation == "commit":
                    await until(lambda: faults.met["renew"], "a capture that takes longer than a third of the lease")

            bench.through = {"agent": relay.url}
            relay.rule = faults.rule
            await bench.start_gym()
            await bench.start_rl()
            await until(lambda: policy.was_asked(C, 3) and A in bench.saved(), "A has finished", BOUND_S)
            assert [B] == (await bench.event("restarted_in_place"))["rollouts"]
            await until(lambda: policy.was_asked(B, 3), "B has begun again", BOUND_S)
            await bench.event("acked")
            assert set(OF_WORK) == faults.met.keys(), "each of them was met"
            await good(bench)
            for turn, call in enumerate(OF_A_SNAPSHOT, 4):
                await policy.let({2: turn})
                await until(lambda turn=turn: policy.was_asked(C, turn), "there is something new to save", BOUND_S)  # type: ignore[misc]
                relay.before = renewed if call == "renew" else None
                await one_fault(bench, faults, call)
                relay.before = None
                await good(bench)
            await bench.kill({"all"}, "quiet", lose_disk=True)
            faults.left.update(dict.fromkeys(OF_A_RESTART, 1))
            lines = len(bench.all_events())
            await bench.bring_back()
            found = hows(await bench.event("restarted", after=lines))
            assert {B: ("continued", 2), C: ("continued", 8)}.items() <= found.items()
            assert set(CALLS) == faults.met.keys()
            samples = await ended_well(bench)
            assert [A, B, C] == [row["rollout_id"] for row in samples]
            assert [] == judge.regenerated(bench)


async def good(bench: Bench) -> None:
    """Take snapshots until nothing is left to save: a machine under load may need more than one try."""
    while (await any_end(bench))["event"] == "snapshot_failed":
        await until_true(lambda: all_open(bench), "every gate is open")


async def one_fault(bench: Bench, faults: Faults, call: str) -> None:
    """Spoil one call of one snapshot, and look at what is left."""
    before, events = bench.newest(), len(bench.all_events())
    faults.left[call] = ALWAYS
    if call == "abort":
        faults.left["commit"] = ALWAYS
    found = await any_end(bench)
    faults.left.clear()
    what = f"{faults.of(call)} at {call}"
    if call in SPOILED:
        assert ("snapshot_failed", "gym/agent", 1) == tuple(
            found[name] for name in ("event", "participant", "consecutive")
        ), what
        assert before == bench.newest(), what
    else:
        assert "snapshot_published" == found["event"], (what, found)
    if call == "resume":
        assert 1 == len(bench.events("resume_failed", after=events))
    await until_true(lambda: all_open(bench), f"every gate is open after {what}")
    assert bench.state() != "Z"
