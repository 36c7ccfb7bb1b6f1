# SPDX-License-Identifier: Apache-2.0
"""One run of one cell as processes: start, wait for a point, kill, go on."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from spec import durable
from tests.crash_matrix.cells import ONE, ROLES
from tests.crash_matrix.forks import ARMED_VARIABLE, HITS_VARIABLE, POINT_VARIABLE, Forked, ForkServer
from tests.ports import ReservedPorts
from tests.rl.harness import events_of, until
from tests.rl.policy import Policy
from tests.rl.processes import TOKENS

BOUND_S = 120.0
"""How long anything in a cell may take before it counts as hanging, in seconds: 2 cores under load are slow."""

ENDED = "Z"
STOPPED = "T"
NOBODY: Mapping[str, str] = {}
SEGMENT_BYTES = 4096
"""Of the boundary log: small enough for segments to end, and to be compacted, in every cell."""


@dataclass(frozen=True)
class Kill:
    """One crash.

    Attributes:
        at: when, on the monotonic clock, in seconds.
        victims: who died.
        point: where.
        events: how many events there were before.
        holding: unfinished rollouts that held a turn, in a living Gym or in the snapshot that is to be restored.
        lost: whether the Gym's disk is gone as well.
        newest: the newest published snapshot at that moment; empty without one.
        missed: whether RL had to recover anything; a participant may be back before anybody missed it.
    """

    at: float
    victims: tuple[str, ...]
    point: str
    events: int
    holding: int
    lost: bool = False
    newest: str = ""
    missed: bool = True


@dataclass(frozen=True)
class Seen:
    """What one participant said of itself at some moment."""

    when: str
    role: str
    status: Mapping[str, Any]


class NotReached(Exception):
    """A named point was not visited."""


@dataclass
class Bench:
    """The processes of one run in one directory.

    The participants of the Gym are processes with one role each, or one process; one that was killed is started again
    at its port, as a supervisor does.

    Args:
        forks: starts the processes.
        directory: empty at the beginning.
        policy: already served.
        tasks: `tasks` of run.yaml.
        more: further settings of run.yaml.
        log: whether the Gym has a boundary log.
        parts: the processes of the Gym.
        segment_bytes: of the log.
        gym: further settings of gym.yaml.
        through: process → the address under which RL finds it, where that is not its own.
    """

    forks: ForkServer
    directory: Path
    policy: Policy
    tasks: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    log: bool = False
    parts: Sequence[str] = ROLES
    segment_bytes: int = SEGMENT_BYTES
    gym: dict[str, Any] = field(default_factory=dict)
    through: dict[str, str] = field(default_factory=dict)
    roles: dict[str, Forked] = field(default_factory=dict)
    client: Forked | None = None
    rivals: list[Forked] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    listed: dict[str, dict[str, int]] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    hits: dict[str, Path] = field(default_factory=dict)
    ports: ReservedPorts = field(default_factory=lambda: ReservedPorts(()))

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
        self._write_run(run)
        self._write_gym()

    def _write_run(self, settings: Mapping[str, Any]) -> None:
        (self.directory / "run.yaml").write_text(yaml.safe_dump(settings))

    def change(self, **sections: Mapping[str, Any]) -> None:
        """Change fields of some sections of run.yaml, for the next RL client."""
        run = yaml.safe_load((self.directory / "run.yaml").read_text())
        self._write_run(run | {name: run.get(name, {}) | dict(section) for name, section in sections.items()})

    def move_policy(self, policy: Policy) -> None:
        """Let the next RL client name another policy."""
        self.policy = policy
        self.change(policy={"base_url": policy.url})

    def _write_gym(self) -> None:
        self.ports.close()
        self.ports = ReservedPorts(ROLES)
        ports = self.ports.by_name
        gym = {
            "name": "gym",
            "ports": ports,
            "storage_roots": ["run/snapshots"],
            "environments": ["taxi"],
            "limits": {"shutdown_grace_ms": 200},
        }
        if ONE not in self.parts:
            gym["peers"] = {role: f"http://127.0.0.1:{ports[role]}" for role in ROLES[1:]}
        if self.log:
            gym |= {"data_dir": "gym-data", "log": {"segment_bytes": self.segment_bytes}}
        (self.directory / "gym.yaml").write_text(yaml.safe_dump(gym | self.gym))

    # --- processes --------------------------------------------------------------------------------------------

    async def start_gym(self, armed: Mapping[str, str] = NOBODY, dying: Mapping[str, str] = NOBODY) -> None:
        """Start what is missing of the Gym, and wait until it announces itself.

        Args:
            armed: process → the point of its own at which it kills itself, once :meth:`arm` was called.
            dying: process → the point at which it kills itself already while it starts: nobody waits for it.
        """
        await self._start_roles(armed, dying)
        if not dying:
            self._announce()

    async def _start_roles(self, armed: Mapping[str, str], dying: Mapping[str, str]) -> None:
        if not self.roles:
            self._write_gym()
        for role in self.parts:
            if role not in self.roles:
                await self._start_role(role, armed.get(role, ""), dying.get(role, ""))
        for role, process in self.roles.items():
            if role in dying:
                continue
            await until(
                lambda role=role, process=process: self._announced(role).exists() or process.returncode is not None,  # type: ignore[misc]
                f"{role} announces itself",
                BOUND_S,
            )
            assert process.returncode is None, process.output.read_text()[-2000:]

    def _announce(self) -> None:
        """Let RL find the Gym: from now on it may call any of its processes."""
        found = [
            {**self._own(role), **({"url": self.through[role]} if role in self.through else {})} for role in self.parts
        ]
        durable.publish_file(self.directory / "announce.json", json.dumps({"participants": found}).encode())

    async def _start_role(self, role: str, armed: str, dying: str) -> None:
        self._announced(role).unlink(missing_ok=True)
        self.hits[role] = self.directory / f"hits-{role}-{len(self.kills)}"
        points = {ARMED_VARIABLE: armed, POINT_VARIABLE: dying, HITS_VARIABLE: str(self.hits[role])}
        arguments = ("serve", "--config", "gym.yaml", "--announce", f"{role}.json")
        if role != ONE:
            arguments = (*arguments, "--role", role)
        name = "reference_gym.cli"
        self.roles[role] = await self.forks.start(self.directory, name, *arguments, environment=TOKENS | points)

    async def arm(self, *roles: str) -> None:
        """Let processes kill themselves at the point that they were started with, from now on.

        Call it before anything can begin that passes such a point; when it returns, each process has said that it is
        armed, or has already died of it.
        """
        for role in roles:
            self.roles[role].send(signal.SIGUSR2)
        for role in roles:
            said, process = Path(f"{self.hits[role]}.armed"), self.roles[role]
            await until(
                lambda said=said, process=process: said.exists() or process.returncode is not None,  # type: ignore[misc]
                f"{role} is armed",
                BOUND_S,
            )

    async def fallen(self, role: str, point: str, *, alone: bool = False) -> None:
        """Wait until a process of the Gym has killed itself at its point.

        Args:
            role: the process.
            point: of the Gym.
            alone: whether there is no RL client that could end first.

        Raises:
            NotReached: it lives, or ended otherwise.
        """
        process = self.roles[role]

        def over() -> bool:
            return process.returncode is not None or not (alone or self.state() != ENDED)

        try:
            await until(over, f"{role} dies", BOUND_S)
        except AssertionError as error:
            raise NotReached(f"{role}/{point}: it lives on") from error
        hit = self.hits[role].read_text() if self.hits[role].exists() else "nothing"
        if process.returncode != -signal.SIGKILL or hit.split()[0] != point:
            raise NotReached(f"{role}/{point}: exit code {process.returncode}, hit {hit}")
        self._note((role,), f"{role}/{point}", self.holding())
        del self.roles[role]

    def _announced(self, role: str) -> Path:
        return self.directory / f"{role}.json"

    def _own(self, role: str) -> dict[str, Any]:
        """Return what a process announces of itself."""
        own: dict[str, Any] = json.loads(self._announced(role).read_text())["participants"][0]
        return own

    async def start_rl(self, *points: str) -> None:
        """Start the RL client, which stops itself at the named points (`name:visit`)."""
        environment = TOKENS | {"REFERENCE_RL_FAILPOINT": ",".join(f"{point}:stop" for point in points)}
        arguments = ("run", "--config", "run.yaml")
        self.client = await self.forks.start(self.directory, "reference_rl.cli", *arguments, environment=environment)

    async def start_rival(self, name: str, **changes: Any) -> Forked:
        """Start another RL client over the same Gym, with a run, a run directory and settings of its own."""
        run = yaml.safe_load((self.directory / "run.yaml").read_text())
        (self.directory / f"{name}.yaml").write_text(yaml.safe_dump(run | {"run_id": name, "run_dir": name} | changes))
        arguments = ("run", "--config", f"{name}.yaml")
        rival = await self.forks.start(self.directory, "reference_rl.cli", *arguments, environment=TOKENS)
        self.rivals.append(rival)
        return rival

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
        dead = {role: process for role, process in self.roles.items() if names & {role, ONE, "all"}}
        dead_rl = bool(names & {"rl", "all"})
        await self.observe(f"before {point}")
        holding = self.holding()
        for process in (*dead.values(), *([client] if dead_rl else [])):
            process.send(signal.SIGKILL)
        self._note(tuple(sorted(names)), point, holding, lost=lose_disk)
        for role, process in dead.items():
            assert await process.wait(BOUND_S) == -signal.SIGKILL, f"{role} was not killed"
            del self.roles[role]
        if lose_disk:
            shutil.rmtree(self.directory / "gym-data", ignore_errors=True)
        if dead_rl:
            assert await client.wait(BOUND_S) == -signal.SIGKILL, "RL was not killed"
            self.client = None
        elif self.state() == STOPPED:
            client.send(signal.SIGCONT)

    def _note(self, victims: tuple[str, ...], point: str, holding: int, *, lost: bool = False) -> None:
        events = len(events_of(self.run_dir))
        newest = self.newest()
        name = newest.name if newest else ""
        self.kills.append(Kill(time.monotonic(), victims, point, events, holding, lost, name))

    async def bring_back(self, *points: str, armed: Mapping[str, str] = NOBODY) -> None:
        """Start what is dead: the Gym, armed before RL can find it, and RL with its points."""
        # RL that lives calls a process at an address that it knows as soon as somebody listens there.
        assert not armed or self.client is None or not self.roles, "the Gym comes back where RL looks for it"
        await self._start_roles(armed, NOBODY)
        await self.arm(*armed)
        self._announce()
        if self.client is None:
            await self.start_rl(*points)

    async def close(self) -> None:
        """End everything."""
        for process in (self.client, *self.rivals, *self.roles.values()):
            if process is not None:
                await process.kill()
        self.ports.close()

    # --- what can be seen -------------------------------------------------------------------------------------

    def events(self, *names: str, after: int = 0) -> list[dict[str, Any]]:
        """Return the events of some names behind the first ``after`` ones."""
        return [event for event in events_of(self.run_dir)[after:] if event["event"] in names]

    def all_events(self) -> list[dict[str, Any]]:
        """Return every event of the run, those of earlier processes included."""
        return events_of(self.run_dir)

    def holding(self) -> int:
        """Return how many unfinished rollouts hold a turn: by the policy's log, or by the snapshot if that was lost."""
        saved = self.saved()
        if any(kill.lost for kill in self.kills):
            return sum(1 for rollout_id, turns in self.to_continue().items() if turns >= 1 and rollout_id not in saved)
        return sum(1 for rollout_id, turn in self.policy.last_asked().items() if turn >= 2 and rollout_id not in saved)

    def newest(self) -> Path | None:
        """Return the directory of the newest published snapshot, by their names alone."""
        found = self.run_dir.glob("snapshots/*-*/manifest.json")
        published = [path.parent for path in found if path.parent.suffix == ""]
        return max(published, key=lambda path: [int(number) for number in path.name.split("-")], default=None)

    def to_continue(self) -> dict[str, int]:
        """Return the turns of the rows `turn` of the newest snapshot, as its files give them."""
        newest = self.newest()
        if newest is None:
            return {}
        lines = [line for path in newest.glob("gym/gym/*/rollouts.jsonl") for line in path.read_text().splitlines()]
        rows = [row for row in map(json.loads, lines) if row["state"] == "turn"]
        turns: dict[str, int] = {}
        for row in rows:
            turns[row["rollout_id"]] = max(turns.get(row["rollout_id"], 0), row["turns_done"])
        return turns

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

    def urls(self) -> dict[str, str]:
        """Return where each participant is, by name."""
        return {own["name"]: own["url"] for own in map(self._own, self.parts)}

    async def ask(self, role: str, path: str) -> Any:
        """Return the reply to a GET of one participant."""
        async with self.http() as http, http.get(f"{self.urls()[role]}/gym-checkpoint/v1/{path}") as reply:
            return await reply.json()

    def http(self) -> aiohttp.ClientSession:
        """Return a client with the token of the control plane."""
        headers = {"Authorization": f"Bearer {TOKENS['GYM_CHECKPOINT_TOKEN']}"}
        return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=BOUND_S))

    async def statuses(self) -> dict[str, dict[str, Any]]:
        """Return `GET /checkpoint` of every participant."""
        return {role: await self.ask(role, "checkpoint") for role in self.urls()}

    async def observe(self, when: str) -> None:
        """Remember the status of whoever lives."""
        for role, process in self.roles.items():
            if process.returncode is None:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    self.seen.append(Seen(when, role, await self.ask(role, "checkpoint")))

    def rl_log(self) -> str:
        """Return the end of what the RL client said."""
        path = self.directory / "reference_rl.log"
        return path.read_text()[-400:] if path.exists() else ""
