# SPDX-License-Identifier: Apache-2.0
"""A retire that meets a sealed gate is answered at once and carried out when the gate opens."""

from __future__ import annotations

import asyncio
from typing import Any

from reference_gym.participant.registry import Registry
from tests.mutants.seam import wrap

TARGETS = "fencing"
SHOWS = "state"
FROM_THE_TEXT = True
BREAKS = ("CKPT-RETIRE-001", "CKPT-RETIRE-002", "CKPT-RETIRE-014", "CKPT-RETIRE-006", "CKPT-RETIRE-009")


def apply() -> None:
    """Break it."""
    waiting: set[asyncio.Task[None]] = set()

    @wrap(Registry, "retire")
    def retire(original: Any, self: Registry, rollout_id: str, through: int) -> Any:
        async def later() -> None:
            await self.gate.wait_open()
            original(self, rollout_id, through)

        if not self.gate.sealed:
            return original(self, rollout_id, through)
        waiting.add(asyncio.get_running_loop().create_task(later()))
        return None
