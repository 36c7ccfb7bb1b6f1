# SPDX-License-Identifier: Apache-2.0
"""A restore raises the fences of its request at once, and leaves them there when its source is damaged."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.restorer import Restorer
from tests.mutants.seam import wrap

TARGETS = "restore"
SHOWS = "state"
BREAKS = ("CKPT-RESTORE-011", "CKPT-RESTORE-002", "CKPT-ABORT-006")


def apply() -> None:
    """Break it."""

    @wrap(Restorer, "_restore")
    async def restore(original: Any, self: Restorer) -> None:
        for fence in self._request.fences:
            self._core.fences.raise_to(fence.rollout_id, fence.through_attempt)
        await original(self)
