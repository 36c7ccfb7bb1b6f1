# SPDX-License-Identifier: Apache-2.0
"""One run of one cell as processes: start, wait for a point, kill, go on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.crash_matrix.policy import MatrixPolicy
from tests.rl.harness import events_of, until
from tests.rl.processes import TOKENS, Process, start

BOUND_S = 60.0
ROLES = ("agent", "model", "resources")
ENDED = "Z"
STOPPED = "T"


@dataclass(frozen=True)
class Kill:
    """One crash: when, who, and how many events and calls there were before."""

    at: float
    victims: tuple[str, ...]
    point: str
    events: int
    holding: int


class NotReached(Exception):
    """A named point was not visited."""


@dataclass
class Bench:
    """The processes of one run in one directory.

    Args:
        directory: empty at the beginning.
        policy: already served.
        tasks: `tasks` of run.yaml.
        more: further settings of run.yaml.
    """

    directory: Path
    policy: MatrixPolicy
    tasks: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    gym: Process | None = None
    client: Process | None = None
    kills: list[Kill] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        """Return the run directory."""
        return self.directory / "run"

    def prepare(self) -> None:
        """Write the settings of both sides."""
        (self.run_dir / "snapshots").mkdir(parents=True)
        gym = {
            "name": "gym",
            "processes": "three",
            "storage_roots": ["run/snapshots"],
            "environments": ["taxi"],
            "limits": {"shutdown_grace_ms": 200},
        }
        run = {
            "run_id": "m",
            "run_dir": "run",
            "column": 3,
            "gyms": [{"alias": "gym", "announce": "announce.json"}],
            "policy": {"base_url": self.policy.url, "model": "m", "api": "chat_completions"},
            "tasks": self.tasks,
            "snapshot": {"timeout_ms": 5000, "durable_timeout_ms": 10000, "lease_ms": 4000, "backoff_s": 0.1},
            "client": {"attempts": 2, "first_wait_s": 0.05, "longest_wait_s": 0.2, "call_ms": 5000},
            "recovery": {"reach_s": 45.0, "health_s": 0.2},
            **self.more,
        }
        (self.directory / "gym.yaml").write_text(yaml.safe_dump(gym))
        (self.directory / "run.yaml").write_text(yaml.safe_dump(run))

    # --- processes --------------------------------------------------------------------------------------------

    async def start_gym(self) -> None:
        """Start the Gym and wait until it announces itself."""
        announce = self.directory / "announce.json"
        announce.unlink(missing_ok=True)
        arguments = ("serve", "--config", "gym.yaml", "--announce", "announce.json")
        gym = await start(self.directory, "reference_gym.cli", *arguments)
        self.gym = gym
        await until(lambda: announce.exists() or gym.process.returncode is not None, "the Gym announces itself", 30)
        assert gym.process.returncode is None, gym.output.read_text()[-2000:]

    async def start_rl(self, *points: str) -> None:
        """Start the RL client, which stops itself at the named points (`name:visit`)."""
        wanted = {"REFERENCE_RL_FAILPOINT": ",".join(f"{point}:stop" for point in points)} if points else {}
        arguments = ("run", "--config", "run.yaml")
        self.client = await start(self.directory, "reference_rl.cli", *arguments, environment=wanted)

    def pids(self) -> dict[str, int]:
        """Return who announced which process."""
        announced = json.loads((self.directory / "announce.json").read_text())
        return {entry["role"]: entry["pid"] for entry in announced["participants"]}

    def state(self) -> str:
        """Return the state of the RL client as the kernel gives it, `Z` when it has ended."""
        assert self.client is not None
        if self.client.process.returncode is not None:
            return ENDED
        try:
            return Path(f"/proc/{self.client.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ENDED

    async def stopped_at(self, point: str) -> None:
        """Wait until the RL client has stopped itself.

        Raises:
            NotReached: it ended, or ran on to its end, without a visit.
        """
        await until(lambda: self.state() in (STOPPED, ENDED), f"RL stops at {point}", BOUND_S)
        if self.state() != STOPPED:
            raise NotReached(point)

    async def kill(self, victims: Iterable[str], point: str, *, lose_disk: bool = False) -> None:
        """SIGKILL the victims at the same instant; let RL go on when it is none of them.

        Args:
            victims: `rl`, roles, `gym` for the whole Gym, `all` for everything.
            point: where, for the record.
            lose_disk: the Gym's own files are gone as well, as with a lost node.
        """
        names = set(victims)
        assert self.client is not None
        assert self.gym is not None
        pids: list[int] = []
        dead_gym = bool(names & {"gym", "all"})
        if dead_gym:
            pids += [self.gym.process.pid, *self.pids().values()]
        pids += [pid for role, pid in self.pids().items() if role in names]
        dead_rl = bool(names & {"rl", "all"})
        if dead_rl:
            pids.append(self.client.process.pid)
        holding = sum(1 for turn in self.policy.highest_asked().values() if turn >= 2) - len(self.saved())
        events = len(events_of(self.run_dir))
        self.kills.append(Kill(time.monotonic(), tuple(sorted(names)), point, events, holding))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if dead_gym:
            await self.gym.process.wait()
            self.gym = None
            if lose_disk:
                shutil.rmtree(self.directory / "gym-data", ignore_errors=True)
        if dead_rl:
            await self.client.process.wait()
            self.client = None
        elif self.state() == STOPPED:
            os.kill(self.client.process.pid, signal.SIGCONT)

    async def bring_back(self, *points: str) -> None:
        """Start what is dead."""
        if self.gym is None:
            await self.start_gym()
        if self.client is None:
            await self.start_rl(*points)

    async def close(self) -> None:
        """End everything."""
        for process in (self.client, self.gym):
            if process is not None:
                with contextlib.suppress(FileNotFoundError):
                    if process is self.gym:
                        process.pids += self.pids().values()
                await process.kill()

    # --- what can be seen -------------------------------------------------------------------------------------

    def events(self, *names: str, after: int = 0) -> list[dict[str, Any]]:
        """Return the events of some names behind the first ``after`` ones."""
        return [event for event in events_of(self.run_dir)[after:] if event["event"] in names]

    def all_events(self) -> list[dict[str, Any]]:
        """Return every event of the run, those of earlier processes included."""
        return events_of(self.run_dir)

    def saved(self) -> set[str]:
        """Return the rollouts whose result the ledger has saved."""
        return {event["rollout_id"] for event in self.events("finished", "failed")}

    async def event(self, name: str, *, after: int = 0) -> dict[str, Any]:
        """Wait for an event; fail when the RL client ends without it."""

        def seen() -> Any:
            found = self.events(name, after=after)
            assert found or self.state() != ENDED, f"RL ended without the event {name}: {self.rl_log()}"
            return found

        return (await until(seen, f"event {name}", BOUND_S))[0]

    async def statuses(self) -> dict[str, dict[str, Any]]:
        """Return `GET /checkpoint` of every participant."""
        announced = json.loads((self.directory / "announce.json").read_text())["participants"]
        headers = {"Authorization": f"Bearer {TOKENS['GYM_CHECKPOINT_TOKEN']}"}
        found = {}
        async with aiohttp.ClientSession(headers=headers) as http:
            for entry in announced:
                async with http.get(f"{entry['url']}/gym-checkpoint/v1/checkpoint") as reply:
                    found[entry["name"]] = await reply.json()
        return found

    def rl_log(self) -> str:
        """Return the end of what the RL client said."""
        path = self.directory / "reference_rl.log"
        return path.read_text()[-1500:] if path.exists() else ""
