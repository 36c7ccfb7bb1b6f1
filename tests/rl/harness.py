# SPDX-License-Identifier: Apache-2.0
"""A run of the RL client inside the test's event loop, and waits for stated conditions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from reference_rl import queries
from reference_rl.checkpointer import Health
from reference_rl.managed import ManagedSession
from reference_rl.older import OlderSession
from reference_rl.session import Session
from reference_rl.settings import RunSettings, settings_of
from tests.rl.scripted import ENVIRONMENT, ScriptedParticipant

BOUND_S = 45.0

QUICK: dict[str, Any] = {
    "snapshot": {"timeout_ms": 400, "durable_timeout_ms": 2000},
    "client": {"call_ms": 300, "grace_s": 0.7},
}
"""Limits for tests that wait for them to end: a machine under load may need more for a call that goes well."""


async def until(condition: Callable[[], Any], what: str, bound_s: float = BOUND_S) -> Any:
    """Wait until a condition holds; fail with its name otherwise."""
    end = time.monotonic() + bound_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {bound_s} s: {what}")
        await asyncio.sleep(0.01)
    return value


def settings(run_dir: Path, gym: ScriptedParticipant | str, **changes: Any) -> RunSettings:
    """Return settings for a test; ``changes`` replace whole fields, ``snapshot`` and the like are merged.

    Calls are not given up, and so not repeated, because a machine is slow: tests count them.
    """
    content: dict[str, Any] = {
        "run_id": "r1",
        "run_dir": str(run_dir),
        "column": 3,
        "gyms": [{"alias": "gym", "url": gym if isinstance(gym, str) else gym.url}],
        "policy": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api": "chat_completions"},
        "tasks": {"environment": ENVIRONMENT, "groups": 1, "siblings": 3, "max_turns": 5, "task": {"seed": 7}},
        "snapshot": {"timeout_ms": 3000, "durable_timeout_ms": 10_000, "lease_ms": 6000, "backoff_s": 0.01},
        "client": {"attempts": 2, "first_wait_s": 0.01, "longest_wait_s": 0.02, "call_ms": 2000, "grace_s": 20.0},
        "recovery": {"reach_s": 5.0, "restore_tries": 3, "health_s": 0.1},
    }
    for name, value in changes.items():
        merge = isinstance(value, dict) and isinstance(content.get(name), dict)
        content[name] = {**content[name], **value} if merge else value
    return settings_of(content, run_dir)


class Running:
    """One process of a run, played by a task; ``kill`` ends it without any goodbye."""

    def __init__(self, config: RunSettings) -> None:
        kind = ManagedSession if config.switches.tracks_rollouts else OlderSession
        self.session: Session = kind(config)
        self.run_dir = config.run_dir
        self._first_event = len(events_of(config.run_dir))
        self.task = asyncio.create_task(self.session.run())

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the events of this process."""
        found = events_of(self.run_dir)[self._first_event :]
        return [e for e in found if name is None or e["event"] == name]

    async def event(self, name: str, count: int = 1) -> dict[str, Any]:
        """Wait for the ``count``-th event of a name."""

        def seen() -> dict[str, Any] | None:
            if self.task.done() and not self.task.cancelled() and self.task.exception() is not None:
                raise self.task.exception()  # type: ignore[misc] # just looked
            found = self.events(name)
            return found[count - 1] if len(found) >= count else None

        found: dict[str, Any] = await until(seen, f"event {name} × {count}")
        return found

    async def snapshot(self) -> Any:
        """Take a snapshot now and return the report."""
        return await self.session.take_snapshot()

    async def done(self) -> int:
        """Wait for the end and return the exit code."""
        return await asyncio.wait_for(self.task, BOUND_S)

    @property
    def health(self) -> Health:
        """Return how the run's snapshots fare."""
        assert self.session.checkpointer is not None
        return self.session.checkpointer.health

    async def kill(self) -> None:
        """End the process as SIGKILL would: nothing is settled, the files stay as they are."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self.task
        self.session.close()


@contextlib.asynccontextmanager
async def running(config: RunSettings) -> AsyncIterator[Running]:
    """Run one process of a run; it is killed at the end if it still runs."""
    run = Running(config)
    try:
        yield run
    finally:
        await run.kill()


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of a run directory."""
    path = run_dir / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def results_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the trained samples of a finished run."""
    return [json.loads(line) for line in (run_dir / "results.jsonl").read_text().splitlines()]


async def dispatched(run: Running, gym: ScriptedParticipant, count: int = 3) -> None:
    """Wait until rollouts run and the ledger knows that they do."""
    await until(lambda: len(gym.runs) >= count, f"{count} rollouts run")
    await until(lambda: run.session.ledger.read(queries.live_count, "gym") >= count, "the ledger knows")


async def finished(run: Running, *gyms: ScriptedParticipant) -> list[tuple[int, int]]:
    """Finish what runs, see the run end, and return (sibling, attempt) of every sample."""
    await dispatched(run, gyms[0], run.session.ledger.read(queries.counts)["unfinished"])
    for gym in gyms:
        for rollout_id, work in list(gym.runs.items()):
            if work.result is None:
                gym.finish(rollout_id)
    assert await run.done() == 0
    return [(r["sibling"], r["attempt"]) for r in results_of(run.run_dir)]
