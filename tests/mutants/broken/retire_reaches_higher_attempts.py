# SPDX-License-Identifier: Apache-2.0
"""A retire stops and fences whatever attempt is live, also one above its `through_attempt`."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.registry import Registry
from tests.mutants.seam import wrap

TARGETS = "fencing"
SHOWS = "answer"
BREAKS = ("CKPT-RETIRE-003",)


def apply() -> None:
    """Break it."""

    @wrap(Registry, "retire")
    def retire(original: Any, self: Registry, rollout_id: str, through: int) -> Any:
        entry = self.live.get(rollout_id)
        return original(self, rollout_id, through if entry is None else max(through, entry.rollout.attempt))
