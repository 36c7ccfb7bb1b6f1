# SPDX-License-Identifier: Apache-2.0
"""The routes of a participant in an aiohttp application, and a server of it.

Every error is a problem document, those of the framework included; only what the author's own handlers raise is
answered as the framework answers it anywhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from aiohttp import EMPTY_PAYLOAD, ClientError, StreamReader, web
from aiohttp.typedefs import Handler

from reference_gym.participant import exchange, http, serving
from reference_gym.participant.auth import Token
from reference_gym.participant.connections import Connections
from reference_gym.participant.errors import (
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    ProtocolError,
    UnsupportedMediaType,
)
from reference_gym.participant.listening import Connection, Listener, listen
from reference_gym.participant.service import Participant
from spec import wire

logger = logging.getLogger(__name__)

CONTROL_PLANE = web.AppKey("control_plane", http.ControlPlane)

_CLIENTS_FAULTS = (OSError, ClientError, web.RequestPayloadError, web.PayloadAccessError)
"""What reading a body raises when its client went away, or sent what is no body."""
_OURS: WeakSet[Handler] = WeakSet()
"""The handlers of this module; every other one is the author's."""
_FRAMEWORK: dict[int, type[ProtocolError]] = {
    404: NotFound,
    405: MethodNotAllowed,
    413: PayloadTooLarge,
    415: UnsupportedMediaType,
}


def create_app(participant: Participant, *, control_token: str | None) -> web.Application:
    """Return an application that serves a participant; the author adds data-plane routes to it.

    Args:
        participant: what is served.
        control_token: the bearer token of the control plane; None only for a server on loopback.
    """
    app = web.Application(
        middlewares=[_told_apart, _problems], client_max_size=participant.config.limits.max_body_bytes
    )
    plane = http.ControlPlane(participant, Token(control_token) if control_token is not None else None)
    app[CONTROL_PLANE] = plane

    async def control(request: web.Request) -> web.StreamResponse:
        return await _send(request, await plane.handle(_request(request), _body(request)))

    async def stamp(request: web.Request, response: web.StreamResponse) -> None:
        # The framework's own refusals too, and only here: what an older route answers stays as it was (CKPT-DISC-028).
        if request.path.startswith(f"{http.ROOT}/"):
            response.headers.setdefault(wire.HEADER_INCARNATION, participant.incarnation)

    _OURS.add(control)
    app.router.add_route("*", f"{http.ROOT}/{{path:.*}}", control)
    app.on_response_prepare.append(stamp)
    return app


def data_plane(
    participant: Participant, token: str | None, handler: http.Handler, *, schema: str | None = None
) -> Handler:
    """Return a route handler for a JSON call of the data plane; see ``http.DataCall`` for the arguments."""
    return handler_of(http.DataCall(participant, token, handler, schema=schema))


def handler_of(call: http.DataCall) -> Handler:
    """Return a route handler for a call of the data plane."""

    async def serve(request: web.Request) -> web.StreamResponse:
        return await _send(request, await call.handle(_request(request), _body(request)))

    _OURS.add(serve)
    return serve


@dataclass(frozen=True, slots=True)
class Server(serving.Server):
    """A server of an aiohttp application."""

    runner: web.AppRunner
    listener: Listener

    async def stop(self) -> None:
        """Close the sockets, let requests end, stop what runs."""
        self.listener.close()
        self.participant.begin_closing()
        await self.runner.cleanup()
        await self.participant.close()


async def start(app: web.Application, *, host: str = "127.0.0.1", port: int = 0) -> Server:
    """Listen.

    Args:
        app: of ``create_app``.
        host: the address to listen on.
        port: 0 takes a free one.

    Raises:
        OSError: the address cannot be listened at.
    """
    participant = app[CONTROL_PLANE].participant
    # The framework waits twice: for the handler to end, and for it to be cancelled.
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=serving.closing_s(participant) / 2)
    await runner.setup()
    server = runner.server
    if server is None:
        raise RuntimeError("the application has no server")
    connections = serving.connections_of(participant)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request, web.Request), "the application makes its requests"
        connection = _connection(request)
        connection.body = request.content
        connection.authors = False
        with connections.serving(connection):
            return await _problems(request, inner)

    # The framework refuses some requests (`Expect`) outside of the application's middlewares.
    inner, server.request_handler = server.request_handler, answer
    try:
        listening = listen(host, port)
    except OSError:
        await runner.cleanup()
        raise
    listener = Listener(listening, participant, connections, lambda: _Connection(server, participant, connections))
    return Server(participant, host, listener.port, runner, listener)


class _Connection(web.RequestHandler, Connection):
    """One connection: it is counted, and what reaches no route is refused with a problem document as well."""

    __slots__ = ("_connections", "_participant", "authors", "body")

    def __init__(self, server: web.Server, participant: Participant, connections: Connections) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            # The access log would cost more than half of the throughput, and paths hold rollout ids.
            access_log=None,  # type: ignore[arg-type]  # the framework's own way to switch it off
            # Bodies are taken as they are: what a few bytes would unpack to is not this side's work to find out.
            auto_decompress=False,
        )
        self._participant = participant
        self._connections = connections
        self.body: StreamReader = EMPTY_PAYLOAD
        self.authors = False

    def data_received(self, data: bytes) -> None:
        """Take what came; a body that goes on in a form which is none has broken off, and is not waited for."""
        super().data_received(data)
        # The parser has given it up, and keeps for later what is wrong: whoever reads the body would not be told.
        if self._messages and not self.body.is_eof() and self.body.exception() is None:
            self.body.set_exception(web.RequestPayloadError("the body is not of the form that its head says"))
            self.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._connections.closed(self)

    def drop(self) -> None:
        """Close it at once; what its client has not read is lost."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the refusal of what is no request, and close the connection (CKPT-ERR-008, CKPT-ID-017)."""
        if status >= 500 and self.authors:
            return super().handle_error(request, status, exc, message)
        if request.writer.output_size > 0:
            raise ConnectionError("a response is on its way already")
        if status < 500:
            # Anybody may send anything: that must not fill a log.
            logger.debug("refused what is not HTTP", exc_info=exc)
            error: Exception = InvalidRequest("this is not HTTP as it is accepted here")
        else:
            error = exc if isinstance(exc, Exception) else Internal("the request failed")
        response = _answer(http.stamped(exchange.refusal(error, request.method.lower()), self._participant))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log a failure of this side; that a client broke off or sent rubbish is none."""
        if isinstance(kw.get("exc_info"), _CLIENTS_FAULTS):
            logger.debug(*args, **kw)
        else:
            super().log_exception(*args, **kw)


def _connection(request: web.Request) -> _Connection:
    connection = request.protocol
    assert isinstance(connection, _Connection), "every connection here is made by the listener"
    return connection


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error of the application into a problem document."""
    operation = request.method.lower()
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400 or _is_authors(request):
            raise
        kind = _FRAMEWORK.get(error.status, InvalidRequest if error.status < 500 else ProtocolError)
        reason = error.reason or "the request is refused"
        return _answer(exchange.refusal(kind(reason, allow=error.headers.get("Allow")), operation))
    except _Unread:
        raise
    except exchange.ClientGone:
        return _answer(exchange.refusal(InvalidRequest("the body broke off"), operation))
    except Exception as error:
        if _is_authors(request):
            raise
        return _answer(exchange.refusal(error, operation))


@web.middleware
async def _told_apart(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Note whether a handler of the author answers, whose errors look as they always did (CKPT-DISC-028)."""
    found = request.match_info
    if isinstance(request.protocol, _Connection):
        request.protocol.authors = found.http_exception is None and found.handler not in _OURS
    return await handler(request)


def _is_authors(request: web.BaseRequest) -> bool:
    return isinstance(request.protocol, _Connection) and request.protocol.authors


def _request(request: web.Request) -> exchange.Request:
    headers: dict[str, list[str]] = {}
    for name, value in request.headers.items():
        headers.setdefault(name.lower(), []).append(value)
    raw = request.rel_url
    return exchange.Request(request.method, raw.raw_path, raw.raw_query_string, headers)


def _body(request: web.Request) -> exchange.Body:
    async def pieces() -> AsyncIterator[bytes]:
        try:
            async for piece in request.content.iter_any():
                yield piece
        except _CLIENTS_FAULTS as error:
            raise exchange.ClientGone from error

    return pieces


class _Unread(ConnectionError):
    """The client went away while it was answered."""


async def _send(request: web.Request, response: exchange.Response) -> web.StreamResponse:
    """Answer a request; a file is sent as it is, without the framework's ranges and compressed siblings."""
    if isinstance(response.body, bytes):
        return _answer(response)
    reply = web.StreamResponse(status=response.status, headers=response.headers)
    reply.content_type = response.media_type
    reply.content_length = response.body.size
    try:
        await reply.prepare(request)
        async for piece in response.body.pieces():
            await reply.write(piece)
        await reply.write_eof()
    except ConnectionError as error:
        raise _Unread from error
    finally:
        await response.body.close()
    return reply


def _answer(response: exchange.Response) -> web.Response:
    assert isinstance(response.body, bytes), "files are sent otherwise"
    headers = dict(response.headers)
    if response.status != 204:
        headers["Content-Type"] = response.media_type
    return web.Response(status=response.status, body=response.body, headers=headers)
