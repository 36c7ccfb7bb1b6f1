# SPDX-License-Identifier: Apache-2.0
"""The model server's route for the agent, and the agent's end of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Literal

from reference_gym.errors import PeerRefused, PeerUnavailable
from reference_gym.model.ledger import Ledger
from reference_gym.participant.errors import InvalidRequest
from reference_gym.participant.exchange import Request
from reference_gym.participant.policy_call import PolicyAnswer, PolicyPort, TurnId
from reference_gym.participant.state import Policy
from reference_gym.peers import Peer
from reference_gym.private import DataPlane, PrivateMessage, read, required_turn_of, turn_of

PATH = "/reference-gym/policy"
FORGET_PATH = "/reference-gym/policy/forget"


class PolicyMessage(PrivateMessage):
    """Where the policy is."""

    base_url: str
    model: str
    api: Literal["chat_completions", "responses"]


class CallMessage(PrivateMessage):
    """One policy call; the request travels as JSON text, so that what the policy once said arrives exactly."""

    policy: PolicyMessage
    request: str


def add_routes(plane: DataPlane, policy: PolicyPort, ledger: Ledger) -> None:
    """Serve policy calls to the agent.

    Args:
        plane: of the model server.
        policy: the way to the policy.
        ledger: whose rows of finished rollouts are freed when the agent says so.
    """

    async def call(request: Request, body: Any) -> Any:
        message = read(CallMessage, body)
        address = Policy(message.policy.base_url, message.policy.model, message.policy.api)
        try:
            form = json.loads(message.request)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("request is not JSON text") from error
        if not isinstance(form, dict):
            raise InvalidRequest("request is no JSON object")
        answer = await policy.call(address, form, turn_of(request))
        return {
            "status": answer.status,
            "retry_after_ms": answer.retry_after_ms,
            "version": answer.version,
            "body": base64.b64encode(answer.body).decode("ascii"),
        }

    async def forget(request: Request, body: Any) -> Any:
        del body
        turn = required_turn_of(request)
        ledger.forget(turn.rollout_id, turn.attempt)
        return {}

    plane.post(PATH, call)
    plane.post(FORGET_PATH, forget)


class RemotePolicy:
    """The way to the policy through the model server.

    Args:
        peer: the server; it does not retry, the agent's policy client does.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def call(self, address: Policy, request: Mapping[str, Any], turn: TurnId | None) -> PolicyAnswer:
        """Make one call; a model server that cannot be reached counts as a policy that cannot."""
        policy = {"base_url": address.base_url, "model": address.model, "api": address.api}
        try:
            reply = await self._peer.call(PATH, {"policy": policy, "request": json.dumps(request)}, turn)
        except PeerUnavailable:
            return PolicyAnswer(None, None, b"")
        except PeerRefused:
            return PolicyAnswer(500, None, b"")
        body = base64.b64decode(reply["body"])
        return PolicyAnswer(reply["status"], reply["retry_after_ms"], body, reply["version"])

    async def forget(self, rollout_id: str, attempt: int) -> None:
        """Let the model server free the rows of a rollout that has its result."""
        await self._peer.call(FORGET_PATH, {}, TurnId(rollout_id, attempt, 1))
