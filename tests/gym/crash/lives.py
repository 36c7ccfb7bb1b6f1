# SPDX-License-Identifier: Apache-2.0
"""A Gym that dies and comes back: its processes are forked by a zygote, and the suite's model follows every call."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import aiohttp
import yaml

from tests.gym.controller import Refused
from tests.gym.crash.watched import Watched
from tests.gym.running import RunningGym, environment
from tests.gym.stubs import BOUND_S
from tests.ports import ReservedPorts

ROOT = Path(__file__).resolve().parents[3]
GONE = (aiohttp.ClientError, OSError, TimeoutError)
ROLES = {"one": ("all",), "three": ("model", "resources", "agent")}
"""The processes of each form, in the order in which they are started."""


class Zygote:
    """The process that forks the lives of Gyms; begun at the first order, and gone with the process of the tests."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pids: SimpleQueue[int] = SimpleQueue()
        self._ended: dict[int, threading.Event] = {}
        self._one = threading.Lock()

    async def order(self, order: dict[str, Any]) -> int:
        """Begin a life; its pid."""
        return await asyncio.to_thread(self._order, order)

    def ended(self, pid: int) -> bool:
        """Whether a life has ended."""
        return self._ended[pid].is_set()

    async def wait(self, pid: int) -> None:
        """Return when a life has ended."""
        assert await asyncio.to_thread(self._ended[pid].wait, BOUND_S), f"process {pid} does not end"

    def _order(self, order: dict[str, Any]) -> int:
        with self._one:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.gym.crash.zygote"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment(),
                    cwd=ROOT,
                )
                threading.Thread(target=self._read, daemon=True).start()
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            return self._pids.get(timeout=BOUND_S)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "pid" in said:
                self._ended[said["pid"]] = threading.Event()
                self._pids.put(said["pid"])
            else:
                self._ended[said["ended"]].set()


ZYGOTE = Zygote()


@dataclass
class MortalGym(RunningGym):
    """A Gym whose lives come from a zygote.

    ``failpoint`` is armed in the process of ``victim`` alone. ``watched`` is what the suite's model says of each
    participant, by role; it judges every call where ``judged``.
    """

    zygote: Zygote = ZYGOTE
    failpoint: str | None = None
    victim: str = "all"
    broken: str | None = None
    lives: dict[str, int] = field(default_factory=dict)
    ports: ReservedPorts | None = None
    judged: bool = True
    cuts: int = 0
    watched: dict[str, Watched] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watched = {role: Watched(owns_rollouts=role == "agent", judges=self.judged) for role in self.roles}
        if self.processes == "three":
            self.ports = ReservedPorts(self.roles)

    @property
    def hits(self) -> Path:
        """Where a fail point writes that it was reached."""
        return self.directory / "hits"

    def write_config(self) -> Path:
        """The settings of this Gym; each of three processes knows where the others are."""
        config = super().write_config()
        if self.ports is not None:
            told = yaml.safe_load(config.read_text())
            ports = told["ports"] = self.ports.by_name
            told["peers"] = {role: f"http://127.0.0.1:{ports[role]}" for role in ("model", "resources")}
            config.write_text(yaml.safe_dump(told))
        return config

    async def start(self, *more: str) -> None:
        """Begin a life, and wait until every process listens, or one has died; `armed`: the victim's point is armed."""
        self.write_config()
        for role in ROLES[self.processes]:
            self._file(role).unlink(missing_ok=True)
        for role in ROLES[self.processes]:
            await self.begin_life(role, armed="armed" in more and role == self.victim)
        self.http = self.http or aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=BOUND_S))
        async with asyncio.timeout(BOUND_S):
            while not all(self._file(role).exists() for role in self.lives):
                if self.dead:
                    assert "armed" in more, self.log_file.read_text()[-3000:]
                    return
                await asyncio.sleep(0.005)
        told = [json.loads(self._file(role).read_text()) for role in self.lives]
        self.announced = {"pid": told[0]["pid"], "participants": [one for each in told for one in each["participants"]]}

    async def begin_life(self, role: str, *, armed: bool = False) -> None:
        """Begin a life of one process."""
        order = {
            "config": str(self.directory / "gym.yaml"),
            "role": role,
            "announce": str(self._file(role)),
            "log": str(self.log_file),
            "failpoint": self.failpoint,
            "armed": armed,
            "hits": str(self.hits),
            "broken": self.broken,
        }
        self.lives[role] = await self.zygote.order(order)

    def refused(self, role: str) -> str:
        """Why the participant with a role has not believed the log of an earlier life."""
        name = "gym" if self.processes == "one" else role
        return (self.directory / "data" / name / "log" / "refused" / "reason.txt").read_text()

    def refusals(self) -> str:
        """Why participants have not believed the logs of earlier lives, as far as they have not."""
        found = sorted((self.directory / "data").glob("*/log/refused/reason.txt"))
        return "".join(f"; {path.parts[-4]}: {path.read_text().strip()}" for path in found)

    async def kill_one(self, role: str) -> None:
        """SIGKILL one process alone."""
        os.kill(self.lives[role], signal.SIGKILL)
        await self.zygote.wait(self.lives[role])

    def _file(self, role: str) -> Path:
        return self.directory / f"announce-{role}.json"

    def arm(self) -> None:
        """Let the fail point act from now on."""
        os.kill(self.lives[self.victim], signal.SIGUSR2)

    async def kill(self) -> None:
        """SIGKILL what lives of it; return when all is gone."""
        for pid in self.lives.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self.lives.values():
            await self.zygote.wait(pid)

    @property
    def dead(self) -> bool:
        """Whether a process of this life has ended."""
        return any(self.zygote.ended(pid) for pid in self.lives.values())

    async def close(self) -> None:
        """End whatever is left."""
        if self.lives:
            await self.kill()
        if self.http is not None:
            await self.http.close()
        if self.ports is not None:
            self.ports.close()

    async def post(self, role: str, path: str, body: Any) -> Any:
        """One mutating call, judged by the model; raises `Refused`."""
        if not self.judged:
            return await super().post(role, path, body)
        watched, call = self.watched[role], self.watched[role].call(self.epoch, path, body)
        try:
            reply = await super().post(role, path, body)
        except Refused as refusal:
            watched.answered(call, refusal.status, refusal.problem)
            raise
        except GONE:
            watched.lost(call)
            raise
        watched.answered(call, 200, reply)
        return reply
