# SPDX-License-Identifier: Apache-2.0
"""One directory with one Gym and one RL client: their settings, their start and end, and what they report."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from reference_rl.demo.calls import Call, Tail, calls_of, read_lines
from reference_rl.demo.errors import ProcessDiedError
from reference_rl.demo.processes import Processes, Started, wait_until
from reference_rl.demo.scenario import COLUMNS, Scenario

START_S = 45.0
GRACE_MS = 200  # nobody wants a last snapshot when a run is over
CONTROL_ENV = "GYM_CHECKPOINT_TOKEN"
DATA_ENV = "GYM_CHECKPOINT_DATA_TOKEN"
Json = dict[str, Any]


def script(name: str) -> str:
    """The path of one of the project's own commands: beside the running interpreter, else on the search path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name


@dataclass(frozen=True)
class Commands:
    """How the Gym and the RL client are called.

    Args:
        gym: program and first arguments of the Gym.
        rl: the same of the RL client.
    """

    gym: tuple[str, ...]
    rl: tuple[str, ...]

    @classmethod
    def installed(cls) -> Commands:
        """The project's own, as installed."""
        return cls(gym=(script("reference-gym"),), rl=(script("reference-rl"),))


@dataclass
class Stage:
    """A Gym and an RL client that share one directory below `build/demo`.

    Args:
        processes: starts and ends them.
        directory: an empty directory.
        scenario: the prompt group.
        column: column of the capability table that the RL client is switched to.
        policy_url: base URL of the policy for this run (without `/v1`).
        gym_form: `one` or `three` processes.
        secrets: environment variables with the tokens.
        snapshot_every_s: snapshot interval in seconds, or None for snapshots on SIGUSR1 only.
        meanwhile: called while the stage waits.
        commands: how the two are called.
    """

    processes: Processes
    directory: Path
    scenario: Scenario
    column: int
    policy_url: str
    gym_form: str
    secrets: dict[str, str]
    snapshot_every_s: float | None = None
    meanwhile: Callable[[], None] = lambda: None
    commands: Commands = field(default_factory=Commands.installed)
    gym: Started | None = None
    rl: Started | None = None
    participants: list[Json] = field(default_factory=list)
    _life: int = 0

    def __post_init__(self) -> None:
        self.run_dir = self.directory / "rl"
        self.snapshots = self.run_dir / "snapshots"
        self._events = Tail(self.run_dir / "events.jsonl")
        self._calls = Tail(self.directory / "policy.jsonl")
        self.snapshots.mkdir(parents=True, mode=0o700)
        (self.directory / "gym").mkdir()
        self._write("gym/gym.yaml", self._gym_settings())
        self._write("rl.yaml", self._rl_settings())

    def start_gym(self) -> None:
        """Start the Gym on free ports and wait until all of its servers listen."""
        self._life += 1
        announce = self.directory / "gym" / f"announce-{self._life}.json"
        argv = [*self.commands.gym, "serve", "--config", str(self.directory / "gym" / "gym.yaml")]
        argv += ["--announce", str(announce)]
        self.gym = self.processes.start("the Gym", argv, self.directory / f"gym-{self._life}.log", self.secrets)
        self.wait(announce.exists, "the Gym's servers to listen", START_S)
        self.participants = json.loads(announce.read_text(encoding="utf-8"))["participants"]
        current = self.directory / "gym" / "announce.json"
        shutil.copyfile(announce, current.with_suffix(".tmp"))
        current.with_suffix(".tmp").rename(current)

    def start_rl(self) -> None:
        """Start the RL client; the same command begins a run and resumes it."""
        argv = [*self.commands.rl, "run", "--config", str(self.directory / "rl.yaml")]
        self.rl = self.processes.start("the RL client", argv, self.directory / f"rl-{self._life}.log", self.secrets)

    def kill_all(self) -> None:
        """SIGKILL every Gym and RL process at once."""
        victims = [started for started in (self.gym, self.rl) if started is not None]
        self.processes.kill(victims, [participant["pid"] for participant in self.participants])
        self.gym = self.rl = None

    def stop(self) -> None:
        """End what is left of this stage."""
        self.processes.stop(started for started in (self.gym, self.rl) if started is not None)

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait for a condition while the Gym and the RL client must live."""
        watching = [started for started in (self.gym, self.rl) if started is not None]
        wait_until(condition, what, timeout_s, watching, self.directory, self.meanwhile)

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until the RL client reports `done` and has ended by itself.

        Raises:
            ProcessDiedError: if it ended without that, or with an exit code other than 0.
        """
        assert self.rl is not None
        rl, self.rl = self.rl, None
        watching = [] if self.gym is None else [self.gym]
        wait_until(rl.ended, "the RL client to finish", timeout_s, watching, self.directory, self.meanwhile)
        if rl.process.returncode != 0 or not self.events("done"):
            raise ProcessDiedError(rl.obituary("the event `done`"))

    @property
    def urls(self) -> list[str]:
        """Where the Gym's participants listen now."""
        return [participant["url"] for participant in self.participants]

    def events(self, kind: str | None = None) -> list[Json]:
        """What the RL client reported so far, in all of its lives."""
        return [event for event in self._events.lines() if kind is None or event["event"] == kind]

    def calls(self) -> list[Call]:
        """The policy's calls of this stage so far."""
        return calls_of(self._calls.lines())

    def bodies(self) -> dict[int, Any]:
        """The trained samples: sibling → body."""
        return {line["sibling"]: line["body"] for line in read_lines(self.run_dir / "results.jsonl")}

    def _write(self, name: str, settings: Json) -> None:
        text = yaml.safe_dump(settings, sort_keys=False)
        (self.directory / name).write_text(text, encoding="utf-8")

    def _gym_settings(self) -> Json:
        return {
            "name": "gym",
            "processes": self.gym_form,
            "storage_roots": [str(self.snapshots)],
            "environments": ["taxi"],
            "limits": {"shutdown_grace_ms": GRACE_MS},
            "tokens": {
                "control": {"env": CONTROL_ENV},
                "data": {"env": DATA_ENV},
                "policy": {"env": "GYM_POLICY_TOKEN"},
            },
        }

    def _rl_settings(self) -> Json:
        # Random kills of the RL process alone would lose answers that the gateway has and the Gym does not.
        gateway = self.column == COLUMNS[-1] and self.snapshot_every_s is None
        return {
            "run_id": f"demo-{self.directory.name}",
            "run_dir": str(self.run_dir),
            "column": self.column,
            "gateway": gateway,
            "gyms": [{"alias": "gym", "announce": str(self.directory / "gym" / "announce.json")}],
            "policy": {"base_url": f"{self.policy_url}/v1", "model": "demo", "api": "chat_completions"},
            "tasks": {
                "environment": "taxi",
                "groups": 1,
                "siblings": self.scenario.siblings,
                "max_turns": self.scenario.turns,
                "task": {"seed": self.scenario.seed},
            },
            "granularity": "sibling",
            "snapshot": {"interval_s": self.snapshot_every_s, "keep": 3},
            "tokens": {"control": {"env": CONTROL_ENV}, "data": {"env": DATA_ENV}},
        }
