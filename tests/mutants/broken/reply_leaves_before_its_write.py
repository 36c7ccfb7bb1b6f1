# SPDX-License-Identifier: Apache-2.0
"""What depends on a boundary leaves as soon as the log's writer has been told of it, not when it has written it."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.journal import LogJournal
from tests.mutants.seam import wrap

TARGETS = "durability"
SHOWS = "crash"
LOG = True
BREAKS = ("CKPT-DIR-023", "CKPT-ID-020", "CKPT-PHASE-015")


def apply() -> None:
    """Break it."""

    @wrap(LogJournal, "settled")
    async def settled(original: Any, self: LogJournal) -> None:
        self._hand_over()
