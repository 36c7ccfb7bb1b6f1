# SPDX-License-Identifier: Apache-2.0
"""A verification that the world has not agreed to is tried once more."""

from __future__ import annotations

from typing import Any

from reference_gym.environments.base import VerificationFailed
from reference_gym.environments.conformance import ConformanceSession
from tests.mutants.seam import wrap

TARGETS = "effects"
SHOWS = "answer"
FROM_THE_TEXT = True
BREAKS = ("CKPT-CONF-028", "CKPT-CONF-029")


def apply() -> None:
    """Break it."""

    @wrap(ConformanceSession, "verify")
    async def verify(original: Any, self: ConformanceSession, rollout_id: str, attempt: int) -> Any:
        try:
            return await original(self, rollout_id, attempt)
        except VerificationFailed:
            return await original(self, rollout_id, attempt)
