# SPDX-License-Identifier: Apache-2.0
"""Recorded replies are looked up by attempt and request id: after a restore a repeat runs its effect again."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.session import Session
from reference_gym.participant.state import Restored
from tests.mutants.seam import wrap

TARGETS = "effects"
SHOWS = "state"
BREAKS = ("CKPT-EFFECT-006", "CKPT-EFFECT-001", "CKPT-EFFECT-002", "CKPT-EFFECT-017")


def apply() -> None:
    """Break it."""

    @wrap(Session, "built")
    def built(original: Any, cls: type[Session], restored: Restored, load: Any) -> Any:
        session = original(cls, restored, load)
        session.replies = {}  # All of them are of an earlier attempt.
        return session
