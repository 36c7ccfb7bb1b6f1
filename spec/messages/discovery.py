# SPDX-License-Identifier: Apache-2.0
"""What a participant is and where it stands: capabilities, status, and the problem document of every error."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spec.messages._base import (
    MAX_ITEMS,
    MAX_LIST,
    SAFE,
    UNIQUE,
    Absent,
    Attempt,
    CheckpointId,
    Count,
    Detail,
    EnvironmentName,
    Items,
    Kind,
    LongName,
    Milliseconds,
    Name,
    ProtocolVersion,
    Response,
    RolloutId,
    SchemaVersion,
    StateVersion,
    Url,
    fallback,
    known_only,
)
from spec.messages._shared import Blockers, Continuation, Controller, ErrorCode, Gate, Last, Owned, Phase, Scheme

Profile = Literal["results", "checkpoint", "turn-recovery"]
_Verify = Literal["wait", "repeat"]
Verify = Annotated[_Verify, fallback("wait", _Verify)]
Limit = Annotated[int, Field(ge=1, le=SAFE)]
ItemLimit = Annotated[int, Field(ge=1, le=MAX_ITEMS)]
TimeLimit = Annotated[int, Field(ge=1, le=86_400_000)]


class Implementation(Response):
    """The software of a participant, for people."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    version: Annotated[str, Field(min_length=1, max_length=64)]


class ReadableStateSchema(Response):
    """The form in which a participant writes its state, and the versions of it that it can restore."""

    id: EnvironmentName
    version: SchemaVersion
    reads: Annotated[Items[SchemaVersion], Field(min_length=1, max_length=64), UNIQUE]


class Agent(Response):
    """One agent of a participant."""

    name: EnvironmentName
    continuation: Continuation


class Environment(Response):
    """One environment of a participant."""

    name: EnvironmentName
    continuation: Continuation
    verify: Verify
    state_version: StateVersion


class Workers(Response):
    """The processes behind one address."""

    count: Annotated[int, Field(ge=1, le=100_000)]
    coordinated: bool


class ParticipantAddress(Response):
    """Another participant of the same Gym."""

    name: Name
    url: Url


class ParticipantLimits(Response):
    """The limits of a participant: bytes, items, milliseconds."""

    max_body_bytes: Limit
    max_batch: ItemLimit
    max_page_items: ItemLimit
    max_page_bytes: Limit
    max_wait_ms: TimeLimit
    min_lease_ms: TimeLimit
    max_lease_ms: TimeLimit
    max_write_ms: Limit
    max_result_bytes: Annotated[int, Field(ge=1, le=67_108_864)]
    max_record_bytes: Limit
    max_artifact_bytes: Limit
    max_live_rollouts: Annotated[int, Field(ge=1, le=MAX_LIST)]
    shutdown_grace_ms: Milliseconds
    policy_retry_ms: Milliseconds
    max_connections: Absent[Limit] = None
    max_silence_ms: Absent[Limit] = None
    max_artifacts: Absent[Limit] = None
    max_artifacts_bytes: Absent[Limit] = None


class Capabilities(Response):
    """What a participant is, owns and can do."""

    name: Name
    role: Name
    owns: Annotated[Items[Owned], Field(min_length=1, max_length=3), known_only(Owned), UNIQUE]
    incarnation: LongName
    implementation: Implementation
    protocol_versions: Annotated[Items[ProtocolVersion], Field(min_length=1, max_length=16), UNIQUE]
    profiles: Annotated[Items[Profile], Field(max_length=16), known_only(Profile), UNIQUE]
    features: Annotated[Items[Kind], Field(max_length=64), UNIQUE]
    state_schema: ReadableStateSchema
    agents: Annotated[Items[Agent], Field(max_length=1000)]
    environments: Annotated[Items[Environment], Field(max_length=MAX_ITEMS)]
    storage: Annotated[Items[Scheme], Field(max_length=2), known_only(Scheme), UNIQUE]
    stage: Annotated[int, Field(ge=0, le=1000)]
    workers: Workers
    participants: Absent[Annotated[Items[ParticipantAddress], Field(max_length=1000)]] = None
    limits: ParticipantLimits


class RolloutCounts(Response):
    """Rollouts by state, each counted once at its highest attempt."""

    admitted: Count
    live: Count
    restart: Count
    finished_unreleased: Count
    failed_unreleased: Count
    released: Count
    retired: Count
    unmanaged: Count


class Status(Response):
    """Where a participant stands."""

    phase: Phase
    gate: Gate
    checkpoint_id: CheckpointId | None
    controller: Controller | None
    lease_remaining_ms: Milliseconds | None
    progress: Count
    fresh: bool
    draining: bool
    captured: bool | None
    feed: Absent[LongName] = None
    counts: RolloutCounts
    last: Last | None


class ProblemRollout(Response):
    """One rollout that an error is about."""

    rollout_id: RolloutId
    through_attempt: Absent[Attempt] = None
    detail: Absent[Detail] = None


class Problem(Response):
    """A problem document as of RFC 9457: every error of a participant has this form."""

    type: Absent[Annotated[str, Field(max_length=256)]] = None
    code: ErrorCode
    title: Annotated[str, Field(min_length=1, max_length=128)]
    detail: Detail
    status: Absent[Annotated[int, Field(ge=400, le=599)]] = None
    retryable: bool
    definite: bool
    retry_after_ms: Absent[Milliseconds] = None
    phase: Absent[Phase] = None
    checkpoint_id: Absent[CheckpointId] = None
    blockers: Absent[Blockers] = None
    controller: Absent[Controller] = None
    rollouts: Absent[Annotated[Items[ProblemRollout], Field(max_length=MAX_LIST)]] = None
    continues: Absent[bool] = None
