# SPDX-License-Identifier: Apache-2.0
"""Stories with a real Gym and a real RL client: the processes of one run, and what is asked of them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.crash_matrix import judge
from tests.crash_matrix.bench import BOUND_S, ENDED, Bench
from tests.crash_matrix.cells import ONE
from tests.crash_matrix.forks import ForkServer
from tests.crash_matrix.story import to_the_end
from tests.rl.harness import until
from tests.rl.policy import Policy, serving

ONE_PROCESS = (ONE,)
TAXI: dict[str, Any] = {"environment": "taxi", "groups": 1, "siblings": 3, "max_turns": 5, "task": {"seed": 7}}
RECOVERY = {"reach_s": 30.0, "health_s": 0.2}
SNAPSHOT = {"timeout_ms": 5000, "durable_timeout_ms": 10_000, "lease_ms": 10_000, "backoff_s": 0.05}
SURVIVES = {"trainer": {"survives": True}}
PROCESSES = ("agent", "model", "resources")
A, B, C, D = (f"m_g0_s{number}" for number in range(4))


@contextlib.asynccontextmanager
async def bench_of(
    forks: ForkServer,
    directory: Path,
    policy: Policy,
    tasks: Any = None,
    *,
    parts: tuple[str, ...] = ONE_PROCESS,
    gym: dict[str, Any] | None = None,
    **more: Any,
) -> AsyncIterator[Bench]:
    """Prepare the processes of one run of three siblings on Taxi, or of other tasks; end them all at the end.

    Args:
        forks: starts the processes.
        directory: not there yet.
        policy: not yet served.
        tasks: `tasks` of run.yaml.
        parts: the processes of the Gym.
        gym: further settings of gym.yaml.
        more: further settings of run.yaml; `recovery` and `snapshot` are merged.
    """
    more |= {"recovery": RECOVERY | more.get("recovery", {}), "snapshot": SNAPSHOT | more.get("snapshot", {})}
    async with serving(policy):
        bench = Bench(forks, directory, policy, tasks or TAXI, more, parts=parts, gym=gym or {})
        bench.prepare()
        try:
            yield bench
        finally:
            await bench.close()


async def any_end(bench: Bench) -> dict[str, Any]:
    """Ask for a snapshot and return the event of its end, whatever that is."""
    lines = len(bench.all_events())
    assert bench.client is not None
    bench.client.send(signal.SIGUSR1)

    def ended() -> Any:
        found = bench.events("snapshot_published", "snapshot_failed", "snapshot_skipped", after=lines)
        assert found or bench.state() != ENDED, f"RL ended in a snapshot: {bench.rl_log()}"
        return found

    return dict((await until(ended, "a snapshot ends", BOUND_S))[0])


async def begin(bench: Bench, *points: str) -> None:
    """Start the Gym and RL, and wait until A has finished, B holds 2 turns and C holds 4.

    Args:
        bench: of three siblings or more; the policy holds turn 3 of B and turn 5 of C.
        points: where RL kills itself.
    """
    await bench.start_gym()
    await bench.start_rl(*points)
    asked = bench.policy.was_asked
    await until(lambda: asked(B, 3) and asked(C, 5), "B and C hold turns", BOUND_S)
    await bench.event("acked")


async def snapshot(bench: Bench, outcome: str = "published") -> dict[str, Any]:
    """Ask for a snapshot, see it end as it should, and return the event of that."""
    found = await any_end(bench)
    assert f"snapshot_{outcome}" == found["event"], found
    return found


async def all_open(bench: Bench) -> bool:
    """Return whether every participant is idle, its gate open."""
    statuses = (await bench.statuses()).values()
    return {("idle", "open")} == {(status["phase"], status["gate"]) for status in statuses}


async def until_true(look: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until a look at the Gym finds what is expected."""
    end = time.monotonic() + BOUND_S
    while not await look():
        assert time.monotonic() < end, f"not within {BOUND_S} s: {what}"
        await asyncio.sleep(0.02)


async def ended_well(bench: Bench) -> list[dict[str, Any]]:
    """Let the policy answer, see the run end, hold I1, I3, I10 and the accounts against it; return the samples."""
    await bench.policy.let_all()
    await to_the_end(bench)
    found = judge.at_the_end(bench, await bench.statuses(), None) if isinstance(bench.tasks, dict) else []
    found += judge.consumed_twice(bench) + judge.published(bench)
    assert [] == found, found
    return judge.results_of(bench.run_dir)


def hows(event: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """Return rollout → (what became of it, turns kept) of a recovery."""
    return {row["rollout_id"]: (row["how"], row["turns_done"]) for row in event["rollouts"]}
