# SPDX-License-Identifier: Apache-2.0
"""The ACK of a failure that is not terminal ends its rollout for good: no higher attempt can start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference_gym.participant.fences import Fences, Tombstone
from tests.mutants.seam import wrap

TARGETS = "ack"
SHOWS = "state"
BREAKS = ("CKPT-ACK-010",)


def apply() -> None:
    """Break it."""

    @wrap(Fences, "bury")
    def bury(original: Any, self: Fences, rollout_id: str, tombstone: Tombstone) -> None:
        original(self, rollout_id, replace(tombstone, final=tombstone.kind == "released"))
