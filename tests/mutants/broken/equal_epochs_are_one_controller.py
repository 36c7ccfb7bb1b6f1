# SPDX-License-Identifier: Apache-2.0
"""Controllers are told apart by their epoch alone: a second one of the same epoch passes for the first."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.machine import Machine, Step
from spec.wire import ControllerPair
from tests.mutants.seam import wrap

TARGETS = "fencing"
SHOWS = "state"
FROM_THE_TEXT = True
BREAKS = ("CKPT-CTRL-001", "CKPT-CTRL-002", "CKPT-CTRL-004", "CKPT-CTRL-005", "CKPT-CTRL-006")


def apply() -> None:
    """Break it."""

    @wrap(Machine, "adopt")
    def adopt(original: Any, self: Machine, pair: ControllerPair, now: float) -> Any:
        if self.controller is not None and self.controller.epoch == pair.epoch:
            return Step(self)
        return original(self, pair, now)
