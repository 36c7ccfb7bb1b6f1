# SPDX-License-Identifier: Apache-2.0
"""A restore keeps all rows of a ledger that the cut holds of a rollout, also those after its `turns_done`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference_gym.model.ledger import MAX_TURN, Ledger
from tests.mutants.seam import wrap

TARGETS = "restore"
SHOWS = "state"
FROM_THE_TEXT = True
BREAKS = ("CKPT-ENV-022",)


def apply() -> None:
    """Break it."""

    @wrap(Ledger, "build")
    async def build(original: Any, self: Ledger, rollouts: Any) -> Any:
        return await original(self, [replace(rollout, turns_done=MAX_TURN) for rollout in rollouts])
