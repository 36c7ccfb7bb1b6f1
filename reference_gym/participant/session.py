# SPDX-License-Identifier: Apache-2.0
"""One session: the author's state, what its effects have left, and both as a JSON value."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from reference_gym.participant.state import EffectCall, Json, Restored

logger = logging.getLogger(__name__)


class SessionState(Protocol):
    """The author's state of one session."""

    async def apply(self, call: EffectCall) -> Json:
        """Run one effect and return its reply; an exception means that nobody knows what it changed."""
        ...

    def save(self) -> Json:
        """Return the whole state as a JSON value (or ``Encoded``), random generators included; changes nothing."""
        ...

    def close(self) -> None:
        """Free the session; it is not used again."""
        ...


@dataclass(slots=True)
class Reply:
    """One recorded reply of the turn that the session is in."""

    tool: str
    args: Json
    reply: Json


@dataclass(slots=True, eq=False)
class Session:
    """One session: the author's state, and what its effects have left.

    ``effects`` counts the recorded effects, ``turn`` is the turn of the last one, ``replies`` holds those of that
    turn by request id. ``running`` is the effect that runs now.
    """

    rollout_id: str
    attempt: int
    environment: str
    task_digest: str | None
    state: SessionState
    effects: int = 0
    turn: int = 0
    replies: dict[str, Reply] = field(default_factory=dict)
    running: tuple[EffectCall, asyncio.Task[Json]] | None = None
    uncertain: bool = False

    def saved(self) -> dict[str, Any]:
        """Return all of it as a JSON value, recorded replies included (CKPT-EFFECT-006)."""
        return {
            "environment": self.environment,
            "task_digest": self.task_digest,
            "effects": self.effects,
            "turn": self.turn,
            "replies": {key: [reply.tool, reply.args, reply.reply] for key, reply in self.replies.items()},
            "state": self.state.save(),
        }

    @classmethod
    def built(cls, restored: Restored, load: Callable[[str, Json, Restored], SessionState]) -> Session:
        """Return the session that ``saved`` described.

        Args:
            restored: the rollout, as the attempt that continues.
            load: builds the author's state.
        """
        data = restored.data
        return cls(
            rollout_id=restored.rollout_id,
            attempt=restored.attempt,
            environment=data["environment"],
            task_digest=data["task_digest"],
            state=load(data["environment"], data["state"], restored),
            effects=data["effects"],
            turn=data["turn"],
            replies={key: Reply(*reply) for key, reply in data["replies"].items()},
        )

    @classmethod
    def lost(cls, rollout: Restored) -> Session:
        """Return a session that ended with the process: it is there, and nobody knows its state."""
        return cls(
            rollout_id=rollout.rollout_id,
            attempt=rollout.attempt,
            environment=rollout.environment or "",
            task_digest=rollout.task_digest,
            state=_Lost(),
            turn=rollout.turns_done,
            uncertain=True,
        )

    def close(self) -> None:
        """Free it, unless its handler still runs: then the handler's end does it."""
        if self.running is not None and not self.running[1].done():
            return
        try:
            self.state.close()
        except Exception:
            logger.exception("closing the session of %s failed", self.rollout_id)


class _Lost:
    """The state of a session that cannot continue."""

    async def apply(self, call: EffectCall) -> Json:
        """No effect ever reaches it."""
        raise RuntimeError(f"effect {call.request_id} on a lost session")

    def save(self) -> Json:
        """There is nothing to save."""
        return None

    def close(self) -> None:
        """There is nothing to free."""
