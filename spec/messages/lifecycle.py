# SPDX-License-Identifier: Apache-2.0
"""Requests and responses of a checkpoint's life: prepare, commit, resume, abort, renew, restore."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spec.messages._base import (
    MAX_LIST,
    Absent,
    AbsolutePath,
    Attempt,
    CheckpointId,
    Count,
    Digest,
    Items,
    LeaseMs,
    LongName,
    Milliseconds,
    Request,
    Response,
    RolloutId,
    TaskDigest,
    TimeoutMs,
    TurnsDone,
)
from spec.messages._shared import (
    Blockers,
    EndedAs,
    IndexRef,
    ManifestRef,
    Phase,
    Policy,
    Reason,
    RolloutFence,
    SentReceipt,
)


class PrepareRequest(Request):
    """Closes the gate and asks whether everything is quiescent."""

    checkpoint_id: CheckpointId
    run_id: LongName
    timeout_ms: TimeoutMs
    lease_ms: LeaseMs


class PrepareResponse(Response):
    """Whether the participant is ready to commit, or what blocks it."""

    phase: Phase
    ready: bool
    blockers: Blockers
    blocker_count: Count
    restart_count: Count
    progress: Count
    wait_ms: Milliseconds
    lease_remaining_ms: Milliseconds | None


class FileTarget(Request):
    """A directory that both sides see."""

    scheme: Literal["file"]
    path: AbsolutePath


class HttpTarget(Request):
    """The participant keeps the files, to be fetched."""

    scheme: Literal["http"]


class CommitRequest(Request):
    """Captures the cut at one instant and writes it."""

    checkpoint_id: CheckpointId
    target: Annotated[FileTarget | HttpTarget, Field(discriminator="scheme")]
    wait: Literal["captured", "durable"]
    leave_out_blocked: Absent[bool] = None
    timeout_ms: TimeoutMs


class CutCounts(Response):
    """What a cut holds: rows by state, files and bytes written."""

    turn: Count
    finished: Count
    restart: Count
    files: Count
    bytes: Count


class CommitResponse(Response):
    """How far the cut is."""

    phase: Phase
    captured: bool
    durable: bool
    manifest: ManifestRef | None
    index: IndexRef | None
    counts: CutCounts
    pause_ms: Milliseconds


class ResumeRequest(Request):
    """Opens the gate after a capture or a restore."""

    checkpoint_id: CheckpointId
    timeout_ms: TimeoutMs


class ResumeResponse(Response):
    """How the checkpoint stands after resume; ``ended_as`` is None while its cut is still being written."""

    phase: Phase
    ended_as: EndedAs | None
    pause_ms: Milliseconds


class AbortRequest(Request):
    """Opens the gate and makes sure that nothing of this id is ever published."""

    checkpoint_id: CheckpointId
    timeout_ms: TimeoutMs


class AbortResponse(Response):
    """How the checkpoint stands after abort."""

    phase: Phase
    ended_as: EndedAs | None
    pause_ms: Milliseconds


class RenewRequest(Request):
    """Extends the lease of the open checkpoint."""

    checkpoint_id: CheckpointId
    lease_ms: LeaseMs


class RenewResponse(Response):
    """The lease as extended."""

    lease_remaining_ms: Milliseconds | None


class FileSource(Request):
    """A participant's directory in a snapshot that both sides see."""

    scheme: Literal["file"]
    path: AbsolutePath
    checkpoint_id: CheckpointId
    manifest_digest: Digest


class HttpSource(Request):
    """Files that were uploaded to the participant."""

    scheme: Literal["http"]
    checkpoint_id: CheckpointId
    manifest_digest: Digest


class RestoreRollout(Request):
    """One rollout to continue as ``next_attempt``."""

    rollout_id: RolloutId
    attempt: Attempt
    next_attempt: Attempt
    turns_done: TurnsDone
    task_digest: TaskDigest


class RestoreRequest(Request):
    """Replaces all live work by exactly the listed rollouts and results; the gate stays closed until resume."""

    checkpoint_id: CheckpointId
    run_id: LongName
    source: Annotated[FileSource | HttpSource, Field(discriminator="scheme")] | None
    rollouts: Annotated[Items[RestoreRollout], Field(max_length=MAX_LIST)]
    results: Annotated[Items[SentReceipt], Field(max_length=MAX_LIST)]
    fences: Annotated[Items[RolloutFence], Field(max_length=MAX_LIST)]
    policy: Absent[Policy] = None
    timeout_ms: TimeoutMs
    lease_ms: LeaseMs

    @model_validator(mode="after")
    def _nothing_from_nowhere(self) -> Self:
        if self.source is None and (self.rollouts or self.results):
            raise ValueError("without a source, rollouts and results are empty")
        return self


class Restart(Response):
    """One listed rollout that cannot continue."""

    rollout_id: RolloutId
    reason: Reason


class RestoreResponse(Response):
    """What was installed."""

    phase: Phase
    restored_count: Count
    restarts: Annotated[Items[Restart], Field(max_length=MAX_LIST)]
    results_count: Count
