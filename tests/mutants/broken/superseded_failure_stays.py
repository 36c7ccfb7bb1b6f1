# SPDX-License-Identifier: Apache-2.0
"""A failure stays in the feed although a higher attempt of its rollout has started."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.registry import Registry
from reference_gym.participant.state import Start
from tests.mutants.seam import wrap

TARGETS = "feed"
SHOWS = "state"
FROM_THE_TEXT = True
BREAKS = ("CKPT-ROLL-019", "CKPT-ACK-008", "CKPT-STATUS-014", "CKPT-STATUS-019", "CKPT-COMMIT-004", "CKPT-DIR-009")


def apply() -> None:
    """Break it."""

    @wrap(Registry, "_admit")
    def admit(original: Any, self: Registry, start: Start) -> Any:
        failure = self._shared.feed.get(start.rollout_id)
        verdict = original(self, start)
        if failure is not None and verdict[0] == "started":
            self._shared.feed.add(failure)
        return verdict
