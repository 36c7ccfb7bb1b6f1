# SPDX-License-Identifier: Apache-2.0
"""The old controller sleeps through a whole takeover and wakes up: nothing changes, and it ends by itself."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from reference_rl.errors import Superseded
from spec.wire import bytes_digest
from tests.crash_matrix import judge
from tests.crash_matrix.bench import BOUND_S, STOPPED, Bench
from tests.crash_matrix.forks import fork_server
from tests.crash_matrix.story import FIRST_HOLD, MORE, TASKS, A, B, first_snapshot, to_the_end
from tests.rl.harness import until
from tests.rl.policy import Policy, serving

ASLEEP = (None, "snapshot.prepared", "snapshot.captured", "snapshot.manifest_written")
"""Where the old controller falls asleep: between two snapshots, or inside one."""

AWAKE = (None, "snapshot.prepared", "snapshot.durable")
"""When it wakes up: when the next one has finished the run, or while that one is inside a snapshot of its own."""

PATIENT = {"timeout_ms": 30_000, "durable_timeout_ms": 60_000, "lease_ms": 60_000, "backoff_s": 0.1}
"""Leases that do not end while the next controller is held up, however slow this machine is."""


async def seen(bench: Bench) -> dict[str, Any]:
    """Return everything that a late controller could change: files, rows, participants, what the policy was asked."""
    databases = {}
    for name in ("ledger.sqlite", "dataplane.sqlite"):
        with contextlib.closing(sqlite3.connect(f"{(bench.run_dir / name).as_uri()}?mode=ro", uri=True)) as con:
            databases[name] = list(con.iterdump())
    files = {
        str(path.relative_to(bench.run_dir)): bytes_digest(path.read_bytes())
        for path in bench.run_dir.rglob("*")
        if path.is_file() and ".trash" not in path.parts and not path.name.startswith((*databases, "events.jsonl"))
    }
    statuses = {role: {**status, "lease_remaining_ms": None} for role, status in (await bench.statuses()).items()}
    rollouts = [{**row, "since_ms": None} for row in (await bench.ask("agent", "rollouts"))["rollouts"]]
    asked = len(bench.policy.calls)
    return {**databases, "files": files, "statuses": statuses, "rollouts": rollouts, "asked": asked}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("awake", AWAKE)
async def test_a_controller_that_sleeps_through_a_takeover_changes_nothing(tmp_path: Path, awake: str | None) -> None:
    """C13, N16: SIGSTOP, another controller takes over, SIGCONT: exit code 5, all is as it was, the run ends whole."""
    async with fork_server() as forks:

        async def one(number: int, asleep: str | None) -> None:
            async with serving(Policy(hold_from=dict(FIRST_HOLD))) as policy:
                bench = Bench(forks, tmp_path / str(number), policy, TASKS, MORE | {"snapshot": PATIENT})
                bench.prepare()
                try:
                    await take_over(bench, asleep, awake)
                finally:
                    await bench.close()

        await asyncio.gather(*(one(number, asleep) for number, asleep in enumerate(ASLEEP)))


async def take_over(bench: Bench, asleep: str | None, awake: str | None) -> None:
    """Put the controller to sleep, let the next one go on, wake it, and compare."""
    policy = bench.policy
    await bench.start_gym()
    await bench.start_rl(*([f"{asleep}:2"] if asleep else []))
    old = bench.client
    assert old is not None
    await first_snapshot(bench)
    await policy.let({A: 99, B: 4})
    asked = policy.was_asked
    await until(lambda: asked("_s1", 4) and asked("_s3", 2), "D has a turn", BOUND_S)
    await bench.event("acked")
    await bench.event("trained")  # ahead of the snapshot: the next controller restores, it does not adopt
    if asleep is None:
        old.send(signal.SIGSTOP)
        await until(lambda: bench.state() == STOPPED, "it sleeps", BOUND_S)
    else:
        old.send(signal.SIGUSR1)
        await bench.stopped_at(asleep)
    lines = len(bench.all_events())
    await bench.start_rl(*([f"{awake}:1"] if awake else []))
    await bench.event("restarted", after=lines)
    if awake is None:
        await policy.let_all()
        await to_the_end(bench)
    else:
        assert bench.client is not None
        await until(lambda: asked_again(bench), "what was restored goes on", BOUND_S)
        bench.client.send(signal.SIGUSR1)
        await bench.stopped_at(awake)
    before = await seen(bench)
    old.send(signal.SIGCONT)
    assert Superseded.exit_code == await old.wait(BOUND_S), asleep
    assert before == await seen(bench), asleep
    if awake is not None:
        assert bench.client is not None
        bench.client.send(signal.SIGCONT)
        await bench.event("snapshot_published", after=lines)
        await policy.let_all()
        await to_the_end(bench)
    assert 4 == (bench.run_dir / "results.jsonl").read_bytes().count(b"\n")
    assert [] == judge.at_the_end(bench, await bench.statuses(), None)


def asked_again(bench: Bench) -> bool:
    """Return whether B, C and D, restored as attempt 1 or started anew, wait for the policy."""
    waiting = {call.rollout_id[-3:] for call in bench.policy.calls if call.attempt >= 1 and call.answered is None}
    return waiting >= {"_s1", "_s2", "_s3"}
