# SPDX-License-Identifier: Apache-2.0
"""Long work in short pieces, so that the event loop serves others in between.

Four kinds of work take long with large state: what the event loop itself does to every rollout (``Slices``), what the
tasks do that it begins or wakes (``Steps``), what a thread does while it holds the interpreter's lock (``Rests``), and
the freeing of what nobody needs any more, which is work too: a dictionary of ten thousand rollouts that is let go at
once holds up everybody (``Remains``, ``free``).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

SLICE_S = 0.002
"""How long work goes on before the event loop serves others, in seconds."""
STEPS = 10
"""How many tasks are begun, woken or ended at most before the event loop serves others."""
_LEAST = 3
"""How many there are at least, so that work which goes on beside them in slices does not starve them."""
_WORK_S, _REST_S = 0.001, 0.00005


class _Rota:
    """Whose slice is next on one event loop: one in each of its turns, however many works go on side by side.

    A call needs several turns of the loop until it is answered; with a slice of every work in each of them it would
    wait for all of that several times.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def turn(self) -> asyncio.Future[None]:
        """Return what is done when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._next)
        return turn

    def _next(self) -> None:
        """Let one of those who still wait go on."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if self._waiting:
            self._waiting[0].set_result(None)
            asyncio.get_running_loop().call_soon(self._next)


_rotas: WeakKeyDictionary[asyncio.AbstractEventLoop, _Rota] = WeakKeyDictionary()


class Slices:
    """Lets others have their turn on the event loop when a slice of work is done."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + SLICE_S

    async def give_way(self) -> None:
        """Let others have their turn if it is time."""
        if time.perf_counter() >= self._until:
            loop = asyncio.get_running_loop()
            if (rota := _rotas.get(loop)) is None:
                rota = _rotas[loop] = _Rota()
            await rota.turn()
            self._until = time.perf_counter() + SLICE_S


class Steps:
    """Tells how many tasks to begin, wake or end before the event loop serves others: each of them runs right after.

    How long they take is their authors' affair and is known afterwards only: where the event loop came back later than
    after a slice, fewer follow, and else one more.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._count = _LEAST
        self._asked: float | None = None

    def next(self) -> int:
        """Return how many there may be now; to be called once in each turn of the event loop."""
        now = self._clock()
        if self._asked is not None:
            late = now - self._asked > SLICE_S
            self._count = max(_LEAST, self._count // 2) if late else min(STEPS, self._count + 1)
        self._asked = now
        return self._count

    def pause(self) -> None:
        """Note that there is nothing more to do for now: what the event loop does until then says nothing."""
        self._asked = None


class Rests:
    """Leaves the interpreter's lock to others every now and then; for work on a thread.

    Without it the event loop waits up to five milliseconds for the lock, and that several times within one request.
    """

    def __init__(self) -> None:
        self._until = time.perf_counter() + _WORK_S

    def rest(self) -> None:
        """Rest if it is time."""
        if time.perf_counter() >= self._until:
            time.sleep(_REST_S)
            self._until = time.perf_counter() + _WORK_S


def free(*tables: Mapping[Any, Any]) -> None:
    """Let go of what dictionaries hold, one item at a time; on a thread. They are empty afterwards."""
    rests = Rests()
    for table in tables:
        while isinstance(table, dict) and table:
            table.popitem()
            rests.rest()


class Remains:
    """What nobody needs any more, freed in slices on the event loop.

    Only dictionaries that nobody else reads may be handed over.
    """

    def __init__(self) -> None:
        self._tables: deque[dict[Any, Any]] = deque()
        self._task: asyncio.Task[None] | None = None

    def take(self, *tables: Mapping[Any, Any]) -> None:
        """Free these; they are empty some time later."""
        self._tables.extend(table for table in tables if isinstance(table, dict) and table)
        if self._tables and (self._task is None or self._task.done()):
            try:
                self._task = asyncio.get_running_loop().create_task(self._free(), name="freeing")
            except RuntimeError:  # Without a running loop nobody is held up: they go at once.
                self._tables.clear()

    async def _free(self) -> None:
        slices = Slices()
        while self._tables:
            table = self._tables[0]
            while table:
                table.popitem()
                await slices.give_way()
            self._tables.popleft()

    @property
    def pending(self) -> bool:
        """Whether something is still to be freed."""
        return bool(self._tables)

    def close(self) -> None:
        """Stop: the process is about to end."""
        if self._task is not None:
            self._task.cancel()
