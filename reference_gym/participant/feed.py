# SPDX-License-Identifier: Apache-2.0
"""Unreleased results: the feed that serves them, and the ACKs that release them.

A result is served to every read until its exact receipt is acknowledged. The cursor is the feed's id and the
number of the last result of a page; numbers only rise within a feed, so nothing unseen ever sorts before a
cursor.
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from reference_gym.participant.journal import Journal, NoJournal
from reference_gym.participant.jsontext import encode
from reference_gym.participant.result import Finished
from reference_gym.participant.slices import Slices


@dataclass(frozen=True, slots=True)
class Page:
    """One page of JSON items, encoded; ``next`` is the cursor after it."""

    items: tuple[bytes, ...]
    next: str
    more: bool


class Feed:
    """The unreleased results of one participant, by rollout id.

    A new feed is a new id (``renew``); cursors of another feed count as none (CKPT-FEED-006).

    Args:
        journal: where changes are noted.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal or NoJournal()
        self.id = _new_id()
        self.successes = 0
        self._results: dict[str, tuple[int, Finished]] = {}
        self._numbers: list[int] = []
        self._by_number: dict[int, Finished] = {}
        self._next_number = 1
        self._moved = asyncio.Event()

    @property
    def failures(self) -> int:
        """How many unreleased results are failures."""
        return len(self._results) - self.successes

    def __len__(self) -> int:
        return len(self._results)

    def get(self, rollout_id: str) -> Finished | None:
        """Return the unreleased result of a rollout, or None."""
        found = self._results.get(rollout_id)
        return None if found is None else found[1]

    def ids(self) -> Iterable[str]:
        """Return the rollouts that have an unreleased result."""
        return self._results.keys()

    def all(self) -> tuple[Finished, ...]:
        """Return all unreleased results as they are now."""
        return tuple(self._by_number.values())

    def add(self, finished: Finished) -> None:
        """Serve a result from now on."""
        number = self._next_number
        self._hold(number, finished)
        self._journal.note("result", finished.text.encode(), number=number, **finished.as_header())
        self.wake()

    def load(self, feed: str, next_number: int, results: Mapping[int, Finished]) -> None:
        """Serve what an earlier life of this incarnation served, under the same id and numbers."""
        self.id = feed
        for number in sorted(results):
            self._hold(number, results[number])
        self._next_number = next_number

    def _hold(self, number: int, finished: Finished) -> None:
        self._next_number = number + 1
        self._results[finished.receipt.rollout_id] = (number, finished)
        self._by_number[number] = finished
        self._numbers.append(number)
        self.successes += finished.success

    def remove(self, rollout_id: str) -> Finished | None:
        """Stop serving the result of a rollout (released, superseded, retired); return it."""
        found = self._results.pop(rollout_id, None)
        if found is None:
            return None
        self._journal.note("unresult", rollout_id=rollout_id)
        number, finished = found
        del self._by_number[number]
        self.successes -= finished.success
        if len(self._numbers) > 64 and len(self._numbers) > 2 * len(self._by_number):
            self._numbers = sorted(self._by_number)
        return finished

    async def build(self, journal: Journal, results: Iterable[Finished]) -> Feed:
        """Return, aside, a new feed that serves exactly these results and numbers them on (CKPT-FEED-004).

        Args:
            journal: where what is built is noted.
            results: those that a restore makes current.
        """
        built, slices = Feed(journal), Slices()
        built._next_number = self._next_number
        journal.note("feed", id=built.id)
        for finished in results:
            built.add(finished)
            await slices.give_way()
        return built

    def renew(self, built: Feed) -> None:
        """Become the feed that was built aside."""
        self.id = built.id
        self._take(built)
        self.wake()

    def clear(self) -> None:
        """Serve nothing any more, under the same id."""
        self._journal.note("feed", id=self.id)
        empty = Feed()
        empty._next_number = self._next_number
        self._take(empty)

    def _take(self, built: Feed) -> None:
        self.successes = built.successes
        self._results, self._numbers, self._by_number = built._results, built._numbers, built._by_number
        self._next_number = max(self._next_number, built._next_number)

    async def page(self, after: str, max_items: int, max_bytes: int) -> Page:
        """Return what comes after a cursor, all of it of one feed.

        Args:
            after: a cursor of this feed; anything else is the beginning.
            max_items: the most items.
            max_bytes: the most bytes of the whole page, unless it holds a single item.
        """
        feed = ""
        while feed != self.id:  # A page takes several slices; a restore that comes in between begins another feed.
            feed, page = self.id, await self._page(after, max_items, max_bytes)
        return page

    async def _page(self, after: str, max_items: int, max_bytes: int) -> Page:
        slices = Slices()
        feed, position = self.id, self._position(after)
        items: list[bytes] = []
        size = 256  # What stands around the items.
        more = False
        for number, finished in list(islice(self._after(position), max_items + 1)):
            await slices.give_way()
            item = encode({"receipt": finished.receipt.as_json(), "result": finished.text})
            if items and (len(items) >= max_items or size + len(item) + 1 > max_bytes):
                more = True
                break
            items.append(item)
            size += len(item) + 1
            position = number
        return Page(tuple(items), f"{feed}.{position}", more)

    async def wait(self) -> None:
        """Return after something was added, or after the feed was renewed or woken."""
        await self._moved.wait()

    def wake(self) -> None:
        """Wake every reader that waits."""
        self._moved.set()
        self._moved = asyncio.Event()

    def _position(self, after: str) -> int:
        feed, _, number = after.rpartition(".")
        if feed != self.id or not (number.isascii() and number.isdigit()) or len(number) > 18:
            return 0
        return min(int(number), self._next_number - 1)

    def _after(self, position: int) -> Iterator[tuple[int, Finished]]:
        for at in range(bisect_right(self._numbers, position), len(self._numbers)):
            number = self._numbers[at]
            if (finished := self._by_number.get(number)) is not None:
                yield number, finished


def _new_id() -> str:
    return "f" + secrets.token_hex(8)


def page_text(items: Iterable[bytes], fields: Mapping[str, object], name: str) -> bytes:
    """Return the JSON text of a page from items that are encoded already.

    Args:
        items: the encoded items.
        fields: the other fields.
        name: the field of the items.
    """
    rest = encode(dict(fields))[1:]
    return b"".join((b'{"', name.encode(), b'":[', b",".join(items), b"],", rest))
