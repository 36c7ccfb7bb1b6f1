# SPDX-License-Identifier: Apache-2.0
"""The older route of the Gym: `POST /run`, held open until an unmanaged rollout has ended."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from reference_gym.agent.loop import GymAgent, Ways
from reference_gym.agent.unmanaged import UnmanagedResources, UnmanagedRollout
from reference_gym.environments.base import Environment
from reference_gym.model.app import PolicyMessage
from reference_gym.participant.errors import InvalidRequest
from reference_gym.participant.exchange import Request
from reference_gym.participant.policy import PolicyClient
from reference_gym.participant.state import Policy, RolloutFailure, Start, Success, TaskRefused
from reference_gym.private import DataPlane, PrivateMessage, read

PATH = "/run"


class LimitsMessage(PrivateMessage):
    """Limits of one rollout."""

    max_turns: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    episode_ms: Annotated[int, Field(ge=1, le=2**53 - 1)] | None = None


class RunMessage(PrivateMessage):
    """One rollout."""

    environment: str
    task: dict[str, Any]
    seed: Annotated[int, Field(ge=0, le=2**53 - 1)] | None = None
    limits: LimitsMessage = LimitsMessage()
    policy: PolicyMessage


def add_routes(plane: DataPlane, environments: Mapping[str, Environment], policy: PolicyClient) -> None:
    """Serve the older route.

    Args:
        plane: of the participant, which counts what runs here as unmanaged and does no more with it.
        environments: by name.
        policy: the way to the policy.
    """

    async def run(request: Request, body: Any) -> Any:
        del request
        message = read(RunMessage, body)
        if message.environment not in environments:
            raise InvalidRequest(f"there is no environment {message.environment}")
        start = _start(message)
        resources = UnmanagedResources(environments)
        ways = Ways(resources, policy, time.monotonic)
        agent = GymAgent(environments, lambda: ways, headers=False)
        try:
            agent.check(start)
        except TaskRefused as error:
            raise InvalidRequest(str(error)) from error
        rollout = UnmanagedRollout(start)
        with plane.participant.unmanaged():
            try:
                success = await agent.run(rollout)
            except RolloutFailure as failure:
                return _content(rollout, failure=failure)
        return _content(rollout, success=success)

    plane.post(PATH, run)


def _start(message: RunMessage) -> Start:
    return Start(
        rollout_id=f"run-{uuid.uuid4().hex}",
        attempt=0,
        environment=message.environment,
        task=message.task,
        task_digest="unmanaged",
        policy=Policy(message.policy.base_url, message.policy.model, message.policy.api),
        seed=message.seed,
        max_turns=message.limits.max_turns,
        episode_ms=message.limits.episode_ms,
    )


def _content(
    rollout: UnmanagedRollout, *, success: Success | None = None, failure: RolloutFailure | None = None
) -> dict[str, Any]:
    content: dict[str, Any] = {
        "rollout_id": rollout.start.rollout_id,
        "environment": rollout.start.environment,
        "info": {"attempt": 0, "policy_versions": rollout.policy_versions, "data_refs": [], "usage": rollout.usage},
    }
    if success is not None and math.isfinite(success.reward):
        content["body"] = {
            "outcome": success.outcome,
            "reward": success.reward,
            "turns": rollout.turns_done,
            "messages": list(success.messages),
        }
        if success.final is not None:
            content["body"]["final"] = success.final
        return content
    if failure is None:
        failure = RolloutFailure("result_not_representable", "the reward is not finite", terminal=True)
    content["failure"] = {
        "kind": failure.kind,
        "reason": str(failure.reason),
        "terminal": failure.terminal,
        "turns": rollout.turns_done,
    }
    if failure.stage is not None:
        content["failure"]["stage"] = failure.stage
    return content
