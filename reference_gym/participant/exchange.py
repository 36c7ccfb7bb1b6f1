# SPDX-License-Identifier: Apache-2.0
"""One exchange over HTTP, whatever serves it: request, response, how a body is read, and problem documents."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from reference_gym.participant.config import Limits
from reference_gym.participant.core import Caller
from reference_gym.participant.errors import (
    AdmissionClosed,
    Internal,
    InvalidRequest,
    PayloadTooLarge,
    ProtocolError,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
)
from reference_gym.participant.jsontext import encode
from spec import wire

logger = logging.getLogger(__name__)

JSON_TYPE = "application/json"
BYTES_TYPE = "application/octet-stream"
PIECE = 1024 * 1024
SLOWEST = 16 * 1024
"""Bytes per second: a body that comes more slowly for long is given up."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_EPOCH = re.compile(r"[1-9][0-9]{0,14}")
_RETRY_AFTER_MS = 1_000

Body = Callable[[], AsyncIterator[bytes]]
"""Yields a body as far as it is asked for; raises ``ClientGone`` when the rest of it will not come."""


class ClientGone(Exception):
    """The client went away while its body was read: nothing was begun, and nobody is there to be answered."""


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


class OpenFile:
    """A file that is sent as it is; made by ``open_file``, ended by ``close``."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield its bytes, in pieces of at most ``PIECE`` bytes."""
        while piece := await asyncio.to_thread(self._file.read, PIECE):
            yield piece

    async def close(self) -> None:
        """Close it."""
        await asyncio.to_thread(self._file.close)


async def open_file(path: Path) -> OpenFile:
    """Open a file that is to be sent; raises ``FileNotFoundError``."""

    def work() -> OpenFile:
        file = path.open("rb")
        return OpenFile(file, os.fstat(file.fileno()).st_size)

    return await asyncio.to_thread(work)


@dataclass(frozen=True, slots=True)
class Response:
    """One response: ``body`` is the whole body, or a file, which whoever sends the response closes."""

    status: int
    body: bytes | OpenFile = b""
    media_type: str = JSON_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)


class Pace:
    """How a body has to arrive, counted from the first question for it.

    Args:
        silence_s: for how long nothing of it may come, and by how much it may be slower than ``SLOWEST``, in seconds.
    """

    def __init__(self, silence_s: float) -> None:
        self.size = 0
        self._silence_s = silence_s
        self._began: float | None = None

    def deadline(self) -> float:
        """Return the time of the event loop at which the next piece is late."""
        now = asyncio.get_running_loop().time()
        if self._began is None:
            self._began = now
        return min(now, self._began + self.size / SLOWEST) + self._silence_s


async def arriving(body: Body, silence_s: float) -> AsyncIterator[bytes]:
    """Yield a body as it comes (CKPT-TIME-015).

    Args:
        body: yields it, however long that takes.
        silence_s: see ``Pace``.

    Raises:
        Unavailable: it does not arrive in time.
    """
    pace, pieces = Pace(silence_s), body()
    while True:
        try:
            async with asyncio.timeout_at(pace.deadline()):
                piece = await anext(pieces, None)
        except TimeoutError as error:
            raise Unavailable("the body does not arrive in time") from error
        if piece is None:
            return
        pace.size += len(piece)
        yield piece


async def read_body(request: Request, body: Body, limits: Limits) -> bytes:
    """Return the whole body.

    Raises:
        PayloadTooLarge: it is longer than ``max_body_bytes``, whether its length was declared or not.
        UnsupportedMediaType: it is no JSON, or in a content coding.
        Unavailable: it does not arrive in time.
    """
    limit, silence_s = limits.max_body_bytes, limits.max_silence_ms / 1000
    require_size(request, limit)
    pieces: list[bytes] = []
    size = 0
    async for piece in arriving(body, silence_s):
        size += len(piece)
        if size > limit:
            raise PayloadTooLarge(f"the body is larger than max_body_bytes {limit}")
        pieces.append(piece)
    require_type(request, JSON_TYPE)
    return b"".join(pieces)


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


def require_size(request: Request, limit: int) -> None:
    """Refuse a body whose declared length is beyond ``limit`` bytes; raises ``PayloadTooLarge``."""
    length = request.header("content-length")
    if length is not None and length.isdecimal() and int(length) > limit:
        raise PayloadTooLarge(f"the body is larger than {limit} bytes")


def require_type(request: Request, media_type: str) -> None:
    """Refuse a body of another media type, or in a content coding; raises ``UnsupportedMediaType``."""
    coding = (request.header("content-encoding") or "identity").strip().lower()
    if coding != "identity":
        raise UnsupportedMediaType("the body must be sent without a content coding")
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
