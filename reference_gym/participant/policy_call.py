# SPDX-License-Identifier: Apache-2.0
"""The values of a policy call, and what can go wrong with one.

    PolicyUnavailable      the policy was unavailable for longer than `policy_retry_ms`
    PolicyRefused          the policy refuses this request, or answers with something else than the form asked for
    EpisodeOver            the rollout's time budget is used up

None of their texts is ever shown to the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from reference_gym.participant.state import Policy
from spec import wire

Api = Literal["chat_completions", "responses"]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool as it is offered to the policy; `parameters` is a JSON Schema object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TurnId:
    """Which turn of which attempt a call is for."""

    rollout_id: str
    attempt: int
    turn: int

    def headers(self) -> dict[str, str]:
        """The three headers of a call that is made for this turn."""
        return {
            wire.HEADER_ROLLOUT_ID: self.rollout_id,
            wire.HEADER_ATTEMPT: str(self.attempt),
            wire.HEADER_TURN: str(self.turn),
        }


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """What came back from the policy.

    Args:
        status: HTTP status; None when the policy could not be reached or its reply broke off.
        retry_after_ms: what the policy asked to wait, in milliseconds.
        body: the reply.
        version: the weights version that the reply carried in `Gym-Policy-Version`.
    """

    status: int | None
    retry_after_ms: int | None
    body: bytes
    version: int | None = None


class PolicyPort(Protocol):
    """The way to the policy; it retries nothing."""

    async def call(self, address: Policy, request: Mapping[str, Any], turn: TurnId | None) -> PolicyAnswer:
        """Make one call for a turn; None for a rollout of the older route, whose calls carry no header.

        Raises:
            StaleAttempt: the owner of the ledger has fenced the attempt.
        """
        ...

    async def forget(self, rollout_id: str, attempt: int) -> None:
        """Let the owner of the ledger free the rows of a rollout that has its result; raises `PeerUnavailable`."""
        ...


class PolicyUnavailable(Exception):
    """The policy was unavailable for longer than is waited for."""


class PolicyRefused(Exception):
    """The policy refused the request.

    Args:
        terminal: whether the same request would be refused again.
    """

    def __init__(self, message: str, *, terminal: bool) -> None:
        super().__init__(message)
        self.terminal = terminal


class EpisodeOver(Exception):
    """The time budget of the episode is used up."""
