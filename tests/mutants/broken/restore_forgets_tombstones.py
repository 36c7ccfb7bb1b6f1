# SPDX-License-Identifier: Apache-2.0
"""A restore does not install the tombstones of its source: what was released before the cut runs once more.

Nobody outside can tell that from a cut without tombstones.
"""

from __future__ import annotations

from typing import Any

from reference_gym.participant.fences import Fences
from tests.mutants.seam import wrap

TARGETS = "restore"
SHOWS = "state"
BREAKS = (
    "CKPT-FENCE-009",
    "CKPT-COMMIT-006",
    "CKPT-FENCE-006",
    "CKPT-ROLL-011",
    "CKPT-ACK-005",
    "CKPT-STATUS-015",
    "CKPT-STATUS-024",
)


def apply() -> None:
    """Break it."""

    @wrap(Fences, "replace")
    def replace(original: Any, self: Fences, built: Fences) -> None:
        built._tombstones.clear()
        original(self, built)
