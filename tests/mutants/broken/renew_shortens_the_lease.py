# SPDX-License-Identifier: Apache-2.0
"""A renew sets the end of the lease, also to an earlier moment than it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference_gym.participant.machine import Machine
from spec.wire import CheckpointId
from tests.mutants.seam import wrap

TARGETS = "lease"
SHOWS = "state"
FROM_THE_TEXT = True
BREAKS = ("CKPT-REPEAT-011",)


def apply() -> None:
    """Break it."""

    @wrap(Machine, "renew")
    def renew(original: Any, self: Machine, checkpoint_id: CheckpointId, lease_ms: int, now: float) -> Any:
        return original(replace(self, lease_until=None), checkpoint_id, lease_ms, now)
