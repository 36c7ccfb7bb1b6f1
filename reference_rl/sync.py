# SPDX-License-Identifier: Apache-2.0
"""A thin face without ``await``, for trainers that have no event loop of their own.

The asynchronous parts run in one thread with one loop; a call waits for its outcome. Callable from any thread, e.g.
from a trainer's barrier.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from reference_rl.checkpointer import Checkpointer, Report

T = TypeVar("T")


class BackgroundLoop:
    """An event loop in a thread of its own; use as a context, everything started in it ends with it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="reference-rl", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine in the loop and return its value.

        Args:
            work: what to run; it must not belong to another loop.
            timeout_s: how long to wait, in seconds; ``None`` for as long as it takes.

        Raises:
            TimeoutError: it was not done in time; it goes on.
            RuntimeError: called from inside the loop, where waiting would never end.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("called from inside the loop: await it there")
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    async def _cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class SyncCheckpointer:
    """Takes snapshots from code without an event loop.

    Args:
        checkpointer: made, and used, in the loop.
        loop: where it lives.
    """

    def __init__(self, checkpointer: Checkpointer, loop: BackgroundLoop) -> None:
        self._checkpointer = checkpointer
        self._loop = loop

    def take(self, *, only_if_moved: bool = True) -> Report:
        """Take one snapshot and report how it went; see :meth:`Checkpointer.take`."""
        return self._loop.call(self._checkpointer.take(only_if_moved=only_if_moved))
