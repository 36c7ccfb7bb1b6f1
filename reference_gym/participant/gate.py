# SPDX-License-Identifier: Apache-2.0
"""The gate: what lets turns open, verifications begin, rollouts start and environment effects run.

It knows three positions. *Open*: everything may begin. *Closing* (phase preparing): nothing new begins, open
turns run to their boundary and begun verifications to their end. *Sealed* (from prepared or commit until the gate
opens): nothing changes but by ACK and retire; what a commit left out waits here.

Everything runs on one event loop, so a coroutine that finds the gate open may begin before it next awaits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Literal

from reference_gym.participant.clock import Clock
from reference_gym.participant.slices import Steps

Kind = Literal["effect", "verification", "generation", "worker"]
MAX_BLOCKERS = 100
"""How many blockers one reply lists; ``blocker_count`` tells the rest."""


class Position(Enum):
    """Where the gate stands."""

    OPEN = "open"
    CLOSING = "closing"
    SEALED = "sealed"


@dataclass(slots=True)
class Running:
    """One thing that runs: an open turn (``handler`` false), or an effect handler or verification in this process.

    ``blocks`` says whether a prepare waits for it; it ends when its rollout is retired or fenced.
    """

    kind: Kind
    rollout_id: str
    attempt: int
    turn: int | None
    since: float
    handler: bool
    blocks: bool


@dataclass(frozen=True, slots=True)
class Blocker:
    """What a prepare waits for; ``since_ms`` is how long it has been running, in milliseconds."""

    kind: Kind
    rollout_id: str
    attempt: int
    since_ms: int
    detail: str

    def as_json(self) -> dict[str, object]:
        """Return it as in ``prepare-response``."""
        return {
            "kind": self.kind,
            "rollout_id": self.rollout_id,
            "attempt": self.attempt,
            "since_ms": self.since_ms,
            "detail": self.detail,
        }


class Gate:
    """The position, what runs, and who waits.

    Args:
        clock: for ``since_ms``.
        on_change: called after something that ran has ended or has stopped blocking.
    """

    def __init__(self, clock: Clock, on_change: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._on_change = on_change
        self._position = Position.OPEN
        self._running: dict[int, Running] = {}
        self._by_rollout: dict[str, set[int]] = {}
        self._turns: dict[str, tuple[int, int]] = {}
        self._blocking = 0
        self._handlers = 0
        self._numbers = count()
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._waking: deque[asyncio.Future[None]] = deque()
        self._steps = Steps()

    @property
    def is_open(self) -> bool:
        """Whether turns may open and rollouts may start."""
        return self._position is Position.OPEN

    @property
    def sealed(self) -> bool:
        """Whether nothing may change."""
        return self._position is Position.SEALED

    @property
    def quiescent(self) -> bool:
        """Whether no turn is open and no verification that a prepare waits for is running."""
        return self._blocking == 0

    @property
    def handlers(self) -> int:
        """How many effect handlers and verifications run in this participant, whoever owns their rollouts by now."""
        return self._handlers

    def turn_of(self, rollout_id: str) -> int | None:
        """Return the number of the agent's open turn of a rollout, or None."""
        return self._turns.get(rollout_id, (0, None))[1]

    def running_of(self, rollout_id: str, through: int) -> bool:
        """Return whether a handler of an attempt up to ``through`` of this rollout still runs."""
        return any(running.handler and running.attempt <= through for running in self._of(rollout_id))

    def move(self, position: Position) -> None:
        """Put the gate into a position and wake whoever waits for it to change."""
        if position is not self._position:
            self._position = position
            self._wake()

    @contextmanager
    def running(
        self,
        kind: Kind,
        rollout_id: str,
        attempt: int,
        *,
        turn: int | None = None,
        handler: bool = False,
        blocks: bool = True,
    ) -> Iterator[None]:
        """Note that something runs for as long as the block lasts.

        Args:
            kind: what it is.
            rollout_id: whose.
            attempt: whose.
            turn: the number of the open turn; only for the agent's turns (``handler`` false).
            handler: whether it is an effect handler or a verification that runs in this participant.
            blocks: whether a prepare waits for it.
        """
        number = next(self._numbers)
        running = Running(kind, rollout_id, attempt, turn, self._clock.now(), handler, blocks)
        self._running[number] = running
        self._by_rollout.setdefault(rollout_id, set()).add(number)
        self._blocking += blocks
        self._handlers += handler
        if turn is not None and not handler:
            self._turns[rollout_id] = number, turn
        try:
            yield
        finally:
            del self._running[number]
            self._by_rollout[rollout_id].discard(number)
            if not self._by_rollout[rollout_id]:
                del self._by_rollout[rollout_id]
            self._blocking -= running.blocks
            self._handlers -= running.handler
            if self._turns.get(rollout_id, (None, 0))[0] == number:
                del self._turns[rollout_id]
            self._on_change()

    def abandon(self, rollout_id: str) -> None:
        """Stop counting what runs for a rollout that was fenced, retired or found uncertain: it blocks nothing."""
        for running in self._of(rollout_id):
            self._blocking -= running.blocks
            running.blocks = False
        self._on_change()
        self.nudge(rollout_id)

    def judged(self, rollout_id: str, attempt: int) -> None:
        """Stop counting the verification of a rollout as a handler: it has ended, and its result waits for the gate."""
        for running in self._of(rollout_id):
            if (running.kind, running.attempt) == ("verification", attempt):
                self._handlers -= running.handler
                running.handler = False
        self._on_change()

    def abandon_all(self) -> None:
        """Stop counting everything that runs, because a restore has dropped all earlier work."""
        for running in self._running.values():
            running.blocks = False
        self._blocking = 0
        self._on_change()
        self._wake()

    def nudge(self, rollout_id: str) -> None:
        """Wake who waits at the gate for this rollout to look again: its attempt may be fenced by now."""
        for waiting in self._waiting.pop(rollout_id, ()):
            _wake(waiting)

    def blocked_rollouts(self) -> set[str]:
        """Return the ids of the rollouts that a prepare waits for."""
        return {running.rollout_id for running in self._running.values() if running.blocks}

    def blockers(self, *, handlers_only: bool = False) -> list[Blocker]:
        """Return what is waited for, the longest running first, one per kind and rollout.

        Args:
            handlers_only: what a restore waits for (handlers in this participant) instead of what a prepare waits for.
        """
        now = self._clock.now()
        oldest: dict[tuple[Kind, str], Running] = {}
        for running in self._running.values():
            if running.handler if handlers_only else running.blocks:
                known = oldest.setdefault((running.kind, running.rollout_id), running)
                if running.since < known.since:
                    oldest[running.kind, running.rollout_id] = running
        return [
            Blocker(
                running.kind,
                running.rollout_id,
                running.attempt,
                max(0, round((now - running.since) * 1000)),
                _detail(running),
            )
            for running in sorted(oldest.values(), key=lambda running: running.since)
        ]

    def admits_effect(self, rollout_id: str, turn: int, last_turn: int | None) -> bool:
        """Return whether an effect may begin now.

        Args:
            rollout_id: whose session it changes.
            turn: the turn that it belongs to.
            last_turn: the turn of the last effect that has run in this session; None before the first.
        """
        match self._position:
            case Position.OPEN:
                return True
            case Position.CLOSING:
                return last_turn == turn or self.turn_of(rollout_id) == turn
            case Position.SEALED:
                return False

    async def wait_open(self, rollout_id: str = "") -> None:
        """Return once the gate is open; nothing has run since it was found so."""
        while not self.is_open:
            await self.wait_change(rollout_id)

    async def wait_change(self, rollout_id: str = "") -> None:
        """Return after the gate has next changed its position, or somebody has nudged this rollout.

        Whoever waits for no rollout is woken at once, the others in slices: ten thousand of them would keep the event
        loop from serving anybody.
        """
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(rollout_id, set()).add(waiting)
        try:
            await waiting
        finally:
            if (others := self._waiting.get(rollout_id)) is not None:
                others.discard(waiting)
                if not others:
                    del self._waiting[rollout_id]

    def _of(self, rollout_id: str) -> list[Running]:
        return [self._running[number] for number in self._by_rollout.get(rollout_id, ())]

    def _wake(self) -> None:
        self.nudge("")
        if not self._waiting:
            return
        begun = bool(self._waking)
        for waiting in self._waiting.values():
            self._waking.extend(waiting)
        self._waiting = {}
        if not begun:
            self._wake_some()

    def _wake_some(self) -> None:
        for _ in range(min(self._steps.next(), len(self._waking))):
            _wake(self._waking.popleft())
        if self._waking:
            asyncio.get_running_loop().call_soon(self._wake_some)
        else:
            self._steps.pause()


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _detail(running: Running) -> str:
    if running.turn is not None:
        return f"turn {running.turn} has not reached its boundary"
    return f"{running.kind} is running"
