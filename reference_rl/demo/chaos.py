# SPDX-License-Identifier: Apache-2.0
"""SIGKILL to everything at seeded random moments, with a snapshot every fraction of a second.

After each restart: the snapshot in use is the newest one that was published before the kill, every file that its
manifest names is whole, and no turn that its index lists is generated again. The kills come in turn in the
middle of the work, at a random moment of a restart, and right after one, so that the same snapshot is restored twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_rl.demo.calls import Call, read_lines, turns_thrown_away
from reference_rl.demo.errors import PromiseBrokenError
from reference_rl.demo.stage import Stage
from reference_rl.demo.story import Teller
from reference_rl.sealed import unseal
from spec.wire import bytes_digest, parse_checkpoint_id

INTERVAL_S = 0.3
LONGEST_S = 2.0
RESTARTING_S = 1.5
RESTART_S = 60.0


@dataclass(frozen=True)
class Kill:
    """One SIGKILL and what the restart after it must not do."""

    number: int
    moment: str
    newest: str | None
    kept: Mapping[str, int]
    calls_before: int


def published(snapshots: Path) -> list[str]:
    """Checkpoint ids of the published snapshots, oldest first."""
    names = [path.name for path in snapshots.iterdir() if path.is_dir() and path.name.replace("-", "").isdigit()]
    return sorted(names, key=parse_checkpoint_id)


def listed_turns(snapshot: Path) -> dict[str, int]:
    """Turns that a snapshot lists as done: rollout id → turns (`turn` and `finished` rows).

    Boundaries are the agent's: the index of the participant that owns rollouts counts. A ledger may already hold the
    row of a policy call whose turn was not closed in the cut; that turn is not a finished one.
    """
    manifest = unseal((snapshot / "manifest.json").read_bytes())
    indexes = [
        snapshot / "gym" / gym["alias"] / participant["name"] / participant["index"]["name"]
        for gym in manifest["gyms"]
        for participant in gym["participants"]
        if "rollouts" in participant["owns"]
    ]
    rows = [row for index in indexes for row in read_lines(index)]
    return {row["rollout_id"]: row["turns_done"] for row in rows if row["state"] in ("turn", "finished")}


def generated_again(calls: Iterable[Call], kept: Mapping[str, int]) -> list[Call]:
    """The completed calls among those of a restart whose turn the restored snapshot lists as done."""
    return [c for c in calls if c.completed is not None and c.rollout_id and c.turn <= kept.get(c.rollout_id, 0)]


def damaged_files(snapshot: Path) -> list[str]:
    """The files named by a snapshot's manifest that are missing or have another digest."""
    manifest = unseal((snapshot / "manifest.json").read_bytes())
    files = {file["path"]: file["digest"] for file in manifest["files"]}
    return [
        path
        for path, digest in files.items()
        if not (snapshot / path).is_file() or bytes_digest((snapshot / path).read_bytes()) != digest
    ]


class Chaos:
    """Kills until the given number is reached; a run that finishes first is followed by a new one.

    Args:
        teller: runs stages.
        kills: how many SIGKILLs.
        seed: of the moments.
    """

    def __init__(self, teller: Teller, kills: int, seed: int) -> None:
        self._teller = teller
        self._kills = kills
        self._random = random.Random(seed)
        self._done = 0

    def run(self) -> None:
        """Run to the end.

        Raises:
            PromiseBrokenError: if a snapshot in use was incomplete or old, a listed turn was redone, or a body differs.
        """
        say = self._teller.say
        say("uninterrupted run")
        yardstick = self._teller.uninterrupted()
        runs = 0
        while self._done < self._kills:
            runs += 1
            stage = self._teller.stage(f"chaos-{runs}", 3, {}, INTERVAL_S)
            self._one_run(stage)
            if stage.bodies() != yardstick:
                raise PromiseBrokenError(f"bodies differ from the uninterrupted run; the logs are in {stage.directory}")
            lost = turns_thrown_away(stage.calls())
            say(f"run {runs} finished: bodies equal; {lost} turns newer than their snapshot were generated twice")
        say(f"{self._done} SIGKILLs: no half snapshot in use, no turn of a restored snapshot generated again")

    def _one_run(self, stage: Stage) -> None:
        last: Kill | None = None
        while True:
            restarts = len(stage.events("restarted"))
            stage.start_gym()
            stage.start_rl()
            during_restart = last is not None and self._done % 3 == 1 and self._done < self._kills
            if last is not None and not during_restart and not self._wait_for_restart(stage, restarts):
                break
            if last is not None and len(stage.events("restarted")) > restarts:
                self._judge_restart(stage, last)
            if self._done >= self._kills or not self._wait_for_moment(stage, last is None):
                break
            stage.kill_all()
            if last is not None:
                self._judge_turns(stage, last)
            last = self._record(stage)
        stage.wait_for_end(RESTART_S + self._teller.finish_s)
        stage.stop()
        if last is not None:
            self._judge_turns(stage, last)

    def _wait_for_restart(self, stage: Stage, restarts: int) -> bool:
        """Wait until it is said what was restored; False if the kill had come after the end of the run."""
        rl = stage.rl
        assert rl is not None

        def restarted() -> bool:
            return len(stage.events("restarted")) > restarts

        stage.wait(lambda: restarted() or rl.process.poll() == 0, "the event `restarted`", RESTART_S)
        return restarted()

    def _wait_for_moment(self, stage: Stage, is_first: bool) -> bool:
        """Wait for the next kill: in the middle of the work, of a restart, or right after one, in turn.

        The middle of the work begins, three times out of four, with the first snapshot of this life; so a slow machine
        does not turn all kills into kills of processes that are only starting.

        Returns:
            False if the run finished before the moment.
        """
        rl = stage.rl
        assert rl is not None
        kind = "work" if is_first else ("work", "restart", "right after")[self._done % 3]
        if kind == "work" and self._random.random() < 0.75:
            seen = len(stage.events("snapshot_published"))
            stage.wait(
                lambda: rl.process.poll() == 0 or len(stage.events("snapshot_published")) > seen,
                "a snapshot to be published",
                RESTART_S,
            )
        moment = {"work": self._random.uniform(0.0, LONGEST_S), "restart": self._random.uniform(0.0, RESTARTING_S)}
        bound = time.monotonic() + moment.get(kind, 0.0)
        stage.wait(lambda: rl.process.poll() == 0 or time.monotonic() >= bound, "the moment", LONGEST_S + 10)
        return not rl.ended()

    def _record(self, stage: Stage) -> Kill:
        self._done += 1
        newest = max(published(stage.snapshots), key=parse_checkpoint_id, default=None)
        kept = listed_turns(stage.snapshots / newest) if newest else {}
        events = stage.events()
        moment = f"after `{events[-1]['event']}`" if events else "before the first event"
        calls = len(stage.calls())
        self._teller.say(
            f"kill {self._done}: {moment}, {calls} calls; newest snapshot {newest}, {sum(kept.values())} turns in it"
        )
        return Kill(self._done, moment, newest, kept, calls)

    def _judge_restart(self, stage: Stage, last: Kill) -> None:
        event: dict[str, Any] = stage.events("restarted")[-1]
        if event["snapshot"] != last.newest:
            raise PromiseBrokenError(
                f"kill {last.number}: restarted from {event['snapshot']}, newest published was {last.newest}"
            )
        damaged = damaged_files(stage.snapshots / last.newest) if last.newest else []
        if damaged:
            raise PromiseBrokenError(
                f"kill {last.number}: snapshot {last.newest} is in use and incomplete: {', '.join(damaged)}"
            )

    def _judge_turns(self, stage: Stage, last: Kill) -> None:
        again = generated_again(stage.calls()[last.calls_before :], last.kept)
        if again:
            named = ", ".join(f"{call.rollout_id} turn {call.turn}" for call in again)
            raise PromiseBrokenError(
                f"kill {last.number}: turns of snapshot {last.newest} were generated again: {named}"
            )
