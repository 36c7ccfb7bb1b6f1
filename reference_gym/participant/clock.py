# SPDX-License-Identifier: Apache-2.0
"""The monotonic clock of a participant, as a seam: every limit and lease runs on it, so that tests can move it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Timer(Protocol):
    """A callback that has been ordered and can be called off."""

    def cancel(self) -> None:
        """Call it off."""
        ...


class Clock(Protocol):
    """Monotonic seconds, and callbacks at a point of them."""

    def now(self) -> float:
        """Return the present in monotonic seconds."""
        ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back at ``when`` or soon after, on the event loop."""
        ...


class LoopClock:
    """The clock of the running event loop; the wall clock's jumps do not move it."""

    def now(self) -> float:
        """Return the event loop's monotonic time in seconds."""
        return asyncio.get_running_loop().time()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back at ``when``."""
        return asyncio.get_running_loop().call_at(when, callback)


async def within(clock: Clock, deadline: float, work: asyncio.Future[T]) -> bool:
    """Wait for ``work`` until ``deadline``; the work itself is never cancelled.

    Args:
        clock: what the deadline is measured on.
        deadline: a point in the clock's seconds; None of the past is an error, it only does not wait.
        work: a future or task; its result and exception stay with it.

    Returns:
        Whether the work is done.
    """
    if work.done():
        return True
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not woken.done():
            woken.set_result(None)

    timer = clock.call_at(deadline, wake)
    work.add_done_callback(wake)
    try:
        await woken
    finally:
        timer.cancel()
        work.remove_done_callback(wake)
    return work.done()
