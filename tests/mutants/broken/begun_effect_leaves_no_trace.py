# SPDX-License-Identifier: Apache-2.0
"""That an effect outside begins is not noted: after a kill in the middle its turn is done again, effect included."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.sessions import Sessions
from tests.mutants.seam import wrap

TARGETS = "effects"
SHOWS = "crash"
LOG = True
BREAKS = ("CKPT-ENV-017", "CKPT-PHASE-018", "CKPT-ID-020")


def apply() -> None:
    """Break it."""

    @wrap(Sessions, "_leaves")
    def leaves(original: Any, self: Sessions, session: Any, call: Any) -> bool:
        return False
