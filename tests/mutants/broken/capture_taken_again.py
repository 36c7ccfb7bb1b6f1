# SPDX-License-Identifier: Apache-2.0
"""A commit that is repeated after a failed writing captures anew, without what was ACKed or retired meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference_gym.participant.machine import Machine, Step
from reference_gym.participant.phases import Phase
from spec.wire import CheckpointId
from tests.mutants.seam import wrap

TARGETS = "durability"
SHOWS = "state"
BREAKS = ("CKPT-COMMIT-027", "CKPT-REPEAT-005", "CKPT-COMMIT-012", "CKPT-COMMIT-013")


def apply() -> None:
    """Break it."""

    @wrap(Machine, "commit")
    def commit(
        original: Any,
        self: Machine,
        checkpoint_id: CheckpointId,
        key: object,
        now: float,
        *,
        leave_out_blocked: bool = False,
    ) -> Step:
        if self.phase is Phase.PREPARED and self.open is not None and self.open.captured:
            self = replace(self, open=replace(self.open, captured=False))
        step: Step = original(self, checkpoint_id, key, now, leave_out_blocked=leave_out_blocked)
        return step
