# SPDX-License-Identifier: Apache-2.0
"""How the agent reaches the sessions: inside one process, or over HTTP; the agent cannot tell them apart.

Its way to the policy is a port of the kit (`participant.policy_call.PolicyPort`), and has the same two forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from reference_gym.environments.base import Verdict
from reference_gym.participant.policy_call import Message
from reference_gym.participant.state import EffectCall


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
