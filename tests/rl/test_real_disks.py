# SPDX-License-Identifier: Apache-2.0
"""Disks that refuse, between a real RL client and a real Gym: a file that may not grow, links and renames that fail."""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reference_rl.errors import SettingsError
from tests.crash_matrix import judge
from tests.crash_matrix.bench import BOUND_S, Bench
from tests.crash_matrix.forks import ForkServer
from tests.rl.harness import until
from tests.rl.policy import Policy
from tests.rl.real import A, B, begin, bench_of, ended_well, hows, snapshot
from tests.rl.relay import KEEP, PASS, Asked, relaying

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

SMALL = 20_000
"""Bytes that a file of the Gym may have while its disk refuses; less than its state."""


def grow_once(seed: int, turn: int) -> tuple[str, dict[str, Any]]:
    """Hold more state than a small file takes."""
    return ("grow", {"bytes": 5 * SMALL}) if turn == 1 else ("add", {"n": turn})


def limit_files(bench: Bench, size: int) -> None:
    """Let the kernel refuse every write of the Gym behind so many bytes of a file."""
    resource.prlimit(bench.roles["gym"].pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


async def until_status(bench: Bench, **wanted: Any) -> dict[str, Any]:
    """Wait until the Gym's status says so."""
    end = time.monotonic() + BOUND_S
    while True:
        status = await bench.ask("gym", "checkpoint")
        if wanted.items() <= (status | status["counts"]).items():
            return dict(status)
        assert time.monotonic() < end, f"not within {BOUND_S} s: {wanted}, but {status}"
        await asyncio.sleep(0.02)


async def test_a_commit_that_is_repeated_writes_the_same_cut(tmp_path: Path, forks: ForkServer) -> None:
    """N20, C44: captured, then the write fails; A is released meanwhile; RL commits again: A is in the cut, unreleased.

    The gate could not be opened in between, and is left to its lease; the snapshot is as good as any.
    """
    policy = Policy(hold_from={1: 3}, tool=grow_once)
    task = {"seed": 7, "world_url": None, "verify_in_world": False}
    tasks = {"environment": "conformance", "siblings": 2, "groups": 1, "max_turns": 3, "task": task}
    wish: dict[str, Any] = {"client": {"call_ms": 20_000}, "snapshot": {"lease_ms": 60_000}}
    async with (
        bench_of(forks, tmp_path / "b", policy, tasks, gym={"conformance": {}}, **wish) as bench,
        relaying(lambda: bench.urls()["gym"]) as relay,
    ):
        bench.through = {"gym": relay.url}
        relay.rule = lambda asked: KEEP if asked.operation == "acks" else PASS
        await bench.start_gym()
        await bench.start_rl()
        await until(lambda: policy.was_asked(B, 3) and A in bench.saved(), "A has finished, B holds turns", BOUND_S)
        await until(lambda: relay.kept, "the ACK of A is under way", BOUND_S)
        limit_files(bench, SMALL)

        async def meanwhile(asked: Asked) -> None:
            if asked.operation == "resume":
                await until_status(bench, phase="prepared", captured=True, gate="closed")
                (acked,) = await relay.send_kept()
                assert ["released"] == [row["outcome"] for row in acked["outcomes"]]
                limit_files(bench, resource.RLIM_INFINITY)

        relay.before = meanwhile
        published = await snapshot(bench)
        relay.before, relay.rule = None, lambda asked: PASS
        assert (1, 1) == (published["turn"], published["finished"])
        assert 1 == len(bench.events("resume_failed"))
        saved = judge.store_of(bench).verify(judge.store_of(bench).ids()[0])
        rows = saved.index("gym", "gym")
        assert {A: ("finished", 3), B: ("turn", 2)} == {name: (r.state, r.turns_done) for name, r in rows.items()}
        await bench.kill({"all"}, "quiet", lose_disk=True)
        lines = len(bench.all_events())
        await bench.bring_back()
        assert ("continued", 2) == hows(await bench.event("restarted", after=lines))[B]
        assert [(A, 0), (B, 1)] == [(row["rollout_id"], row["attempt"]) for row in await ended_well(bench)]
        assert [] == judge.regenerated(bench)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """Return a directory on another file system than the run's: nothing can be linked or renamed between the two."""
    other = Path("/dev/shm")
    if other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("everything here is one file system")
    with tempfile.TemporaryDirectory(dir=other) as path:
        yield Path(path)


async def test_a_disk_without_renames_and_one_without_links(tmp_path: Path, forks: ForkServer, elsewhere: Path) -> None:
    """C47: RL refuses to start where a snapshot could not be renamed away; the Gym copies where it cannot link.

    The refusal is one sentence, and nothing half is there; the copies restore every turn after everything is lost.
    """
    policy = Policy(hold_from={1: 3, 2: 5})
    gym = {"data_dir": str(elsewhere / "gym"), "log": {"segment_bytes": 4096}}
    async with bench_of(forks, tmp_path / "b", policy, gym=gym) as bench:
        snapshots = bench.run_dir / "snapshots"
        (elsewhere / "trash").mkdir(0o700)
        (snapshots / ".trash").symlink_to(elsewhere / "trash")
        await bench.start_gym()
        await bench.start_rl()
        assert bench.client is not None
        assert SettingsError.exit_code == await bench.client.wait(BOUND_S)
        assert "a directory cannot be renamed in one step" in bench.rl_log()
        assert [".trash"] == [path.name for path in snapshots.iterdir()]
        assert [] == list((elsewhere / "trash").iterdir())
        assert 0 == (await bench.ask("gym", "checkpoint"))["counts"]["admitted"]

        (snapshots / ".trash").unlink()
        await begin(bench)
        await snapshot(bench)
        segments = [path for path in snapshots.rglob("*") if path.is_file() and path.stat().st_nlink > 1]
        assert [] == segments, "nothing is linked from one file system to the other"
        assert list((elsewhere / "gym").rglob("*")), "the log is where no link leads from"
        await bench.kill({"all"}, "quiet")
        for path in sorted((elsewhere / "gym").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        lines = len(bench.all_events())
        await bench.bring_back()
        restarted = await bench.event("restarted", after=lines)
        assert {"gym": "restored"} == restarted["gyms"]
        assert {("continued", 2), ("continued", 4)} <= set(hows(restarted).values())
        await ended_well(bench)
        assert [] == judge.regenerated(bench)
