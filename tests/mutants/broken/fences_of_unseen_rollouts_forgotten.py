# SPDX-License-Identifier: Apache-2.0
"""A restore raises the fences of the rollouts that are known there, and not those of rollouts never seen."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.restorer import Restorer
from tests.mutants.seam import wrap

TARGETS = "fencing"
SHOWS = "state"
FROM_THE_TEXT = True
BREAKS = ("CKPT-RESTORE-030",)


def apply() -> None:
    """Break it."""

    @wrap(Restorer, "_install")
    def install(original: Any, self: Restorer, *what: Any) -> None:
        core, fences = self._core, self._request.fences
        unseen = {fence.rollout_id for fence in fences if core.highest(fence.rollout_id) < 0}
        raise_to = core.fences.raise_to
        core.fences.raise_to = lambda key, through: key not in unseen and raise_to(key, through)  # type: ignore[method-assign]
        try:
            original(self, *what)
        finally:
            del core.fences.raise_to
