# SPDX-License-Identifier: Apache-2.0
"""A controller that has the id of the adopted one is served, also from an earlier life of it, with a lower epoch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference_gym.participant.machine import Machine, Step
from spec.wire import ControllerPair
from tests.mutants.seam import wrap

TARGETS = "fencing"
SHOWS = "state"
BREAKS = ("CKPT-CTRL-008", "CKPT-CTRL-005")


def apply() -> None:
    """Break it."""

    @wrap(Machine, "adopt")
    def adopt(original: Any, self: Machine, pair: ControllerPair, now: float) -> Any:
        if self.controller is not None and pair < self.controller and pair.name == self.controller.name:
            return Step(replace(self, controller=pair))
        return original(self, pair, now)
