# SPDX-License-Identifier: Apache-2.0
"""The gate guards effects: a turn whose reply asks for none is closed whatever the gate says."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.policy import PolicyClient
from reference_gym.participant.rollout import Rollout
from tests.mutants.seam import wrap

TARGETS = "gate"
SHOWS = "race"
BREAKS = ("CKPT-GATE-001", "CKPT-GATE-003", "CKPT-GATE-007", "CKPT-GATE-009")


def apply() -> None:
    """Break it."""
    ungated: set[Any] = set()

    @wrap(PolicyClient, "ask")
    async def ask(
        original: Any, self: PolicyClient, rollout: Any, messages: Any, tools: Any, budget: Any, *, headers: bool = True
    ) -> Any:
        reply = await original(self, rollout, messages, tools, budget, headers=headers)
        (ungated.discard if reply.calls else ungated.add)(rollout)
        return reply

    @wrap(Rollout, "_parked_until_open")
    async def parked_until_open(original: Any, self: Rollout) -> None:
        if self not in ungated:
            await original(self)

    @wrap(Rollout, "_unsealed")
    async def unsealed(original: Any, self: Rollout) -> None:
        if self in ungated:
            ungated.discard(self)  # The turn is about to be closed; the verification waits at the gate again.
        else:
            await original(self)
