# SPDX-License-Identifier: Apache-2.0
"""Bounded waits for stated conditions; one knob scales every bound of the suite."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from conformance.errors import TimedOut

T = TypeVar("T")

POLL_FIRST_S = 0.005
POLL_LAST_S = 0.1


class Patience:
    """How long the suite waits; every bound goes through here.

    Args:
        scale: factor on every bound (1.0 = as written; 4.0 on a slow machine).
    """

    def __init__(self, scale: float = 1.0) -> None:
        if not scale > 0:
            raise ValueError("time scale must be positive")
        self.scale = scale
        self._never = threading.Event()

    def seconds(self, bound_s: float) -> float:
        """Return a bound in seconds, scaled."""
        return bound_s * self.scale

    def ms(self, bound_ms: int) -> int:
        """Return a bound in milliseconds, scaled, as an integer."""
        return max(1, round(bound_ms * self.scale))

    def until(self, condition: Callable[[], T], what: str, *, within_s: float = 5.0) -> T:
        """Poll until a condition is true and return its (true) value.

        Args:
            condition: called again and again; a true value ends the wait.
            what: the condition in words, shown when it does not come true.
            within_s: bound in seconds, before scaling.

        Raises:
            TimedOut: the condition did not come true within the bound.
        """
        started = time.monotonic()
        limit = self.seconds(within_s)
        pause = POLL_FIRST_S
        while True:
            value = condition()
            if value:
                return value
            passed = time.monotonic() - started
            if passed >= limit:
                raise TimedOut(what, expected=f"true within {limit:g} s", got=f"still {value!r} after {passed:.1f} s")
            self._never.wait(min(pause, max(limit - passed, 0.001)))
            pause = min(pause * 1.5, POLL_LAST_S)

    def stays(self, condition: Callable[[], object], for_s: float = 0.25) -> bool:
        """Watch a condition for a while, where it is judged that nothing happens; False as soon as it is not true.

        Args:
            condition: called again and again.
            for_s: how long, in seconds, before scaling.
        """
        deadline = time.monotonic() + self.seconds(for_s)
        while condition():
            if time.monotonic() >= deadline:
                return True
            self._never.wait(POLL_FIRST_S * 4)
        return False

    def pause(self, for_s: float) -> None:
        """Let a stated amount of time pass, where the passing of time itself is what is judged (a lease)."""
        self._never.wait(for_s)


class Journal:
    """A condition shared by a server thread that records and by checks that wait for records."""

    def __init__(self, patience: Patience) -> None:
        self.changed = threading.Condition()
        self.patience = patience

    def wait_for(
        self,
        condition: Callable[[], T],
        what: str,
        *,
        within_s: float = 5.0,
        got: Callable[[], str] | None = None,
    ) -> T:
        """Wait until a condition over the records is true; it is looked at after every change.

        Args:
            condition: called with the lock held.
            what: the condition in words.
            within_s: bound in seconds, before scaling.
            got: describes what is there instead, for the failure text.

        Raises:
            TimedOut: the condition did not come true within the bound.
        """
        limit = self.patience.seconds(within_s)
        deadline = time.monotonic() + limit
        with self.changed:
            while True:
                value = condition()
                if value:
                    return value
                left = deadline - time.monotonic()
                if left <= 0:
                    seen = got() if got else repr(value)
                    raise TimedOut(what, expected=f"within {limit:g} s", got=seen)
                self.changed.wait(left)
