# SPDX-License-Identifier: Apache-2.0
"""A restore keeps the feed and numbers its results anew: an old cursor jumps over what its client never saw."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.feed import Feed
from tests.mutants.seam import wrap

TARGETS = "feed"
SHOWS = "state"
BREAKS = ("CKPT-FEED-004", "CKPT-FEED-006", "CKPT-FEED-018")


def apply() -> None:
    """Break it."""

    @wrap(Feed, "renew")
    def renew(original: Any, self: Feed, built: Feed) -> None:
        again, self._next_number = Feed(), 1
        again.id = self.id
        for finished in built.all():
            again.add(finished)
        original(self, again)
