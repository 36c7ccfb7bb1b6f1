# SPDX-License-Identifier: Apache-2.0
"""The routes of a participant in an aiohttp application, and a server of it that drains when it is told to stop.

Every error of the application is a problem document, those of the framework included.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from reference_gym.participant import http
from reference_gym.participant.auth import Token, require_token
from reference_gym.participant.errors import (
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    ProtocolError,
    UnsupportedMediaType,
)
from reference_gym.participant.jsontext import encode
from reference_gym.participant.machine import EndedAs, Phase
from reference_gym.participant.service import Participant

JsonHandler = Callable[[web.Request, Any], Awaitable[Any]]
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
        return _answer(await plane.handle(_request(request), request.content.iter_any))

    app.router.add_route("*", "/gym-checkpoint/{path:.*}", control)
    return app


def data_plane(
    participant: Participant, token: str | None, handler: JsonHandler, *, schema: str | None = None
) -> Handler:
    """Return a route handler for a JSON call of the data plane.

    Args:
        participant: whose limits hold.
        token: the bearer token of the data plane; None only for a server on loopback.
        handler: gets the request and the JSON body (None for a GET), returns a JSON value or a response of its own; the
            refusals that it raises become problem documents.
        schema: the name of a schema of the specification that the body must match, e.g. ``probe-request``; the handler
            then gets the typed message.
    """
    held = Token(token) if token is not None else None

    async def serve(request: web.Request) -> web.StreamResponse:
        given = _request(request)
        require_token(given.header("authorization"), held)
        body: Any = None
        if request.method not in ("GET", "HEAD"):
            limit = participant.config.limits.max_body_bytes
            data = await http.read_body(given, request.content.iter_any, limit)
            body = http.read_json(data) if schema is None else http.read_message(schema, given, data)
        reply = await handler(request, body)
        if isinstance(reply, web.StreamResponse):
            return reply
        return _answer(http.Response(200, encode(reply)))

    return serve


@dataclass(frozen=True, slots=True)
class Server:
    """A listening server: ``url`` is its address, ``port`` the port that it got."""

    participant: Participant
    runner: web.AppRunner
    listening: asyncio.Server
    host: str
    port: int

    @property
    def url(self) -> str:
        """The address without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def drain(self) -> None:
        """Stop admitting; keep the control plane until a checkpoint is durable or the grace period is nearly over.

        The last part of ``shutdown_grace_ms`` is left for the requests that are under way (CKPT-SEC-018 to -021).
        """
        participant = self.participant
        clock = participant.clock
        deadline = clock.now() + participant.config.limits.shutdown_grace_ms * 0.8 / 1000
        participant.begin_draining()
        earlier = participant.machine.last

        def durable() -> bool:
            machine = participant.machine
            ended = machine.last is not earlier and machine.last is not None
            committed = ended and machine.last is not None and machine.last.ended_as is EndedAs.COMMITTED
            return committed or machine.phase is Phase.COMMITTED

        while not durable() and await participant.wait_move(deadline):
            pass

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
    grace = participant.config.limits.shutdown_grace_ms * 0.2 / 1000
    # The access log would cost more than half of the throughput, and paths hold rollout ids.
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=max(0.1, grace))
    await runner.setup()
    server = runner.server
    if server is None:
        raise RuntimeError("the application has no server")

    def connection() -> web.RequestHandler:
        made = server()
        made.__class__ = _Handler  # The framework has no setting for the class of its connections.
        return made

    listening = await asyncio.get_running_loop().create_server(connection, host, port)
    return Server(participant, runner, listening, host, int(listening.sockets[0].getsockname()[1]))


@contextlib.asynccontextmanager
async def serving(app: web.Application, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Server]:
    """Serve for as long as the block lasts."""
    server = await start(app, host=host, port=port)
    try:
        yield server
    finally:
        await server.stop()


async def serve_until_terminated(server: Server) -> None:
    """Serve until SIGTERM or SIGINT, then drain and stop; a second signal stops at once."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    again = asyncio.Event()

    def signalled() -> None:
        (again if told.is_set() else told).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    await told.wait()
    draining = asyncio.ensure_future(server.drain())
    stopping = asyncio.ensure_future(again.wait())
    await asyncio.wait([draining, stopping], return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, stopping):
        task.cancel()
    await server.stop()


class _Handler(web.RequestHandler):
    """A connection whose malformed requests, which reach no route, are refused with a problem document as well."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the refusal and close the connection (CKPT-ERR-008)."""
        super().handle_error(request, status, exc, message)  # It logs, and refuses to answer twice.
        kind = InvalidRequest if status < 500 else Internal
        response = _answer(http.refusal(kind("this is not HTTP as it is accepted here"), request.method.lower()))
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
        return _answer(http.refusal(kind(reason, allow=error.headers.get("Allow")), operation))
    except Exception as error:
        return _answer(http.refusal(error, operation))


def _request(request: web.Request) -> http.Request:
    headers: dict[str, list[str]] = {}
    for name, value in request.headers.items():
        headers.setdefault(name.lower(), []).append(value)
    raw = request.rel_url
    return http.Request(request.method, raw.raw_path, raw.raw_query_string, headers)


def _answer(response: http.Response) -> web.StreamResponse:
    if isinstance(response.body, Path):
        file = web.FileResponse(response.body, headers=response.headers)
        file.content_type = response.media_type
        return file
    headers = dict(response.headers)
    if response.status != 204:
        headers["Content-Type"] = response.media_type
    return web.Response(status=response.status, body=response.body, headers=headers)
