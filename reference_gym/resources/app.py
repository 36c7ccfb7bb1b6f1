# SPDX-License-Identifier: Apache-2.0
"""The resources server's routes for the agent: open, effect, verify, close."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from reference_gym.environments.base import TaskInvalid, VerificationFailed
from reference_gym.participant.errors import InvalidRequest
from reference_gym.participant.exchange import Request, Response
from reference_gym.participant.state import EffectCall
from reference_gym.ports import ResourcesPort, SessionSpec
from reference_gym.private import DataPlane, PrivateMessage, read, required_turn_of
from reference_gym.resources.ports import PREFIX

Count = Annotated[int, Field(ge=0, le=2**53)]


class OpenMessage(PrivateMessage):
    """What a session is opened with."""

    environment: str
    task: dict[str, Any]
    task_digest: str
    seed: int | None


class EffectMessage(PrivateMessage):
    """One effect."""

    request_id: str
    tool: str
    args: Any
    effects_done: Count | None


class VerifyMessage(PrivateMessage):
    """How many effects the caller has recorded."""

    effects_done: Count


def add_routes(plane: DataPlane, resources: ResourcesPort) -> None:
    """Serve sessions to the agent.

    Args:
        plane: of the resources server.
        resources: the sessions.
    """

    async def open_session(request: Request, body: Any) -> Any:
        turn, message = required_turn_of(request), read(OpenMessage, body)
        spec = SessionSpec(message.environment, message.task, message.task_digest, message.seed)
        try:
            return {"messages": await resources.open(turn.rollout_id, turn.attempt, spec)}
        except (TaskInvalid, KeyError) as error:
            raise InvalidRequest(f"this session cannot be opened: {error}") from error

    async def effect(request: Request, body: Any) -> Any:
        turn, message = required_turn_of(request), read(EffectMessage, body)
        return await resources.effect(
            EffectCall(
                rollout_id=turn.rollout_id,
                attempt=turn.attempt,
                turn=turn.turn,
                request_id=message.request_id,
                tool=message.tool,
                args=message.args,
                effects_done=message.effects_done,
            )
        )

    async def verify(request: Request, body: Any) -> Any:
        turn, message = required_turn_of(request), read(VerifyMessage, body)
        try:
            verdict = await resources.verify(turn.rollout_id, turn.attempt, message.effects_done)
        except VerificationFailed as error:
            return {"failed": str(error), "reward": None, "final": None}
        final = None if verdict.final is None else dict(verdict.final)
        # A reward that is no number of JSON still has to reach the agent: it makes a failure of its own kind there.
        text = json.dumps({"failed": None, "reward": verdict.reward, "final": final})
        return Response(200, text.encode("ascii"))

    async def close(request: Request, body: Any) -> Any:
        del body
        turn = required_turn_of(request)
        await resources.close(turn.rollout_id, turn.attempt)
        return {}

    for name, handler in (("open", open_session), ("effect", effect), ("verify", verify), ("close", close)):
        plane.post(f"{PREFIX}/{name}", handler)
