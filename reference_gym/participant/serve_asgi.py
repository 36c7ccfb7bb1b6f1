# SPDX-License-Identifier: Apache-2.0
"""The routes of a participant as a plain ASGI application, for FastAPI, Starlette and whatever else speaks ASGI.

It imports no framework and no server. Either it is put in front of the Gym's own application, or mounted in it::

    served = serve_asgi.create_app(participant, control_token=token, inner=app)    # in front: everything is set
    app.mount("/gym-checkpoint", serve_asgi.create_app(participant, control_token=token))

In front of an application it answers what is the protocol's, errors included, and hands everything else on; a body for
that has to arrive like any other (``max_silence_ms``), and may be bounded.
A mounted one sees no lifespan: then the host ends the participant with ``await participant.close()``. A server for it
that drains on SIGTERM is ``serve_uvicorn``; another server has to keep listening while ``serving.drain`` runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import quote

from reference_gym.participant import exchange, http
from reference_gym.participant.auth import Token
from reference_gym.participant.errors import MethodNotAllowed, NotFound
from reference_gym.participant.exchange import ClientGone, Request, Response
from reference_gym.participant.service import Participant

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class Application:
    """An ASGI application that serves a participant; made by ``create_app``."""

    def __init__(
        self, participant: Participant, plane: http.ControlPlane, inner: App | None, inner_body_bytes: int | None
    ) -> None:
        self.participant = participant
        self._plane = plane
        self._inner = inner
        self._inner_body_bytes = inner_body_bytes
        self._calls: dict[str, dict[str, http.DataCall]] = {}

    def add(self, method: str, path: str, call: http.DataCall) -> None:
        """Serve a call of the data plane.

        Args:
            method: e.g. ``POST``.
            path: the whole path, e.g. ``/gym-conformance/v1/effect``.
            call: what answers.
        """
        self._calls.setdefault(path, {})[method] = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope."""
        path = self._own(scope) if scope["type"] == "http" else None
        if path is None and self._inner is not None:
            if scope["type"] == "http":
                receive = self._bounded(receive)
            await self._inner(scope, receive, send)
        elif scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._serve(_request(scope, path or _raw_path(scope)), receive, send)

    def _own(self, scope: Scope) -> str | None:
        """Return the path of a request that is served here, as the protocol spells it; None: it is not ours.

        What the host or a proxy has put before it is named by ``root_path``.
        """
        for path in _tails(_raw_path(scope), scope.get("root_path", "")):
            if path == http.ROOT or path.startswith(f"{http.ROOT}/") or path in self._calls:
                return path
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """Return what the inner application receives: it is as if the client had gone when its body does not arrive.

        Frameworks read bodies before they look for a token, and wait for them for ever.
        """
        pace = exchange.Pace(self.participant.config.limits.max_silence_ms / 1000)
        most = self._inner_body_bytes
        more, gone = True, False

        async def bounded() -> MutableMapping[str, Any]:
            nonlocal more, gone
            if gone:
                return {"type": "http.disconnect"}
            if not more:
                return await receive()
            try:
                async with asyncio.timeout_at(pace.deadline()):
                    message = await receive()
            except TimeoutError:
                gone = True
                return {"type": "http.disconnect"}
            more = bool(message.get("more_body", False))
            pace.size += len(message.get("body", b""))
            gone = most is not None and pace.size > most
            return {"type": "http.disconnect"} if gone else message

        return bounded

    async def _serve(self, request: Request, receive: Receive, send: Send) -> None:
        try:
            response = await self._answer(request, _body(receive))
            await _send(response, send)
        except ClientGone:
            return

    async def _answer(self, request: Request, body: exchange.Body) -> Response:
        calls = self._calls.get(request.path)
        if calls is None and request.path.startswith(f"{http.ROOT}/"):
            return await self._plane.handle(request, body)
        if calls is not None and request.method in calls:
            return await calls[request.method].handle(request, body)
        error = (
            NotFound("there is nothing at this path")
            if calls is None
            else MethodNotAllowed(f"{request.method} is not served here", allow=", ".join(sorted(calls)))
        )
        return exchange.refusal(error, request.method.lower())


def create_app(
    participant: Participant,
    *,
    control_token: str | None,
    inner: App | None = None,
    inner_body_bytes: int | None = None,
) -> Application:
    """Return an application that serves a participant; the author adds data-plane routes with ``add``.

    Args:
        participant: what is served.
        control_token: the bearer token of the control plane; None only for a server on loopback.
        inner: the Gym's own application, which gets everything that is not the protocol's, its lifespan included.
        inner_body_bytes: beyond so many bytes of a body its client counts as gone; None: it bounds them itself.
    """
    token = Token(control_token) if control_token is not None else None
    return Application(participant, http.ControlPlane(participant, token), inner, inner_body_bytes)


def _raw_path(scope: Scope) -> str:
    """Return the path as it was sent, percent-encoded, with everything before it that a host has cut off."""
    raw = scope.get("raw_path")
    if raw is not None:
        return _origin(bytes(raw).decode("latin-1"))
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return quote(path if path.startswith(root) else root + path)


def _origin(target: str) -> str:
    """Return the path of a request target, which may be in absolute form."""
    scheme, found, rest = target.partition("://")
    if target.startswith("/") or not found or not scheme.isalnum():
        return target
    return f"/{rest.partition('/')[2]}"


def _tails(path: str, root: str) -> Iterator[str]:
    """Yield the path, and what is left of it when whole segments of ``root`` are taken from its front."""
    yield path
    taken = ""
    for segment in root.strip("/").split("/"):
        taken += f"/{segment}"
        if segment and path.startswith(f"{taken}/"):
            yield path[len(taken) :]


def _request(scope: Scope, path: str) -> Request:
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(_text(value))
    return Request(scope["method"], path, scope.get("query_string", b"").decode("latin-1"), headers)


def _text(value: bytes) -> str:
    """Return a header's value; what is no UTF-8 stays distinguishable and fits no form."""
    return value.decode("utf-8", "surrogateescape")


def _body(receive: Receive) -> exchange.Body:
    async def pieces() -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            more = message.get("more_body", False)
            if piece := message.get("body", b""):
                yield piece

    return pieces


async def _send(response: Response, send: Send) -> None:
    headers = dict(response.headers)
    body = response.body
    if response.status != 204:
        headers["Content-Type"] = response.media_type
        headers["Content-Length"] = str(len(body) if isinstance(body, bytes) else body.size)
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    try:
        await send({"type": "http.response.start", "status": response.status, "headers": encoded})
        if not isinstance(body, bytes):
            async for piece in body.pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": body if isinstance(body, bytes) else b"", "more_body": False})
    finally:
        if not isinstance(body, bytes):
            await body.close()


async def _live(receive: Receive, send: Send) -> None:
    """Follow the lifespan of a server where no inner application does."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
