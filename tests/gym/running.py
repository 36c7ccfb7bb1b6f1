# SPDX-License-Identifier: Apache-2.0
"""A real Gym, started through its command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.gym.controller import CONTROL_TOKEN, DATA_TOKEN, Controller
from tests.gym.stubs import BOUND_S, until

POLICY_TOKEN = "policy-token-for-tests"
FORMS = ("one", "three")


@dataclass
class RunningGym(Controller):
    """One life of a Gym: its processes, where they listen, and a connection."""

    directory: Path
    processes: str
    world_url: str | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    timeouts: Mapping[str, int] = field(default_factory=dict)
    log: Mapping[str, Any] | None = None
    process: asyncio.subprocess.Process | None = None
    announced: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    sequence: int = 0
    incarnations: dict[str, str] = field(default_factory=dict)
    http: aiohttp.ClientSession | None = None

    @property
    def announce_file(self) -> Path:
        """Where the Gym says where it listens."""
        return self.directory / "announce.json"

    @property
    def log_file(self) -> Path:
        """What the processes write on standard error."""
        return self.directory / "gym.log"

    def write_config(self) -> Path:
        """The settings of this Gym."""
        (self.directory / "snapshots").mkdir(exist_ok=True)
        config = self.directory / "gym.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "processes": self.processes,
                    "conformance": {"world_url": self.world_url},
                    **({} if self.log is None else {"data_dir": "data", "log": dict(self.log)}),
                    "limits": {"policy_retry_ms": 3_000, "shutdown_grace_ms": 1_000} | dict(self.limits),
                    "timeouts": {"peer_retry_ms": 30_000} | dict(self.timeouts),
                }
            )
        )
        return config

    def command(self) -> list[str]:
        """What starts it."""
        config = str(self.write_config())
        return [
            *(sys.executable, "-m", "reference_gym.cli", "serve"),
            *("--config", config, "--announce", str(self.announce_file)),
        ]

    async def start(self, *more: str) -> None:
        """Start it and wait until every server listens."""
        self.announce_file.unlink(missing_ok=True)
        with self.log_file.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command(),
                *more,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment(),
            )
        assert self.process.stdout is not None
        async with asyncio.timeout(BOUND_S):
            line = await self.process.stdout.readline()
        assert line, self.log_file.read_text()
        self.announced = json.loads(line)
        self.http = self.http or aiohttp.ClientSession()

    async def attach(self) -> None:
        """Become the next controller of a Gym that somebody else has started."""
        self.announced = json.loads(self.announce_file.read_text())
        self.http = aiohttp.ClientSession()
        controller = (await self.raw("agent", "GET", "/checkpoint"))["controller"]
        self.epoch = 0 if controller is None else controller["epoch"]
        await self.adopt()

    @property
    def pids(self) -> list[int]:
        """Every process of this Gym."""
        return sorted({self.announced["pid"], *(each["pid"] for each in self.announced["participants"])})

    def url(self, role: str) -> str:
        """Where the participant with a role listens; one process has them all."""
        found = [each["url"] for each in self.announced["participants"] if each["role"] == role]
        return str(found[0] if found else self.announced["participants"][0]["url"])

    @property
    def roles(self) -> list[str]:
        """One role per participant, in the order of their stages."""
        return ["agent"] if self.processes == "one" else ["agent", "model", "resources"]

    async def kill(self) -> None:
        """SIGKILL every process at once, and wait until they are gone."""
        assert self.process is not None
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.process.wait()
        await until(lambda: not any(alive(pid) for pid in self.pids), "all processes are gone")

    async def term(self) -> int:
        """SIGTERM the command; its exit code."""
        assert self.process is not None
        self.process.terminate()
        async with asyncio.timeout(BOUND_S):
            return await self.process.wait()

    async def close(self) -> None:
        """End whatever is left."""
        if self.process is not None and self.process.returncode is None:
            await self.kill()
        if self.http is not None:
            await self.http.close()


@contextlib.asynccontextmanager
async def gym_at(directory: Path, processes: str, **more: Any) -> AsyncIterator[RunningGym]:
    """A Gym that runs, with an adopted controller; nothing of it is left afterwards."""
    gym = RunningGym(directory, processes, **more)
    try:
        await gym.start()
        await gym.adopt()
        yield gym
    finally:
        await gym.close()


def environment() -> dict[str, str]:
    """The environment of a Gym: its tokens beside everything else."""
    return dict(os.environ) | {
        "GYM_CHECKPOINT_TOKEN": CONTROL_TOKEN,
        "GYM_CHECKPOINT_DATA_TOKEN": DATA_TOKEN,
        "GYM_POLICY_TOKEN": POLICY_TOKEN,
    }


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def task_of(world_url: str | None = None, *, seed: int = 7, verify_in_world: bool = False) -> dict[str, Any]:
    """A task of the conformance environment."""
    return {"seed": seed, "world_url": world_url, "verify_in_world": verify_in_world}


def texts_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the tools answered, in order."""
    return [message["content"] for message in messages if message["role"] == "tool"]
