# SPDX-License-Identifier: Apache-2.0
"""A repeat that arrives while its effect still runs is not recognised: the handler runs twice."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.sessions import Sessions
from reference_gym.participant.state import EffectCall
from tests.mutants.seam import wrap

TARGETS = "effects"
SHOWS = "race"
BREAKS = ("CKPT-EFFECT-005", "CKPT-EFFECT-017", "CKPT-EFFECT-019", "CKPT-REPEAT-014")


def apply() -> None:
    """Break it."""

    @wrap(Sessions, "effect")
    async def effect(original: Any, self: Sessions, call: EffectCall) -> Any:
        self._participant.check(call.rollout_id, call.attempt)
        session = self._sessions.get(call.rollout_id)
        if session is not None and session.running is not None and session.running[0].request_id == call.request_id:
            return await session.state.apply(call)
        return await original(self, call)
