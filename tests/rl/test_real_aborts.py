# SPDX-License-Identifier: Apache-2.0
"""Aborts of a real RL client that reach a real Gym at awkward moments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.crash_matrix.bench import BOUND_S, Bench
from tests.crash_matrix.forks import ForkServer
from tests.rl.harness import until
from tests.rl.policy import Policy
from tests.rl.real import A, B, any_end, bench_of, ended_well, snapshot
from tests.rl.relay import KEEP, LOST, PASS, Relay, relaying
from tests.rl.world import world_server

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

BYTES = 60_000_000
"""Of state, so that its writing takes longer than RL waits."""


def grow_then_ask(seed: int, turn: int) -> tuple[str, dict[str, Any]]:
    """Hold much state after the first turn, and ask the world in the third."""
    if turn == 1 and seed == 1:
        return "grow", {"bytes": BYTES}
    return ("world", {"tag": "t"}) if turn == 3 else ("add", {"n": 1})


async def ended(bench: Bench, checkpoint_id: str) -> None:
    """See the Gym idle and open, its last checkpoint aborted without a manifest."""
    status = await bench.ask("gym", "checkpoint")
    assert ("idle", "open") == (status["phase"], status["gate"])
    last = status["last"]
    assert (checkpoint_id, "aborted", None) == (last["checkpoint_id"], last["ended_as"], last["manifest"])


async def test_aborts_at_awkward_moments(tmp_path: Path, forks: ForkServer) -> None:
    """C22: while a commit writes, while prepare polls, twice at once, before prepare: bounded, open, never published.

    Each ends one snapshot of RL; whatever arrives late is refused, and the next snapshot is good.
    """
    policy = Policy(hold_from={0: 3, 1: 3}, tool=grow_then_ask)
    async with world_server() as world:
        task = {"seed": 7, "world_url": world.url, "verify_in_world": False}
        tasks = {"environment": "conformance", "siblings": 2, "groups": 1, "max_turns": 4, "task": task}
        gym = {"conformance": {"world_url": world.url}}
        wish: dict[str, Any] = {
            "snapshot": {"timeout_ms": 400, "durable_timeout_ms": 1, "failures_before_fallback": 1000},
            "client": {"attempts": 1, "call_ms": 2000, "grace_s": 1.0},
        }
        async with (
            bench_of(forks, tmp_path / "b", policy, tasks, gym=gym, **wish) as bench,
            relaying(lambda: bench.urls()["gym"]) as relay,
        ):
            bench.through = {"gym": relay.url}
            await bench.start_gym()
            await bench.start_rl()
            await until(lambda: policy.was_asked(A, 3) and policy.was_asked(B, 3), "both hold two turns", BOUND_S)
            await while_it_writes(bench, relay)
            await before_prepare(bench, relay)
            world.held = (A,)
            await policy.let({0: 4})
            await until(lambda: world.asked, "a tool is under way", BOUND_S)
            await while_prepare_polls(bench, relay)
            ended_so = {event["checkpoint_id"] for event in bench.events("snapshot_failed")}
            assert not ended_so & {path.parent.name for path in bench.run_dir.rglob("manifest.json")}
            await world.let_go()
            await bench.kill({"rl"}, "quiet")
            bench.change(snapshot={"durable_timeout_ms": 20_000, "timeout_ms": 20_000})
            lines = len(bench.all_events())
            await bench.bring_back()
            await bench.event("restarted", after=lines)
            await snapshot(bench)
            await ended_well(bench)


async def while_it_writes(bench: Bench, relay: Relay) -> None:
    """RL does not wait for the writing: its abort comes twice, and stops it."""
    relay.copies = lambda asked: 2 if asked.operation == "abort" else 1
    found: list[Any] = []
    while found != ["durable", *[("idle", "aborted")] * 2]:  # under load everything may be written by then
        relay.doubled.clear()
        failed = await any_end(bench)
        replies = [json.loads(data) for _, _, data in relay.doubled]
        found = [failed.get("step"), *[(reply.get("phase"), reply.get("ended_as")) for reply in replies]]
    relay.copies = lambda asked: 1
    await ended(bench, failed["checkpoint_id"])


async def before_prepare(bench: Bench, relay: Relay) -> None:
    """RL gives up a prepare that is still under way: it arrives behind its abort, and closes nothing."""
    relay.rule = lambda asked: KEEP if asked.operation == "prepare" else PASS
    failed = await snapshot(bench, "failed")
    relay.rule = lambda asked: PASS
    await ended(bench, failed["checkpoint_id"])
    assert ["stale_checkpoint"] == [reply["code"] for reply in await relay.send_kept()]
    await ended(bench, failed["checkpoint_id"])


async def while_prepare_polls(bench: Bench, relay: Relay) -> None:
    """RL loses the connection of a prepare that a slow tool keeps waiting: the abort answers it at once."""
    relay.rule = lambda asked: LOST if asked.operation == "prepare" else PASS
    failed = await snapshot(bench, "failed")
    relay.rule = lambda asked: PASS
    assert ("prepare", "gym/gym") == (failed["step"], failed["participant"])
    (prepare,) = relay.lost
    status, _, data = await prepare
    assert (409, "stale_checkpoint") == (status, json.loads(data)["code"])
    await ended(bench, failed["checkpoint_id"])
