# SPDX-License-Identifier: Apache-2.0
"""A restored result is parsed and written anew: the same JSON value, other bytes than its receipt names.

A second cycle ends at a restore that refuses the text, because it is not the one of its receipt: no rollout gets to
its end through two cycles (ENV-006 and ENV-026 were added after the first runs).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from reference_gym.participant.feed import Feed
from tests.mutants.seam import wrap

TARGETS = "feed"
SHOWS = "answer"
BREAKS = ("CKPT-RESULT-002", "CKPT-RESULT-004", "CKPT-FEED-016", "CKPT-RESTORE-021", "CKPT-ENV-026", "CKPT-ENV-006")


def apply() -> None:
    """Break it."""

    @wrap(Feed, "build")
    async def build(original: Any, self: Feed, journal: Any, results: Any) -> Any:
        anew = [replace(finished, text=json.dumps(json.loads(finished.text))) for finished in results]
        return await original(self, journal, anew)
