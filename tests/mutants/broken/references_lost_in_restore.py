# SPDX-License-Identifier: Apache-2.0
"""A restored rollout has forgotten where the data of its saved turns lies."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.registry import Registry
from tests.mutants.seam import wrap

TARGETS = "restore"
SHOWS = "state"
FROM_THE_TEXT = True
BREAKS = ("CKPT-RESULT-023", "CKPT-DIR-018")


def apply() -> None:
    """Break it."""

    @wrap(Registry, "_rebuilt")
    def rebuilt(original: Any, self: Registry, *saved: Any) -> Any:
        entry = original(self, *saved)
        entry.rollout.data_refs = []
        return entry
