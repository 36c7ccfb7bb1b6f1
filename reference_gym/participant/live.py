# SPDX-License-Identifier: Apache-2.0
"""Live rollouts: the task that runs each of them, and what their handles do.

A rollout is *live* from its start or restore until it finishes, is retired, or is replaced by a higher attempt.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from reference_gym.participant import failpoints
from reference_gym.participant.clock import Clock
from reference_gym.participant.config import ParticipantConfig
from reference_gym.participant.encoding import PartValues, state_pieces
from reference_gym.participant.errors import SessionLost, StaleAttempt
from reference_gym.participant.feed import Feed
from reference_gym.participant.fences import Fences
from reference_gym.participant.gate import Gate
from reference_gym.participant.journal import Journal
from reference_gym.participant.jsontext import NotRepresentable
from reference_gym.participant.records import BoundaryStore, Record
from reference_gym.participant.result import conclude
from reference_gym.participant.rollout import Rollout, internal_failure
from reference_gym.participant.slices import Steps
from reference_gym.participant.state import (
    Agent,
    RolloutFailure,
    SessionUncertain,
    Success,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Entry:
    """One live rollout; ``restart`` is why its work has stopped for good, or None while it works."""

    rollout: Rollout
    text: bytes
    task: asyncio.Task[None] | None = None
    restart: str | None = None


@dataclass(slots=True)
class BuiltRollouts:
    """Rollouts that were built aside: ``live`` by id, and which of them only start again after a restore."""

    live: dict[str, Entry] = field(default_factory=dict)
    restart_only: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the registry shares with the rest of its participant.

    ``values`` returns what the parts hold of a rollout, ``drop`` frees it there. ``progressed`` counts a change of what
    a cut would hold, ``freed`` tells that something has stopped. ``owns_sessions`` tells whether verifications run in
    this participant.
    """

    gate: Gate
    fences: Fences
    feed: Feed
    store: BoundaryStore
    clock: Clock
    values: Callable[[str], PartValues]
    drop: Callable[[str], None]
    progressed: Callable[[], None]
    freed: Callable[[], None]
    owns_sessions: bool
    journal: Journal


class LiveRollouts(ABC):
    """All live rollouts.

    Args:
        config: the participant's.
        agent: the author's.
        shared: the rest of the participant.
    """

    def __init__(self, config: ParticipantConfig, agent: Agent, shared: Shared) -> None:
        self.live: dict[str, Entry] = {}
        self.draining = False
        self._config = config
        self._agent = agent
        self._shared = shared
        self._stopped: set[str] = set()
        self._restart_only: set[str] = set()
        self._stopping: dict[str, set[asyncio.Task[None]]] = {}
        self._dropped: list[dict[str, Entry]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._sorted: list[str] | None = None

    # --- the host of its rollouts -------------------------------------------------------------------------------------

    @property
    def gate(self) -> Gate:
        """The participant's gate."""
        return self._shared.gate

    def now(self) -> float:
        """Return the participant's monotonic time in seconds."""
        return self._shared.clock.now()

    def holds(self, rollout: Rollout) -> bool:
        """Return whether this attempt is still the current one of its rollout: a restore drops all at once."""
        entry = self.live.get(rollout.rollout_id)
        return entry is not None and entry.rollout is rollout

    def stopping(self, rollout_id: str) -> bool:
        """Return whether a task of this rollout has been told to end and has not yet."""
        return rollout_id in self._stopping or any(rollout_id in dropped for dropped in self._dropped)

    async def settled(self) -> None:
        """Return once everything that has changed here would survive the process (CKPT-DIR-023)."""
        await self._shared.journal.settled()

    def boundary(self, rollout: Rollout) -> None:
        """Record the present state of a rollout as its last boundary.

        Raises:
            RolloutFailure: the state has no JSON text.
        """
        entry = self._entry(rollout)
        self._shared.store.put(self._record(entry))
        self._shared.progressed()
        failpoints.reach("boundary.crossed")

    def verifying(self, rollout: Rollout) -> AbstractContextManager[object]:
        """Hold while a verification runs; a prepare waits for it unless the environment says ``repeat``."""
        environment = self._config.environment(rollout.start.environment)
        return self._shared.gate.running(
            "verification",
            rollout.rollout_id,
            rollout.attempt,
            handler=self._shared.owns_sessions,
            blocks=environment is None or environment.verify == "wait",
        )

    def finish(self, rollout: Rollout, outcome: Success | RolloutFailure) -> None:
        """End a rollout with a result that is served from now on."""
        entry = self._entry(rollout)
        finished = conclude(rollout, outcome, self._config.limits.max_result_bytes, self.now())
        self._remove(entry)
        self._shared.feed.add(finished)
        self._shared.progressed()
        failpoints.reach("finish.recorded")

    def stop(self, rollout: Rollout, reason: str) -> None:
        """Stop the work of a rollout for good; it stays in state ``restart`` until it is retired (CKPT-ENV-016)."""
        entry = self._entry(rollout)
        self._stop(entry, reason)
        self._shared.progressed()

    @abstractmethod
    def end_stale(self, rollout: Rollout) -> None:
        """End a rollout one of whose calls another participant has refused as stale."""

    # --- inside -------------------------------------------------------------------------------------------------------

    def _entry(self, rollout: Rollout) -> Entry:
        """Return the entry of a rollout that is still current.

        Raises:
            StaleAttempt: it has ended.
        """
        entry = self.live.get(rollout.rollout_id)
        if entry is None or entry.rollout is not rollout or rollout.ended:
            raise StaleAttempt.of(rollout.rollout_id, rollout.attempt)
        return entry

    def _stop(self, entry: Entry, reason: str) -> None:
        entry.restart = reason
        self._stopped.add(entry.rollout.rollout_id)
        self._shared.journal.note("stop", rollout_id=entry.rollout.rollout_id, reason=reason)
        self._halt(entry)

    def _insert(self, entry: Entry) -> None:
        rollout = entry.rollout
        self.live[rollout.rollout_id] = entry
        if self._config.restart_only(rollout.start.environment, rollout.start.agent):
            self._restart_only.add(rollout.rollout_id)
        self._sorted = None

    def _remove(self, entry: Entry) -> None:
        """Take a rollout out of the live ones; its work stops and can change nothing any more."""
        rollout_id = entry.rollout.rollout_id
        del self.live[rollout_id]
        self._stopped.discard(rollout_id)
        self._restart_only.discard(rollout_id)
        self._sorted = None
        self._shared.store.drop(rollout_id)
        self._halt(entry)

    def _halt(self, entry: Entry) -> None:
        self._cancel(entry)
        self._shared.gate.abandon(entry.rollout.rollout_id)

    def _cancel(self, entry: Entry) -> None:
        entry.rollout.ended = True
        rollout_id, task = entry.rollout.rollout_id, entry.task
        if task is not None and not task.done() and task is not asyncio.current_task():
            self._stopping.setdefault(rollout_id, set()).add(task)
            task.add_done_callback(partial(self._stopped_task, rollout_id))
            task.cancel()

    def _replace(self, built: BuiltRollouts) -> None:
        """Make rollouts current in place of all others, whose work is over from now on; it is cancelled in slices."""
        gone, self.live = self.live, built.live
        self._stopped, self._restart_only, self._sorted = set(), built.restart_only, None
        if gone:
            self._dropped.append(gone)
            self._spawn(self._cancel_all(gone), "ending of dropped rollouts")

    async def _cancel_all(self, gone: dict[str, Entry]) -> None:
        steps = Steps()
        while gone:
            for _ in range(min(steps.next(), len(gone))):
                self._cancel(gone.popitem()[1])
            await asyncio.sleep(0)
        self._dropped = [dropped for dropped in self._dropped if dropped is not gone]
        self._shared.freed()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stopped_task(self, rollout_id: str, task: asyncio.Task[None]) -> None:
        tasks = self._stopping[rollout_id]
        tasks.discard(task)
        if not tasks:
            del self._stopping[rollout_id]
        self._shared.freed()

    # --- running ------------------------------------------------------------------------------------------------------

    def _run(self, entry: Entry) -> None:
        entry.task = asyncio.get_running_loop().create_task(self._drive(entry.rollout), name=entry.rollout.key)

    async def _drive(self, rollout: Rollout) -> None:
        """Run the author's loop to its end, and make of that end what the protocol asks for."""
        outcome: Success | RolloutFailure
        try:
            await self.settled()
            outcome = await self._agent.run(rollout)
            if not rollout.ended:
                _require_outcome(outcome)
        except StaleAttempt:
            self.end_stale(rollout)
            return
        except SessionUncertain:
            if not rollout.ended:
                self.stop(rollout, "uncertain")
            return
        except SessionLost as error:
            outcome = RolloutFailure("session_lost", error.detail, terminal=False)
        except RolloutFailure as failure:
            outcome = failure
        except Exception as error:
            if rollout.ended:
                return
            outcome = internal_failure(rollout, error)
        try:
            if not rollout.ended:
                await rollout.finish(outcome)
        except StaleAttempt:
            return
        except Exception as error:
            self.finish(rollout, internal_failure(rollout, error))

    def _record(self, entry: Entry) -> Record:
        """Return the last boundary of a rollout, encoded.

        Raises:
            RolloutFailure: its state has no JSON text.
        """
        rollout = entry.rollout
        try:
            pieces = state_pieces(rollout, entry.text, self._shared.values(rollout.rollout_id))
        except NotRepresentable as error:
            raise RolloutFailure("state_not_representable", str(error)[:500], terminal=True) from error
        return Record(
            rollout_id=rollout.rollout_id,
            attempt=rollout.attempt,
            turns_done=rollout.turns_done,
            task_digest=rollout.start.task_digest,
            environment=rollout.start.environment,
            effects={rollout.start.environment: rollout.effects},
            payload=pieces,
            policy_version=max(rollout.policy_versions, default=None),
            data_refs=tuple(rollout.data_refs),
        )

    async def close(self) -> None:
        """Stop every task; the process is about to end."""
        entries = [entry for known in (self.live, *self._dropped) for entry in known.values()]
        tasks = {entry.task for entry in entries if entry.task is not None}.union(self._tasks, *self._stopping.values())
        for entry in entries:
            entry.rollout.ended = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _require_outcome(outcome: object) -> None:
    """Refuse what a loop returned that had not ended its rollout before.

    Raises:
        TypeError: it is no outcome; the loop has most likely left a verification without ``finish``.
    """
    if not isinstance(outcome, Success | RolloutFailure):
        returned = type(outcome).__name__
        raise TypeError(f"Agent.run returned {returned}, no Success, and called no verification.finish(success)")
