# SPDX-License-Identifier: Apache-2.0
"""Values that several messages share: enumerations, receipts, addresses, references to files."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spec.messages._base import (
    Absent,
    Attempt,
    BaseUrl,
    CheckpointId,
    Count,
    DataKey,
    Detail,
    Digest,
    EnvironmentName,
    Epoch,
    Items,
    LongName,
    Milliseconds,
    Request,
    Response,
    RolloutId,
    SchemaVersion,
    StateVersion,
    fallback,
    known_fields_only,
)

Phase = Literal["idle", "preparing", "prepared", "committing", "committed", "restoring", "restored"]
Gate = Literal["open", "closed"]
_EndedAs = Literal["committed", "restored", "aborted", "expired", "failed"]
EndedAs = Annotated[_EndedAs, fallback("failed", _EndedAs)]
Scheme = Literal["file", "http"]
Owned = Literal["rollouts", "sessions", "ledger"]
_Continuation = Literal["export_restore", "stateless", "restart_only"]
Continuation = Annotated[_Continuation, fallback("restart_only", _Continuation)]
_Reason = Literal[
    "blocked",
    "uncertain",
    "restart_only",
    "record_too_large",
    "row_missing",
    "effects_differ",
    "left_out",
    "install_failed",
    "other",
]
Reason = Annotated[_Reason, fallback("other", _Reason)]
_ErrorCode = Literal[
    "invalid_request",
    "unauthorized",
    "forbidden_target",
    "not_found",
    "method_not_allowed",
    "payload_too_large",
    "unsupported_media_type",
    "stale_incarnation",
    "stale_controller",
    "stale_checkpoint",
    "stale_attempt",
    "checkpoint_conflict",
    "argument_conflict",
    "target_exists",
    "invalid_phase",
    "session_lost",
    "not_ready",
    "checkpoint_corrupt",
    "state_incompatible",
    "state_mismatch",
    "unsupported",
    "unsupported_version",
    "admission_closed",
    "unavailable",
    "deadline_exceeded",
    "insufficient_storage",
    "internal",
]
ErrorCode = Annotated[_ErrorCode, fallback("internal", _ErrorCode)]

_BlockerKind = Literal["effect", "verification", "generation", "worker"]
BlockerKind = Annotated[_BlockerKind, fallback("worker", _BlockerKind)]


class Receipt(Response):
    """Names one finished result exactly: rollout, attempt, and the digest of the result string."""

    rollout_id: RolloutId
    attempt: Attempt
    digest: Digest


SentReceipt = Annotated[Receipt, known_fields_only("rollout_id", "attempt", "digest")]
"""A receipt inside a request, where unknown fields are refused."""


class Policy(Request):
    """Where the agent finds the model; it holds no credential."""

    base_url: BaseUrl
    model: Annotated[str, Field(min_length=1, max_length=256)]
    api: Literal["chat_completions", "responses"]


class Controller(Response):
    """The pair by which controllers are totally ordered: epoch, then id bytewise."""

    id: LongName
    epoch: Epoch


class RolloutFence(Request):
    """A fence to raise: attempts up to ``through_attempt`` of one rollout are refused from then on."""

    rollout_id: RolloutId
    through_attempt: Attempt


class Blocker(Response):
    """One piece of work that keeps a participant from being ready; ``since_ms`` in milliseconds."""

    kind: BlockerKind
    rollout_id: Absent[RolloutId] = None
    attempt: Absent[Attempt] = None
    since_ms: Milliseconds
    detail: Detail


Blockers = Annotated[Items[Blocker], Field(max_length=100)]


class ManifestRef(Response):
    """Names one manifest exactly; ``bytes`` is its size."""

    name: LongName
    digest: Digest
    bytes: Count


class IndexRef(Response):
    """Names one index of rollouts exactly; ``records`` is its number of lines."""

    name: LongName
    digest: Digest
    records: Count


class Last(Response):
    """The one record that a participant keeps of the checkpoint that ended last."""

    checkpoint_id: CheckpointId
    ended_as: EndedAs
    manifest: ManifestRef | None
    error_code: ErrorCode | None
    pause_ms: Milliseconds


class StateSchema(Response):
    """The form of a participant's saved state."""

    id: EnvironmentName
    version: SchemaVersion


class EnvironmentVersion(Response):
    """An environment and the version of its state, compared for equality."""

    name: EnvironmentName
    state_version: StateVersion


class DataRef(Response):
    """A reference to data in RL's data plane, by exactly one of key and prefix."""

    key: Absent[DataKey] = None
    prefix: Absent[DataKey] = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.key is None) == (self.prefix is None):
            raise ValueError("exactly one of key and prefix")
        return self
