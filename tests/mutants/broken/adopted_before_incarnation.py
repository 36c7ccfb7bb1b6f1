# SPDX-License-Identifier: Apache-2.0
"""A call that expects another incarnation is refused only after its controller has been adopted."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.core import Caller
from reference_gym.participant.judging import Judging
from tests.mutants.seam import wrap

TARGETS = "fencing"
SHOWS = "state"
BREAKS = ("CKPT-ORDER-004", "CKPT-ORDER-001", "CKPT-ID-037", "CKPT-CTRL-002", "CKPT-ERR-013")


def apply() -> None:
    """Break it."""

    @wrap(Judging, "_admit")
    def admit(original: Any, self: Judging, caller: Caller) -> None:
        self.move(self.machine.adopt(caller.controller, self.clock.now()))
        original(self, caller)
