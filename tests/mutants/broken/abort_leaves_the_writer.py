# SPDX-License-Identifier: Apache-2.0
"""An abort leaves the writer of the cut to its work: the manifest of the aborted checkpoint appears later.

So an abort never has to wait, also where its time limit ends before the writer has stopped.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from reference_gym.participant.committing import Commit, Writer
from reference_gym.participant.machine import Machine, Step
from reference_gym.participant.phases import Phase, Todo
from tests.mutants.seam import wrap

TARGETS = "durability"
SHOWS = "race"
BREAKS = ("CKPT-COMMIT-041", "CKPT-ABORT-003", "CKPT-PHASE-006", "CKPT-TIME-006")


def apply() -> None:
    """Break it."""

    @wrap(Machine, "_abandon")
    def abandon(original: Any, self: Machine, ended_as: Any, now: float) -> Step:
        if self.phase is Phase.COMMITTING:
            return Step(self._end(ended_as, now), todo=Todo.STOP_WRITER)
        step: Step = original(self, ended_as, now)
        return step

    @wrap(Commit, "abandon")
    def answer_waiters(original: Any, self: Commit) -> None:
        stop, self.stop = self.stop, threading.Event()
        original(self)
        self.stop = stop

    @wrap(Writer, "write")
    async def write(original: Any, self: Writer, commit: Commit) -> Any:
        written = await original(self, commit)
        if commit.outcome.done():
            raise asyncio.CancelledError  # Nobody is left to be told.
        return written
