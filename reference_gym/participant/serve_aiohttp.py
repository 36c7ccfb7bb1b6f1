# SPDX-License-Identifier: Apache-2.0
"""The routes of a participant in an aiohttp application, and a server of it.

Every error of the application is a problem document, those of the framework included.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientError, web
from aiohttp.typedefs import Handler

from reference_gym.participant import exchange, http, serving
from reference_gym.participant.auth import Token
from reference_gym.participant.errors import (
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    ProtocolError,
    UnsupportedMediaType,
)
from reference_gym.participant.service import Participant
from spec import wire

CONTROL_PLANE = web.AppKey("control_plane", http.ControlPlane)

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
    app = web.Application(middlewares=[_problems], client_max_size=participant.config.limits.max_body_bytes)
    plane = http.ControlPlane(participant, Token(control_token) if control_token is not None else None)
    app[CONTROL_PLANE] = plane

    async def control(request: web.Request) -> web.StreamResponse:
        return await _send(request, await plane.handle(_request(request), _body(request)))

    async def stamp(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.setdefault(wire.HEADER_INCARNATION, participant.incarnation)

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

    return serve


@dataclass(frozen=True, slots=True)
class Server(serving.Server):
    """A server of an aiohttp application."""

    runner: web.AppRunner
    listening: asyncio.Server

    async def stop(self) -> None:
        """Close the sockets, let requests end, stop what runs."""
        self.listening.close()
        await self.runner.cleanup()
        await self.participant.close()


async def start(app: web.Application, *, host: str = "127.0.0.1", port: int = 0) -> Server:
    """Listen.

    Args:
        app: of ``create_app``.
        host: the address to listen on.
        port: 0 takes a free one.
    """
    participant = app[CONTROL_PLANE].participant
    # The access log would cost more than half of the throughput, and paths hold rollout ids.
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=serving.closing_s(participant))
    await runner.setup()
    server = runner.server
    if server is None:
        raise RuntimeError("the application has no server")

    def connection() -> web.RequestHandler:
        made = server()
        made.__class__ = _Handler  # The framework has no setting for the class of its connections.
        return made

    listening = await asyncio.get_running_loop().create_server(connection, host, port)
    return Server(participant, host, int(listening.sockets[0].getsockname()[1]), runner, listening)


class _Handler(web.RequestHandler):
    """A connection whose malformed requests, which reach no route, are refused with a problem document as well."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the refusal and close the connection (CKPT-ERR-008)."""
        super().handle_error(request, status, exc, message)  # It logs, and refuses to answer twice.
        kind = InvalidRequest if status < 500 else Internal
        response = _answer(exchange.refusal(kind("this is not HTTP as it is accepted here"), request.method.lower()))
        response.force_close()
        return response


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error of the application into a problem document."""
    operation = request.method.lower()
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        kind = _FRAMEWORK.get(error.status, InvalidRequest if error.status < 500 else ProtocolError)
        reason = error.reason or "the request is refused"
        return _answer(exchange.refusal(kind(reason, allow=error.headers.get("Allow")), operation))
    except exchange.ClientGone:
        return _answer(exchange.refusal(InvalidRequest("the body broke off"), operation))
    except Exception as error:
        return _answer(exchange.refusal(error, operation))


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
        except (ConnectionError, ClientError) as error:
            raise exchange.ClientGone from error

    return pieces


async def _send(request: web.Request, response: exchange.Response) -> web.StreamResponse:
    """Answer a request; a file is sent as it is, without the framework's ranges and compressed siblings."""
    if not isinstance(response.body, Path):
        return _answer(response)
    reply = web.StreamResponse(status=response.status, headers=response.headers)
    reply.content_type = response.media_type
    reply.content_length = (await asyncio.to_thread(response.body.stat)).st_size
    await reply.prepare(request)
    async for piece in exchange.file_pieces(response.body):
        await reply.write(piece)
    await reply.write_eof()
    return reply


def _answer(response: exchange.Response) -> web.Response:
    assert isinstance(response.body, bytes), "files are sent otherwise"
    headers = dict(response.headers)
    if response.status != 204:
        headers["Content-Type"] = response.media_type
    return web.Response(status=response.status, body=response.body, headers=headers)
