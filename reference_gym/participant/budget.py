# SPDX-License-Identifier: Apache-2.0
"""The time budget of an episode: a stopwatch that stands still while others keep the rollout from going on.

It stops while the policy is unavailable, while the gate is closed (its clock stands still then, see `opentime`), and,
because only the used time is saved, while the Gym is down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class EpisodeBudget:
    """How much of an episode's time is used up.

    Args:
        limit_ms: the budget in milliseconds; None has no end.
        used_ms: what earlier lives of the rollout have used.
        clock: seconds that count.
    """

    def __init__(self, limit_ms: int | None, used_ms: int, clock: Callable[[], float]) -> None:
        self.limit_ms = limit_ms
        self._used = used_ms / 1000
        self._clock = clock
        self._stopped = 0
        self._since = clock()

    @property
    def used_ms(self) -> int:
        """Time used so far, in whole milliseconds."""
        running = 0.0 if self._stopped else self._clock() - self._since
        return round((self._used + running) * 1000)

    @property
    def left_s(self) -> float | None:
        """Seconds left, never negative; None without a limit."""
        return None if self.limit_ms is None else max(0.0, (self.limit_ms - self.used_ms) / 1000)

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left."""
        return self.limit_ms is not None and self.used_ms >= self.limit_ms

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let the stopwatch stand still inside the block; blocks may nest and overlap."""
        if self._stopped == 0:
            self._used += self._clock() - self._since
        self._stopped += 1
        try:
            yield
        finally:
            self._stopped -= 1
            if self._stopped == 0:
                self._since = self._clock()

    def refund(self, seconds: float) -> None:
        """Give back time that was spent on a policy which turned out to be unavailable."""
        self._used -= seconds
