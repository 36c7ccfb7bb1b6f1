# SPDX-License-Identifier: Apache-2.0

"""What can go wrong on the RL side.

RlError
├── SettingsError                 run.yaml cannot be used
├── GymError                      a call to one participant failed; carries participant, operation, definite, retryable
│   ├── Refused                   the participant answered with a problem document of the protocol
│   ├── Unreachable               no connection: nothing was sent, so nothing happened (definite)
│   ├── Indefinite                reset, silence, cut JSON, a proxy's page: the outcome is open, a repeat is safe
│   ├── NotAParticipant           404 on /capabilities; an error where a participant was expected
│   └── BrokenReply               a well-formed 2xx reply that the schema does not allow
├── Superseded                    a higher controller has taken over; this one stops for good
├── Incompatible                  the deployment, or a snapshot with it, cannot be used; names every difference
├── EpochTaken                    another controller holds this epoch or a higher one in the run directory
├── SnapshotError
│   ├── SnapshotFailed            the sequence did not reach publication; the run goes on
│   ├── SnapshotDamaged           a published snapshot fails its verification; names file and record
│   └── SnapshotExists            something is already at the place of publication
├── RecoveryFailed                a Gym could not be brought back within its limit; names the participant
└── LedgerError
    ├── LedgerVersion             the file was written by a newer schema or belongs to another run
    └── InvariantViolated         the one kind that stops a run; carries the evidence
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


class RlError(Exception):
    """Base of everything that this package raises on purpose."""

    exit_code: ClassVar[int] = 1


class SettingsError(RlError):
    """The settings cannot be used; the text names the field."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """The problem document of one refusal, as far as the controller reads it.

    Unknown codes keep their text and are treated by their status and by ``retryable`` and ``definite`` in the body.
    """

    code: str
    status: int
    title: str = ""
    detail: str = ""
    retryable: bool = False
    definite: bool = False
    retry_after_ms: int | None = None
    phase: str | None = None
    checkpoint_id: str | None = None
    continues: bool = False
    blockers: Sequence[Mapping[str, Any]] = ()
    controller: Mapping[str, Any] | None = None
    rollouts: Sequence[Mapping[str, Any]] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)


class GymError(RlError):
    """A call to one participant failed.

    Attributes:
        participant: its name, or its URL before it is known.
        operation: the protocol operation, e.g. ``commit``.
        definite: whether the call is known to have changed nothing.
        retryable: whether the same call may succeed when repeated.
        problem: the problem document, where there is one.
    """

    exit_code = 4

    def __init__(
        self,
        participant: str,
        operation: str,
        detail: str,
        *,
        definite: bool,
        retryable: bool,
        problem: Problem | None = None,
    ) -> None:
        super().__init__(f"{operation} on {participant}: {detail}")
        self.participant = participant
        self.operation = operation
        self.definite = definite
        self.retryable = retryable
        self.problem = problem

    @property
    def code(self) -> str | None:
        """Return the error code of the problem document, or ``None``."""
        return self.problem.code if self.problem else None


class Refused(GymError):
    """The participant refused in the protocol's own form."""

    problem: Problem

    def __init__(self, participant: str, operation: str, problem: Problem) -> None:
        super().__init__(
            participant,
            operation,
            f"{problem.code} ({problem.status}): {problem.detail or problem.title}",
            definite=problem.definite,
            retryable=problem.retryable,
            problem=problem,
        )


class Unreachable(GymError):
    """No connection could be made: the call did not leave this process."""

    def __init__(self, participant: str, operation: str, detail: str) -> None:
        super().__init__(participant, operation, detail, definite=True, retryable=True)


class Indefinite(GymError):
    """Whatever is not an answer of this protocol: the call may or may not have been carried out."""

    def __init__(self, participant: str, operation: str, detail: str) -> None:
        super().__init__(participant, operation, detail, definite=False, retryable=True)


class NotAParticipant(GymError):
    """The server serves no capabilities. Whether that is an error, the caller knows."""

    def __init__(self, participant: str, operation: str) -> None:
        super().__init__(participant, operation, "it answers 404: no participant", definite=True, retryable=False)


class BrokenReply(GymError):
    """A successful reply that its schema does not allow; repeating cannot help."""

    def __init__(self, participant: str, operation: str, detail: str) -> None:
        super().__init__(participant, operation, detail, definite=False, retryable=False)


class Superseded(RlError):
    """A higher (epoch, controller id) has been adopted; nothing that this controller sends counts any more."""

    exit_code = 5


class Incompatible(RlError):
    """The deployment cannot be used as the settings ask; one sentence for each difference."""

    exit_code = 6

    def __init__(self, gym: str, reasons: Sequence[str]) -> None:
        super().__init__(f"{gym} cannot be used: " + " ".join(reasons))
        self.gym = gym
        self.reasons = tuple(reasons)


class EpochTaken(RlError):
    """The epoch was claimed by another controller of the same run directory."""

    exit_code = 5


class SnapshotError(RlError):
    """Base of what concerns snapshots on disk."""


class SnapshotFailed(SnapshotError):
    """The sequence failed before publication. The previous snapshot stays in use and the run goes on.

    Attributes:
        step: the step of the sequence that failed, e.g. ``commit``.
        participant: whose call failed, where it was a call.
    """

    def __init__(self, step: str, reason: str, participant: str | None = None) -> None:
        super().__init__(f"{step} failed: {reason}")
        self.step = step
        self.checkpoint_id: str | None = None
        self.reason = reason
        self.participant = participant


class SnapshotDamaged(SnapshotError):
    """A file of a snapshot is missing, altered or unreadable.

    Attributes:
        file: the path inside the snapshot.
        record: the line number, for files of records.
    """

    def __init__(self, file: str, reason: str, record: int | None = None) -> None:
        super().__init__(f"{file}{f', record {record}' if record else ''}: {reason}")
        self.file = file
        self.reason = reason
        self.record = record


class SnapshotExists(SnapshotError):
    """Publication never replaces: something is at the final name already."""


class RecoveryFailed(RlError):
    """A Gym could not be brought back to work within its limit."""

    exit_code = 4

    def __init__(self, gym: str, reason: str, participant: str | None = None) -> None:
        super().__init__(f"{gym}: {reason}")
        self.gym = gym
        self.participant = participant


class LedgerError(RlError):
    """Base of what concerns the ledger."""


class LedgerVersion(LedgerError):
    """The ledger file cannot be read by this version or is another run's."""

    exit_code = 2


class InvariantViolated(LedgerError):
    """Something happened that the protocol makes impossible; the run stops with the evidence saved."""

    exit_code = 3

    def __init__(self, text: str, evidence: Mapping[str, Any]) -> None:
        super().__init__(text)
        self.evidence = dict(evidence)
