# SPDX-License-Identifier: Apache-2.0
"""The two commands as processes of their own, for tests that kill them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from reference_rl import failpoints
from tests.crash_matrix.forks import Forked, ForkServer
from tests.rl.harness import events_of, until

TOKENS = {
    "GYM_CHECKPOINT_TOKEN": "control-token-of-a-test",
    "GYM_CHECKPOINT_DATA_TOKEN": "data-token-of-a-test",
    "GYM_POLICY_TOKEN": "policy-token-of-a-test",
}


RUN = ("reference_rl.cli", "run", "--config", "run.yaml")


class Process:
    """A command with its output in a file; ended by its own pid only."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path) -> None:
        self.process = process
        self.output = output
        self.pids = [process.pid]

    @property
    def returncode(self) -> int | None:
        """Return how it ended, if it has."""
        return self.process.returncode

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command itself."""
        self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL the command and what it announced as its own."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.process.wait()

    async def wait(self, bound_s: float = 60.0) -> int:
        """Return the exit code."""
        async with asyncio.timeout(bound_s):
            return await self.process.wait()


async def start(directory: Path, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Process:
    """Start `python -m <name>` with the tokens, and more when given, in its environment."""
    output = directory / f"{name.split('.')[0]}.log"
    with output.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            name,
            *arguments,
            stdout=file,
            stderr=file,
            env=os.environ | TOKENS | dict(environment or {}),
            cwd=directory,
        )
    return Process(process, output)


@contextlib.asynccontextmanager
async def gym_process(directory: Path, processes: str = "one", **more: Any) -> AsyncIterator[Process]:
    """Serve the real Gym; its announce file is `announce.json` in the directory."""
    config = {
        "name": "gym",
        "processes": processes,
        "storage_roots": ["run/snapshots"],
        "environments": ["taxi"],
        "tokens": {
            "control": {"env": "GYM_CHECKPOINT_TOKEN"},
            "data": {"env": "GYM_CHECKPOINT_DATA_TOKEN"},
            "policy": {"env": "GYM_POLICY_TOKEN"},
        },
        **more,
    }
    (directory / "gym.yaml").write_text(yaml.safe_dump(config))
    announce = directory / "announce.json"
    announce.unlink(missing_ok=True)
    gym = await start(directory, "reference_gym.cli", "serve", "--config", "gym.yaml", "--announce", "announce.json")
    try:
        await until(lambda: announce.exists() or gym.process.returncode is not None, "the Gym announces itself")
        assert gym.process.returncode is None, gym.output.read_text()
        announced = json.loads(announce.read_text())
        gym.pids += [p["pid"] for p in announced["participants"] if p["pid"] != gym.process.pid]
        yield gym
    finally:
        await gym.kill()


@contextlib.asynccontextmanager
async def rl_process(directory: Path, **settings: Any) -> AsyncIterator[Process]:
    """Run the RL client in `run/` of the directory."""
    (directory / "run.yaml").write_text(yaml.safe_dump(settings))
    client = await start(directory, *RUN)
    try:
        yield client
    finally:
        if client.returncode is None:
            await client.kill()


@contextlib.asynccontextmanager
async def rl_fork(forks: ForkServer, directory: Path, point: str, **settings: Any) -> AsyncIterator[Forked]:
    """Run the RL client without the price of its imports; it dies at a point, or at none."""
    (directory / "run.yaml").write_text(yaml.safe_dump(settings))
    client = await forks.start(directory, *RUN, environment=TOKENS | {failpoints.VARIABLE: point})
    try:
        yield client
    finally:
        if client.returncode is None:
            await client.kill()


async def event(directory: Path, name: str, client: Process | Forked, *, after: int = 0) -> dict[str, Any]:
    """Wait for an event of a name behind the first ``after`` lines of the event log."""

    def seen() -> dict[str, Any] | None:
        assert client.returncode in (None, 0), client.output.read_text()
        found = [e for e in events_of(directory / "run")[after:] if e["event"] == name]
        return found[0] if found else None

    found: dict[str, Any] = await until(seen, f"event {name}")
    return found
