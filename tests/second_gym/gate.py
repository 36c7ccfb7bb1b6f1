# SPDX-License-Identifier: Apache-2.0
"""The one lock, the gate, and the time that counts."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple


def milliseconds(seconds: float) -> int:
    """Return a length of time as the protocol tells it: rounded up, never negative."""
    return max(0, math.ceil(seconds * 1000))


class Handler(NamedTuple):
    """An effect or a verification that runs in this process, also one whose attempt is over."""

    since: float
    kind: str
    rollout_id: str
    attempt: int


class Gate:
    """What lets turns open and rollouts start, and the lock that guards everything.

    `lock` is held by whoever looks at or changes state; it is notified after every change that somebody may wait for.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.open = True
        self.finishing = False  # closed for `preparing`: open turns run to their boundary
        self.handlers: list[Handler] = []
        self._counted = 0.0
        self._since = time.monotonic()

    def clock(self) -> float:
        """Return the seconds for which the gate has been open: what the budgets of rollouts are measured with."""
        return self._counted + (time.monotonic() - self._since if self.open else 0.0)

    def close(self, *, finishing: bool) -> None:
        """Close the gate.

        Args:
            finishing: whether open turns may run to their boundary.
        """
        if self.open:
            self._counted, self.open = self.clock(), False
        self.finishing = finishing
        self.lock.notify_all()

    def reopen(self) -> None:
        """Open the gate; whatever it held goes on."""
        if not self.open:
            self.open, self._since = True, time.monotonic()
        self.finishing = False
        self.lock.notify_all()

    def wait(self, until: Callable[[], bool], deadline: float | None = None) -> bool:
        """Wait, holding the lock, until something is so, or until a moment of the monotonic clock.

        Returns:
            Whether it is so.
        """
        while not until():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self.lock.wait(left)
        return True
