# SPDX-License-Identifier: Apache-2.0
"""An environment's session in the shape that the kit keeps: apply one effect, save, close."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reference_gym.environments.base import EffectContext, Environment, Session, StateInvalid, Verdict
from reference_gym.participant.state import EffectCall, Restored
from reference_gym.ports import Message, SessionSpec


class SessionHandle:
    """One session, with what is needed to open it again from its saved form.

    Args:
        spec: what it was opened with.
        session: the environment's.
        opening: the messages with which its conversation started.
    """

    def __init__(self, spec: SessionSpec, session: Session, opening: list[Message]) -> None:
        self.spec = spec
        self.opening = opening
        self._session = session

    async def apply(self, call: EffectCall) -> dict[str, Any]:
        """Run one effect; an exception means that its handler died."""
        context = EffectContext(call.rollout_id, call.attempt, call.turn, call.request_id)
        observation = await self._session.call(call.tool, call.args, context)
        return {"text": observation.text, "ended": observation.ended}

    async def verify(self, rollout_id: str, attempt: int) -> Verdict:
        """Judge the state; raises `VerificationFailed`."""
        return await self._session.verify(rollout_id, attempt)

    def save(self) -> dict[str, Any]:
        """Everything as JSON data."""
        return {
            "task": dict(self.spec.task),
            "seed": self.spec.seed,
            "opening": self.opening,
            "state": self._session.export(),
        }

    def close(self) -> None:
        """Nothing outside of memory is held."""


class SessionFactory:
    """Opens sessions at their beginning and from their saved form.

    Args:
        environments: by name.
    """

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        self._environments = environments

    def open(self, spec: SessionSpec) -> SessionHandle:
        """A session at its beginning; raises `TaskInvalid`, and KeyError for an unknown environment."""
        session = self._environments[spec.environment].open(spec.task, spec.seed)
        return SessionHandle(spec, session, session.opening())

    def load(self, environment: str, saved: Any, rollout: Restored) -> SessionHandle:
        """A session as `save` saw it; raises `StateInvalid`, and then nothing has been made."""
        if environment not in self._environments:
            raise StateInvalid(f"there is no environment {environment}")
        try:
            task, seed, opening, state = (saved[key] for key in ("task", "seed", "opening", "state"))
        except (KeyError, TypeError) as error:
            raise StateInvalid("a saved session is damaged") from error
        spec = SessionSpec(environment, task, rollout.task_digest or "", seed)
        return SessionHandle(spec, self._environments[environment].restore(task, state), list(opening))
