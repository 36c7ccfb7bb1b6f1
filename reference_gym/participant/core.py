# SPDX-License-Identifier: Apache-2.0
"""What every operation of a participant stands on: the author's hooks, and what of its state a step changes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import spec.durable
from reference_gym.participant import failpoints, installing
from reference_gym.participant.artifacts import Durable
from reference_gym.participant.clock import Clock, LoopClock
from reference_gym.participant.committing import Commit, Writer
from reference_gym.participant.config import ParticipantConfig
from reference_gym.participant.encoding import PartValues
from reference_gym.participant.feed import Feed
from reference_gym.participant.fences import Fences
from reference_gym.participant.journal import Journal, NoJournal
from reference_gym.participant.live import Shared
from reference_gym.participant.machine import Machine
from reference_gym.participant.moving import Moving
from reference_gym.participant.part_records import part_record
from reference_gym.participant.phases import EndedAs, Phase, Todo
from reference_gym.participant.records import BoundaryStore, MemoryStore, Record
from reference_gym.participant.registry import Registry
from reference_gym.participant.slices import Remains
from reference_gym.participant.staging import Staging
from reference_gym.participant.state import Agent, Owns, Part
from spec.wire import ControllerPair

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: what the three control headers of a mutating call say."""

    controller: ControllerPair
    expect_incarnation: str


class Work(Protocol):
    """A restore that is under way: an abort stops it; ``outcome`` is done when it has been decided."""

    @property
    def outcome(self) -> asyncio.Future[None]:
        """Done when the restore has been decided."""
        ...

    def abandon(self) -> None:
        """Stop the work, and answer at once whoever waits for it."""
        ...


class Core(Moving):
    """The state of one participant.

    Args:
        config: what it is and where it may write.
        agent: the author's agent loop; None if it owns no rollouts.
        clock: monotonic time; the event loop's unless a test moves it.
        durable: the durable file steps.
        journal: where what has to survive the process is noted; nothing survives without one.
        incarnation: the present life of its state; a new one unless the author has recovered it.
    """

    def __init__(
        self,
        config: ParticipantConfig,
        *,
        agent: Agent | None = None,
        clock: Clock | None = None,
        durable: Durable = spec.durable,
        journal: Journal | None = None,
        incarnation: str | None = None,
    ) -> None:
        super().__init__(clock or LoopClock(), journal or NoJournal())
        self.config = config
        self.incarnation = incarnation or f"i{secrets.token_hex(12)}"
        self.fences = Fences(self.journal)
        self.feed = Feed(self.journal)
        self.draining = False
        self.unmanaged_count = 0
        self.staging = Staging(config.staging, config.limits) if config.staging is not None else None
        if self.staging is not None and journal is None:
            self.staging.begin()
        self._durable = durable
        self._store: BoundaryStore = MemoryStore(config.limits.max_record_bytes, self.journal)
        self._parts: dict[str, Part] = {}
        self._progress = 0
        self._agent = agent
        self._registry: Registry | None = None
        self._writer = Writer(config, lambda: self.owns, durable, self.clock)
        self._commit: Commit | None = None
        self._cuts = 0
        self._restorer: Work | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.undo = installing.Undo()
        self.remains = Remains()

    # --- for authors --------------------------------------------------------------------------------------------------

    def add(self, part: Part) -> None:
        """Add a store of sessions or ledger rows; before the first call is served."""
        if part.name in self._parts:
            raise ValueError(f"there is a part {part.name} already")
        self._parts[part.name] = part

    @property
    def owns(self) -> tuple[Owns, ...]:
        """What this participant owns, sorted."""
        found: set[Owns] = {part.owns for part in self._parts.values()}
        if self._agent is not None:
            found.add("rollouts")
        return tuple(sorted(found))

    @property
    def registry(self) -> Registry | None:
        """The rollouts; None if it owns none."""
        if self._registry is None and self._agent is not None:
            shared = Shared(
                gate=self.gate,
                fences=self.fences,
                feed=self.feed,
                store=self._store,
                clock=self.clock,
                values=self._part_values,
                drop=self._drop_parts,
                progressed=self.progressed,
                freed=self._wake,
                owns_sessions="sessions" in self.owns,
                journal=self.journal,
            )
            self._registry = Registry(self.config, self._agent, shared)
        return self._registry

    def progressed(self) -> None:
        """Count one change of what a cut would hold (CKPT-STATUS-006)."""
        self._progress += 1
        self.journal.progressed(self._progress)

    async def settled(self) -> None:
        """Return once everything that has changed here would survive the process (CKPT-DIR-023).

        Awaited before anything that depends on it leaves: a reply, a page of the feed, a policy call.
        """
        await self.journal.settled()

    @property
    def progress(self) -> int:
        """How many changes of what a cut would hold there were in this incarnation."""
        return self._progress

    @property
    def features(self) -> list[str]:
        """The features that the capabilities list."""
        return sorted({*self.config.features, *(["artifacts_http"] if self.staging is not None else [])})

    @property
    def storage(self) -> list[str]:
        """The storage schemes that the capabilities list."""
        return [*(["file"] if self.config.storage_roots else []), *(["http"] if self.staging is not None else [])]

    @property
    def store(self) -> BoundaryStore:
        """Where boundaries are kept."""
        return self._store

    @property
    def parts(self) -> Sequence[Part]:
        """The author's parts."""
        return tuple(self._parts.values())

    def changed(self, rollout_id: str) -> None:
        """Tell that what a part holds of a rollout has come to a boundary of its own: an effect or a row is recorded.

        Where rollouts are owned the cut takes it at the turn's boundary; elsewhere it is captured now.
        """
        failpoints.reach("part.changed")
        self.progressed()
        if self._agent is not None:
            return
        values = self._part_values(rollout_id)
        if not values:
            self._store.drop(rollout_id)
            return
        self._store.put(part_record(rollout_id, values))

    def check(self, rollout_id: str, attempt: int) -> None:
        """Refuse a call of a fenced attempt; changes nothing.

        Raises:
            StaleAttempt: naming the fence (CKPT-FENCE-001).
        """
        self.fences.check(rollout_id, attempt)

    def observe(self, rollout_id: str, attempt: int) -> None:
        """Refuse a call of a fenced attempt, and fence every attempt below this one.

        Raises:
            StaleAttempt: naming the fence.
        """
        self.fences.check(rollout_id, attempt)
        if self.fences.raise_to(rollout_id, attempt - 1) and self._agent is None:
            self._drop_parts(rollout_id)
            self._store.drop(rollout_id)
            self.gate.abandon(rollout_id)
            self.progressed()

    def uncertain(self, rollout_id: str) -> None:
        """Tell that nobody knows what an effect of this rollout changed: it stops in state ``restart``."""
        self.gate.abandon(rollout_id)
        registry = self.registry
        entry = None if registry is None else registry.live.get(rollout_id)
        if registry is not None and entry is not None and not entry.rollout.ended:
            registry.stop(entry.rollout, "uncertain")
        self.changed(rollout_id)

    @contextmanager
    def unmanaged(self) -> Iterator[None]:
        """Count a rollout of the Gym's own older routes while it runs; the gate does not hold it (CKPT-GATE-022)."""
        self.unmanaged_count += 1
        try:
            yield
        finally:
            self.unmanaged_count -= 1

    def take_over(self, incarnation: str, progress: int, machine: Machine | None, records: Iterable[Record]) -> None:
        """Be the participant that an earlier process was; before the first call is served."""
        self.incarnation = incarnation
        self._progress = progress
        self._machine = machine or self._machine
        for record in records:
            self._store.put(record)

    def go_on(self) -> None:
        """Let the rollouts of an earlier life of this incarnation run (CKPT-PHASE-015)."""
        failpoints.reach("recover.listening")
        if self.registry is not None:
            self.registry.continue_restored()

    def begin_draining(self) -> None:
        """Admit nothing more, because the process is about to stop; long polls are answered (CKPT-SEC-018, -019)."""
        self.draining = True
        self.feed.wake()
        self._wake()

    def begin_closing(self) -> None:
        """Let no call wait any longer, because the process ends now: each is answered with what there is."""
        self.draining = self._closing = True
        self.feed.wake()
        self._wake()

    @property
    def holds_work(self) -> bool:
        """Whether a live rollout, an unreleased result, or sessions or rows of rollouts would end with this process."""
        if self.registry is not None:
            return bool(self.registry.live) or bool(self.feed.ids())
        return not self._store.empty

    # --- what a step of the machine changes ---------------------------------------------------------------------------

    @property
    def _target(self) -> str | None:
        return None if self._commit is None else str(self._commit.target.directory)

    def _act(self, todo: Todo | None) -> None:
        match todo:
            case Todo.STOP_WRITER if self._commit is not None:
                self._commit.abandon()
            case Todo.STOP_BUILDER if self._restorer is not None:
                self._restorer.abandon()
            case Todo.DISCARD_INSTALLED:
                installing.discard(self)
            case Todo.CONTINUE_RESTORED:
                self._keep_installed()
            case _:
                pass
        if self.machine.open is None and self._commit is not None:
            self.remains.take(self._commit.cut.records)  # A cut may be the last to hold boundaries of long ago.
            self._commit = None

    def _keep_installed(self) -> None:
        """Run what a restore has installed; nothing undoes it any more."""
        undo, self.undo = self.undo, installing.Undo()
        self.remains.take(undo.marks)
        for part, empty in undo.parts:
            self.spawn(part.discard(empty), "freeing of what a restore would have been undone with")
        if self.registry is not None:
            self.registry.continue_restored()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run something as a task that the end of the participant waits for."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tidy(self, before: Machine) -> None:
        """Remove committed files when another id opens or has not ended as committed, and uploads after a restore.

        CKPT-ART-002, CKPT-ART-004 and CKPT-ART-009.
        """
        was, now, last = before.open, self.machine.open, self.machine.last
        if self.staging is None:
            return
        if now is not None:
            if was is None or was.checkpoint_id != now.checkpoint_id:
                self.staging.forget_cuts()
        elif was is not None and before.phase in (Phase.RESTORING, Phase.RESTORED):
            self.staging.forget_uploads()
        elif was is not None and (last is None or last.ended_as is not EndedAs.COMMITTED):
            self.staging.forget_cuts()

    # --- restoring ----------------------------------------------------------------------------------------------------

    def highest(self, rollout_id: str) -> int:
        """Return the highest attempt that is fenced or held here, or -1 (CKPT-RESTORE-029, CKPT-RESTORE-053)."""
        held = [self.fences.held(rollout_id)]
        if (record := self._store.get(rollout_id)) is not None:
            held.append(record.attempt)
        if (finished := self.feed.get(rollout_id)) is not None:
            held.append(finished.receipt.attempt)
        return max(held)

    @property
    def held(self) -> int:
        """How many rollouts are held: live, finished and unreleased, or with sessions or rows here."""
        return len(self._store.attempts()) if self.registry is None else len(self.registry.live) + len(self.feed)

    @property
    def busy(self) -> bool:
        """Whether there is state that nobody holds: a restore builds it, a commit writes it, or it is being freed."""
        building = self._restorer is not None and not self._restorer.outcome.done()
        return building or self._commit is not None or self.remains.pending

    @property
    def changes(self) -> int:
        """A number that is another one whenever ``highest`` of a rollout may have risen."""
        return self._progress + self.fences.changes

    def attempts(self) -> Iterable[tuple[str, int]]:
        """Return everything that a restore drops as of now: live rollouts and unreleased results, or records."""
        return self._store.attempts() if self.registry is None else self.registry.attempts()

    # --- the parts ----------------------------------------------------------------------------------------------------

    def _part_values(self, rollout_id: str) -> PartValues:
        captured = ((name, part.capture(rollout_id)) for name, part in self._parts.items())
        return {name: values for name, values in captured if values is not None}

    async def close(self) -> None:
        """Stop everything that runs here; the process is about to end."""
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        if self._commit is not None:
            self._commit.abandon()
        if self._restorer is not None:
            self._restorer.abandon()
        if self.registry is not None:
            await self.registry.close()
        self.remains.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()
        await self.journal.close()

    def _drop_parts(self, rollout_id: str) -> None:
        for part in self._parts.values():
            part.drop(rollout_id)
