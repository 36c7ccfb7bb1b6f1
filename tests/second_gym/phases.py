# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that is open and the one that ended last: ids, phases, leases, controllers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.second_gym.book import Book
from tests.second_gym.cuts import Cut, Written
from tests.second_gym.gate import Gate, milliseconds
from tests.second_gym.refusals import Refusal

Json = dict[str, Any]
Id = tuple[int, int]
REPLAYED = {"commit": {"committed"}, "restore": {"restored"}, "resume": {"committed", "restored"}}


def as_id(text: str) -> Id:
    """Return a checkpoint id as the pair of numbers that it is compared as."""
    epoch, sequence = text.split("-")
    return int(epoch), int(sequence)


def as_text(identity: Id) -> str:
    """Return a checkpoint id as it is written."""
    return f"{identity[0]}-{identity[1]}"


@dataclass(eq=False)
class Work:
    """What runs in a thread for a checkpoint: the writing of a cut, or a restore.

    Args:
        deadline: the moment at which it counts as failed.
    """

    deadline: float
    done: bool = False
    error: Refusal | None = None
    waits_for_handlers: bool = False


@dataclass(eq=False)
class Checkpoint:
    """The open checkpoint; changed only by who holds the lock.

    Args:
        arguments: what a repeat of the call that opened it is compared with.
        lease: the length of its lease in seconds.
    """

    id: Id
    run_id: str
    restoring: bool
    arguments: object
    lease: float
    lease_end: float | None = None
    serving: int = 0
    closed_at: float | None = None
    pause: float = 0.0
    prepared_after: float | None = None
    committed_with: object = None
    cut: Cut | None = None
    work: Work | None = None
    written: Written | None = None
    restored: Json | None = None
    ending: str | None = None
    recorded_id: Id = (0, 0)
    over: bool = False

    @property
    def pause_ms(self) -> int:
        """For how long it has kept the gate closed."""
        still = 0.0 if self.closed_at is None else time.monotonic() - self.closed_at
        return milliseconds(self.pause + still)

    def remaining_ms(self) -> int | None:
        """Return what is left of its lease."""
        if self.lease_end is None or self.ending is not None:
            return None
        left = self.lease_end - time.monotonic()
        return milliseconds(max(left, self.lease) if self.serving else left)


@dataclass(frozen=True)
class Last:
    """The record of the checkpoint that ended last; `checkpoint` is None for an abort of an unseen id."""

    id: Id
    ended_as: str
    error_code: str | None = None
    checkpoint: Checkpoint | None = None

    @property
    def pause_ms(self) -> int:
        """For how long it kept the gate closed."""
        return 0 if self.checkpoint is None else self.checkpoint.pause_ms

    def show(self) -> Json:
        """Return the record as the status shows it."""
        written = self.checkpoint.written if self.checkpoint is not None and self.ended_as == "committed" else None
        return {
            "checkpoint_id": as_text(self.id),
            "ended_as": self.ended_as,
            "manifest": None if written is None else written.manifest,
            "error_code": self.error_code,
            "pause_ms": self.pause_ms,
        }


class Phases:
    """The phase machine without its operations. Its methods want the lock held."""

    def __init__(self, gate: Gate, book: Book, limits: Mapping[str, int]) -> None:
        self.gate = gate
        self.book = book
        self.limits = limits
        self.phase = "idle"
        self.open: Checkpoint | None = None
        self.last: Last | None = None
        self.controller: tuple[int, str] | None = None
        self.fresh = True
        self.draining = False
        self.became_durable = False

    # --- judging a call ---

    def adopt(self, epoch: int, controller_id: str) -> None:
        """Take a higher controller over, with the end of what a lower one left open; refuse a lower one."""
        pair = (epoch, controller_id)
        if self.controller is not None and pair < self.controller:
            named = {"id": self.controller[1], "epoch": self.controller[0]}
            detail = f"This participant has adopted {named['id']} of epoch {named['epoch']}."
            raise Refusal("stale_controller", detail, {"controller": named})
        if self.controller is not None and pair > self.controller and self.open is not None:
            self.cancel("committed" if self.phase == "committed" else "aborted")
        self.controller = pair

    def judge(self, operation: str, text: str) -> str:
        """Return how the id of a call stands to this participant: `open`, `last` or `unseen`.

        Raises:
            Refusal: the id is over, or another one is open.
        """
        identity = as_id(text)
        if self.open is not None:
            if identity == self.open.id and (self.open.ending is None or operation == "abort"):
                return "open"
            if identity > max(self.open.id, self.open.recorded_id):
                if operation == "abort":
                    return "unseen"
                raise self.refusal("checkpoint_conflict", f"Checkpoint {as_text(self.open.id)} is open.")
        elif self.last is None or identity > self.last.id:
            if operation in ("abort", "prepare", "restore"):
                return "unseen"
        elif identity == self.last.id and (
            operation == "abort" or self.last.ended_as in REPLAYED.get(operation, set())
        ):
            return "last"
        raise self.refusal("stale_checkpoint", f"Checkpoint {text} is over, or was never here.")

    def refusal(self, code: str, detail: str, **members: object) -> Refusal:
        """Return a refusal that names the phase and the open checkpoint."""
        named: Json = {} if self.open is None else {"checkpoint_id": as_text(self.open.id)}
        return Refusal(code, detail, {"phase": self.phase, **named, **members})

    def invalid_phase(self) -> Refusal:
        """Return the refusal of a call that comes at the wrong moment."""
        return self.refusal("invalid_phase", f"This is not possible while {self.phase}.")

    # --- opening and ending ---

    def begin(self, checkpoint: Checkpoint, phase: str) -> None:
        """Open a checkpoint."""
        self.open, self.phase = checkpoint, phase
        checkpoint.recorded_id = checkpoint.id
        checkpoint.lease_end = time.monotonic() + checkpoint.lease

    def close_gate(self, checkpoint: Checkpoint, *, finishing: bool) -> None:
        """Close the gate for a checkpoint."""
        checkpoint.closed_at = time.monotonic()
        self.gate.close(finishing=finishing)

    def open_gate(self, checkpoint: Checkpoint) -> None:
        """Open the gate; no lease runs any more."""
        if checkpoint.closed_at is not None:
            checkpoint.pause += time.monotonic() - checkpoint.closed_at
        checkpoint.closed_at = checkpoint.lease_end = None
        self.gate.reopen()

    def end(self, checkpoint: Checkpoint, ended_as: str, error: Refusal | None = None) -> None:
        """End a checkpoint, with the gate open."""
        self.open_gate(checkpoint)
        if checkpoint.recorded_id == checkpoint.id:
            code = None if error is None else error.code
            self.last = Last(checkpoint.id, ended_as, code, checkpoint)
        else:
            self.last = Last(checkpoint.recorded_id, "aborted")
        checkpoint.over, self.open, self.phase = True, None, "idle"
        self.gate.lock.notify_all()

    def cancel(self, ended_as: str, recorded_id: Id | None = None) -> Checkpoint:
        """End the open checkpoint from outside; what works for it is waited for, with the gate open."""
        checkpoint = self.open
        assert checkpoint is not None
        if recorded_id is not None:
            checkpoint.recorded_id = max(checkpoint.recorded_id, recorded_id)
        checkpoint.ending = checkpoint.ending or ended_as
        if self.phase == "restored":
            self.book.discard()
        if checkpoint.work is None or checkpoint.work.done:
            self.end(checkpoint, checkpoint.ending)
        else:
            self.open_gate(checkpoint)
        return checkpoint

    def work_ended(self, checkpoint: Checkpoint, work: Work, error: Refusal | None) -> bool:
        """Note that the thread of a checkpoint has stopped; return whether the checkpoint is over by that."""
        work.done, work.error = True, error
        if checkpoint.ending is not None:
            self.end(checkpoint, checkpoint.ending)
        self.gate.lock.notify_all()
        return checkpoint.over

    # --- time ---

    @contextmanager
    def serving(self, checkpoint: Checkpoint, lease_ms: int | None = None) -> Iterator[None]:
        """Serve an accepted call about the open checkpoint: its lease stands still, and is full again afterwards."""
        if lease_ms is not None:
            checkpoint.lease = self.lease(lease_ms)
        checkpoint.serving += 1
        self.fresh = False
        try:
            yield
        finally:
            checkpoint.serving -= 1
            if checkpoint.lease_end is not None:
                checkpoint.lease_end = max(checkpoint.lease_end, time.monotonic() + checkpoint.lease)
                self.gate.lock.notify_all()

    def lease(self, lease_ms: int) -> float:
        """Return the length of a lease in seconds, within the limits."""
        return min(max(lease_ms, self.limits["min_lease_ms"]), self.limits["max_lease_ms"]) / 1000

    def deadline(self, arrived: float, timeout_ms: int) -> float:
        """Return the moment until which a call may wait."""
        return arrived + min(timeout_ms, self.limits["max_wait_ms"]) / 1000

    def settle(self) -> None:
        """Do what is due by itself: become prepared, or let the lease end."""
        checkpoint = self.open
        if checkpoint is None or checkpoint.ending is not None:
            return
        if self.phase == "preparing" and not self.book.blockers():
            assert checkpoint.closed_at is not None
            checkpoint.prepared_after = time.monotonic() - checkpoint.closed_at
            self.phase, self.gate.finishing = "prepared", False
            self.gate.lock.notify_all()
        if checkpoint.lease_end is not None and not checkpoint.serving and time.monotonic() >= checkpoint.lease_end:
            self.cancel("committed" if self.phase == "committed" else "expired")

    def next_deadline(self) -> float | None:
        """Return when `settle` is due at the latest."""
        return None if self.open is None or self.open.serving else self.open.lease_end

    def status(self) -> Json:
        """Return the status, of one instant."""
        pair = self.controller
        checkpoint = self.open
        return {
            "phase": self.phase,
            "gate": "open" if self.gate.open else "closed",
            "checkpoint_id": None if checkpoint is None else as_text(checkpoint.id),
            "controller": None if pair is None else {"id": pair[1], "epoch": pair[0]},
            "lease_remaining_ms": None if checkpoint is None else checkpoint.remaining_ms(),
            "progress": self.book.progress,
            "fresh": self.fresh,
            "draining": self.draining,
            "captured": None if checkpoint is None else checkpoint.cut is not None,
            "feed": self.book.feed,
            "counts": self.book.counts(),
            "last": None if self.last is None else self.last.show(),
        }
