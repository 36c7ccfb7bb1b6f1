# SPDX-License-Identifier: Apache-2.0
"""After a restore `counts.released` is still the number from before it."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.fences import Fences
from tests.mutants.seam import wrap

TARGETS = "restore"
SHOWS = "state"
FROM_THE_TEXT = True
BREAKS = ("CKPT-STATUS-024", "CKPT-STATUS-020", "CKPT-STATUS-021")


def apply() -> None:
    """Break it."""

    @wrap(Fences, "_set")
    def set_tombstones(original: Any, self: Fences, tombstones: Any) -> None:
        released = self._released
        original(self, tombstones)
        self._released = released
