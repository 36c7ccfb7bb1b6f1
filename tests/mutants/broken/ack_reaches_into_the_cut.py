# SPDX-License-Identifier: Apache-2.0
"""The results of a cut are read from the feed when they are written: an ACK meanwhile takes one out of the cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from reference_gym.participant.commits import Commits
from reference_gym.participant.feed import Feed
from reference_gym.participant.records import Cut
from reference_gym.participant.result import Finished
from tests.mutants.seam import wrap

TARGETS = "ack"
SHOWS = "race"
BREAKS = ("CKPT-COMMIT-012", "CKPT-COMMIT-002", "CKPT-FEED-017")


class Living:
    """The results of a feed as they are whenever somebody looks."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[Finished]:
        return iter(self._feed.all())

    def __len__(self) -> int:
        return len(self._feed.all())


def apply() -> None:
    """Break it."""

    @wrap(Commits, "_capture")
    def capture(original: Any, self: Commits, *, without_blocked: bool) -> Cut:
        return replace(original(self, without_blocked=without_blocked), results=Living(self.feed))  # type: ignore[arg-type]
