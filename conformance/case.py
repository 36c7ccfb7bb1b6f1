# SPDX-License-Identifier: Apache-2.0
"""What a check is given: the Gym, the three clocks, a namespace of its own, and words to tell its story in."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from conformance.bench import Bench
from conformance.controller import Controller, Json, Participant
from conformance.errors import Lost, NotOffered, SuiteError
from conformance.failpoints import Action, Armed
from conformance.gym import CONFORMANCE
from conformance.judging import Judging
from conformance.script import Script, add, script
from conformance.target import ProcessTarget
from conformance.unchanged import Unchanged
from conformance.wire import Reply
from conformance.witness import Hold
from spec import wire as names

T = TypeVar("T")

FINISH_WITHIN_S = 10.0
LISTENED_MS = 400
DEFAULT_SCRIPT = script(add(5), [add(-3), add(2)], add(0), "done")


@dataclass
class Rollout:
    """One rollout of a check: what it was started with, and where it stands in the suite's own book."""

    rollout_id: str
    attempt: int
    item: Json = field(repr=False)
    script: Script = field(repr=False)
    hold: Hold | None = field(default=None, repr=False)

    @property
    def key(self) -> tuple[str, int]:
        """Its id and attempt."""
        return self.rollout_id, self.attempt


class Case(Judging):
    """One run of one check.

    Args:
        bench: what the run shares.
        name: the check's name.
        number: ordinal of the case in the run; makes its namespace.
        participant: the participant under study; by default the owner of rollouts.
    """

    def __init__(self, bench: Bench, name: str, number: int, participant: Participant | None = None) -> None:
        self.bench = bench
        super().__init__(bench.spec, bench.patience)
        self.gym = bench.gym
        self.wire = bench.wire
        self.witness = bench.witness
        self.world = bench.world
        self.name = name
        self.prefix = f"{bench.nonce}-{number}-"
        self.attempts: dict[str, int] = {}
        self.rollouts: dict[str, Rollout] = {}
        self._participant = participant
        self._controller: Controller | None = None
        self._adopting = threading.RLock()
        self._count = 0

    # --- who ---

    @property
    def p(self) -> Participant:
        """The participant under study."""
        return self._participant or self.gym.agent

    @property
    def agent(self) -> Participant:
        """The participant that owns rollouts."""
        return self.gym.agent

    @property
    def sessions(self) -> Participant:
        """The participant that owns sessions.

        Raises:
            NotOffered: none does.
        """
        found = self.gym.owner("sessions")
        if found is None:
            raise NotOffered("no participant owns sessions")
        return found

    @property
    def continues(self) -> bool:
        """Whether rollouts of the conformance environment continue from a cut (profile turn-recovery)."""
        return "turn-recovery" in self.gym.profiles

    @property
    def process(self) -> ProcessTarget:
        """The Gym's process, for checks of level 1."""
        if not isinstance(self.bench.target, ProcessTarget):
            raise NotOffered("process control (level 1) is not offered")
        return self.bench.target

    def failpoint(self, moment: str, action: Action) -> Armed:
        """Return a context in which the Gym is killed, fails or waits at a moment (level 2).

        Raises:
            NotOffered: the Gym has no such fail point.
        """
        self.step(f"{action} at the fail point {moment} from now on")
        return self.process.failpoints.arm(moment, action)

    @property
    def controller(self) -> Controller:
        """This check's controller; the first use adopts it everywhere."""
        with self._adopting:
            if self._controller is None:
                self._controller = self.new_controller()
            return self._controller

    def new_controller(self, name: str = "suite") -> Controller:
        """Return a controller above every adopted one, adopted everywhere, and use it from now on."""
        controller = self.gym.controller(f"{name}-{self.bench.nonce}")
        for participant in self.gym.participants:
            self.accepted(controller.adopt(participant), f"abort {controller.epoch}-0 adopts a new controller")
        self._controller = controller
        return controller

    def unchanged(self, *requirements: str, at: Iterable[Participant] | None = None) -> Unchanged:
        """Return a context in which nothing visible of the participants may change (default: the one under study)."""
        return Unchanged(self.prefix, list(at) if at is not None else [self.p], requirements)

    # --- rollouts ---

    def new_id(self, stem: str = "r") -> str:
        """Return a fresh rollout id in this check's namespace."""
        self._count += 1
        return f"{self.prefix}{stem}{self._count}"

    def item(
        self,
        rollout_id: str,
        *,
        attempt: int = 0,
        seed: int = 7,
        environment: str = CONFORMANCE,
        verify_in_world: bool = False,
        max_turns: int = 50,
        episode_ms: int = 600_000,
        **more: Any,
    ) -> Json:
        """Return one item of a start call for the conformance environment."""
        world_url = self.world.url if self.bench.has_world else None
        task = {"seed": seed, "world_url": world_url, "verify_in_world": verify_in_world}
        return {
            "rollout_id": rollout_id,
            "attempt": attempt,
            "environment": environment,
            "task": task,
            "task_digest": names.result_digest(json.dumps(task, sort_keys=True)),
            "limits": {"max_turns": max_turns, "episode_ms": episode_ms},
            **more,
        }

    def start_items(self, items: list[Json], **kwargs: Any) -> Reply:
        """Send a start call with these items and the witness as policy; the outcomes are not judged."""
        kwargs.setdefault("policy", self.witness.policy())
        reply = self.controller.start(self.agent, items, **kwargs)
        for item in items:
            self._reserve(item["rollout_id"], item["attempt"])
        return reply

    def outcome(self, item: Json, **kwargs: Any) -> Json:
        """Start one item and return its outcome entry."""
        reply = self.accepted(self.start_items([item], **kwargs), "a start call is answered item by item")
        return dict(reply["outcomes"][0])

    def start(
        self, written: Script = DEFAULT_SCRIPT, *, rollout_id: str | None = None, attempt: int = 0, **kwargs: Any
    ) -> Rollout:
        """Start a rollout with a script and judge that it is `started`."""
        policy = kwargs.pop("policy", None)
        rollout_id = rollout_id or self.new_id()
        self.witness.script(rollout_id, written)
        item = self.item(rollout_id, attempt=attempt, **kwargs)
        self.step(f"start {rollout_id} as attempt {attempt} in {item['environment']}")
        outcome = self.outcome(item, **({"policy": policy} if policy else {}))
        self.equal("started", outcome["outcome"], f"a new rollout is started ({outcome.get('detail', '')})")
        rollout = Rollout(rollout_id, attempt, item, written)
        self.rollouts[rollout_id] = rollout
        return rollout

    def start_at(self, turns: int, written: Script = DEFAULT_SCRIPT, **kwargs: Any) -> Rollout:
        """Start a rollout and wait until it has done `turns` turns and waits for the policy, whose answer is held."""
        rollout_id = kwargs.pop("rollout_id", None) or self.new_id()
        hold = self.witness.hold(rollout_id, turns + 1)
        rollout = self.start(written, rollout_id=rollout_id, **kwargs)
        rollout.hold = hold
        self.step(f"wait until turn {turns + 1} of {rollout_id} is asked, and hold it")
        hold.wait_asked()
        return rollout

    def start_crowd(self, number: int, turns: int, written: Script = DEFAULT_SCRIPT, **kwargs: Any) -> list[Rollout]:
        """Start rollouts in one batch, and wait until each has done `turns` turns and waits for the held policy."""
        ids = [self.new_id() for _ in range(number)]
        holds = {rollout_id: self.witness.hold(rollout_id, turns + 1) for rollout_id in ids}
        for rollout_id in ids:
            self.witness.script(rollout_id, written)
        items = [self.item(rollout_id, **kwargs) for rollout_id in ids]
        self.step(f"start {number} rollouts in one batch, each held in turn {turns + 1}")
        reply = self.accepted(self.start_items(items), "a batch is answered item by item")
        outcomes = {row["outcome"] for row in reply["outcomes"]}
        self.equal({"started"}, outcomes, "the outcomes of a batch of new rollouts")
        crowd = [Rollout(item["rollout_id"], 0, item, written, holds[item["rollout_id"]]) for item in items]
        for rollout in crowd:
            holds[rollout.rollout_id].wait_asked()
            self.rollouts[rollout.rollout_id] = rollout
        return crowd

    def release(self, *rollouts: Rollout) -> None:
        """Let the held generations of rollouts end."""
        for rollout in rollouts:
            if rollout.hold is not None:
                self.step(f"release turn {rollout.hold.turn} of {rollout.rollout_id}")
                rollout.hold.release()

    def row(self, rollout: Rollout | str) -> Json:
        """Return GET /rollouts/{rollout_id}."""
        rollout_id = rollout if isinstance(rollout, str) else rollout.rollout_id
        return dict(self.accepted(self.agent.get_rollout(rollout_id), "a known rollout can be read").json)

    def until_state(self, rollout: Rollout, *states: str, requirements: tuple[str, ...] = ()) -> Json:
        """Wait until a rollout is in one of these states, and return its row."""
        what = f"{rollout.rollout_id} is {' or '.join(states)}"

        def there() -> Json | None:
            row = self.row(rollout)
            return row if row["state"] in states else None

        return self.until(there, what, *requirements) or {}

    def result(self, rollout: Rollout, *requirements: str) -> Json:
        """Wait until the feed serves the result of a rollout, and return the entry with `content` parsed."""
        self.step(f"wait for the result of {rollout.rollout_id}")

        def read(after: str | None, wait_ms: int) -> tuple[Json | None, str]:
            while True:
                page = self.accepted(self.agent.get_results(after=after, wait_ms=wait_ms), "the feed can be read")
                for entry in page["results"]:
                    if entry["receipt"]["rollout_id"] == rollout.rollout_id:
                        return dict(entry), page["next"]
                after = str(page["next"])
                if not page["more"]:
                    return None, after

        def there() -> Json | None:
            # From its beginning, then at its end, where the Gym answers as soon as there is more.
            found, end = read(None, 0)
            return found or read(end, LISTENED_MS)[0]

        entry = self.until(there, f"the feed serves the result of {rollout.rollout_id}", *requirements) or {}
        return {**entry, "content": json.loads(entry["result"])}

    def body(self, rollout: Rollout, *requirements: str) -> Json:
        """Wait for the result of a rollout and return its `body`; a failure instead is a failure of the Gym."""
        content = self.result(rollout, *requirements)["content"]
        what = f"{rollout.rollout_id} succeeds"
        self.true("body" in content, what, *requirements, got=content.get("failure"))
        return dict(content["body"])

    def finished(self, written: Script = DEFAULT_SCRIPT, **kwargs: Any) -> tuple[Rollout, Json]:
        """Start a rollout, let it finish, and return it with its result entry."""
        rollout = self.start(written, **kwargs)
        return rollout, self.result(rollout)

    def baseline(self, written: Script = DEFAULT_SCRIPT, **kwargs: Any) -> Json:
        """Return the body of the same rollout uninterrupted, under an id of its own."""
        self.step("run the same rollout uninterrupted")
        return self.body(self.start(written, **kwargs))

    def failure(self, rollout: Rollout, *requirements: str) -> Json:
        """Wait for the result of a rollout and return its `failure`; a success instead is a failure of the Gym."""
        content = self.result(rollout, *requirements)["content"]
        self.true("failure" in content, f"{rollout.rollout_id} fails", *requirements, got=content)
        return dict(content["failure"])

    def ack(self, *receipts: Json, **kwargs: Any) -> list[str]:
        """ACK receipts and return the outcomes."""
        self.step(f"ACK {', '.join(receipt['rollout_id'] for receipt in receipts[:4])}")
        reply = self.accepted(self.controller.ack(self.agent, receipts, **kwargs), "ACKs are answered item by item")
        return [row["outcome"] for row in reply["outcomes"]]

    def next_attempt(self, rollout_id: str) -> int:
        """Reserve the next attempt of a rollout in the suite's own book."""
        return self._reserve(rollout_id, self.attempts.get(rollout_id, -1) + 1)

    def _reserve(self, rollout_id: str, attempt: int) -> int:
        if isinstance(attempt, int):
            self.attempts[rollout_id] = max(attempt, self.attempts.get(rollout_id, -1))
        return attempt

    # --- the end ---

    def close(self) -> None:
        """Release everything, and, if rollouts were started, end what is open, retire and ACK what is ours."""
        if isinstance(self.bench.target, ProcessTarget):
            self.bench.target.disarm()
        self.witness.release_all()
        self.world.release_all()
        if not self.attempts:
            return
        try:
            self.gym.refresh()
            controller = self.new_controller("tidy")
            self._tidy(controller)
        except (SuiteError, KeyError, TypeError):
            # Whatever is wrong with the Gym was judged before; tidying up is only politeness.
            pass
        self.witness.forget(self.prefix)
        self.world.forget(self.prefix)

    def _tidy(self, controller: Controller) -> None:
        through = {key: attempt for key, attempt in self.attempts.items() if names.is_rollout_id(key)}
        batch = self.gym.limit("max_batch")
        rows = list(through.items())
        for participant in self.gym.participants:
            for start in range(0, len(rows), batch):
                controller.retire(participant, dict(rows[start : start + batch]), timeout_ms=200)
        if not rows:
            return
        results = self.agent.results()
        receipts = [row["receipt"] for key, row in results.items() if key.startswith(self.prefix)]
        for start in range(0, len(receipts), batch):
            controller.ack(self.agent, receipts[start : start + batch])


__all__ = ["DEFAULT_SCRIPT", "Bench", "Case", "Lost", "Rollout", "Unchanged"]
