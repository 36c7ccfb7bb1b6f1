# SPDX-License-Identifier: Apache-2.0
"""When a call is sent again: by the error's code, never by the exception's type alone.

Every operation of the protocol may be repeated (a repeat joins or gets the recorded outcome), so whatever is
indefinite is sent again. What is retryable only after something else was done first is handed up: ``not_ready`` wants
another prepare, ``checkpoint_conflict`` wants the open one ended.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import stamina

from reference_rl.errors import GymError

T = TypeVar("T")

NOT_IN_PLACE: Final = frozenset({"not_ready", "checkpoint_conflict", "admission_closed"})
"""Codes that are retryable, but not by sending the same call again at once."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long one call is tried.

    Attributes:
        attempts: tries in all.
        first_wait_s: the wait before the second try, in seconds; doubled each time, and never shorter.
        longest_wait_s: no wait is longer, in seconds, whatever ``Retry-After`` says.

    Requirements: CKPT-ERR-015, CKPT-ERR-017.
    """

    attempts: int = 4
    first_wait_s: float = 0.1
    longest_wait_s: float = 2.0

    def verdict(self, error: Exception) -> bool | dt.timedelta:
        """Return whether to try again, or how long to wait before it."""
        if not isinstance(error, GymError) or not error.retryable or error.code in NOT_IN_PLACE:
            return False
        if error.problem is not None and error.problem.retry_after_ms is not None:
            return dt.timedelta(seconds=self._wait_s(error.problem.retry_after_ms))
        return True

    def _wait_s(self, retry_after_ms: int) -> float:
        return min(max(retry_after_ms / 1000, self.first_wait_s), self.longest_wait_s)

    async def run(self, call: Callable[[], Awaitable[T]], budget_s: float) -> T:
        """Call until it succeeds, fails for good, or the tries or the budget are used up.

        A 504 whose work continues costs no try: a repeat joins it for as long as the budget lasts.

        Args:
            call: one try.
            budget_s: no try begins after so many seconds.
        """
        end = time.monotonic() + budget_s
        while True:
            remaining = end - time.monotonic()
            try:
                async for attempt in stamina.retry_context(
                    on=self.verdict,
                    attempts=self.attempts,
                    timeout=max(remaining, 0.001),
                    wait_initial=self.first_wait_s,
                    wait_max=self.longest_wait_s,
                    wait_jitter=self.first_wait_s,
                ):
                    with attempt:
                        return await call()
            except GymError as error:
                problem = error.problem
                if problem is None or not problem.continues or time.monotonic() >= end:
                    raise
                await asyncio.sleep(self._wait_s(problem.retry_after_ms or 0))


class Pace:
    """The least time between two calls of which the participant should have made the second one wait.

    Args:
        least_s: that time, in seconds; who waited as long as it was asked to loses nothing.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._last = time.monotonic()

    async def step(self) -> None:
        """Return when the next call may be sent."""
        await asyncio.sleep(max(0.0, self._last + self._least_s - time.monotonic()))
        self._last = time.monotonic()


NO_RETRY: Final = RetryPolicy(attempts=1)
"""One try."""
