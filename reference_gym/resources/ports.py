# SPDX-License-Identifier: Apache-2.0
"""The two ways from the agent to the sessions: in the same process, and over HTTP."""

from __future__ import annotations

from typing import Any

from reference_gym.environments.base import Verdict, VerificationFailed
from reference_gym.errors import PeerRefused, PeerUnavailable
from reference_gym.participant.errors import SessionLost
from reference_gym.participant.policy_call import Message, TurnId
from reference_gym.participant.sessions import Sessions
from reference_gym.participant.state import EffectCall, SessionUncertain
from reference_gym.peers import Peer
from reference_gym.ports import SessionSpec
from reference_gym.resources.handle import SessionFactory, SessionHandle

PREFIX = "/reference-gym/sessions"


class LocalResources:
    """The sessions of this process.

    Args:
        sessions: the kit's store.
        factory: makes what it stores.
    """

    def __init__(self, sessions: Sessions, factory: SessionFactory) -> None:
        self._sessions = sessions
        self._factory = factory

    async def open(self, rollout_id: str, attempt: int, spec: SessionSpec) -> list[Message]:
        """Open the session, or find it open; the messages with which its conversation starts."""
        try:
            return self.handle(rollout_id, attempt).opening
        except SessionLost:
            handle = self._factory.open(rollout_id, attempt, spec)
        await self._sessions.open(rollout_id, attempt, spec.environment, spec.task_digest, handle)
        return handle.opening

    async def effect(self, call: EffectCall) -> Any:
        """Run one effect, or get the recorded reply of a repeat."""
        return await self._sessions.effect(call)

    async def verify(self, rollout_id: str, attempt: int, effects_done: int) -> Verdict:
        """Judge the session; the rollout itself, in this process, has passed the gate for it."""
        return await self.comparable(rollout_id, attempt, effects_done).verify(rollout_id, attempt)

    async def close(self, rollout_id: str, attempt: int) -> None:
        """Free the session."""
        await self._sessions.close(rollout_id, attempt)

    def comparable(self, rollout_id: str, attempt: int, effects_done: int) -> SessionHandle:
        """The session, if it stands where the caller does.

        Raises:
            StaleAttempt: the attempt is fenced.
            SessionLost: there is none, or it has recorded another number of effects (CKPT-ENV-032).
            Internal: nobody knows what an effect has changed in it.
        """
        handle = self._sessions.at(rollout_id, attempt, effects_done)
        assert isinstance(handle, SessionHandle), "all sessions come from the factory"
        return handle

    def handle(self, rollout_id: str, attempt: int) -> SessionHandle:
        """The session; raises `SessionLost` and `StaleAttempt`."""
        handle = self._sessions.get(rollout_id, attempt)
        assert isinstance(handle, SessionHandle), "all sessions come from the factory"
        return handle


class RemoteResources:
    """The sessions of the resources server.

    Args:
        peer: the server.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def open(self, rollout_id: str, attempt: int, spec: SessionSpec) -> list[Message]:
        """Open the session, or find it open."""
        message = {
            "environment": spec.environment,
            "task": dict(spec.task),
            "task_digest": spec.task_digest,
            "seed": spec.seed,
        }
        reply = await self._peer.call(f"{PREFIX}/open", message, TurnId(rollout_id, attempt, 1))
        return list(reply["messages"])

    async def effect(self, call: EffectCall) -> Any:
        """Run one effect.

        Raises:
            SessionLost: also when no try can have reached the server.
            SessionUncertain: also when the reply was lost for good.
        """
        message = {
            "request_id": call.request_id,
            "tool": call.tool,
            "args": call.args,
            "effects_done": call.effects_done,
        }
        turn = TurnId(call.rollout_id, call.attempt, call.turn)
        try:
            return await self._peer.call(f"{PREFIX}/effect", message, turn)
        except PeerUnavailable as error:
            if error.reached:
                raise SessionUncertain(str(error)) from error
            raise SessionLost(str(error)) from error
        except PeerRefused as error:
            raise SessionUncertain(str(error)) from error

    async def verify(self, rollout_id: str, attempt: int, effects_done: int) -> Verdict:
        """Judge the session."""
        message = {"effects_done": effects_done}
        reply = await self._peer.call(f"{PREFIX}/verify", message, TurnId(rollout_id, attempt, 1))
        if reply["failed"] is not None:
            raise VerificationFailed(reply["failed"])
        return Verdict(reply["reward"], reply["final"])

    async def close(self, rollout_id: str, attempt: int) -> None:
        """Free the session."""
        await self._peer.call(f"{PREFIX}/close", {}, TurnId(rollout_id, attempt, 1))
