# SPDX-License-Identifier: Apache-2.0
"""A listening socket that accepts no more than can be served, and answers what it does not serve.

The event loop's own way of accepting takes every connection, and writes a stack trace for each try when there is no
descriptor left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from reference_gym.participant import exchange
from reference_gym.participant.connections import Connections
from reference_gym.participant.errors import ProtocolError, Unavailable
from reference_gym.participant.http import stamped
from reference_gym.participant.service import Participant

logger = logging.getLogger(__name__)

BACKLOG = 1024
BATCH = 16
"""How many connections are accepted before the event loop does something else."""
MOST_REFUSED = 8
"""How many connections are being refused at once; more wait in the system's queue."""
REFUSAL_S = 0.5
"""How long a refused client may take to read why."""
PAUSE_S = 0.5
"""How long nothing is accepted when the system has no descriptor to give."""
TELL_EVERY_S = 60.0
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Connection(asyncio.Protocol):
    """What a listener makes of an accepted socket."""

    __slots__ = ()

    def drop(self) -> None:
        """Close it at once."""
        raise NotImplementedError


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Args:
        host: an address or a name.
        port: 0 takes a free one.

    Raises:
        OSError: the address cannot be listened at.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listening.setblocking(False)
    return listening


class Listener:
    """Accepts connections from its making until ``close``.

    Args:
        listening: of ``listen``; closed with this object.
        participant: who refuses, and whose limits hold.
        connections: the book of the server's connections; its ``closed`` is the connection's to call.
        connect: makes the asyncio protocol of one connection.
    """

    def __init__(
        self,
        listening: socket.socket,
        participant: Participant,
        connections: Connections,
        connect: Callable[[], Connection],
    ) -> None:
        self._listening = listening
        self._participant = participant
        self._connections = connections
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused = 0
        self._paused: asyncio.TimerHandle | None = None
        self._told = -TELL_EVERY_S
        self._loop.add_reader(listening, self._accept)

    @property
    def port(self) -> int:
        """The port that it got."""
        return int(self._listening.getsockname()[1])

    def close(self) -> None:
        """Accept nothing more."""
        if self._listening.fileno() < 0:
            return
        self._loop.remove_reader(self._listening)
        self._listening.close()
        self._connections.close()
        if self._paused is not None:
            self._paused.cancel()
        for task in self._tasks:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(BATCH):
            if self._refused >= MOST_REFUSED:
                self._pause()
                return
            if self._connections.settling:  # The event loop calls again for whoever waits, after what it has to do.
                return
            try:
                accepted, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._failed(error)
                return
            accepted.setblocking(False)
            # Also bounds how long a client may leave unread what it has asked for.
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                silence_ms = self._participant.config.limits.max_silence_ms
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(silence_ms, 2**31 - 1))
            if self._connections.make_room():
                connection = self._connect()
                self._connections.opened(connection)
                self._begin(self._serve(accepted, connection))
            else:
                self._refused += 1
                self._begin(self._refuse(accepted))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, accepted: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        except OSError:  # It is gone already.
            self._connections.closed(connection)
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise
        else:
            self._connections.connected(connection)

    async def _refuse(self, accepted: socket.socket) -> None:
        """Say that there is no room, and wait a little until that is read: closing at once would take it back."""
        try:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(REFUSAL_S):
                    answer = http_bytes(self._participant, Unavailable("as many connections are open as can be served"))
                    await self._loop.sock_sendall(accepted, answer)
                    accepted.shutdown(socket.SHUT_WR)
                    while await self._loop.sock_recv(accepted, 65_536):
                        pass
        finally:
            self._refused -= 1
            accepted.close()

    def _failed(self, error: OSError) -> None:
        """Wait where the system cannot give a descriptor; what else can happen concerns the one connection alone."""
        if error.errno not in _SHORT:
            return
        now = self._loop.time()
        if now - self._told >= TELL_EVERY_S:
            self._told = now
            logger.warning("no connection can be accepted for now: %s", error.strerror)
        if not self._connections.drop_idle():
            self._pause()

    def _pause(self) -> None:
        self._loop.remove_reader(self._listening)
        self._paused = self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listening, self._accept)


def http_bytes(participant: Participant, error: ProtocolError) -> bytes:
    """Return a whole refusal as it is sent to a client whose request reaches no route (CKPT-ERR-008, CKPT-ID-017)."""
    response = stamped(exchange.refusal(error, ""), participant)
    assert isinstance(response.body, bytes), "a refusal is no file"
    headers = {
        **response.headers,
        "Content-Type": response.media_type,
        "Content-Length": str(len(response.body)),
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + response.body
