# SPDX-License-Identifier: Apache-2.0
"""The old controller sleeps through a whole takeover and wakes up: nothing changes, and it ends by itself."""

from __future__ import annotations

import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from reference_rl.errors import Superseded
from spec.wire import bytes_digest
from tests.crash_matrix.bench import BOUND_S, Bench
from tests.crash_matrix.forks import fork_server
from tests.crash_matrix.policy import MatrixPolicy, serving
from tests.crash_matrix.story import FIRST_HOLD, MORE, TASKS, A, B, to_the_end
from tests.rl.harness import until

ASLEEP = (None, "snapshot.prepared", "snapshot.captured", "snapshot.manifest_written")
"""Where the old controller falls asleep: between two snapshots, or inside one."""


def seen(bench: Bench, statuses: dict[str, Any]) -> dict[str, Any]:
    """Return everything that a late controller could change: files, rows, participants, what the policy was asked."""
    con = sqlite3.connect(f"{(bench.run_dir / 'ledger.sqlite').as_uri()}?mode=ro", uri=True)
    try:
        ledger = list(con.iterdump())
    finally:
        con.close()
    snapshots = bench.run_dir / "snapshots"
    files = {
        str(path.relative_to(snapshots)): bytes_digest(path.read_bytes())
        for path in snapshots.rglob("*")
        if path.is_file() and ".trash" not in path.parts
    }
    return {
        "ledger": ledger,
        "files": files,
        "results": (bench.run_dir / "results.jsonl").read_bytes(),
        "statuses": statuses,
        "asked": len(bench.policy.calls),
    }


@pytest.mark.timeout(180)
async def test_a_controller_that_sleeps_through_a_takeover_changes_nothing(tmp_path: Path) -> None:
    """C13, N16: SIGSTOP, another controller takes over and finishes the run, SIGCONT: exit code 5, all is as it was."""
    async with fork_server() as forks:
        for number, point in enumerate(ASLEEP):
            async with serving(MatrixPolicy(hold_from=dict(FIRST_HOLD))) as policy:
                directory = tmp_path / str(number)
                bench = Bench(forks, directory, policy, TASKS, MORE)
                bench.prepare()
                try:
                    await take_over(bench, point)
                finally:
                    await bench.close()


async def take_over(bench: Bench, point: str | None) -> None:
    """Put the controller to sleep, let the next one finish, wake it, and compare."""
    policy = bench.policy
    await bench.start_gym()
    await bench.start_rl(*([f"{point}:2"] if point else []))
    old = bench.client
    assert old is not None
    asked = policy.was_asked
    await until(lambda: asked("_s0", 5) and asked("_s1", 3) and asked("_s2", 5), "three rollouts hold turns", BOUND_S)
    old.send(signal.SIGUSR1)
    await bench.event("snapshot_published")
    await policy.let({A: 99, B: 4})
    await until(lambda: asked("_s1", 4) and asked("_s3", 2), "D has a turn", BOUND_S)
    await bench.event("acked")
    if point is None:
        old.send(signal.SIGSTOP)
        await until(lambda: bench.state() == "T", "it sleeps")
    else:
        old.send(signal.SIGUSR1)
        await bench.stopped_at(point)
    lines = len(bench.all_events())
    await bench.start_rl()
    await bench.event("restarted", after=lines)
    await policy.let_all()
    await to_the_end(bench)
    before = seen(bench, await bench.statuses())
    assert 4 == before["results"].count(b"\n")
    old.send(signal.SIGCONT)
    assert Superseded.exit_code == await old.wait(BOUND_S), point
    assert before == seen(bench, await bench.statuses()), point
