# SPDX-License-Identifier: Apache-2.0
"""How the agent reaches the two other parts of the Gym: the policy (through the model server) and the sessions.

Each port has a form inside one process and a form over HTTP; the agent cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from reference_gym.environments.base import Verdict
from reference_gym.participant.state import EffectCall, Policy
from spec import wire

Api = Literal["chat_completions", "responses"]
Message = dict[str, Any]


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
    """The way to the policy."""

    async def call(self, address: Policy, request: Mapping[str, Any], turn: TurnId | None) -> PolicyAnswer:
        """Make one call for a turn; None for a rollout of the older route, whose calls carry no header.

        Raises:
            StaleAttempt: the owner of the ledger has fenced the attempt.
        """
        ...

    async def forget(self, rollout_id: str, attempt: int) -> None:
        """Let the owner of the ledger free the rows of a rollout that has its result; raises `PeerUnavailable`."""
        ...


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a session is opened with."""

    environment: str
    task: Mapping[str, Any]
    task_digest: str
    seed: int | None


class ResourcesPort(Protocol):
    """The way to the sessions.

    Every call may raise `StaleAttempt` and `PeerUnavailable`; effects and verification also `SessionLost`, and effects
    `SessionUncertain`.
    """

    async def open(self, rollout_id: str, attempt: int, spec: SessionSpec) -> list[Message]:
        """Open the session, or find it open; the messages with which its conversation starts."""
        ...

    async def effect(self, call: EffectCall) -> Any:
        """Run one effect, or get the recorded reply of a repeat: `{"text", "ended"}`."""
        ...

    async def verify(self, rollout_id: str, attempt: int, effects_done: int) -> Verdict:
        """Judge a session that stands where the caller does (CKPT-ENV-032); raises `VerificationFailed`."""
        ...

    async def close(self, rollout_id: str, attempt: int) -> None:
        """Free the session; an unknown one is closed already."""
        ...
