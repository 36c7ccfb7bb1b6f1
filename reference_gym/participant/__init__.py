# SPDX-License-Identifier: Apache-2.0
"""The participant kit: what any Gym can embed to become a participant of the Gym Checkpoint Protocol.

Knows no environment but the one of ``conformance``, and no web framework but in ``serve_aiohttp``. An author reads
``state`` (what to implement) and ``rollout`` (what the agent loop holds), builds a ``Participant``, adds ``Sessions``
or parts of its own, and serves it with ``serve_aiohttp`` or ``serve_asgi``. Beside that, ``policy`` asks the policy,
with retries and time budgets, and ``serving`` ends the process as it should; ``examples/fastapi_gym`` shows it all.
A process that is nothing but a Gym lets ``collecting`` choose when all of its objects are looked through for garbage.
"""

from __future__ import annotations

from reference_gym.participant.boundary_log import BoundaryLog
from reference_gym.participant.config import (
    AgentInfo,
    EnvironmentInfo,
    Limits,
    ParticipantConfig,
    Peer,
    StateSchema,
)
from reference_gym.participant.core import Caller
from reference_gym.participant.errors import ProtocolError, SessionLost, StaleAttempt
from reference_gym.participant.rollout import Rollout, Turn, Verification
from reference_gym.participant.service import Participant
from reference_gym.participant.session import SessionState
from reference_gym.participant.sessions import Sessions
from reference_gym.participant.state import (
    Agent,
    CannotContinue,
    Captured,
    EffectCall,
    Encoded,
    Part,
    Policy,
    Restored,
    RolloutFailure,
    SessionUncertain,
    Start,
    Success,
    TaskRefused,
    Usage,
)

__all__ = [
    "Agent",
    "AgentInfo",
    "BoundaryLog",
    "Caller",
    "CannotContinue",
    "Captured",
    "EffectCall",
    "Encoded",
    "EnvironmentInfo",
    "Limits",
    "Part",
    "Participant",
    "ParticipantConfig",
    "Peer",
    "Policy",
    "ProtocolError",
    "Restored",
    "Rollout",
    "RolloutFailure",
    "SessionLost",
    "SessionState",
    "SessionUncertain",
    "Sessions",
    "StaleAttempt",
    "Start",
    "StateSchema",
    "Success",
    "TaskRefused",
    "Turn",
    "Usage",
    "Verification",
]
