# SPDX-License-Identifier: Apache-2.0
"""An environment's session in the shape that the kit keeps: apply one effect, save, close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from reference_gym.environments.base import EffectContext, Environment, Session, StateInvalid, Verdict
from reference_gym.participant.policy_call import Message
from reference_gym.participant.state import EffectCall, Restored
from reference_gym.ports import SessionSpec

Key = tuple[str, int]


class SessionHandle:
    """One session, with what is needed to open it again from its saved form.

    Args:
        key: rollout and attempt.
        spec: what it was opened with.
        session: the environment's.
        opening: the messages with which its conversation started.
        factory: keeps it for as long as it is not closed.

    `judging` is its verification, where another process may ask for it twice.
    """

    def __init__(
        self, key: Key, spec: SessionSpec, session: Session, opening: list[Message], factory: SessionFactory
    ) -> None:
        self.key = key
        self.spec = spec
        self.opening = opening
        self._session = session
        self._factory = factory
        self.judging: asyncio.Task[Verdict] | None = None
        self._busy = 0
        self._used = factory.clock()
        factory.handles.add(self)

    def idle_s(self) -> float:
        """For how many seconds nobody has used it; 0 while somebody does."""
        return 0.0 if self._busy else self._factory.clock() - self._used

    def touch(self) -> None:
        """Note that somebody uses it."""
        self._used = self._factory.clock()

    async def apply(self, call: EffectCall) -> dict[str, Any]:
        """Run one effect; an exception means that its handler died."""
        context = EffectContext(call.rollout_id, call.attempt, call.turn, call.request_id)
        with self._using():
            observation = await self._session.call(call.tool, call.args, context)
        return {"text": observation.text, "ended": observation.ended}

    async def verify(self, rollout_id: str, attempt: int) -> Verdict:
        """Judge the state; raises `VerificationFailed`."""
        with self._using():
            return await self._session.verify(rollout_id, attempt)

    @contextmanager
    def _using(self) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self.touch()

    def save(self) -> dict[str, Any]:
        """Everything as JSON data."""
        return {
            "task": dict(self.spec.task),
            "seed": self.spec.seed,
            "opening": self.opening,
            "state": self._session.export(),
        }

    def close(self) -> None:
        """Forget it; nothing outside of memory is held."""
        self._factory.handles.discard(self)


class SessionFactory:
    """Opens sessions at their beginning and from their saved form.

    Args:
        environments: by name.
        clock: seconds of the idle limits.
    """

    def __init__(self, environments: Mapping[str, Environment], clock: Callable[[], float]) -> None:
        self.clock = clock
        self.handles: set[SessionHandle] = set()
        self._environments = environments

    def open(self, rollout_id: str, attempt: int, spec: SessionSpec) -> SessionHandle:
        """A session at its beginning; raises `TaskInvalid`, and KeyError for an unknown environment."""
        session = self._environments[spec.environment].open(spec.task, spec.seed)
        return SessionHandle((rollout_id, attempt), spec, session, session.opening(), self)

    def contained(self, environment: str, tool: str) -> bool:
        """Whether the effects of a tool change nothing but their session."""
        known = self._environments.get(environment)
        return known is not None and not known.reaches_outside(tool)

    def load(self, environment: str, saved: Any, rollout: Restored) -> SessionHandle:
        """A session as `save` saw it; raises `StateInvalid`, and then nothing has been made."""
        if environment not in self._environments:
            raise StateInvalid(f"there is no environment {environment}")
        try:
            task, seed, opening, state = (saved[key] for key in ("task", "seed", "opening", "state"))
        except (KeyError, TypeError) as error:
            raise StateInvalid("a saved session is damaged") from error
        spec = SessionSpec(environment, task, rollout.task_digest or "", seed)
        session = self._environments[environment].restore(task, state)
        return SessionHandle((rollout.rollout_id, rollout.attempt), spec, session, list(opening), self)
