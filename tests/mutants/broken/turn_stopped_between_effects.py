# SPDX-License-Identifier: Apache-2.0
"""An open turn looks at the gate before each effect, so that a closing gate stops it halfway.

Prepare never gets ready. While the turn waits there it is listed as parked although it is open.
"""

from __future__ import annotations

from typing import Any

from reference_gym.participant.rollout import Turn
from tests.mutants.seam import wrap

TARGETS = "gate"
SHOWS = "race"
BREAKS = ("CKPT-GATE-004", "CKPT-PREP-002", "CKPT-ROLL-044")


def apply() -> None:
    """Break it."""

    @wrap(Turn, "effect")
    async def effect(original: Any, self: Turn, tool: str, args: Any, perform: Any) -> Any:
        if self._ordinal > 0:
            await self._rollout._parked_until_open()
        return await original(self, tool, args, perform)
