# SPDX-License-Identifier: Apache-2.0
"""The order of events in one column: start, hold, snapshot, SIGKILL, restart, finish; and the run without a crash."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from reference_rl.demo.calls import Call, Count, completed_turns, count_siblings, held_turns, turns_thrown_away
from reference_rl.demo.policy import TOKEN_ENV
from reference_rl.demo.processes import Processes, wait_until
from reference_rl.demo.scenario import Scenario
from reference_rl.demo.stage import START_S, Commands, Json, Stage

SNAPSHOT_S = 30.0


@dataclass(frozen=True)
class Mark:
    """One thing that happened to the whole column at one time (seconds since the Unix epoch)."""

    t: float
    kind: str
    text: str = ""


@dataclass(frozen=True)
class Column:
    """What one column showed: everything that the page and the summary are made of."""

    column: int
    scenario: Scenario
    calls: list[Call]
    counts: list[Count]
    marks: list[Mark]
    bodies: dict[int, Any]
    yardstick: dict[int, Any]
    snapshot: Json
    urls: list[list[str]]
    seconds: float
    directory: str

    @property
    def thrown_away(self) -> int:
        """Completed turns that were generated again."""
        return turns_thrown_away(self.calls)

    @property
    def equal_bodies(self) -> set[int]:
        """The siblings whose body is that of the uninterrupted run."""
        return {
            s for s in range(self.scenario.siblings) if s in self.bodies and self.bodies[s] == self.yardstick.get(s)
        }

    @property
    def bodies_equal(self) -> bool:
        """True if every sibling has a body, equal to that of the uninterrupted run."""
        return len(self.equal_bodies) == self.scenario.siblings == len(self.bodies)

    @property
    def as_promised(self) -> bool:
        """True if the count and the bodies are what the example promises."""
        return self.thrown_away == self.scenario.expected(self.column) and self.bodies_equal

    def summary(self) -> Json:
        """This column's part of `summary.json`."""
        names = [self.scenario.name(sibling) for sibling in range(self.scenario.siblings)]
        return {
            "turns_thrown_away": self.thrown_away,
            "expected": self.scenario.expected(self.column),
            "bodies_equal_to_uninterrupted": self.bodies_equal,
            "siblings": {name: asdict(count) for name, count in zip(names, self.counts, strict=True)},
            "snapshot": self.snapshot.get("checkpoint_id"),
            "pause_ms": self.snapshot.get("pause_ms"),
            "snapshot_ms": self.snapshot.get("total_ms"),
            "token_rows": self.snapshot.get("token_rows"),
            "urls_before_and_after": self.urls,
            "seconds": round(self.seconds, 2),
            "seconds_at": {mark.kind: round(mark.t - self.marks[0].t, 2) for mark in self.marks},
            "logs": self.directory,
        }


class Policy:
    """The policy server's process and its small control endpoint.

    Args:
        processes: starts it.
        directory: where its log and its announce file go.
        latency_s: seconds per generation.
        secrets: environment variables with the tokens.
    """

    def __init__(self, processes: Processes, directory: Path, latency_s: float, secrets: dict[str, str]) -> None:
        announce = directory / "policy-announce.json"
        announce.unlink(missing_ok=True)
        argv = [
            sys.executable,
            "-m",
            "reference_rl.demo.policy",
            "--announce",
            str(announce),
            "--latency",
            str(latency_s),
        ]
        self.process = processes.start("the policy server", argv, directory / "policy.log", secrets)
        wait_until(announce.exists, "the policy server to listen", START_S, [self.process], directory)
        self.url: str = json.loads(announce.read_text(encoding="utf-8"))["url"]
        self._headers = {"Authorization": f"Bearer {secrets[TOKEN_ENV]}"}

    def open(self, run: str, scenario: Scenario, holds: dict[int, int], log: Path) -> str:
        """Tell the policy who is who in a run and whom to hold; the answer is the run's base URL."""
        body = {
            "siblings": {str(seed): sibling for seed, sibling in scenario.policy_seeds.items()},
            "holds": {str(sibling): turn for sibling, turn in holds.items()},
            "log": str(log),
        }
        httpx.put(f"{self.url}/{run}", json=body, headers=self._headers).raise_for_status()
        return f"{self.url}/{run}"

    def release(self, run: str) -> None:
        """Let every held call go on."""
        httpx.post(f"{self.url}/{run}/release", headers=self._headers).raise_for_status()


@dataclass
class Teller:
    """Tells the story of one run after the other; all of them share the policy.

    Args:
        processes: starts and ends everything.
        policy: the policy server.
        directory: `build/demo`, absolute.
        scenario: the prompt group.
        gym_form: `one` or `three` processes.
        secrets: environment variables with the tokens.
        latency_s: seconds per generation.
        say: takes one line of progress.
        commands: how the Gym and the RL client are called.
        look: called while something is waited for, with what gives the run's policy calls so far.
    """

    processes: Processes
    policy: Policy
    directory: Path
    scenario: Scenario
    gym_form: str
    secrets: dict[str, str]
    latency_s: float
    say: Callable[[str], None]
    commands: Commands = field(default_factory=Commands.installed)
    look: Callable[[Callable[[], list[Call]]], None] = lambda calls: None
    _marks: list[Mark] = field(default_factory=list)

    @property
    def finish_s(self) -> float:
        """A generous bound for all turns of the group, in seconds."""
        return 60.0 + 4 * self.scenario.turns * self.latency_s + 0.2 * self.scenario.turns * self.scenario.siblings

    def uninterrupted(self) -> dict[int, Any]:
        """Run the group once with no crash and no checkpoint protocol (column 0); its bodies are the yardstick."""
        stage = self.stage("uninterrupted", 0, {})
        stage.start_gym()
        stage.start_rl()
        stage.wait_for_end(self.finish_s)
        stage.stop()
        return stage.bodies()

    def column(self, number: int, yardstick: dict[int, Any]) -> Column:
        """Tell one column of the table, from its start to the comparison of the bodies.

        Args:
            number: the column, 0 … 3.
            yardstick: bodies of the uninterrupted run.
        """
        began = time.monotonic()
        self._marks = []
        name = f"column-{number}"
        stage = self.stage(name, number, self.scenario.held)
        urls = []
        self.say("starting a Gym and an RL client")
        self._start(stage, "start")
        urls.append(stage.urls)
        self._wait_for_positions(stage)
        snapshot = self._snapshot(stage)
        self.say(f"snapshot {snapshot['checkpoint_id']} is published; SIGKILL to every Gym and RL process")
        self._mark("kill", "SIGKILL: all Gym and RL processes")
        stage.kill_all()
        self.say("restarting on new ports")
        self._start(stage, "restart")
        urls.append(stage.urls)
        self.policy.release(name)
        self._mark("release")
        stage.wait_for_end(self.finish_s)
        self._mark("done", "all results are in")
        stage.stop()
        calls = stage.calls()
        return Column(
            column=number,
            scenario=self.scenario,
            calls=calls,
            counts=count_siblings(calls, self.scenario.siblings),
            marks=self._marks,
            bodies=stage.bodies(),
            yardstick=yardstick,
            snapshot=snapshot,
            urls=urls,
            seconds=time.monotonic() - began,
            directory=name,
        )

    def stage(self, name: str, column: int, holds: dict[int, int], snapshot_every_s: float | None = None) -> Stage:
        """A fresh directory for a Gym and an RL client, made known to the policy.

        Args:
            name: of the run and of its directory.
            column: column of the capability table.
            holds: calls that the policy holds, sibling → turn.
            snapshot_every_s: snapshot interval in seconds, or None for SIGUSR1 only.
        """
        directory = self.directory / name
        directory.mkdir()
        stage = Stage(
            processes=self.processes,
            directory=directory,
            scenario=self.scenario,
            column=column,
            policy_url=self.policy.open(name, self.scenario, holds, directory / "policy.jsonl"),
            gym_form=self.gym_form,
            secrets=self.secrets,
            snapshot_every_s=snapshot_every_s,
            commands=self.commands,
        )
        stage.meanwhile = lambda: self.look(stage.calls)
        return stage

    def _start(self, stage: Stage, kind: str) -> None:
        self._mark(kind)
        stage.start_gym()
        stage.start_rl()
        self._mark(f"{kind}ed", ", ".join(url.rpartition(":")[2] for url in stage.urls))

    def _wait_for_positions(self, stage: Stage) -> None:
        held = self.scenario.held
        self.say("waiting until the first sibling has finished and the next turns of the others are asked and held")

        def in_position() -> bool:
            calls = stage.calls()
            done = completed_turns(calls)
            return (
                held_turns(calls) == held
                and all(done[sibling] == turns for sibling, turns in self.scenario.completed_at_crash.items())
                and any(event["sibling"] == 0 for event in stage.events("finished"))
            )

        stage.wait(in_position, f"sibling {self.scenario.name(0)} to finish and the others to be held", self.finish_s)

    def _snapshot(self, stage: Stage) -> Json:
        """Ask for a snapshot the way a preemption notice does, and wait for its publication."""
        assert stage.rl is not None
        asked = len(stage.events())
        stage.rl.process.send_signal(signal.SIGUSR1)
        published: list[Json] = []

        def is_published() -> bool:
            later = stage.events()[asked:]
            published[:] = [event for event in later if event["event"] == "snapshot_published"]
            return bool(published)

        stage.wait(is_published, "the snapshot to be published", SNAPSHOT_S)
        self._mark("snapshot", str(published[0]["checkpoint_id"]))
        return published[0]

    def _mark(self, kind: str, text: str = "") -> None:
        self._marks.append(Mark(time.time(), kind, text))
