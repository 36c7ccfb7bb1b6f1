# SPDX-License-Identifier: Apache-2.0
"""Many rollouts, kills of random processes at random instants: nothing lost, nothing trained twice.

    python -m tests.crash_matrix.soak [--rollouts 2000] [--kills 20] [--seed 1] [--minutes 15] [--log]

Prints a line for each kill: who died, how many rollouts were in the middle of a turn, how many turns were kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from spec import durable
from tests.crash_matrix import judge
from tests.crash_matrix.bench import ENDED, Bench
from tests.crash_matrix.forks import ForkServer, fork_server
from tests.rl.harness import results_of, until
from tests.rl.policy import Policy, serving

WHO: Final = ("rl", "agent", "model", "resources", "gym", "all", "lost node")
"""`gym` is the whole Gym; with a lost node everything dies and the Gym's disk is gone."""

SEGMENT_BYTES: Final = 1_048_576

RECOVERED: Final = ("restarted", "gym_recovered")

SNAPSHOTS: Final = 30
"""How many are kept: what RL has restored is still there when the judge comes to it, on a busy machine as well."""

SETTLED_S: Final = 30.0

UNNOTICED_S: Final = 2.0
"""How long a Gym that is back may go on before its crash counts as one that RL never missed, in seconds."""

TURN_S: Final = 3.0
"""How long a kill may be put off until a rollout is in the middle of a turn, in seconds."""


@dataclass(frozen=True)
class Wish:
    """What a run is to be.

    Attributes:
        latency_s: of the policy, in seconds; a turn takes as long at least.
        interval_s: between snapshots, in seconds.
        longest_s: a kill comes at most so long after the recovery from the one before, in seconds.
    """

    rollouts: int = 2000
    kills: int = 20
    seed: int = 1
    turns: int = 8
    latency_s: float = 0.2
    live: int = 64
    interval_s: float = 0.5
    longest_s: float = 6.0
    bound_s: float = 900.0
    log: bool = False


@dataclass
class Struck:
    """One kill as it was seen."""

    number: int
    victim: str
    in_a_turn: int
    finished: int
    kept: int = 0
    restored: str | None = None
    how: str = ""


@dataclass
class Outcome:
    """What became of a run."""

    trained: int = 0
    kills: list[Struck] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def in_a_turn(self) -> int:
        """Return how many kills came while a rollout was in the middle of a turn."""
        return sum(1 for kill in self.kills if kill.in_a_turn)


class Soak:
    """Kills while a run goes on.

    Args:
        bench: prepared.
        wish: what the run is to be.
        say: called with one line for each kill.
    """

    def __init__(self, bench: Bench, wish: Wish, say: Any) -> None:
        self._bench = bench
        self._wish = wish
        self._say = say
        self._random = random.Random(wish.seed)
        self.outcome = Outcome()

    async def run(self) -> None:
        """Run to the end, with all kills in the middle.

        Raises:
            AssertionError: the run, or a recovery, did not end within its bound.
        """
        bench, wish = self._bench, self._wish
        await bench.start_gym()
        await bench.start_rl()
        for number in range(1, wish.kills + 1):
            # The kills are spread over the run, so that the last ones still meet rollouts under way.
            due = wish.rollouts * number // (wish.kills + 2)
            await self._until(lambda due=due: len(bench.saved()) >= due, "the run moves on")
            moment = time.monotonic() + self._random.uniform(0.0, wish.longest_s)
            await self._until(
                lambda moment=moment, due=due: (
                    time.monotonic() >= moment or len(bench.saved()) > due + wish.rollouts // 40
                ),
                "the moment",
            )
            patience = time.monotonic() + TURN_S
            await self._until(lambda patience=patience: self._in_a_turn() or time.monotonic() > patience, "a turn")
            if bench.state() == ENDED:
                break
            await self._strike(number)
        await self._until(lambda: False, "the run is done", end_is_fine=True)

    async def _strike(self, number: int) -> None:
        bench = self._bench
        victim = self._random.choice(WHO)
        struck = Struck(number, victim, self._in_a_turn(), len(bench.saved()))
        self.outcome.kills.append(struck)
        lost = victim == "lost node"
        events = len(bench.all_events())
        await bench.kill({"all"} if lost else {victim}, f"kill {number} ({victim})", lose_disk=lost)
        held = self._held()
        if bench.client is None:
            self.outcome.violations += judge.published(bench)
        await bench.bring_back()
        back = time.monotonic()

        def recovered() -> Any:
            if bench.events(*RECOVERED, after=events) or bench.state() == ENDED:
                return True
            # With its log a participant may be back, with its incarnation, before RL has missed it.
            moved_on = time.monotonic() > back + UNNOTICED_S and len(bench.saved()) > struck.finished
            return self._wish.log and bench.client is not None and moved_on

        await self._until(recovered, "it is recovered")
        found = bench.events(*RECOVERED, after=events)
        if found:
            event = found[-1]
            fated = [r for r in event["rollouts"] if r["how"] not in ("restarted", "reused", "not started")]
            struck.kept = sum(r["turns_done"] for r in fated)
            struck.restored = event["snapshot"] if judge.any_restored(event) else None
            struck.how = str(event.get("how") or ", ".join(event["gyms"].values()))
        elif self._wish.log:
            struck.kept, struck.how = held, "not missed"
            bench.kills[-1] = replace(bench.kills[-1], missed=False)
        judge.note_restores(bench)
        self._say(
            f"kill {number:2}: {victim:9} {struck.finished:5} finished, {struck.in_a_turn:3} in the middle of a turn; "
            f"{struck.how} {struck.restored or ''}: {struck.kept} turns of unfinished rollouts kept"
        )

    def _held(self) -> int:
        """Return how many turns unfinished rollouts have done, by the policy's log."""
        saved = self._bench.saved()
        return sum(turn - 1 for rollout, turn in self._bench.policy.last_asked().items() if rollout not in saved)

    def _in_a_turn(self) -> int:
        """Return how many rollouts that have done a turn wait for the policy's answer to the next one."""
        now = time.monotonic()
        late = 2 * self._wish.latency_s + 0.1  # what waits longer was asked by somebody who is dead
        calls = self._bench.policy.calls
        return len({c.rollout_id for c in calls if c.answered is None and c.turn >= 2 and now - c.asked < late})

    async def _until(self, condition: Any, what: str, *, end_is_fine: bool = False) -> None:
        """Wait for a condition; RL must not end otherwise than done meanwhile."""
        bench = self._bench
        end = time.monotonic() + (self._wish.bound_s if end_is_fine else SETTLED_S * 4)
        while not condition():
            judge.note_restores(bench)
            if bench.state() == ENDED:
                assert bench.client is not None
                code = await bench.client.wait()
                assert code == 0, f"RL ended with code {code}: {bench.rl_log()}"
                return
            assert time.monotonic() < end, f"not in time: {what}: {bench.rl_log()}"
            await asyncio.sleep(0.05)


async def soak(forks: ForkServer, directory: Path, wish: Wish, say: Any = lambda text: None) -> Outcome:
    """Run once without and once with kills; judge the second by the first."""
    began = time.monotonic()
    yardstick = await _bodies(forks, directory / "whole", wish)
    say(f"uninterrupted: {len(yardstick)} samples in {time.monotonic() - began:.0f} s")
    async with serving(Policy(latency_s=wish.latency_s)) as policy:
        bench = _bench(forks, directory / "killed", policy, wish)
        run = Soak(bench, wish, say)
        outcome = run.outcome
        try:
            await run.run()
            rows = results_of(bench.run_dir)
            outcome.trained = len(rows)
            outcome.violations += judge.of_the_run(bench, await bench.statuses(), yardstick)
            outcome.violations += await judge.of_the_stale(bench)
            outcome.excused = sorted(judge.excused(bench))
        except AssertionError as error:
            outcome.violations.append(f"I7: {error}")
        finally:
            await bench.close()
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


async def _bodies(forks: ForkServer, directory: Path, wish: Wish) -> dict[tuple[int, int], Any]:
    async with serving(Policy()) as policy:
        bench = _bench(forks, directory, policy, wish)
        try:
            await bench.start_gym()
            await bench.start_rl()
            await until(lambda: bench.state() == ENDED, "the uninterrupted run is done", wish.bound_s)
        finally:
            await bench.close()
        return {(row["group"], row["sibling"]): row["body"] for row in results_of(bench.run_dir)}


def _bench(forks: ForkServer, directory: Path, policy: Policy, wish: Wish) -> Bench:
    siblings = 4
    tasks = {
        "environment": "taxi",
        "groups": wish.rollouts // siblings,
        "siblings": siblings,
        "max_turns": wish.turns,
        "task": {"seed": 7},
    }
    # With a log a trainer that lives on lets the whole Gym be adopted; without one it goes back to the snapshot.
    more = {"max_live": wish.live, "trainer": {"survives": wish.log}}
    bench = Bench(forks, directory, policy, tasks, more, wish.log, segment_bytes=SEGMENT_BYTES)
    bench.more["snapshot"] = {
        "interval_s": wish.interval_s,
        "keep": SNAPSHOTS,
        "timeout_ms": 5000,
        "durable_timeout_ms": 20000,
        "lease_ms": 6000,
        "backoff_s": 0.2,
    }
    bench.prepare()
    return bench


def main(arguments: list[str] | None = None) -> int:
    """Run the soak; 0 when nothing was lost, trained twice or redone, and 3 of 4 kills came in the middle of a turn."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash_matrix.soak", description="Kills at random instants.")
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=15.0, help="the run with kills ends within so many minutes")
    parser.add_argument("--log", action="store_true", help="the Gym has a boundary log, and the trainer lives on")
    parser.add_argument("--output", type=Path, default=Path("build"))
    options = parser.parse_args(arguments)
    # A small run has fewer rollouts at a time, so that it lasts longer than its kills and some snapshots.
    live = min(Wish.live, max(4, options.rollouts // 20))
    bound_s = options.minutes * 60
    wish = Wish(options.rollouts, options.kills, options.seed, live=live, bound_s=bound_s, log=options.log)

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    async def run() -> Outcome:
        with tempfile.TemporaryDirectory(prefix="soak-") as directory:
            async with fork_server() as forks:
                return await soak(forks, Path(directory), wish, say)

    outcome = asyncio.run(run())
    options.output.mkdir(parents=True, exist_ok=True)
    name = "soak-log.json" if options.log else "soak.json"
    durable.publish_file(options.output / name, json.dumps(asdict(outcome), indent=1).encode() + b"\n")
    lost = wish.rollouts - outcome.trained
    say(
        f"{outcome.trained} trained, {lost} lost, {len(outcome.kills)} kills, {outcome.in_a_turn} in the middle of a "
        f"turn, {sum(kill.kept for kill in outcome.kills)} turns kept, {outcome.seconds:.0f} s; "
        f"{len(outcome.violations)} violations, {len(outcome.excused)} rollouts failed by themselves"
    )
    for text in outcome.violations:
        say(f"  {text}")
    enough = len(outcome.kills) == wish.kills and outcome.in_a_turn * 4 >= wish.kills * 3
    return 0 if lost == 0 and not outcome.violations and enough else 1


if __name__ == "__main__":
    sys.exit(main())
