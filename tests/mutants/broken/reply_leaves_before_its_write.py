# SPDX-License-Identifier: Apache-2.0
"""The log's writer gathers changes for a moment, and what depends on them leaves before it has written them.

Whatever was answered may be forgotten by the next life: boundaries, and what became of a checkpoint.
"""

from __future__ import annotations

import time
from typing import Any

from reference_gym.participant.journal import LogJournal
from reference_gym.participant.log_writer import LogWriter
from tests.mutants.seam import wrap

TARGETS = "durability"
SHOWS = "crash"
LOG = True
BREAKS = (
    "CKPT-DIR-023",
    "CKPT-ID-020",
    "CKPT-PHASE-009",
    "CKPT-PHASE-010",
    "CKPT-PHASE-011",
    "CKPT-PHASE-012",
    "CKPT-PHASE-013",
    "CKPT-PHASE-015",
    "CKPT-PHASE-018",
    "CKPT-PHASE-019",
    "CKPT-GATE-023",
    "CKPT-CKID-010",
    "CKPT-CKID-014",
    "CKPT-CTRL-007",
    "CKPT-FENCE-004",
)
GATHERS_S = 0.02


def apply() -> None:
    """Break it."""

    @wrap(LogJournal, "settled")
    async def settled(original: Any, self: LogJournal) -> None:
        self._hand_over()

    @wrap(LogWriter, "_write")
    def write(original: Any, self: LogWriter, batches: Any) -> None:
        time.sleep(GATHERS_S)
        original(self, batches)
