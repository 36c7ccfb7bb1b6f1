# SPDX-License-Identifier: Apache-2.0
"""A segment of the log in which nothing lives is emptied before it is removed, and so is every cut that links it."""

from __future__ import annotations

import os
from typing import Any

from reference_gym.participant.log_writer import LogWriter
from tests.mutants.seam import wrap

TARGETS = "durability"
SHOWS = "state"
LOG = True
BREAKS = ("CKPT-COMMIT-043", "CKPT-RESTORE-044")


def apply() -> None:
    """Break it."""

    @wrap(LogWriter, "_remove_dead")
    def remove_dead(original: Any, self: LogWriter) -> None:
        for number, segment in self._kept.items():
            if self._state.sizes.get(number, 0) == 0 and number not in self._pinned:
                os.truncate(segment.path, 0)
        original(self)
