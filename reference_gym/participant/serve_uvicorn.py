# SPDX-License-Identifier: Apache-2.0
"""A server of an ASGI application on uvicorn that does what the protocol wants of a process, and uvicorn does not.

Uvicorn by itself closes its sockets at SIGTERM, dies of that signal at the end, and refuses malformed requests in plain
text. Here the author's ``serving.Signals`` and ``serving.drain`` decide, and every refusal is a problem document.
Uvicorn is needed by this module alone, and no dependency of the kit.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from reference_gym.participant import exchange, serving
from reference_gym.participant.errors import InvalidRequest
from reference_gym.participant.serve_asgi import App
from reference_gym.participant.service import Participant


@dataclass(frozen=True, slots=True)
class Server(serving.Server):
    """A server of an ASGI application."""

    uvicorn: _Uvicorn
    running: asyncio.Task[None]

    async def stop(self) -> None:
        """Close the sockets, let requests end, end the lifespan, stop what runs."""
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
        RuntimeError: the application refused to start.
    """
    # The access log would hold rollout ids, and the host's logging is the host's own.
    config = uvicorn.Config(app, http=_Protocol, log_config=None, access_log=False, server_header=False)
    config.timeout_graceful_shutdown = serving.closing_s(participant)  # type: ignore[assignment]  # it may be a fraction
    server = _Uvicorn(config)
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    running = asyncio.ensure_future(server.serve([listening]))
    heard = asyncio.ensure_future(server.listening.wait())
    await asyncio.wait([running, heard], return_when=asyncio.FIRST_COMPLETED)
    heard.cancel()
    if running.done():
        listening.close()
        raise RuntimeError("the application refused to start")
    return Server(participant, host, int(listening.getsockname()[1]), server, running)


class _Uvicorn(uvicorn.Server):
    """Uvicorn without signals, and with a word for when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            self.should_exit = True  # The lifespan failed, and has said why in the log.
            return
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """A connection whose malformed requests, which reach no application, are refused with a problem document."""

    def send_400_response(self, msg: str) -> None:
        """Return the refusal and close the connection (CKPT-ERR-007)."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.close()  # A response is on its way already.
            return
        response = exchange.refusal(InvalidRequest("this is not HTTP as it is accepted here"), "")
        assert isinstance(response.body, bytes), "a refusal is no file"
        headers = [
            ("content-type", response.media_type),
            ("content-length", str(len(response.body))),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=response.body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
