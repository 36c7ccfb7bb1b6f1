# SPDX-License-Identifier: Apache-2.0
"""The capture is the living table of boundaries, not a copy: what happens before it is written leaks into it.

A commit that is repeated after a failed writing writes what there is by then, too.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from reference_gym.participant.records import MemoryStore
from tests.mutants.seam import wrap

TARGETS = "durability"
SHOWS = "race"
BREAKS = (
    "CKPT-COMMIT-002",
    "CKPT-COMMIT-013",
    "CKPT-COMMIT-020",
    "CKPT-COMMIT-027",
    "CKPT-DIR-009",
    "CKPT-DIR-013",
    "CKPT-REPEAT-005",
)


def apply() -> None:
    """Break it."""

    @wrap(MemoryStore, "cut")
    def cut(original: Any, self: MemoryStore) -> Any:
        return MappingProxyType(self._records), self._unable  # A proxy, because a cut is emptied when it is done with.
