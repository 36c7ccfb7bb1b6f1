# SPDX-License-Identifier: Apache-2.0
"""Refusals of the protocol, as exceptions; each becomes a problem document.

    ProtocolError                      code, detail, and what the problem document carries beside them
    ├── InvalidRequest                 400 invalid_request
    ├── Unauthorized                   401 unauthorized
    ├── ForbiddenTarget                403 forbidden_target
    ├── NotFound                       404 not_found
    ├── MethodNotAllowed               405 method_not_allowed
    ├── UnsupportedMediaType           415 unsupported_media_type
    ├── PayloadTooLarge                413 payload_too_large
    ├── Stale                          409, something newer exists
    │   ├── StaleIncarnation
    │   ├── StaleController            carries the adopted pair
    │   ├── StaleCheckpoint
    │   └── StaleAttempt               carries rollouts and their fences
    ├── Conflict                       409, not now or not so
    │   ├── CheckpointConflict
    │   ├── ArgumentConflict
    │   ├── TargetExists
    │   ├── InvalidPhase
    │   ├── NotReady                   carries blockers
    │   └── SessionLost                (effects)
    ├── Unusable                       422, a source that cannot be restored
    │   ├── CheckpointCorrupt
    │   ├── StateIncompatible
    │   └── StateMismatch              carries rollouts
    ├── Unsupported, UnsupportedVersion   501
    ├── AdmissionClosed, Unavailable   503
    ├── InsufficientStorage            507
    ├── DeadlineExceeded               504
    └── Internal                       500

Status, title, retryable and definite come from the specification's ``errors.yaml``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, ClassVar

import spec


@cache
def _catalogue() -> Mapping[str, spec.ErrorSpec]:
    return spec.load("1.0").errors


class ProtocolError(Exception):
    """One refusal.

    Args:
        detail: a sentence for people; never a secret, never a stack trace.
        extra: further members of the problem document, e.g. ``blockers``, ``rollouts``, ``continues``.
    """

    code: ClassVar[str] = "internal"

    def __init__(self, detail: str, **extra: Any) -> None:
        super().__init__(f"{self.code}: {detail}")
        self.detail = detail
        self.extra = {name: value for name, value in extra.items() if value is not None}

    @property
    def status(self) -> int:
        """The HTTP status."""
        return _catalogue()[self.code].status

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later."""
        return _catalogue()[self.code].retryable

    def problem(self, operation: str) -> dict[str, Any]:
        """Return the problem document.

        Args:
            operation: the operation that is refused, e.g. ``commit``: some codes are indefinite on some operations.
        """
        row = _catalogue()[self.code]
        return {
            "type": "about:blank",
            "status": row.status,
            "code": self.code,
            "title": row.title,
            "detail": self.detail,
            "retryable": row.retryable,
            "definite": row.definite_on(operation),
            **self.extra,
        }


class InvalidRequest(ProtocolError):
    """The request is malformed."""

    code = "invalid_request"


class Unauthorized(ProtocolError):
    """No token, or a wrong one."""

    code = "unauthorized"


class ForbiddenTarget(ProtocolError):
    """A path outside the configured roots."""

    code = "forbidden_target"


class NotFound(ProtocolError):
    """There is nothing at this path."""

    code = "not_found"


class MethodNotAllowed(ProtocolError):
    """The path does not support this method."""

    code = "method_not_allowed"


class UnsupportedMediaType(ProtocolError):
    """The body is not of the expected media type."""

    code = "unsupported_media_type"


class PayloadTooLarge(ProtocolError):
    """The body exceeds the declared limit."""

    code = "payload_too_large"


class Stale(ProtocolError):
    """Something newer exists: nothing was done."""


class StaleIncarnation(Stale):
    """The participant's state is not the expected one."""

    code = "stale_incarnation"


class StaleController(Stale):
    """A higher controller has taken over."""

    code = "stale_controller"


class StaleCheckpoint(Stale):
    """The checkpoint id is neither open nor usable for this operation any more."""

    code = "stale_checkpoint"


class StaleAttempt(Stale):
    """A higher attempt has fenced this one."""

    code = "stale_attempt"

    @classmethod
    def of(cls, rollout_id: str, attempt: int, through: int | None = None) -> StaleAttempt:
        """Return the refusal of one attempt.

        Args:
            rollout_id: whose.
            attempt: the attempt that the call named.
            through: the highest fenced attempt, where it is known.
        """
        fence = attempt if through is None else through
        return cls(
            f"attempt {attempt} of {rollout_id} is fenced through attempt {fence}",
            rollouts=[{"rollout_id": rollout_id, "through_attempt": fence}],
        )


class Conflict(ProtocolError):
    """Not now, or not so."""


class CheckpointConflict(Conflict):
    """Another checkpoint is open."""

    code = "checkpoint_conflict"


class ArgumentConflict(Conflict):
    """The same key was used with other arguments."""

    code = "argument_conflict"


class TargetExists(Conflict):
    """The target holds what this commit did not write."""

    code = "target_exists"


class InvalidPhase(Conflict):
    """The operation is not possible in this phase."""

    code = "invalid_phase"


class NotReady(Conflict):
    """Work is still under way."""

    code = "not_ready"


class SessionLost(Conflict):
    """The session is unknown, or does not stand where the caller does."""

    code = "session_lost"


class Unusable(ProtocolError):
    """A source that cannot be restored here."""


class CheckpointCorrupt(Unusable):
    """A file of the source is damaged."""

    code = "checkpoint_corrupt"


class StateIncompatible(Unusable):
    """The source has a newer or foreign state."""

    code = "state_incompatible"


class StateMismatch(Unusable):
    """The lists and the files disagree."""

    code = "state_mismatch"

    @classmethod
    def of(cls, problems: Iterable[tuple[str, str]]) -> StateMismatch:
        """Return the refusal that names rollouts: pairs of rollout id and what is wrong with it."""
        found = list(problems)
        named = "; ".join(f"{rollout_id}: {reason}" for rollout_id, reason in found[:5])
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        return cls(named + more, rollouts=[{"rollout_id": rollout_id} for rollout_id, _ in found])


class Unsupported(ProtocolError):
    """A feature that the capabilities do not list."""

    code = "unsupported"


class UnsupportedVersion(ProtocolError):
    """The protocol version is not offered."""

    code = "unsupported_version"


class AdmissionClosed(ProtocolError):
    """The gate is closed and the call could not be held."""

    code = "admission_closed"


class Unavailable(ProtocolError):
    """The participant cannot serve this now."""

    code = "unavailable"


class InsufficientStorage(ProtocolError):
    """The storage is full."""

    code = "insufficient_storage"


class DeadlineExceeded(ProtocolError):
    """The time limit of the call ended."""

    code = "deadline_exceeded"


class Internal(ProtocolError):
    """An unforeseen failure."""

    code = "internal"
