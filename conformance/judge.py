# SPDX-License-Identifier: Apache-2.0
"""Judges single messages: each request and response against openapi.yaml, each problem against the error catalogue.

The authority is openapi-core, at a millisecond or more for a message. It judges the first message of each kind
(operation, status, media type), some of the others, and every one that a `Sieve` does not let pass.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from openapi_core import Config, OpenAPI
from openapi_core.datatypes import RequestParameters
from openapi_core.exceptions import OpenAPIError
from openapi_core.validation.request.validators import V31RequestBodyValidator, V31RequestParametersValidator
from openapi_core.validation.response.validators import V31ResponseDataValidator, V31ResponseHeadersValidator
from werkzeug.datastructures import Headers, ImmutableMultiDict

from conformance.sieve import Sieve
from spec import ErrorSpec
from spec import wire as names

HOST = "http://gym"
MAX_HEADS = 20_000
SAMPLED = 0.02
"""The share of the messages that pass the sieve and are judged by openapi-core all the same."""
FILE_MEDIA_TYPE = "application/octet-stream"
CHANGING_HEADERS = frozenset({"date", "content-length", "server"})


@dataclass
class _Request:
    """A request in the shape that openapi-core reads; the host is left out (`servers: /`)."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes | None
    host_url: str = HOST
    path: str = ""
    content_type: str = ""
    parameters: RequestParameters = field(default_factory=RequestParameters)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self.method = self.method.lower()
        self.path = parts.path
        headers = Headers(list(self.headers.items()))
        self.content_type = _media_type(headers)
        query = ImmutableMultiDict(parse_qsl(parts.query, keep_blank_values=True))
        self.parameters = RequestParameters(query=query, header=headers)


@dataclass(frozen=True)
class _Response:
    status_code: int
    headers: Headers
    content_type: str
    data: bytes


class Judge:
    """Validates single messages against the OpenAPI document and the error catalogue.

    Args:
        document: the self-contained OpenAPI document.
        errors: the error catalogue, by code.
        seed: chooses which messages are judged twice.
    """

    def __init__(self, document: Mapping[str, Any], errors: Mapping[str, ErrorSpec], seed: int = 0) -> None:
        inlined = _inline(document, document)
        self._sieve = Sieve(inlined)
        self._seen: set[Hashable] = set()
        self._random = random.Random(seed)
        self._bodies = _openapi(inlined, V31RequestBodyValidator, V31ResponseDataValidator)
        self._heads = _openapi(inlined, V31RequestParametersValidator, V31ResponseHeadersValidator)
        self._good_heads: set[Hashable] = set()
        self._errors = errors
        # openapi-core builds its validators lazily and keeps them; one message is judged at a time.
        self._lock = threading.Lock()

    def request_faults(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> list[str]:
        """Return what is wrong with a request, one sentence each; empty if it fits."""
        if self._passes(self._sieve.request(method, url, headers, body)):
            return []
        request = _Request(method, url, headers, body)
        with self._lock:
            faults = self._head_faults((method, url, *headers.items()), self._heads.iter_request_errors(request))
            if body == b"" and request.content_type == FILE_MEDIA_TYPE:
                return faults  # a file may be empty; openapi-core takes that for a missing body
            return faults + _sentences(self._bodies.iter_request_errors(request))

    def _passes(self, kind: Hashable | None) -> bool:
        """Say whether a message that the sieve let pass, as this kind, need not be judged any further."""
        if kind is None:
            return False
        with self._lock:
            if kind not in self._seen:
                self._seen.add(kind)
                return False
            return self._random.random() >= SAMPLED

    def _head_faults(self, head: Hashable, errors: Iterable[Exception]) -> list[str]:
        """Judge parameters or headers, once for equal ones: they repeat call after call, bodies do not."""
        if head in self._good_heads:
            return []
        faults = _sentences(errors)
        if not faults and len(self._good_heads) < MAX_HEADS:
            self._good_heads.add(head)
        return faults

    def response_faults(
        self,
        method: str,
        url: str,
        status: int,
        headers: Sequence[tuple[str, str]],
        body: bytes,
    ) -> list[str]:
        """Return what is wrong with the response to a request, one sentence each; empty if it fits."""
        if self._passes(self._sieve.response(method, url, status, headers, body)):
            return []
        request = _Request(method, url, {}, None)
        found = Headers(list(headers))
        response = _Response(status, found, _media_type(found), body)
        judged = [(name, value) for name, value in headers if name.lower() not in CHANGING_HEADERS]
        head = (method, url.partition("?")[0], status, *judged)
        with self._lock:
            faults = self._head_faults(head, self._heads.iter_response_errors(request, response))
            if body == b"" and response.content_type == FILE_MEDIA_TYPE:
                return faults
            return list(dict.fromkeys([*faults, *_sentences(self._bodies.iter_response_errors(request, response))]))

    def problem_faults(self, status: int, problem: Any, operation: str) -> dict[str, str]:
        """Return where a problem document disagrees with the error catalogue, by the requirement that it breaks.

        Args:
            status: the HTTP status of the response.
            problem: its body as JSON.
            operation: short name of the operation, since `definite` depends on it (`commit`, `restore`, …).
        """
        if not isinstance(problem, dict) or not isinstance(problem.get("code"), str):
            return {"CKPT-ERR-009": "the body of an error is a problem document with a `code`"}
        known = self._errors.get(problem["code"])
        if known is None:
            return {"CKPT-ERR-039": f"the error code {problem['code']!r} is in the catalogue"}
        faults: dict[str, str] = {}
        if status != known.status:
            faults["CKPT-ERR-010"] = f"{known.code} has status {known.status}, not {status}"
        if problem.get("retryable") is not known.retryable:
            faults["CKPT-ERR-011"] = f"{known.code} has retryable: {str(known.retryable).lower()}"
        if problem.get("definite") is not known.definite_on(operation):
            definite = str(known.definite_on(operation)).lower()
            faults["CKPT-ERR-012"] = f"{known.code} on {operation} has definite: {definite}"
        return faults


def _media_type(headers: Headers) -> str:
    """Return the media type without its parameters, which openapi-core does not look past."""
    return (headers.get("Content-Type") or "").partition(";")[0].strip().lower()


def _openapi(document: Mapping[str, Any], request_cls: type[Any], response_cls: type[Any]) -> OpenAPI:
    # The document itself is judged by the tests of the specification, not at every start.
    config = Config(
        spec_validator_cls=None,  # type: ignore[arg-type]  # None is handled, but not declared
        request_validator_cls=request_cls,
        response_validator_cls=response_cls,
        extra_media_type_deserializers={
            names.PROBLEM_MEDIA_TYPE: json.loads,
            # Files are judged by their digests; here they only have to be a string of bytes.
            FILE_MEDIA_TYPE: lambda content, **_: content.decode("latin-1"),
        },
    )
    return OpenAPI.from_dict(dict(document), config=config)


def _inline(node: Any, root: Mapping[str, Any]) -> Any:
    """Return a node with every reference into the document replaced by what it names; none of them is recursive."""
    if isinstance(node, list):
        return [_inline(item, root) for item in node]
    if not isinstance(node, Mapping):
        return node
    rest = {key: _inline(value, root) for key, value in node.items() if key != "$ref"}
    if not isinstance(node.get("$ref"), str):
        return rest | ({"$ref": _inline(node["$ref"], root)} if "$ref" in node else {})
    named: Any = root
    for part in node["$ref"].removeprefix("#/").split("/"):
        named = named[part.replace("~1", "/").replace("~0", "~")]
    named = _inline(named, root)
    rest.pop("description", None)
    return {"allOf": [named], **rest} if rest else named


def _sentences(errors: Any) -> list[str]:
    found: list[str] = []
    for error in errors:
        found.extend(_explain(error))
    return found


def _explain(error: Exception) -> list[str]:
    """Turn an openapi-core error and its causes into sentences with a place."""
    cause: BaseException | None = error
    while cause is not None:
        listed = getattr(cause, "schema_errors", None)
        if listed:
            return [f"{_place(item)}: {item.message[:300]}" for item in listed]
        cause = cause.__cause__
    text = str(error) or type(error).__name__
    if error.__cause__ is not None and isinstance(error, OpenAPIError):
        text += f" ({error.__cause__})"
    return [text[:400]]


def _place(item: Any) -> str:
    path = "/".join(str(part) for part in item.absolute_path)
    return f"/{path}"
