# SPDX-License-Identifier: Apache-2.0
"""An effect is refused when its caller has recorded more effects than the session, not when it has recorded fewer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference_gym.participant.sessions import Sessions
from reference_gym.participant.state import EffectCall
from tests.mutants.seam import wrap

TARGETS = "effects"
SHOWS = "state"
FROM_THE_TEXT = True
BREAKS = ("CKPT-EFFECT-011", "CKPT-EFFECT-007", "CKPT-CONF-038")


def apply() -> None:
    """Break it."""

    @wrap(Sessions, "_judge")
    def judge(original: Any, self: Sessions, call: EffectCall) -> Any:
        session = self._sessions.get(call.rollout_id)
        if session is not None and call.effects_done is not None and call.effects_done < session.effects:
            call = replace(call, effects_done=None)
        return original(self, call)
