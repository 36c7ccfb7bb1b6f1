# SPDX-License-Identifier: Apache-2.0
"""The time budget of a rollout runs on while the gate holds it."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.opentime import OpenTime
from tests.mutants.seam import wrap

TARGETS = "gate"
SHOWS = "state"
BREAKS = ("CKPT-GATE-016",)


def apply() -> None:
    """Break it."""

    @wrap(OpenTime, "now")
    def now(original: Any, self: OpenTime) -> float:
        return self._clock()
