# SPDX-License-Identifier: Apache-2.0
"""A fence of attempt n refuses the attempts below n on the data plane, and lets n itself through."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.fences import Fences
from tests.mutants.seam import wrap

TARGETS = "fencing"
SHOWS = "answer"
BREAKS = ("CKPT-FENCE-001", "CKPT-FENCE-002", "CKPT-EFFECT-007", "CKPT-EFFECT-008", "CKPT-CONF-038")


def apply() -> None:
    """Break it."""

    @wrap(Fences, "check")
    def check(original: Any, self: Fences, rollout_id: str, attempt: int) -> None:
        if attempt < self.through(rollout_id):
            original(self, rollout_id, attempt)
