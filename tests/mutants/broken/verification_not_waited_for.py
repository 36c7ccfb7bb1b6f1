# SPDX-License-Identifier: Apache-2.0
"""A verification under way is no blocker: prepare is ready while it runs."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.gate import Gate
from tests.mutants.seam import wrap

TARGETS = "gate"
SHOWS = "race"
BREAKS = ("CKPT-ENV-007", "CKPT-ENV-008", "CKPT-PREP-002", "CKPT-PREP-005")


def apply() -> None:
    """Break it."""

    @wrap(Gate, "running")
    def running(
        original: Any,
        self: Gate,
        kind: Any,
        rollout_id: str,
        attempt: int,
        *,
        turn: int | None = None,
        handler: bool = False,
        blocks: bool = True,
    ) -> Any:
        blocks = blocks and kind != "verification"
        return original(self, kind, rollout_id, attempt, turn=turn, handler=handler, blocks=blocks)
