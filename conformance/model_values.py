# SPDX-License-Identifier: Apache-2.0
"""The values of the model: what may be true of one participant, a call, and an answer to it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal

from conformance.model_rollouts import Busy, Plan, Receipt, Retire, Rollouts, Stand, Start
from spec.wire import CheckpointId, ControllerPair

Phase = Literal["idle", "preparing", "prepared", "committing", "committed", "restoring", "restored"]
Gate = Literal["open", "closed"]
Ending = Literal["committed", "restored", "aborted", "expired", "failed"]
Relation = Literal["open", "last", "unseen", "lower"]

PHASES: tuple[Phase, ...] = ("idle", "preparing", "prepared", "committing", "committed", "restoring", "restored")
RELATIONS: tuple[Relation, ...] = ("open", "last", "unseen", "lower")
CHECKPOINT_OPERATIONS = ("prepare", "commit", "resume", "abort", "renew", "restore")
"""The operations that name a checkpoint."""
OPERATIONS = (*CHECKPOINT_OPERATIONS, "start", "ack", "retire")
"""Every operation of a controller that the model knows."""


@dataclass(frozen=True, slots=True)
class Last:
    """The record of the checkpoint that ended most recently."""

    id: CheckpointId
    ended_as: Ending


@dataclass(frozen=True, slots=True)
class Call:
    """One mutating call of a controller.

    Args:
        operation: one of `OPERATIONS`.
        controller: the pair in its headers.
        expects: whether the incarnation that the call names is the participant's.
        unfit: the refusal that its form earns before anything else is looked at (``invalid_request``, …).
        checkpoint_id: of an operation that names one.
        run_id: of prepare and restore.
        arguments: what a repeat of commit or restore must equal.
        leave_out_blocked: of a commit.
        wait: of a commit, what it waits for.
        deserves: the error that its target, source or lists earn by themselves (``forbidden_target``, …).
        source: of a restore, the checkpoint whose cut is restored; ``None``: none (``source: null``).
        uploaded: of a restore, whether the files of its source have to be uploaded before (scheme ``http``).
        plan: of a restore, its lists.
        policy: of a restore, where restored rollouts call; ``None``: their saved one.
        failing: of a commit, whether its writing may fail for lack of space.
        patient: whether its time limit is long enough for everything that the outside does not hold.
        items: of a start, an ACK or a retire.
    """

    operation: str
    controller: ControllerPair
    expects: bool = True
    unfit: str | None = None
    checkpoint_id: CheckpointId | None = None
    run_id: str = ""
    arguments: Hashable | None = None
    leave_out_blocked: bool = False
    wait: Literal["captured", "durable"] = "durable"
    deserves: str | None = None
    source: CheckpointId | None = None
    uploaded: bool = False
    plan: Plan = field(default_factory=Plan)
    policy: str | None = None
    failing: bool = False
    patient: bool = True
    items: tuple[Start | Receipt | Retire, ...] = ()

    @property
    def id(self) -> CheckpointId:
        """The checkpoint that the call names."""
        assert self.checkpoint_id is not None, f"{self.operation} needs a checkpoint id"
        return self.checkpoint_id


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The open checkpoint.

    Args:
        arguments: what the first commit or restore that was not refused was called with, as far as it is compared.
        cut: what was captured; ``None``: nothing yet.
        failing: whether its writing may fail for lack of space.
        ending: how it will end once its writer or builder has stopped.
        restore: the restore that opened it.
    """

    id: CheckpointId
    run_id: str
    arguments: Hashable | None = None
    cut: Rollouts | None = None
    failing: bool = False
    ending: Ending | None = None
    restore: Call | None = None


@dataclass(frozen=True)
class State:
    """What may be true of one participant.

    Args:
        outside: how far the outside lets each rollout get, whatever its attempt.
        guests: of a participant that owns sessions and no rollouts: what the outside keeps from its end there.
        sessions: of such a participant: the rollouts of which it may hold something.
        cuts: what each cut that may be restored holds.
        uploads: the cuts of which every file was uploaded and is certainly still there.
        feed: the value of the feed; ``None``: one that was never seen.
        late: a call that is still under way and may yet be executed, or never.
        runs_effects: whether effects run in this participant (it owns sessions).
        draining: whether it was told to end (SIGTERM).
        room: how many rollouts may be live at once.
    """

    phase: Phase = "idle"
    gate: Gate = "open"
    open: Checkpoint | None = None
    last: Last | None = None
    controller: ControllerPair | None = None
    rollouts: Rollouts = field(default_factory=Rollouts)
    outside: Mapping[str, Stand] = field(default_factory=lambda: MappingProxyType({}))
    guests: Mapping[str, Busy] = field(default_factory=lambda: MappingProxyType({}))
    sessions: frozenset[str] = frozenset()
    cuts: Mapping[CheckpointId, Rollouts] = field(default_factory=lambda: MappingProxyType({}))
    uploads: frozenset[CheckpointId] = frozenset()
    feed: str | None = None
    late: Call | None = None
    runs_effects: bool = True
    draining: bool = False
    room: int = 2**31

    def __hash__(self) -> int:
        return hash((self.phase, self.gate, self.open, self.last, self.controller, self.rollouts, self.late))

    @property
    def blocked(self) -> frozenset[str]:
        """The rollouts that certainly keep the participant from `prepared`."""
        own = {name for name, rollout in self.rollouts.known.items() if rollout.blocks}
        return frozenset(own | {name for name, busy in self.guests.items() if busy == "effect"})

    @property
    def perhaps_blocked(self) -> frozenset[str]:
        """The rollouts that certainly or possibly do."""
        own = {name for name, rollout in self.rollouts.known.items() if rollout.may_block}
        return frozenset(own | set(self.guests))


@dataclass(frozen=True)
class Outcome:
    """One answer that the specification allows, and what is true after it.

    ``fields`` are the fields of the body that are determined, each with the values that it may have; ``outcomes`` is,
    for a call with items, what each item may get.
    """

    status: int
    code: str | None
    after: State
    fields: Mapping[str, frozenset[Any]] = field(default_factory=dict)
    outcomes: tuple[frozenset[str], ...] | None = None

    def __hash__(self) -> int:
        return hash((self.status, self.code, self.after, self.outcomes))

    def fits(self, status: int, body: Any) -> bool:
        """Return whether an answer is this outcome."""
        if status != self.status or not isinstance(body, Mapping):
            return False
        if self.code is not None and body.get("code") != self.code:
            return False
        if self.outcomes is not None:
            given = [entry.get("outcome") for entry in body.get("outcomes", ())]
            fits = (one in allowed for one, allowed in zip(given, self.outcomes, strict=False))
            return len(given) == len(self.outcomes) and all(fits)
        return all(body.get(name) in allowed for name, allowed in self.fields.items())

    @property
    def brief(self) -> str:
        """The answer on one line."""
        if self.code is not None:
            named = "".join(f" {name}={'|'.join(sorted(allowed))}" for name, allowed in self.fields.items())
            return f"{self.status} {self.code}{named}"
        if self.outcomes is not None:
            runs = [(name, len(list(run))) for name, run in groupby("|".join(sorted(one)) for one in self.outcomes)]
            return f"{self.status} outcomes {', '.join(f'{name} × {n}' if n > 1 else name for name, n in runs)}"
        shown = {name: sorted(map(str, allowed)) for name, allowed in self.fields.items()}
        return f"{self.status} " + " ".join(f"{name}={'|'.join(values)}" for name, values in shown.items())


STATUS: Mapping[str, int] = {
    "invalid_request": 400,
    "forbidden_target": 403,
    "payload_too_large": 413,
    "checkpoint_corrupt": 422,
    "state_incompatible": 422,
    "state_mismatch": 422,
    "unsupported": 501,
    "unavailable": 503,
    "deadline_exceeded": 504,
    "insufficient_storage": 507,
}
"""The HTTP status of the codes whose status is not 409."""
