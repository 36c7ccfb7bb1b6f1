# SPDX-License-Identifier: Apache-2.0
"""A restore raises the fences of the rollouts that are known there, and not those of rollouts never seen."""

from __future__ import annotations

from typing import Any

from reference_gym.participant import installing
from tests.mutants.seam import wrap

TARGETS = "fencing"
SHOWS = "state"
FROM_THE_TEXT = True
BREAKS = ("CKPT-RESTORE-030",)


def apply() -> None:
    """Break it."""

    @wrap(installing, "build")
    async def build(original: Any, core: Any, request: Any, *what: Any) -> Any:
        known = tuple(fence for fence in request.fences if core.highest(fence.rollout_id) >= 0)
        return await original(core, request.model_copy(update={"fences": known}), *what)
