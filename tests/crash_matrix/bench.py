# SPDX-License-Identifier: Apache-2.0
"""One run of one cell as processes: start, wait for a point, kill, go on."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from spec import durable
from tests.crash_matrix.forks import Forked, ForkServer
from tests.crash_matrix.policy import MatrixPolicy
from tests.rl.harness import events_of, until
from tests.rl.processes import TOKENS

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

    The three participants of the Gym are processes with one role each; one that was killed is started again at its
    port, as a supervisor does.

    Args:
        forks: starts the processes.
        directory: empty at the beginning.
        policy: already served.
        tasks: `tasks` of run.yaml.
        more: further settings of run.yaml.
    """

    forks: ForkServer
    directory: Path
    policy: MatrixPolicy
    tasks: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, Forked] = field(default_factory=dict)
    client: Forked | None = None
    kills: list[Kill] = field(default_factory=list)
    listed: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """Return the run directory."""
        return self.directory / "run"

    def prepare(self) -> None:
        """Write the settings of both sides."""
        (self.run_dir / "snapshots").mkdir(parents=True)
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
        (self.directory / "run.yaml").write_text(yaml.safe_dump(run))
        self._write_gym()

    def _write_gym(self) -> None:
        ports = dict(zip(ROLES, free_ports(len(ROLES)), strict=True))
        gym = {
            "name": "gym",
            "ports": ports,
            "peers": {role: f"http://127.0.0.1:{ports[role]}" for role in ROLES[1:]},
            "storage_roots": ["run/snapshots"],
            "environments": ["taxi"],
            "limits": {"shutdown_grace_ms": 200},
        }
        (self.directory / "gym.yaml").write_text(yaml.safe_dump(gym))

    # --- processes --------------------------------------------------------------------------------------------

    async def start_gym(self) -> None:
        """Start what is missing of the Gym, and wait until it announces itself."""
        if not self.roles:
            self._write_gym()
        for role in ROLES:
            if role not in self.roles:
                self._announced(role).unlink(missing_ok=True)
                arguments = ("serve", "--config", "gym.yaml", "--role", role, "--announce", f"{role}.json")
                name = "reference_gym.cli"
                self.roles[role] = await self.forks.start(self.directory, name, *arguments, environment=TOKENS)
        for role, process in self.roles.items():
            await until(
                lambda role=role, process=process: self._announced(role).exists() or process.returncode is not None,  # type: ignore[misc]
                f"{role} announces itself",
                30,
            )
            assert process.returncode is None, process.output.read_text()[-2000:]
        participants = [json.loads(self._announced(role).read_text())["participants"][0] for role in ROLES]
        durable.publish_file(self.directory / "announce.json", json.dumps({"participants": participants}).encode())

    def _announced(self, role: str) -> Path:
        return self.directory / f"{role}.json"

    async def start_rl(self, *points: str) -> None:
        """Start the RL client, which stops itself at the named points (`name:visit`)."""
        environment = TOKENS | {"REFERENCE_RL_FAILPOINT": ",".join(f"{point}:stop" for point in points)}
        arguments = ("run", "--config", "run.yaml")
        self.client = await self.forks.start(self.directory, "reference_rl.cli", *arguments, environment=environment)

    def state(self) -> str:
        """Return the state of the RL client as the kernel gives it, `Z` when it has ended."""
        assert self.client is not None
        if self.client.returncode is not None:
            return ENDED
        try:
            return Path(f"/proc/{self.client.pid}/stat").read_text().rpartition(")")[2].split()[0]
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
        client = self.client
        assert client is not None
        dead = {role: process for role, process in self.roles.items() if names & {role, "gym", "all"}}
        dead_rl = bool(names & {"rl", "all"})
        holding = sum(1 for turn in self.policy.highest_asked().values() if turn >= 2) - len(self.saved())
        events = len(events_of(self.run_dir))
        self.kills.append(Kill(time.monotonic(), tuple(sorted(names)), point, events, holding))
        for process in (*dead.values(), *([client] if dead_rl else [])):
            process.send(signal.SIGKILL)
        for role, process in dead.items():
            await process.wait()
            del self.roles[role]
        if lose_disk:
            shutil.rmtree(self.directory / "gym-data", ignore_errors=True)
        if dead_rl:
            await client.wait()
            self.client = None
        elif self.state() == STOPPED:
            client.send(signal.SIGCONT)

    async def bring_back(self, *points: str) -> None:
        """Start what is dead."""
        await self.start_gym()
        if self.client is None:
            await self.start_rl(*points)

    async def close(self) -> None:
        """End everything."""
        for process in (self.client, *self.roles.values()):
            if process is not None:
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


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback address that nobody listens at."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
