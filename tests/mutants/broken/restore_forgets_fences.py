# SPDX-License-Identifier: Apache-2.0
"""A restore begins with clean fences: what was retired or restored before it may come back.

In a participant that owns no rollouts the fences of the work that it drops are lost as well.
"""

from __future__ import annotations

from typing import Any

from reference_gym.participant.core import Core
from reference_gym.participant.fences import Fences
from tests.mutants.seam import wrap

TARGETS = "fencing"
SHOWS = "state"
BREAKS = ("CKPT-FENCE-004", "CKPT-FENCE-005", "CKPT-FENCE-011", "CKPT-RESTORE-016")


def apply() -> None:
    """Break it."""

    @wrap(Fences, "build")
    async def build(original: Any, self: Fences, *what: Any) -> Fences:
        built: Fences = await original(self, *what)
        built._fences.clear()
        return built

    @wrap(Fences, "replace")
    def replace(original: Any, self: Fences, built: Fences) -> None:
        self._fences.clear()
        original(self, built)

    @wrap(Core, "attempts")
    def attempts(original: Any, self: Core) -> Any:
        return [] if self.registry is None else original(self)
