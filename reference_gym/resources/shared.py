# SPDX-License-Identifier: Apache-2.0
"""The sessions of a process that another one uses: bounded in number, and freed when their callers have vanished.

A caller that is gone does not close its sessions. One that nobody uses for its idle limit is freed (CKPT-ENV-031). The
limit does not run while the gate is closed (CKPT-GATE-016), nor while an effect or a verification runs.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from reference_gym.environments.base import Verdict
from reference_gym.participant.errors import SessionLost, Unavailable
from reference_gym.participant.policy_call import Message
from reference_gym.participant.sessions import Sessions
from reference_gym.participant.state import EffectCall
from reference_gym.ports import SessionSpec
from reference_gym.resources.handle import SessionFactory, SessionHandle
from reference_gym.resources.ports import LocalResources

LOOKS_PER_LIMIT = 4

log = logging.getLogger(__name__)


class SharedResources:
    """Sessions that are used over HTTP.

    Args:
        sessions: the kit's store.
        factory: makes what it stores, and has the clock of the idle limits.
        most: how many sessions there may be.
        idle_s: after how many unused seconds a session is freed.
    """

    def __init__(self, sessions: Sessions, factory: SessionFactory, *, most: int, idle_s: float) -> None:
        self._sessions = sessions
        self._factory = factory
        self._local = LocalResources(sessions, factory)
        self._most = most
        self._idle_s = idle_s

    async def open(self, rollout_id: str, attempt: int, spec: SessionSpec) -> list[Message]:
        """Open the session, or find it open; raises `Unavailable` when there are too many."""
        if len(self._sessions) >= self._most and not any(held.key[0] == rollout_id for held in self._factory.handles):
            raise Unavailable(f"there are {self._most} sessions already")
        return await self._local.open(rollout_id, attempt, spec)

    async def effect(self, call: EffectCall) -> Any:
        """Run one effect, or get the recorded reply of a repeat."""
        with suppress(SessionLost):
            self._local.handle(call.rollout_id, call.attempt).touch()
        return await self._local.effect(call)

    async def verify(self, rollout_id: str, attempt: int, effects_done: int) -> Verdict:
        """Judge the session once, held while the gate is closed; a repeat gets the same verdict (CKPT-CONF-028)."""
        handle = self._local.comparable(rollout_id, attempt, effects_done)
        if handle.judging is None:
            handle.judging = asyncio.get_running_loop().create_task(self._judge(rollout_id, attempt))
            handle.judging.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(handle.judging)

    async def _judge(self, rollout_id: str, attempt: int) -> Verdict:
        async with self._sessions.verification(rollout_id, attempt) as handle:
            assert isinstance(handle, SessionHandle), "all sessions come from the factory"
            return await handle.verify(rollout_id, attempt)

    async def close(self, rollout_id: str, attempt: int) -> None:
        """Free the session."""
        await self._local.close(rollout_id, attempt)

    async def reap(self) -> None:
        """Free the sessions whose callers have vanished; runs for as long as the participant."""
        while True:
            await asyncio.sleep(self._idle_s / LOOKS_PER_LIMIT)
            for handle in [handle for handle in self._factory.handles if handle.idle_s() >= self._idle_s]:
                await self.close(*handle.key)
                log.info("freed an idle session", extra={"rollout_id": handle.key[0], "attempt": handle.key[1]})
