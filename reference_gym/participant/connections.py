# SPDX-License-Identifier: Apache-2.0
"""The connections of a server: how many there are at most, and for how long one may stay silent (CKPT-SEC-017).

Knows neither sockets nor a web framework. A connection is *idle* while no request of it is served: it has sent nothing,
or only the beginning of a head. Idle ones are dropped when they have been so for too long, and the one that has been
idle for longest makes room for a new one, so that nobody without a token can keep a controller out.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

_OPEN = Path("/proc/self/fd")
_OWN_AT_LEAST = 16


class Held(Protocol):
    """One connection, as a server holds it."""

    def drop(self) -> None:
        """Close it at once."""
        ...


class Connections:
    """The connections of one server.

    Args:
        most: how many are held at once.
        silence_s: for how long one may be idle, in seconds.
    """

    def __init__(self, most: int, silence_s: float) -> None:
        self.most = most
        self._silence_s = silence_s
        self._open: set[Held] = set()
        self._opening: set[Held] = set()
        self._idle: dict[Held, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def make_room(self) -> bool:
        """Return whether there is room for one more; when there is none, the one that is idle for longest goes."""
        return len(self._open) < self.most or self.drop_idle()

    @property
    def settling(self) -> bool:
        """Whether there is no room now, but may be as soon as what was just opened is connected, and so idle."""
        return len(self._open) >= self.most and not self._idle and bool(self._opening)

    def drop_idle(self) -> bool:
        """Drop the connection that has been idle for longest; return whether there was one."""
        for held in self._idle:
            self._drop(held)
            return True
        return False

    def opened(self, held: Held) -> None:
        """Count one more; it is not idle before it is ``connected``."""
        self._open.add(held)
        self._opening.add(held)

    def connected(self, held: Held) -> None:
        """Begin to count how long it is idle."""
        self._opening.discard(held)
        if held in self._open:
            self._idle[held] = asyncio.get_running_loop().time()
            self._order()

    def closed(self, held: Held) -> None:
        """Forget one that is closed."""
        self._open.discard(held)
        self._opening.discard(held)
        self._idle.pop(held, None)

    @contextmanager
    def serving(self, held: Held) -> Iterator[None]:
        """Hold a connection while a request of it is served."""
        self._idle.pop(held, None)
        try:
            yield
        finally:
            self.connected(held)

    def close(self) -> None:
        """Stop counting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self, held: Held) -> None:
        self.closed(held)
        held.drop()

    def _order(self) -> None:
        """See to it that the one that is idle for longest is looked at in time."""
        if self._timer is None and self._idle:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(next(iter(self._idle.values())) + self._silence_s, self._look)

    def _look(self) -> None:
        self._timer = None
        due = asyncio.get_running_loop().time() - self._silence_s
        for held in [held for held, since in self._idle.items() if since <= due]:
            self._drop(held)
        self._order()


def raise_descriptor_limit(connections: int) -> None:
    """Let this process have as many descriptors as so many connections need, as far as it may have them.

    Args:
        connections: how many it would serve at once.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def within_descriptors(connections: int) -> int:
    """Return how many connections can be served: as wanted, or half of the descriptors that are left.

    The other half is for files, and for the calls that the Gym makes itself.

    Args:
        connections: how many are wanted.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections
    used = sum(1 for _ in _OPEN.iterdir()) if _OPEN.is_dir() else _OWN_AT_LEAST
    return max(1, min(connections, (soft - used) // 2))
