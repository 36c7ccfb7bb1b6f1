# SPDX-License-Identifier: Apache-2.0
"""After a restart of the process the feed counts on from what it holds, not from what it has ever served."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.feed import Feed
from tests.mutants.seam import wrap

TARGETS = "feed"
SHOWS = "crash"
LOG = True
BREAKS = ("CKPT-FEED-008",)


def apply() -> None:
    """Break it."""

    @wrap(Feed, "load")
    def load(original: Any, self: Feed, feed: str, next_number: int, results: Any) -> None:
        original(self, feed, max(results, default=0) + 1, results)
