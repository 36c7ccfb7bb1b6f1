# SPDX-License-Identifier: Apache-2.0
"""What is kept: the content of a result, and the files of a participant's directory and of a snapshot."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    Field,
    PlainSerializer,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from spec.messages._base import (
    MAX_ITEMS,
    MAX_LIST,
    UNIQUE,
    Absent,
    Attempt,
    CheckpointId,
    Count,
    Detail,
    Digest,
    EnvironmentName,
    Items,
    JsonObject,
    Kind,
    Labels,
    LongName,
    Milliseconds,
    Name,
    PolicyVersion,
    ProtocolVersion,
    RelativePath,
    Response,
    RolloutId,
    SchemaVersion,
    TaskDigest,
    TurnsDone,
    fallback,
    is_reading,
    known_only,
)
from spec.messages._shared import (
    DataRef,
    EnvironmentVersion,
    IndexRef,
    ManifestRef,
    Owned,
    Reason,
    Receipt,
    StateSchema,
)

_BodyOutcome = Literal["completed", "truncated"]
BodyOutcome = Annotated[_BodyOutcome, fallback("completed", _BodyOutcome)]
IndexState = Literal["turn", "finished", "restart"]
DataRefs = Annotated[Items[DataRef], Field(max_length=100_000)]
Owns = Annotated[Items[Owned], Field(min_length=1, max_length=3), known_only(Owned), UNIQUE]


def _exact(value: object, check: ValidatorFunctionWrapHandler) -> float:
    """Return a number as it came: a whole one beyond 2**53 has no exact form as a float."""
    number: float = check(value)
    return value if type(value) is int else number


def _as_it_is(number: float) -> Any:
    return number


Number = Annotated[float, WrapValidator(_exact), PlainSerializer(_as_it_is)]


class ResultBody(Response):
    """The success of a rollout: holds nothing that depends on time, attempt or process."""

    outcome: BodyOutcome
    reward: Number
    turns: TurnsDone
    messages: Annotated[Items[JsonObject], Field(max_length=1_000_000)]
    final: Absent[JsonObject] = None


class ResultFailure(Response):
    """The failure of a rollout; ``terminal`` says that a next attempt is pointless."""

    kind: Kind
    stage: Absent[Name] = None
    reason: Detail
    terminal: bool
    turns: TurnsDone


class ResultInfo(Response):
    """What may differ between two runs of one rollout; ``timings`` in milliseconds."""

    attempt: Attempt
    policy_versions: Annotated[Items[PolicyVersion], Field(max_length=100_000)]
    data_refs: DataRefs
    usage: Absent[Annotated[dict[str, Count], Field(max_length=64)]] = None
    timings: Absent[Annotated[dict[str, Milliseconds], Field(max_length=64)]] = None
    labels: Absent[Labels] = None


class Result(Response):
    """What the result string holds: exactly one of ``body`` and ``failure``."""

    rollout_id: RolloutId
    environment: EnvironmentName
    task_digest: TaskDigest
    body: Absent[ResultBody] = None
    failure: Absent[ResultFailure] = None
    info: ResultInfo

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.body is None) == (self.failure is None):
            raise ValueError("exactly one of body and failure")
        return self


class RowCounts(Response):
    """The rows of an index by state."""

    turn: Count
    finished: Count
    restart: Count


class ParticipantFile(Response):
    """One file of a participant's directory; ``records`` is 0 for a file without records."""

    name: LongName
    bytes: Count
    digest: Digest
    records: Count


class ParticipantManifest(Response):
    """The file manifest.json of a participant's directory."""

    protocol_version: ProtocolVersion
    run_id: LongName
    checkpoint_id: CheckpointId
    participant: Name
    owns: Owns
    state_schema: StateSchema
    environments: Annotated[Items[EnvironmentVersion], Field(max_length=MAX_ITEMS)]
    index: IndexRef
    counts: RowCounts
    files: Annotated[Items[ParticipantFile], Field(max_length=100_000)]


class IndexRecord(Response):
    """One line of rollouts.jsonl, the index of a participant's cut."""

    rollout_id: RolloutId
    attempt: Attempt
    state: IndexState
    reason: Absent[Reason] = None
    turns_done: TurnsDone
    task_digest: TaskDigest | None
    environment: EnvironmentName | None
    effects: Annotated[dict[EnvironmentName, Count], Field(max_length=64)]
    receipt: Absent[Receipt] = None
    policy_version: Absent[PolicyVersion] = None
    data_refs: DataRefs

    @model_validator(mode="before")
    @classmethod
    def _unknown_state_restarts(cls, value: Any, info: ValidationInfo) -> Any:
        state = value.get("state") if is_reading(info) and isinstance(value, dict) else None
        if isinstance(state, str) and state not in get_args(IndexState):
            return {**value, "state": "restart", "reason": "other"}
        return value

    @model_validator(mode="after")
    def _what_the_state_carries(self) -> Self:
        if self.state == "restart" and self.reason is None:
            raise ValueError("state restart carries a reason")
        if self.state == "finished" and self.receipt is None:
            raise ValueError("state finished carries the receipt")
        return self


class SnapshotParticipant(Response):
    """One participant's cut in a snapshot."""

    name: Name
    incarnation: LongName
    owns: Owns
    stage: Annotated[int, Field(ge=0, le=1000)]
    state_schema: StateSchema
    environments: Annotated[Items[EnvironmentVersion], Field(max_length=MAX_ITEMS)]
    manifest: ManifestRef
    index: IndexRef


class SnapshotGym(Response):
    """One Gym in a snapshot; ``included`` is false for an optional Gym that was left out whole."""

    alias: Name
    included: bool
    participants: Annotated[Items[SnapshotParticipant], Field(max_length=1000)]


class SnapshotFile(Response):
    """One file of a snapshot, by its path below the snapshot's directory."""

    path: RelativePath
    bytes: Count
    digest: Digest


class SnapshotManifest(Response):
    """The file manifest.json of a published snapshot."""

    protocol_version: ProtocolVersion
    schema_version: SchemaVersion
    run_id: LongName
    checkpoint_id: CheckpointId
    trainer_step: Count | None
    weights_version: PolicyVersion | None
    gyms: Annotated[Items[SnapshotGym], Field(max_length=1000)]
    restart_count: Count
    files: Annotated[Items[SnapshotFile], Field(max_length=MAX_LIST)]
    seal: Absent[Digest] = None


class RestartRecord(Response):
    """One line of restarts.jsonl: a rollout that a restart from this snapshot begins at turn 1."""

    gym: Name
    rollout_id: RolloutId
    attempt: Attempt
    reason: Reason
    turns_done: TurnsDone
    detail: Absent[Detail] = None


class MarkedRollout(Response):
    """One unfinished rollout of a fallback marker."""

    gym: Name
    rollout_id: RolloutId
    attempt: Attempt
    task_digest: TaskDigest


class FallbackMarker(Response):
    """The file gym-restart-fallback.json."""

    protocol_version: ProtocolVersion
    schema_version: SchemaVersion
    run_id: LongName
    trainer_checkpoint: Annotated[str, Field(min_length=1, max_length=1024)]
    trainer_step: Count
    weights_version: PolicyVersion
    action: Literal["start_at_turn_1"]
    rollouts: Annotated[Items[MarkedRollout], Field(max_length=MAX_LIST)]
    seal: Absent[Digest] = None
