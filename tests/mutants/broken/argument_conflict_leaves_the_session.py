# SPDX-License-Identifier: Apache-2.0
"""A request id that comes again with another input is refused, and its session goes on as if nothing had happened."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.errors import ArgumentConflict
from reference_gym.participant.session import Session
from reference_gym.participant.sessions import Sessions
from tests.mutants.seam import wrap

TARGETS = "effects"
SHOWS = "state"
BREAKS = ("CKPT-EFFECT-004",)


def apply() -> None:
    """Break it."""

    @wrap(Sessions, "_require_same")
    def require_same(original: Any, self: Sessions, session: Session, call: Any, tool: str, args: Any) -> None:
        if (tool, args) != (call.tool, call.args):
            raise ArgumentConflict(f"effect {call.request_id} was another one before")
