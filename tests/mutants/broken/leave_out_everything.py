# SPDX-License-Identifier: Apache-2.0
"""A commit with `leave_out_blocked` leaves out every rollout as soon as one blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference_gym.participant.commits import Commits
from reference_gym.participant.records import Cut
from tests.mutants.seam import wrap

TARGETS = "gate"
SHOWS = "answer"
BREAKS = ("CKPT-COMMIT-033", "CKPT-DIR-029", "CKPT-ENV-002")


def apply() -> None:
    """Break it."""

    @wrap(Commits, "_capture")
    def capture(original: Any, self: Commits, *, without_blocked: bool) -> Cut:
        cut: Cut = original(self, without_blocked=without_blocked)
        if not without_blocked:
            return cut
        return replace(cut, restarts={**dict.fromkeys(cut.records, "blocked"), **cut.restarts})
