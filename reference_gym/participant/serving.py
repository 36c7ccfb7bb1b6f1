# SPDX-License-Identifier: Apache-2.0
"""A listening server and its end, whatever serves it: signals, draining, and when there is nothing to wait for.

An author makes ``Signals`` before the server is announced, so that a signal which comes right after is heard::

    signals = Signals()
    server = await serve_aiohttp.start(app)
    announce(server.url)
    await serve_until_terminated(server, signals)

and ends the process with ``leave(0)`` when its event loop has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, Self

from reference_gym.participant.connections import Connections, within_descriptors
from reference_gym.participant.phases import EndedAs, Phase
from reference_gym.participant.service import Participant

KEPT = 0.8
"""The part of ``shutdown_grace_ms`` for which the control plane is kept."""
CLOSED = 0.88
"""The part after which requests that are under way are broken off."""
ENDED = 0.92
"""The part after which the process ends, whatever still runs in it; the rest is for whoever started it."""
LOOK_S = 0.1
"""How often a draining participant looks whether it still holds anything."""


class Signals:
    """SIGTERM and SIGINT of this process, heard from the making of this object on, in the running event loop.

    ``told`` is set by the first one, ``hurried`` by a second SIGINT, which is a person at a terminal. A second
    SIGTERM means nothing: a supervisor and whoever stops the whole Gym may both send one.
    """

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self.hurried = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.told.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupted)

    def ignore(self) -> None:
        """Ignore what comes from now on: the process ends, and a late second signal must not spoil its exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _interrupted(self) -> None:
        (self.hurried if self.told.is_set() else self.told).set()


@dataclass(frozen=True, slots=True)
class Server:
    """A listening server: ``port`` is the one that it got. Leaving its ``async with`` block stops it."""

    participant: Participant
    host: str
    port: int

    @property
    def url(self) -> str:
        """The address without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def drain(self, callers: Callable[[], bool] | None = None) -> None:
        """See ``drain``."""
        await drain(self.participant, callers)

    async def stop(self) -> None:
        """Close the sockets, let requests end, stop what runs."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def kept_ms(participant: Participant) -> float:
    """Return for how long a draining participant keeps its control plane at most, in milliseconds."""
    return participant.config.limits.shutdown_grace_ms * KEPT


def closing_s(participant: Participant) -> float:
    """Return for how long requests that are under way may go on after that, in seconds."""
    return participant.config.limits.shutdown_grace_ms * (CLOSED - KEPT) / 1000


def connections_of(participant: Participant) -> Connections:
    """Return a new book of the connections of a server of this participant."""
    limits = participant.config.limits
    return Connections(within_descriptors(limits.max_connections), limits.max_silence_ms / 1000)


async def drain(participant: Participant, callers: Callable[[], bool] | None = None) -> None:
    """Stop admitting, and keep the control plane while that can save something (CKPT-SEC-018 to -021).

    Returns when the participant holds no work and no open checkpoint, when a checkpoint has become durable, or when
    four fifths of ``shutdown_grace_ms`` have passed.

    Args:
        participant: what is about to end.
        callers: tells whether the participants that call this one are still there; while they are, it stays, and
            when they are gone only an open checkpoint keeps it.
    """
    clock = participant.clock
    deadline = clock.now() + kept_ms(participant) / 1000
    participant.begin_draining()
    earlier = participant.machine.last

    def durable() -> bool:
        machine = participant.machine
        ended = machine.last is not None and machine.last is not earlier
        committed = ended and machine.last is not None and machine.last.ended_as is EndedAs.COMMITTED
        return committed or machine.phase is Phase.COMMITTED

    def needed() -> bool:
        if callers is not None and callers():
            return True
        if participant.machine.open is not None:
            return not durable()
        return callers is None and participant.holds_work and not durable()

    while needed() and clock.now() < deadline:
        await participant.wait_move(min(deadline, clock.now() + LOOK_S))


def leave(code: int) -> NoReturn:
    """End this process now, with what it has written flushed.

    Taking the interpreter apart would cost time out of the grace that nothing bounds, for what a kill may take as well.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def end_after(seconds: float) -> None:
    """End this process with exit code 0 after so many seconds, from a thread that nothing else holds up.

    What is durable by then is as it would be after a kill; nothing else is lost that way.
    """

    def end() -> None:
        time.sleep(seconds)
        os._exit(0)

    threading.Thread(target=end, name="grace", daemon=True).start()


async def serve_until_terminated(
    server: Server, signals: Signals | None = None, *, callers: Callable[[], bool] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and stop; a second SIGINT stops at once.

    Afterwards the process is to end (CKPT-SEC-025): it hears no signal any more, and is ended with exit code 0 when its
    grace is nearly over, even if the loop does not turn or a thread does not return (CKPT-SEC-021).

    Args:
        server: a listening server.
        signals: made before the server was announced; None: made now.
        callers: see ``drain``.
    """
    signals = signals or Signals()
    await signals.told.wait()
    end_after(server.participant.config.limits.shutdown_grace_ms * ENDED / 1000)
    draining = asyncio.ensure_future(server.drain(callers))
    hurrying = asyncio.ensure_future(signals.hurried.wait())
    await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
    for waiting in (draining, hurrying):
        waiting.cancel()
    await server.stop()
    signals.ignore()
