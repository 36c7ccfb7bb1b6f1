# SPDX-License-Identifier: Apache-2.0
"""A restore begins with clean fences: what was retired or restored before it may come back.

In a participant that owns no rollouts the fences of the work that it drops are lost as well.
"""

from __future__ import annotations

from typing import Any

from reference_gym.participant.fences import Fences
from tests.mutants.seam import wrap

TARGETS = "fencing"
SHOWS = "state"
BREAKS = ("CKPT-FENCE-004", "CKPT-FENCE-005", "CKPT-FENCE-011", "CKPT-RESTORE-016")


def apply() -> None:
    """Break it."""

    @wrap(Fences, "replace")
    def replace(original: Any, self: Fences, tombstones: Any, kept: Any) -> None:
        original(self, tombstones, kept)
        self._fences.clear()
