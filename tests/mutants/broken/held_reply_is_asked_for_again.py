# SPDX-License-Identifier: Apache-2.0
"""A policy reply that the closed gate holds is thrown away and asked for again when the gate has opened."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.policy import PolicyClient
from reference_gym.participant.rollout import Rollout
from tests.mutants.seam import wrap

TARGETS = "gate"
SHOWS = "race"
FROM_THE_TEXT = True
BREAKS = ("CKPT-GATE-008",)


def apply() -> None:
    """Break it."""

    @wrap(PolicyClient, "ask")
    async def ask(
        original: Any, self: PolicyClient, rollout: Any, messages: Any, tools: Any, budget: Any, *, headers: bool = True
    ) -> Any:
        reply = await original(self, rollout, messages, tools, budget, headers=headers)
        if isinstance(rollout, Rollout) and not rollout._host.gate.is_open:
            await rollout._parked_until_open()
            reply = await original(self, rollout, messages, tools, budget, headers=headers)
        return reply
