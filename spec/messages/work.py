# SPDX-License-Identifier: Apache-2.0
"""Requests and responses about rollouts and their results: start, list, feed, ACK, retire."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spec.messages._base import (
    MAX_ITEMS,
    SAFE,
    Absent,
    Attempt,
    Cursor,
    Detail,
    EnvironmentName,
    Items,
    JsonObject,
    Labels,
    LongName,
    Milliseconds,
    Request,
    Response,
    RolloutId,
    Seed,
    TaskDigest,
    TimeoutMs,
    Turn,
    TurnsDone,
    fallback,
)
from spec.messages._shared import Policy, Receipt, RolloutFence, SentReceipt

_RetireVerdict = Literal["retired", "pending", "finished"]
RetireVerdict = Annotated[_RetireVerdict, fallback("pending", _RetireVerdict)]
_StartVerdict = Literal[
    "invalid",
    "unknown_environment",
    "stale_attempt",
    "released",
    "conflict",
    "already_finished",
    "already_started",
    "admission_closed",
    "over_capacity",
    "started",
]
StartVerdict = Annotated[_StartVerdict, fallback("over_capacity", _StartVerdict)]
_RolloutState = Literal["running", "parked", "waiting_policy", "restart", "finished", "failed", "released", "retired"]
RolloutState = Annotated[_RolloutState, fallback("running", _RolloutState)]
_AckVerdict = Literal["released", "already_released", "mismatch", "unknown"]
AckVerdict = Annotated[_AckVerdict, fallback("unknown", _AckVerdict)]


class RetireRequest(Request):
    """Fences attempts, stops them and frees what they hold."""

    rollouts: Annotated[Items[RolloutFence], Field(max_length=MAX_ITEMS)]
    timeout_ms: TimeoutMs


class RetireOutcome(Response):
    """The outcome of retire for one rollout; ``finished`` carries the receipt."""

    rollout_id: RolloutId
    outcome: RetireVerdict
    receipt: Absent[Receipt] = None

    @model_validator(mode="after")
    def _finished_has_a_receipt(self) -> Self:
        if self.outcome == "finished" and self.receipt is None:
            raise ValueError("outcome finished carries the receipt")
        return self


class RetireResponse(Response):
    """One outcome per rollout, in request order."""

    outcomes: Annotated[Items[RetireOutcome], Field(max_length=MAX_ITEMS)]


class RolloutLimits(Request):
    """Limits of one rollout: turns, and a time budget in milliseconds."""

    max_turns: Turn
    episode_ms: Annotated[int, Field(ge=1, le=SAFE)]


class StartRollout(Request):
    """One rollout to start."""

    rollout_id: RolloutId
    attempt: Attempt
    environment: EnvironmentName
    agent: Absent[EnvironmentName] = None
    task: JsonObject
    task_digest: TaskDigest
    seed: Absent[Seed] = None
    limits: Absent[RolloutLimits] = None
    policy: Absent[Policy] = None
    labels: Absent[Labels] = None


class StartRequest(Request):
    """Starts a batch of rollouts."""

    policy: Absent[Policy] = None
    rollouts: Annotated[Items[StartRollout], Field(max_length=MAX_ITEMS)]


class StartOutcome(Response):
    """The outcome of a start for one rollout; ``already_finished`` carries the receipt."""

    rollout_id: RolloutId
    attempt: Attempt
    outcome: StartVerdict
    receipt: Absent[Receipt] = None
    detail: Absent[Detail] = None

    @model_validator(mode="after")
    def _finished_has_a_receipt(self) -> Self:
        if self.outcome == "already_finished" and self.receipt is None:
            raise ValueError("outcome already_finished carries the receipt")
        return self


class StartResponse(Response):
    """One outcome per rollout, in request order."""

    outcomes: Annotated[Items[StartOutcome], Field(max_length=MAX_ITEMS)]


class Rollout(Response):
    """One rollout at its highest attempt; of a released or retired one only id, attempt and state are left."""

    rollout_id: RolloutId
    attempt: Attempt
    state: RolloutState
    turns_done: Absent[TurnsDone] = None
    open_turn: Turn | None
    environment: Absent[EnvironmentName] = None
    task_digest: Absent[TaskDigest] = None
    receipt: Absent[Receipt] = None
    since_ms: Absent[Milliseconds] = None

    @model_validator(mode="after")
    def _complete_unless_a_tombstone(self) -> Self:
        facts = (self.turns_done, self.environment, self.task_digest, self.since_ms)
        if self.state not in ("released", "retired") and None in facts:
            raise ValueError(f"incomplete for state {self.state}")
        if self.state in ("finished", "failed") and self.receipt is None:
            raise ValueError(f"state {self.state} carries the receipt")
        return self


class RolloutsPage(Response):
    """A page of the rollouts that a participant holds; ``next`` is None after the last page."""

    rollouts: Annotated[Items[Rollout], Field(max_length=MAX_ITEMS)]
    next: Cursor | None


class FeedResult(Response):
    """One result of the feed: its receipt, and the result as JSON text."""

    receipt: Receipt
    result: Annotated[str, Field(max_length=67_108_864)]


class ResultsPage(Response):
    """A page of finished results that are not released."""

    feed: LongName
    results: Annotated[Items[FeedResult], Field(max_length=MAX_ITEMS)]
    next: Cursor
    more: bool


class AcksRequest(Request):
    """Says that these results are durably saved or settled as surplus."""

    receipts: Annotated[Items[SentReceipt], Field(max_length=MAX_ITEMS)]


class AckOutcome(Response):
    """The outcome for one receipt."""

    rollout_id: RolloutId
    attempt: Attempt
    outcome: AckVerdict


class AcksResponse(Response):
    """One outcome per receipt, in request order."""

    outcomes: Annotated[Items[AckOutcome], Field(max_length=MAX_ITEMS)]
