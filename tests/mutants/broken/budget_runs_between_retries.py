# SPDX-License-Identifier: Apache-2.0
"""The time budget of a rollout runs on between two tries of a policy that is away."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from reference_gym.participant.budget import EpisodeBudget
from tests.mutants.seam import wrap

TARGETS = "budgets"
SHOWS = "state"
FROM_THE_TEXT = True
BREAKS = ("CKPT-GATE-018",)


def apply() -> None:
    """Break it."""

    @wrap(EpisodeBudget, "stopped")
    def stopped(original: Any, self: EpisodeBudget) -> Any:
        return nullcontext()
