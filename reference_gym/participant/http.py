# SPDX-License-Identifier: Apache-2.0
"""The control plane over HTTP, without a web framework: routes, the order of checks, problem documents.

An adapter (``serve_aiohttp``) turns its framework's request into a ``Request`` and a body, and a ``Response``
back. Checks come in the order of CKPT-ORDER-001: token; then form (size, media type, JSON, schema, headers); then
support (501); then the participant's own: incarnation, controller, checkpoint id, arguments, phase.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote

import jsonschema_rs
from pydantic import ValidationError

from reference_gym.participant.auth import Token, require_token
from reference_gym.participant.errors import (
    AdmissionClosed,
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    ProtocolError,
    Unauthorized,
    Unavailable,
    Unsupported,
    UnsupportedMediaType,
    UnsupportedVersion,
)
from reference_gym.participant.jsontext import NotJson, decode, encode
from reference_gym.participant.result import validator
from reference_gym.participant.service import Caller, Participant
from spec import wire
from spec.messages import MESSAGES, Message

logger = logging.getLogger(__name__)
T = TypeVar("T")

JSON_TYPE = "application/json"
BYTES_TYPE = "application/octet-stream"
_ROOT = "/gym-checkpoint/"
_VERSION = re.compile(r"v(0|[1-9][0-9]{0,3})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_EPOCH = re.compile(r"[1-9][0-9]{0,14}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,15}")
_QUERY: Mapping[str, Collection[str]] = {
    "list_rollouts": ("after", "limit", "state"),
    "results": ("after", "limit", "wait_ms"),
}
_STATES = frozenset({"running", "parked", "waiting_policy", "restart", "finished", "failed", "released", "retired"})
_RETRY_AFTER_MS = 1_000

Body = Callable[[], AsyncIterator[bytes]]


@dataclass(frozen=True, slots=True)
class Request:
    """One request: ``path`` as it was sent (percent-encoded), ``headers`` by lower-case name, every value kept."""

    method: str
    path: str
    query: str
    headers: Mapping[str, Sequence[str]]

    def header(self, name: str) -> str | None:
        """Return a header that may be sent once.

        Raises:
            InvalidRequest: it was sent more than once.
        """
        values = self.headers.get(name.lower(), ())
        if len(values) > 1:
            raise InvalidRequest(f"the header {name} is there {len(values)} times")
        return values[0] if values else None


@dataclass(frozen=True, slots=True)
class Response:
    """One response: ``body`` is the whole body, or the path of a file that is sent."""

    status: int
    body: bytes | Path = b""
    media_type: str = JSON_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)


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

    async def handle(self, request: Request, body: Body) -> Response:
        """Answer one request; never raises but for cancellation.

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
        except Exception as error:
            response = refusal(error, operation)
        return self._stamped(response)

    # --- routes -------------------------------------------------------------------------------------------------------

    def _route(self, request: Request) -> tuple[Route, list[str]]:
        """Return the operation and the values in its path.

        Raises:
            UnsupportedVersion: another major version (CKPT-VER-002).
            NotFound, MethodNotAllowed: nothing is served there, or not so.
        """
        if not request.path.startswith(_ROOT):
            raise NotFound("there is nothing at this path")
        version, *segments = request.path[len(_ROOT) :].split("/")
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
        data = await read_body(request, body, self.participant.config.limits.max_body_bytes)
        message = read_message(str(route.schema), request, data)
        caller = read_caller(request)
        if route.profile not in self.participant.config.profiles:
            raise Unsupported(f"the profile {route.profile} is not offered here")
        operation: Callable[[Caller, Any], Coroutine[Any, Any, dict[str, Any]]]
        operation = getattr(self.participant, route.operation)
        return Response(200, encode(await self._outlive(operation(caller, message))))

    async def _put_artifact(self, request: Request, values: Sequence[str], body: Body) -> Response:
        participant = self.participant
        _require_size(request, participant.config.limits.max_artifact_bytes)
        _require_type(request, BYTES_TYPE)
        checkpoint_id, name = _artifact(values)
        caller = read_caller(request)
        upload = participant.begin_upload(caller, checkpoint_id, name)
        try:
            async for piece in body():
                upload.write(piece)
                if upload.size > participant.config.limits.max_artifact_bytes:
                    raise PayloadTooLarge("the artifact is larger than max_artifact_bytes")
            await self._outlive(participant.finish_upload(caller, upload))
        except OSError as error:
            raise participant.storage_error(error) from error
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
        return Response(200, self.participant.artifact(checkpoint_id, name), BYTES_TYPE)

    def _stamped(self, response: Response) -> Response:
        headers = {**response.headers, wire.HEADER_INCARNATION: self.participant.incarnation}
        return Response(response.status, response.body, response.media_type, headers)


# --- pieces that the data plane uses as well --------------------------------------------------------------------------


async def read_body(request: Request, body: Body, limit: int) -> bytes:
    """Return the whole body.

    Raises:
        PayloadTooLarge: it is longer than ``limit`` bytes, whether its length was declared or not.
        UnsupportedMediaType: it is no JSON.
    """
    _require_size(request, limit)
    pieces: list[bytes] = []
    size = 0
    async for piece in body():
        size += len(piece)
        if size > limit:
            raise PayloadTooLarge(f"the body is larger than max_body_bytes {limit}")
        pieces.append(piece)
    _require_type(request, JSON_TYPE)
    return b"".join(pieces)


def read_json(data: bytes) -> Any:
    """Return the JSON value of a body.

    Raises:
        InvalidRequest: it is not JSON.
    """
    try:
        return decode(data)
    except NotJson as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def read_message(schema: str, request: Request, data: bytes) -> Any:
    """Return the typed request of a body.

    Raises:
        InvalidRequest: it is not JSON or does not match its schema; the detail names the first offending field.
    """
    value = read_json(data)
    try:
        _validator(schema).validate(value)
        return _message(schema).of(value)
    except jsonschema_rs.ValidationError as error:
        where = "/".join(map(str, error.instance_path)) or "the body"
        raise InvalidRequest(f"{where}: {error.message[:500]}") from error
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise InvalidRequest(f"{'/'.join(map(str, fault['loc']))}: {fault['msg'][:500]}") from error


def read_caller(request: Request) -> Caller:
    """Return who calls.

    Raises:
        InvalidRequest: one of the three headers is missing or malformed (CKPT-ID-032 to CKPT-ID-034).
    """
    controller = _required(request, wire.HEADER_CONTROLLER_ID, _NAME)
    epoch = _required(request, wire.HEADER_CONTROLLER_EPOCH, _EPOCH)
    incarnation = _required(request, wire.HEADER_EXPECT_INCARNATION, _NAME)
    return Caller(wire.ControllerPair.of(int(epoch), controller), incarnation)


def refusal(error: Exception, operation: str) -> Response:
    """Return the problem document of whatever went wrong.

    Args:
        error: anything; what is no refusal is logged under a reference and told as ``internal``.
        operation: what was asked for.
    """
    if not isinstance(error, ProtocolError):
        reference = secrets.token_hex(4)
        logger.error("%s failed, reference %s", operation, reference, exc_info=error)
        error = Internal(f"an unforeseen failure; the log has it under reference {reference}")
    headers: dict[str, str] = {}
    problem = error.problem(operation)
    if (allow := problem.pop("allow", None)) is not None:
        headers["Allow"] = str(allow)
    if isinstance(error, AdmissionClosed | Unavailable):
        problem.setdefault("retry_after_ms", _RETRY_AFTER_MS)
        headers["Retry-After"] = str(-(-int(problem["retry_after_ms"]) // 1000))
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    problem["detail"] = str(problem["detail"]).encode("utf-8", "replace").decode()[:4000]
    return Response(error.status, encode(problem), wire.PROBLEM_MEDIA_TYPE, headers)


@cache
def _validator(schema: str) -> jsonschema_rs.Validator:
    return validator(schema)


def _message(schema: str) -> type[Message]:
    return MESSAGES[schema]


def _values(pattern: Sequence[str], segments: Sequence[str]) -> list[str]:
    return [unquote(segment) for name, segment in zip(pattern, segments, strict=True) if name == "*"]


def _require_size(request: Request, limit: int) -> None:
    length = request.header("content-length")
    if length is not None and length.isdecimal() and int(length) > limit:
        raise PayloadTooLarge(f"the body is larger than {limit} bytes")


def _require_type(request: Request, media_type: str) -> None:
    given = (request.header("content-type") or "").partition(";")[0].strip().lower()
    if given != media_type:
        raise UnsupportedMediaType(f"the body must be {media_type}")


def _required(request: Request, name: str, form: re.Pattern[str]) -> str:
    value = request.header(name)
    if value is None:
        raise InvalidRequest(f"the header {name} is missing")
    if not form.fullmatch(value):
        raise InvalidRequest(f"the header {name} is malformed")
    return value


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
