# SPDX-License-Identifier: Apache-2.0
"""The phase machine of one participant, as a pure value: phases, the open id, ``last``, controllers, the lease.

Every operation takes the present machine and the time, and returns a ``Step``: the next machine, how the call is
answered, and what the shell has to do. Nothing here does I/O, waits, or reads a clock. A refusal is a raised
``ProtocolError`` and changes nothing. Held cell by cell against ``spec/v1/state-machine.yaml`` by the tests.

Two things end only after work has stopped: a commit that is aborted while it writes, and a restore that is
aborted while it builds. From the abort until ``stopped`` the gate is open, ``Open.ending`` is set, and the phase
is still the old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reference_gym.participant.errors import (
    ArgumentConflict,
    CheckpointConflict,
    InvalidPhase,
    NotReady,
    StaleCheckpoint,
    StaleController,
)
from reference_gym.participant.phases import Answer, EndedAs, Last, Open, Phase, Todo, Where
from spec.wire import CheckpointId, ControllerPair

__all__ = ["Machine", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """What an operation or an event comes to."""

    machine: Machine
    answer: Answer = Answer.ACCEPTED
    todo: Todo | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """The whole state of the protocol in one participant.

    ``serving`` counts the accepted POSTs of the open id that are under way: the lease does not run meanwhile.
    ``lease_until`` is in the caller's monotonic seconds.
    """

    phase: Phase = Phase.IDLE
    gate_open: bool = True
    open: Open | None = None
    last: Last | None = None
    controller: ControllerPair | None = None
    fresh: bool = True
    serving: int = 0
    lease_until: float | None = None

    # --- what can be read ---------------------------------------------------------------------------------------------

    def where(self, checkpoint_id: CheckpointId) -> Where:
        """Return how an id relates to the open one and to ``last`` (CKPT-ID)."""
        if self.open is not None:
            if checkpoint_id == self.open.checkpoint_id:
                return Where.OPEN
            floor = self.open.then or self.open.checkpoint_id
            return Where.UNSEEN if checkpoint_id > floor else Where.LOWER
        if self.last is None or checkpoint_id > self.last.checkpoint_id:
            return Where.UNSEEN
        return Where.LAST if checkpoint_id == self.last.checkpoint_id else Where.LOWER

    def pause_ms(self, now: float) -> int:
        """Return how long the gate has been closed for the open checkpoint, in milliseconds."""
        if self.open is None:
            return 0
        closed = 0.0 if self.open.closed_at is None else now - self.open.closed_at
        return round((self.open.pause_s + closed) * 1000)

    def wait_ms(self, now: float) -> int:
        """Return how long the open checkpoint waited to be prepared, or has waited until now, in milliseconds."""
        if self.open is None or self.open.closed_at is None:
            return 0
        until = now if self.open.prepared_at is None else self.open.prepared_at
        return round(max(0.0, until - self.open.closed_at) * 1000)

    @property
    def leased(self) -> bool:
        """Whether a lease holds the open checkpoint: not once a resume has opened the gate, nor while it is ending."""
        if self.open is None or self.open.ending is not None:
            return False
        return not (self.phase is Phase.COMMITTING and self.gate_open)

    def lease_remaining_ms(self, now: float) -> int | None:
        """Return what is left of the lease in milliseconds, or None without one."""
        if not self.leased or self.open is None:
            return None
        until = now if self.lease_until is None else self.lease_until
        left = round(max(0.0, until - now) * 1000)
        return max(left, self.open.lease_ms) if self.serving else left

    # --- controllers and the lease ------------------------------------------------------------------------------------

    def adopt(self, pair: ControllerPair, now: float) -> Step:
        """Judge the controller of a well-formed mutating call, before the call itself is judged.

        Raises:
            StaleController: a higher pair was adopted; it is in the refusal.
        """
        if self.controller is not None and pair < self.controller:
            raise StaleController(
                f"controller {self.controller.name} of epoch {self.controller.epoch} has taken over",
                controller={"id": self.controller.name, "epoch": self.controller.epoch},
            )
        if pair == self.controller:
            return Step(self)
        adopted = replace(self, controller=pair)
        if self.open is None or self.open.ending is not None:
            return Step(adopted)
        if self.phase is Phase.COMMITTED:
            return Step(adopted._end(EndedAs.COMMITTED, now))
        return adopted._abandon(EndedAs.ABORTED, now)

    def begin_serving(self) -> Machine:
        """Note that an accepted POST of the open id is being served: the lease stands still."""
        return replace(self, serving=self.serving + 1)

    def end_serving(self, checkpoint_id: CheckpointId, now: float) -> Machine:
        """Note that it has been answered: the lease runs anew, and never ends earlier than it did before."""
        if self.open is None or self.open.checkpoint_id != checkpoint_id:
            return self
        until = max(self.lease_until or 0.0, now + self.open.lease_ms / 1000)
        return replace(self, serving=self.serving - 1, lease_until=until)

    def lease_end(self, now: float) -> Step | None:
        """Return what the end of the lease does, or None if it has not ended."""
        if not self.leased or self.serving or self.lease_until is None or now < self.lease_until:
            return None
        if self.phase is Phase.COMMITTED:
            return Step(self._end(EndedAs.COMMITTED, now))
        return self._abandon(EndedAs.EXPIRED, now)

    # --- the operations -----------------------------------------------------------------------------------------------

    def prepare(self, checkpoint_id: CheckpointId, run_id: str, lease_ms: int, now: float) -> Step:
        """Close the gate, or join."""
        if self._judge(checkpoint_id) is Where.UNSEEN:
            opened = Open(checkpoint_id, run_id, lease_ms, closed_at=now)
            return Step(replace(self, phase=Phase.PREPARING, gate_open=False, open=opened, serving=0, lease_until=None))
        current = self._current()
        if self.phase in (Phase.RESTORING, Phase.RESTORED):
            raise self._invalid_phase("a prepare")
        if run_id != current.run_id:
            raise self._argument_conflict("run_id")
        if self.gate_open:
            raise self._invalid_phase("a prepare after its resume")
        answer = Answer.JOINS if self.phase is Phase.PREPARING else Answer.REPLIES
        return Step(replace(self, open=replace(current, lease_ms=lease_ms)), answer)

    def commit(self, checkpoint_id: CheckpointId, key: object, now: float, *, leave_out_blocked: bool = False) -> Step:
        """Capture and write, join, or reply.

        Args:
            checkpoint_id: the open id, or ``last``.
            key: the compared arguments (target, leave_out_blocked).
            now: monotonic seconds.
            leave_out_blocked: whether a commit in ``preparing`` leaves out what blocks.
        """
        if self._judge(checkpoint_id, EndedAs.COMMITTED) is Where.LAST:
            return Step(self, Answer.REPLIES)
        current = self._current()
        if current.commit_key is not None and key != current.commit_key:
            raise self._argument_conflict("target or leave_out_blocked")
        match self.phase:
            case Phase.PREPARING if not leave_out_blocked:
                raise NotReady("the checkpoint is not prepared yet", **self._named())
            case Phase.PREPARING | Phase.PREPARED:
                todo = None if current.captured else Todo.CAPTURE
                if self.phase is Phase.PREPARING:
                    todo = Todo.CAPTURE_WITHOUT_BLOCKED
                opened = replace(current, commit_key=key, captured=True)
                return Step(replace(self, phase=Phase.COMMITTING, open=opened), Answer.ACCEPTED, todo)
            case Phase.COMMITTING:
                return Step(self, Answer.JOINS)
            case Phase.COMMITTED:
                return Step(self, Answer.REPLIES)
            case _:
                raise self._invalid_phase("a commit")

    def resume(self, checkpoint_id: CheckpointId, now: float) -> Step:
        """Open the gate after the capture or the restore."""
        if self._judge(checkpoint_id, EndedAs.COMMITTED, EndedAs.RESTORED) is Where.LAST:
            return Step(self, Answer.REPLIES)
        match self.phase:
            case Phase.COMMITTING if self.gate_open:
                return Step(self, Answer.REPLIES)
            case Phase.COMMITTING:
                return Step(self._open_gate(now))
            case Phase.COMMITTED:
                return Step(self._end(EndedAs.COMMITTED, now))
            case Phase.RESTORED:
                return Step(self._end(EndedAs.RESTORED, now), todo=Todo.CONTINUE_RESTORED)
            case _:
                raise self._invalid_phase("a resume")

    def abort(self, checkpoint_id: CheckpointId, now: float) -> Step:
        """Open the gate for good: this id, and an open lower one, never publishes."""
        where = self.where(checkpoint_id)
        if self.open is None:
            if where is Where.LOWER:
                raise self._stale(checkpoint_id)
            if where is Where.LAST:
                return Step(self, Answer.REPLIES)
            return Step(replace(self, last=Last(checkpoint_id, EndedAs.ABORTED)))
        if where is Where.LOWER and checkpoint_id != self.open.then:
            raise self._stale(checkpoint_id)
        higher = None if where is Where.OPEN else checkpoint_id
        if self.open.ending is not None:
            opened = self.open if higher is None else replace(self.open, then=higher)
            return Step(replace(self, open=opened), Answer.JOINS)
        return replace(self, open=replace(self.open, then=higher))._abandon(EndedAs.ABORTED, now)

    def renew(self, checkpoint_id: CheckpointId, lease_ms: int, now: float) -> Step:
        """Extend the lease; it never ends earlier than it did before."""
        self._judge(checkpoint_id)
        if self.open is None:
            raise self._stale(checkpoint_id)
        until = max(self.lease_until or 0.0, now + lease_ms / 1000)
        opened = replace(self.open, lease_ms=lease_ms)
        return Step(replace(self, open=opened, lease_until=until), Answer.REPLIES)

    def restore(self, checkpoint_id: CheckpointId, run_id: str, key: object, lease_ms: int, now: float) -> Step:
        """Begin a restore, join it, or reply.

        Args:
            checkpoint_id: a fresh id.
            run_id: the run's.
            key: the compared arguments (source, lists as sets, policy, run_id).
            lease_ms: how long the controller may be silent.
            now: monotonic seconds.
        """
        where = self._judge(checkpoint_id, EndedAs.RESTORED)
        if where is Where.UNSEEN:
            opened = Open(checkpoint_id, run_id, lease_ms, restore_key=key)
            return Step(replace(self, phase=Phase.RESTORING, open=opened, serving=0, lease_until=None))
        if where is Where.LAST:
            return Step(self, Answer.REPLIES)
        current = self._current()
        if self.phase not in (Phase.RESTORING, Phase.RESTORED):
            raise self._invalid_phase("a restore")
        if key != current.restore_key:
            raise self._argument_conflict("source, lists or policy")
        opened = replace(current, lease_ms=lease_ms)
        return Step(replace(self, open=opened), Answer.JOINS if self.phase is Phase.RESTORING else Answer.REPLIES)

    # --- what the participant itself brings about ---------------------------------------------------------------------

    def quiescent(self, now: float) -> Machine:
        """No turn is open and no verification runs: preparing becomes prepared."""
        if self.phase is not Phase.PREPARING:
            return self
        return replace(self, phase=Phase.PREPARED, open=replace(self._current(), prepared_at=now))

    def durable(self, manifest: Mapping[str, Any], outcome: Mapping[str, Any], now: float) -> Machine:
        """The manifest of the open checkpoint is durable."""
        opened = replace(self._current(), manifest=manifest, outcome=outcome)
        written = replace(self, open=opened)
        if self.gate_open:
            return written._end(EndedAs.COMMITTED, now)
        return replace(written, phase=Phase.COMMITTED)

    def write_failed(self, error_code: str, now: float) -> Machine:
        """Writing failed and has stopped: the capture is kept while the gate is closed."""
        if self.gate_open:
            return self._end(EndedAs.FAILED, now, error_code)
        return replace(self, phase=Phase.PREPARED)

    def verified(self, now: float) -> Machine:
        """The source of a restore is sound: the gate closes."""
        return replace(self, gate_open=False, open=replace(self._current(), closed_at=now))

    def installed(self, outcome: Mapping[str, Any]) -> Machine:
        """The built state is current and parked."""
        return replace(self, phase=Phase.RESTORED, open=replace(self._current(), outcome=outcome))

    def restore_failed(self, error_code: str, now: float) -> Machine:
        """A restore failed before its installing step: all is as before."""
        return self._end(EndedAs.FAILED, now, error_code)

    def stopped(self, now: float) -> Machine:
        """The writer or the builder of an ending checkpoint has stopped."""
        return self._end(self._current().ending or EndedAs.ABORTED, now)

    def restarted(self, *, manifest: Mapping[str, Any] | None = None) -> Step:
        """The process came back with its incarnation kept.

        Args:
            manifest: the complete manifest of the open checkpoint, if there is one.
        """
        if self.open is None:
            return Step(self)
        written = manifest is not None and self.phase is Phase.COMMITTING
        known = replace(self, open=replace(self.open, manifest=manifest or self.open.manifest, closed_at=None))
        if self.phase is Phase.COMMITTED or written:
            return Step(known._end(EndedAs.COMMITTED, 0.0))
        if self.phase is Phase.RESTORED:
            return Step(known._end(EndedAs.ABORTED, 0.0), todo=Todo.DISCARD_INSTALLED)
        todo = Todo.STOP_BUILDER if self.phase is Phase.RESTORING else None
        return Step(known._end(EndedAs.FAILED, 0.0), todo=todo)

    def used(self) -> Machine:
        """Note that a mutating call was accepted in this incarnation."""
        return replace(self, fresh=False) if self.fresh else self

    # --- inside -------------------------------------------------------------------------------------------------------

    def _judge(self, checkpoint_id: CheckpointId, *replayed: EndedAs) -> Where:
        """Return where an id stands for a verb other than abort, or refuse it.

        Args:
            checkpoint_id: the id of the call.
            replayed: how ``last`` must have ended for this verb to be answered with its record.
        """
        where = self.where(checkpoint_id)
        if self.open is not None:
            if where is Where.UNSEEN:
                raise CheckpointConflict(f"checkpoint {self.open.checkpoint_id} is open", **self._named())
            if where is Where.LOWER or self.open.ending is not None:
                raise self._stale(checkpoint_id)
            return where
        opens = replayed in ((), (EndedAs.RESTORED,))  # Prepare (and renew, which refuses it itself) and restore.
        if where is Where.UNSEEN and opens:
            return where
        if where is Where.LAST and self.last is not None and self.last.ended_as in replayed:
            return where
        raise self._stale(checkpoint_id)

    def _current(self) -> Open:
        if self.open is None:
            raise RuntimeError("no checkpoint is open")
        return self.open

    def _named(self) -> dict[str, Any]:
        """Return what an error about the open checkpoint carries."""
        return {"checkpoint_id": str(self._current().checkpoint_id), "phase": self.phase.value}

    def _stale(self, checkpoint_id: CheckpointId) -> StaleCheckpoint:
        if self.open is not None:
            return StaleCheckpoint(f"checkpoint {checkpoint_id} is over", **self._named())
        return StaleCheckpoint(f"checkpoint {checkpoint_id} is over or was never prepared here", phase=self.phase.value)

    def _invalid_phase(self, what: str) -> InvalidPhase:
        return InvalidPhase(f"{what} is not possible in phase {self.phase.value}", **self._named())

    def _argument_conflict(self, what: str) -> ArgumentConflict:
        return ArgumentConflict(f"an earlier call of this id had another {what}", **self._named())

    def _open_gate(self, now: float) -> Machine:
        current = self._current()
        pause = current.pause_s + (0.0 if current.closed_at is None else now - current.closed_at)
        return replace(self, gate_open=True, open=replace(current, closed_at=None, pause_s=pause))

    def _abandon(self, ended_as: EndedAs, now: float) -> Step:
        """End the open checkpoint by abort, adoption or lease end, at once or as soon as its work has stopped."""
        match self.phase:
            case Phase.COMMITTING | Phase.RESTORING:
                opened = self._open_gate(now)
                ending = replace(opened, open=replace(opened._current(), ending=ended_as), lease_until=None)
                return Step(ending, todo=Todo.STOP_WRITER if self.phase is Phase.COMMITTING else Todo.STOP_BUILDER)
            case Phase.RESTORED:
                return Step(self._end(ended_as, now), todo=Todo.DISCARD_INSTALLED)
            case _:
                return Step(self._end(ended_as, now))

    def _end(self, ended_as: EndedAs, now: float, error_code: str | None = None) -> Machine:
        """Return to idle with the gate open, and record how it ended."""
        opened = self._open_gate(now)
        current = opened._current()
        well = ended_as in (EndedAs.COMMITTED, EndedAs.RESTORED)
        last = Last(
            checkpoint_id=current.checkpoint_id,
            ended_as=ended_as,
            manifest=current.manifest if well else None,
            error_code=error_code,
            pause_ms=round(current.pause_s * 1000),
            outcome=current.outcome if well else None,
        )
        if current.then is not None:
            last = Last(current.then, EndedAs.ABORTED)
        return replace(opened, phase=Phase.IDLE, open=None, last=last, serving=0, lease_until=None)
