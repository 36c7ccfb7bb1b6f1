# SPDX-License-Identifier: Apache-2.0
"""A server of an ASGI application on uvicorn that does what the protocol wants of a process, and uvicorn does not.

Uvicorn by itself closes its sockets at SIGTERM, dies of that signal at the end, refuses malformed requests in plain
text, and waits for the rest of a head for ever. Here the author's ``serving.Signals`` and ``serving.drain`` decide,
``listening`` accepts, and every refusal is a problem document. What of uvicorn's inside is used is looked for when the
server starts; its tests pass with uvicorn 0.30.6, 0.34.3, 0.40, 0.47, 0.51 and 0.54. Uvicorn is needed by this module
alone, and no dependency of the kit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from reference_gym.participant import serving
from reference_gym.participant.connections import Connections
from reference_gym.participant.errors import InvalidRequest
from reference_gym.participant.listening import Connection, Listener, http_bytes, listen
from reference_gym.participant.serve_asgi import App, Receive, Scope, Send
from reference_gym.participant.service import Participant

_quiet = logging.getLogger("uvicorn.error.connection")
_quiet.setLevel(logging.ERROR)
"""Of a connection only failures are logged: what its client sends wrong must not fill a log."""


@dataclass(frozen=True, slots=True)
class Server(serving.Server):
    """A server of an ASGI application."""

    uvicorn: _Uvicorn
    running: asyncio.Task[None]
    listener: Listener

    async def stop(self) -> None:
        """Close the sockets, let requests end, end the lifespan, stop what runs."""
        self.listener.close()
        self.participant.begin_closing()
        self.uvicorn.should_exit = True
        await self.running
        await self.participant.close()


async def start(app: App, participant: Participant, *, host: str = "127.0.0.1", port: int = 0) -> Server:
    """Listen.

    Args:
        app: of ``serve_asgi.create_app``, or the application that it is mounted in.
        participant: what it serves; it is closed with the server.
        host: the address to listen on.
        port: 0 takes a free one.

    Raises:
        OSError: the address cannot be listened at.
        RuntimeError: the application refused to start, or this uvicorn is none that the server was written for.
    """
    _require_known()
    # The access log would hold rollout ids, and the host's logging is the host's own.
    config = uvicorn.Config(app, http=H11Protocol, log_config=None, access_log=False, server_header=False)
    config.timeout_graceful_shutdown = serving.closing_s(participant)  # type: ignore[assignment]  # it may be a fraction
    server = _Uvicorn(config)
    listening = listen(host, port)
    running = asyncio.ensure_future(server.serve(sockets=[]))
    heard = asyncio.ensure_future(server.ready.wait())
    await asyncio.wait([running, heard], return_when=asyncio.FIRST_COMPLETED)
    heard.cancel()
    if running.done():
        listening.close()
        raise RuntimeError("the application refused to start")
    connections = serving.connections_of(participant)
    listener = Listener(listening, participant, connections, lambda: _Connection(server, participant, connections))
    return Server(participant, host, listener.port, server, running, listener)


def _require_known() -> None:
    """Refuse a uvicorn whose inside is another one; raises ``RuntimeError``."""
    used = {
        H11Protocol: ("send_400_response", "connection_lost", "handle_events"),
        uvicorn.Server: ("startup", "capture_signals", "serve"),
    }
    missing = [f"{kind.__name__}.{name}" for kind, names in used.items() for name in names if not hasattr(kind, name)]
    if missing:
        raise RuntimeError(
            f"uvicorn {uvicorn.__version__} has no {', '.join(missing)}: this server is for uvicorn 0.30 to 0.54"
        )


class _Uvicorn(uvicorn.Server):
    """Uvicorn without sockets and signals, and with a word for when its application has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            self.should_exit = True  # The lifespan failed, and has said why in the log.
            return
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol, Connection):
    """One connection: it is counted, and what reaches no application is refused with a problem document."""

    def __init__(self, server: _Uvicorn, participant: Participant, connections: Connections) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self.logger = _quiet
        self.timeout_keep_alive = participant.config.limits.max_silence_ms / 1000  # type: ignore[assignment]  # it may be a fraction
        self._participant = participant
        self._connections = connections
        inner = self.app

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            with connections.serving(self):
                try:
                    await inner(scope, receive, send)
                except asyncio.CancelledError:
                    if not server.should_exit:
                        raise
                    self._forget_request()  # Broken off because the process ends: no failure to be logged.

        self.app = counted

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connections.closed(self)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Leave the connection to the host's WebSockets, if it has a library for them."""
        super().handle_websocket_upgrade(event)
        self._connections.closed(self)

    def drop(self) -> None:
        """Close it at once; what its client has not read is lost."""
        if self.transport is not None:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Return the refusal of what is no request, and close the connection (CKPT-ERR-008, CKPT-ID-017)."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.write(
                http_bytes(self._participant, InvalidRequest("this is not HTTP as it is accepted here"))
            )
        self.transport.close()
        self._forget_request()

    def _forget_request(self) -> None:
        """Let nothing more be answered to the present request: it is as if the client had gone."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
