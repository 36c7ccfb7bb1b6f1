# SPDX-License-Identifier: Apache-2.0
"""The control plane over HTTP, without a web framework: routes, the order of checks, problem documents.

An adapter (``serve_aiohttp``, ``serve_asgi``) turns its request into a ``Request`` and a body, and a ``Response``
back. Checks come in the order of CKPT-ORDER-001: token; then form (size, media type, JSON, schema, headers); then
support (501); then the participant's own: incarnation, controller, checkpoint id, arguments, phase.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote

from reference_gym.participant import failpoints
from reference_gym.participant.auth import Token, require_token
from reference_gym.participant.core import Caller
from reference_gym.participant.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    Unsupported,
    UnsupportedVersion,
)
from reference_gym.participant.exchange import (
    BYTES_TYPE,
    Body,
    ClientGone,
    Request,
    Response,
    arriving,
    open_file,
    read_body,
    read_caller,
    refusal,
    require_size,
    require_type,
)
from reference_gym.participant.jsontext import encode
from reference_gym.participant.requests import read_json, read_large, read_message
from reference_gym.participant.result import validator
from reference_gym.participant.service import Participant
from spec import wire

T = TypeVar("T")
Handler = Callable[[Request, Any], Awaitable[Any]]
"""A call of the data plane: request and JSON body (None for a GET) in, a JSON value or a ``Response`` out."""

ROOT = "/gym-checkpoint"
_VERSION = re.compile(r"v(0|[1-9][0-9]{0,3})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,15}")
_QUERY: Mapping[str, Collection[str]] = {
    "list_rollouts": ("after", "limit", "state"),
    "results": ("after", "limit", "wait_ms"),
}
_STATES = frozenset({"running", "parked", "waiting_policy", "restart", "finished", "failed", "released", "retired"})


@dataclass(frozen=True, slots=True)
class Route:
    """One operation: its name, the method, who serves it, and the schema of its request."""

    operation: str
    method: str
    owns: str | None = None
    profile: str = "results"
    schema: str | None = None


_ROUTES: Mapping[tuple[str, ...], Sequence[Route]] = {
    ("capabilities",): [Route("capabilities", "GET")],
    ("checkpoint",): [Route("status", "GET")],
    ("checkpoint", "prepare"): [Route("prepare", "POST", profile="checkpoint", schema="prepare-request")],
    ("checkpoint", "commit"): [Route("commit", "POST", profile="checkpoint", schema="commit-request")],
    ("checkpoint", "resume"): [Route("resume", "POST", profile="checkpoint", schema="resume-request")],
    ("checkpoint", "abort"): [Route("abort", "POST", schema="abort-request")],
    ("checkpoint", "renew"): [Route("renew", "POST", profile="checkpoint", schema="renew-request")],
    ("checkpoint", "restore"): [Route("restore", "POST", profile="checkpoint", schema="restore-request")],
    ("retire",): [Route("retire", "POST", schema="retire-request")],
    ("rollouts",): [
        Route("list_rollouts", "GET", owns="rollouts"),
        Route("start", "POST", owns="rollouts", schema="start-request"),
    ],
    ("rollouts", "*"): [Route("get_rollout", "GET", owns="rollouts")],
    ("results",): [Route("results", "GET", owns="rollouts")],
    ("acks",): [Route("acks", "POST", owns="rollouts", schema="acks-request")],
    ("checkpoints", "*", "artifacts", "*"): [Route("get_artifact", "GET"), Route("put_artifact", "PUT")],
}


class ControlPlane:
    """Serves one participant under the protocol's prefix.

    Args:
        participant: what is served.
        token: the control plane's; None only for a server that listens on loopback alone.
    """

    def __init__(self, participant: Participant, token: Token | None) -> None:
        self.participant = participant
        self._token = token
        self._running: set[asyncio.Task[Any]] = set()
        self._gets: Mapping[str, Callable[[Mapping[str, str], Sequence[str]], Awaitable[Response]]] = {
            "capabilities": self._capabilities,
            "status": self._status,
            "list_rollouts": self._list_rollouts,
            "get_rollout": self._get_rollout,
            "results": self._results,
            "get_artifact": self._get_artifact,
        }
        # Now, because the first call of each operation would keep the event loop from all others.
        for schema in ("result", *(route.schema for routes in _ROUTES.values() for route in routes)):
            if schema is not None:
                validator(schema)

    async def handle(self, request: Request, body: Body) -> Response:
        """Answer one request; raises nothing but ``ClientGone``.

        Args:
            request: without its body.
            body: yields the body, as far as it is asked for.
        """
        operation = request.method.lower()
        try:
            require_token(request.header("authorization"), self._token)
            route, values = self._route(request)
            operation = route.operation
            query = _query(request, _QUERY.get(operation, ()))
            if route.operation in self._gets:
                response = await self._gets[route.operation](query, values)
            elif route.operation == "put_artifact":
                response = await self._put_artifact(request, values, body)
            else:
                response = await self._post(route, request, body)
        except ClientGone:
            raise
        except Exception as error:
            response = refusal(error, operation)
        # Refusals too: they tell of fences, of the controller, and of phases.
        await self.participant.settled()
        if failpoints.armed is not None:
            failpoints.reach(f"{operation}.answered")
        return stamped(response, self.participant)

    # --- routes -------------------------------------------------------------------------------------------------------

    def _route(self, request: Request) -> tuple[Route, list[str]]:
        """Return the operation and the values in its path.

        Raises:
            UnsupportedVersion: another major version (CKPT-VER-002).
            NotFound, MethodNotAllowed: nothing is served there, or not so.
        """
        if not request.path.startswith(f"{ROOT}/"):
            raise NotFound("there is nothing at this path")
        version, *segments = request.path[len(ROOT) + 1 :].split("/")
        if version != "v1":
            if _VERSION.fullmatch(version):
                raise UnsupportedVersion(f"version {version} is not offered here, v1 is")
            raise NotFound("there is nothing at this path")
        for pattern, routes in _ROUTES.items():
            if len(pattern) == len(segments) and all(p in ("*", s) for p, s in zip(pattern, segments, strict=True)):
                return self._method(routes, request.method), _values(pattern, segments)
        raise NotFound("there is nothing at this path")

    def _method(self, routes: Sequence[Route], method: str) -> Route:
        owns = self.participant.owns
        served = [route for route in routes if route.owns is None or route.owns in owns]
        if not served or not owns:
            raise NotFound("this participant does not own what this path is about")
        for route in served:
            if route.method == method:
                return route
        raise MethodNotAllowed(f"{method} is not served here", allow=", ".join(route.method for route in served))

    # --- mutating operations ------------------------------------------------------------------------------------------

    async def _post(self, route: Route, request: Request, body: Body) -> Response:
        data = await read_body(request, body, self.participant.config.limits)
        message = await read_large(str(route.schema), data)
        caller = read_caller(request)
        if route.profile not in self.participant.config.profiles:
            raise Unsupported(f"the profile {route.profile} is not offered here")
        operation: Callable[[Caller, Any], Coroutine[Any, Any, dict[str, Any]]]
        operation = getattr(self.participant, route.operation)
        return Response(200, encode(await self._outlive(operation(caller, message))))

    async def _put_artifact(self, request: Request, values: Sequence[str], body: Body) -> Response:
        participant = self.participant
        require_size(request, participant.config.limits.max_artifact_bytes)
        require_type(request, BYTES_TYPE)
        checkpoint_id, name = _artifact(values)
        caller = read_caller(request)
        upload = participant.begin_upload(caller, checkpoint_id, name)
        limits = participant.config.limits
        try:
            async for piece in arriving(body, limits.max_silence_ms / 1000):
                participant.take_upload(upload, piece)
                if upload.size > limits.max_artifact_bytes:
                    raise PayloadTooLarge("the artifact is larger than max_artifact_bytes")
            await self._outlive(participant.finish_upload(caller, upload))
        finally:
            upload.abandon()
        return Response(204)

    async def _outlive(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that ends although its client goes away (CKPT-REPEAT-015)."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _capabilities(self, _query: Mapping[str, str], _values: Sequence[str]) -> Response:
        return Response(200, encode(self.participant.capabilities()))

    async def _status(self, _query: Mapping[str, str], _values: Sequence[str]) -> Response:
        return Response(200, encode(self.participant.status()))

    async def _list_rollouts(self, query: Mapping[str, str], _values: Sequence[str]) -> Response:
        if (state := query.get("state")) is not None and state not in _STATES:
            raise InvalidRequest("state is not one of the states of a rollout")
        limit = _number(query, "limit", 1, 1_000_000)
        return Response(200, self.participant.rollouts_page(query.get("after", ""), limit, state))

    async def _get_rollout(self, _query: Mapping[str, str], values: Sequence[str]) -> Response:
        if not wire.is_rollout_id(values[0]):
            raise InvalidRequest("the path does not name a rollout id")
        return Response(200, encode(self.participant.rollout(values[0])))

    async def _results(self, query: Mapping[str, str], _values: Sequence[str]) -> Response:
        limit = _number(query, "limit", 1, 1_000_000)
        wait_ms = _number(query, "wait_ms", 0, 86_400_000) or 0
        return Response(200, await self.participant.results(query.get("after", ""), limit, wait_ms))

    async def _get_artifact(self, _query: Mapping[str, str], values: Sequence[str]) -> Response:
        checkpoint_id, name = _artifact(values)
        path = self.participant.artifact(checkpoint_id, name)
        try:
            return Response(200, await open_file(path), BYTES_TYPE)
        except FileNotFoundError as error:  # Another checkpoint has opened just now.
            raise NotFound(f"there is no artifact {name} of checkpoint {checkpoint_id}") from error


class DataCall:
    """One call of the data plane.

    Args:
        participant: whose limits hold.
        token: the bearer token of the data plane; None only for a server on loopback.
        handler: what answers; the refusals that it raises become problem documents.
        schema: the name of a schema of the specification that the body must match, e.g. ``probe-request``; the handler
            then gets the typed message.
    """

    def __init__(
        self, participant: Participant, token: str | None, handler: Handler, *, schema: str | None = None
    ) -> None:
        self.participant = participant
        self._token = Token(token) if token is not None else None
        self._handler = handler
        self._schema = schema
        if schema is not None:
            validator(schema)

    async def handle(self, request: Request, body: Body) -> Response:
        """Answer one request; raises nothing but ``ClientGone``."""
        try:
            require_token(request.header("authorization"), self._token)
            response = await self._answer(request, body)
        except ClientGone:
            raise
        except Exception as error:
            response = refusal(error, request.path)
        await self.participant.settled()  # Refusals too tell of what is recorded.
        failpoints.reach("call.answered")
        return response

    async def _answer(self, request: Request, body: Body) -> Response:
        given: Any = None
        if request.method not in ("GET", "HEAD"):
            data = await read_body(request, body, self.participant.config.limits)
            given = read_json(data) if self._schema is None else read_message(self._schema, data)
        reply = await self._handler(request, given)
        return reply if isinstance(reply, Response) else Response(200, encode(reply))


def stamped(response: Response, participant: Participant) -> Response:
    """Return a response that says of which incarnation it is (CKPT-ID-017)."""
    return replace(response, headers={**response.headers, wire.HEADER_INCARNATION: participant.incarnation})


def _values(pattern: Sequence[str], segments: Sequence[str]) -> list[str]:
    return [unquote(segment) for name, segment in zip(pattern, segments, strict=True) if name == "*"]


def _query(request: Request, names: Collection[str]) -> dict[str, str]:
    """Return the fields of the query.

    Raises:
        InvalidRequest: it cannot be read, or holds an unknown field or one twice (CKPT-ERR-040, CKPT-ERR-041).
    """
    found: dict[str, str] = {}
    try:
        pairs = parse_qsl(request.query, keep_blank_values=True, errors="strict", max_num_fields=100)
    except ValueError as error:
        raise InvalidRequest("the query is malformed") from error
    for name, value in pairs:
        if name in found:
            raise InvalidRequest(f"{name} is in the query twice")
        if name not in names:
            raise InvalidRequest("the query holds a field that this operation does not know")
        found[name] = value
    if len(found.get("after", "")) > 1024:
        raise InvalidRequest("after is longer than 1024 characters")
    return found


def _number(query: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    value = query.get(name)
    if value is None:
        return None
    if not _NUMBER.fullmatch(value) or not low <= int(value) <= high:
        raise InvalidRequest(f"{name} is not a number from {low} to {high}")
    return int(value)


def _artifact(values: Sequence[str]) -> tuple[str, str]:
    """Return the checkpoint id and the file name of an artifact's path (CKPT-ART-013)."""
    checkpoint_id, name = values
    try:
        wire.parse_checkpoint_id(checkpoint_id)
    except ValueError as error:
        raise InvalidRequest("the path does not name a checkpoint id") from error
    if not _NAME.fullmatch(name):
        raise InvalidRequest("the path does not name a flat file name")
    return checkpoint_id, name
