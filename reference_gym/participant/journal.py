# SPDX-License-Identifier: Apache-2.0
"""The event loop's end of the boundary log: changes are noted where they happen, and waited for where they leave.

Everything that one step of the event loop notes is one batch: it is recovered whole or not at all. ``settled`` returns
once everything that was noted before would survive the process (CKPT-DIR-023); it is awaited before a reply, a policy
call or an effect of the next turn leaves. Without a log (``NoJournal``) notes go nowhere and nothing is waited for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from reference_gym.participant.log_format import Entry
from reference_gym.participant.log_state import LogState
from reference_gym.participant.log_writer import LogWriter, Mark
from reference_gym.participant.slices import Steps


class Journal(Protocol):
    """Where changes are noted."""

    def note(self, op: str, *pieces: bytes, **values: Any) -> None:
        """Note one change; see ``LogState`` for the operations."""
        ...

    @property
    def kept(self) -> bool:
        """Whether notes are kept at all."""
        ...

    def note_all(self, entries: Sequence[Entry]) -> None:
        """Note changes that were put down aside, in one batch with all else of this step."""
        ...

    def progressed(self, progress: int) -> None:
        """Note the present progress."""
        ...

    async def settled(self) -> None:
        """Return once everything noted so far would survive the process."""
        ...

    def seal(self) -> Future[Mark] | None:
        """Mark this instant as a cut; None without a log."""
        ...

    async def close(self) -> None:
        """Write what was noted; nothing is noted afterwards."""
        ...


class NoJournal:
    """Nothing survives the process, and nobody waits."""

    kept = False

    def note(self, op: str, *pieces: bytes, **values: Any) -> None:
        """Nothing is kept."""

    def note_all(self, entries: Sequence[Entry]) -> None:
        """Nothing is kept."""

    def progressed(self, progress: int) -> None:
        """Nothing is kept."""

    async def settled(self) -> None:
        """Nothing is waited for."""

    def seal(self) -> Future[Mark] | None:
        """There is no log."""
        return None

    async def close(self) -> None:
        """Nothing to do."""


class Draft(NoJournal):
    """Notes of what is built aside: they count once they are handed to ``note_all`` of the journal itself.

    Args:
        journal: where they will go; where nothing is kept, nothing is put down.
    """

    def __init__(self, journal: Journal) -> None:
        self.entries: list[Entry] = []
        self.kept = journal.kept

    def note(self, op: str, *pieces: bytes, **values: Any) -> None:
        """Put down one change."""
        if self.kept:
            self.entries.append(Entry({"op": op, **values}, pieces))


class LogJournal:
    """Notes go into the boundary log once it has been opened; those before describe what the log holds already."""

    def __init__(self) -> None:
        self._writer: LogWriter | None = None
        self._pending: list[Entry] = []
        self._progress: int | None = None
        self._ordered = False
        self._handed = 0
        self._written = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._waking = False
        self._steps = Steps()
        self._lost = False

    def open(self, make: Callable[..., LogWriter], state: LogState) -> None:
        """Begin to write.

        Args:
            make: makes the writer; it is given ``told`` and ``lost``.
            state: for the writer.
        """
        loop = asyncio.get_running_loop()
        self._writer = make(
            state,
            told=lambda number: _tell(loop, self._told, number),
            lost=lambda: _tell(loop, self._give_up),
        )

    def note(self, op: str, *pieces: bytes, **values: Any) -> None:
        """Note one change."""
        if self._writer is None or self._lost:
            return
        self._pending.append(Entry({"op": op, **values}, pieces))
        self._order()

    @property
    def kept(self) -> bool:
        """Whether notes are kept: not before the log was opened, nor after it was lost."""
        return self._writer is not None and not self._lost

    def note_all(self, entries: Sequence[Entry]) -> None:
        """Note changes that were put down aside, in one batch with all else of this step."""
        if not entries or not self.kept:
            return
        self._pending.extend(entries)
        self._order()

    def progressed(self, progress: int) -> None:
        """Note the present progress, once per batch."""
        if self._writer is None or self._lost:
            return
        self._progress = progress
        self._order()

    async def settled(self) -> None:
        """Return once everything noted so far is written."""
        if self._ordered:
            self._hand_over()
        if self._written >= self._handed or self._lost:
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append((self._handed, waiting))
        await waiting

    def seal(self) -> Future[Mark] | None:
        """Mark this instant as a cut."""
        if self._writer is None or self._lost:
            return None
        self._hand_over()
        return self._writer.seal()

    async def close(self) -> None:
        """Write what was noted, and end the thread."""
        if self._writer is None:
            return
        self._hand_over()
        writer, self._writer = self._writer, None
        await asyncio.to_thread(writer.close)

    def _order(self) -> None:
        if not self._ordered:
            self._ordered = True
            asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        """Hand the batch to the writer; the step that noted it is over."""
        self._ordered = False
        if self._progress is not None:
            self._pending.append(Entry({"op": "progress", "n": self._progress}))
            self._progress = None
        if not self._pending or self._writer is None:
            return
        batch, self._pending = self._pending, []
        self._handed += 1
        self._writer.append(self._handed, batch)

    def _told(self, number: int) -> None:
        self._written = max(self._written, number)
        if not self._waking:
            self._wake_some()

    def _wake_some(self) -> None:
        """Wake the first of those whose notes are written, and the others in slices: each of them runs right after."""
        for _ in range(self._steps.next()):
            if not self._waiting or self._waiting[0][0] > self._written:
                self._waking = False
                self._steps.pause()
                return
            _, waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
        self._waking = True
        asyncio.get_running_loop().call_soon(self._wake_some)

    def _give_up(self) -> None:
        """The log is lost: nothing will survive the process, and nobody waits for that any more."""
        self._lost = True
        self._told(self._handed)


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[..., None], *values: Any) -> None:
    """Tell the event loop; one that has ended waits for nothing."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(what, *values)
