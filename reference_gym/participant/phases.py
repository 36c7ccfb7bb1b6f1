# SPDX-License-Identifier: Apache-2.0
"""What the phase machine is made of: phases, answers, the open checkpoint, and the record of the last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from spec.wire import CheckpointId


class Phase(StrEnum):
    """Where the participant stands; see the ``phases`` of the state machine."""

    IDLE = "idle"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    COMMITTED = "committed"
    RESTORING = "restoring"
    RESTORED = "restored"


class EndedAs(StrEnum):
    """How a checkpoint ended, as ``last`` tells it."""

    COMMITTED = "committed"
    RESTORED = "restored"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"


class Answer(Enum):
    """How a call that is not refused is answered."""

    ACCEPTED = "accepted"
    JOINS = "joins"
    REPLIES = "replies"


class Todo(Enum):
    """What the shell does with the work that the gate guards."""

    CAPTURE = "captured"
    CAPTURE_WITHOUT_BLOCKED = "captured_without_blocked"
    CONTINUE_RESTORED = "restored_continues"
    STOP_WRITER = "writer_stopped"
    STOP_BUILDER = "as_before"
    DISCARD_INSTALLED = "installed_discarded"


class Where(Enum):
    """How the id of a call relates to what the machine knows."""

    OPEN = "open"
    LAST = "last"
    UNSEEN = "unseen"
    LOWER = "lower"


@dataclass(frozen=True, slots=True)
class Last:
    """The record of the checkpoint that ended most recently.

    ``manifest`` and ``outcome`` (the recorded reply of its commit or restore) are set where it ended well,
    ``error_code`` where it failed. ``pause_ms`` is how long the gate was closed for it, in milliseconds.
    """

    checkpoint_id: CheckpointId
    ended_as: EndedAs
    manifest: Mapping[str, Any] | None = None
    error_code: str | None = None
    pause_ms: int = 0
    outcome: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """The open checkpoint.

    ``run_id`` is what a prepare gave, ``commit_key`` and ``restore_key`` the compared arguments of the first call
    that was not refused. ``ending`` is set while its work is being stopped; ``then`` is a higher id whose abort
    ended it.
    """

    checkpoint_id: CheckpointId
    run_id: str
    lease_ms: int
    closed_at: float | None = None
    prepared_at: float | None = None
    pause_s: float = 0.0
    captured: bool = False
    commit_key: object = None
    restore_key: object = None
    manifest: Mapping[str, Any] | None = None
    outcome: Mapping[str, Any] | None = None
    ending: EndedAs | None = None
    then: CheckpointId | None = None
