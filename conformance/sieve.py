# SPDX-License-Identifier: Apache-2.0
"""Lets messages pass that certainly fit openapi.yaml; whatever it does not let pass is openapi-core's to judge.

A message passes where its path, method, parameters, headers, status and media type are declared, and its parameters,
headers and body fit their compiled schemas. Anything out of the ordinary (escaped paths, repeated headers, files) does
not pass. A sieve never refuses: it has no words for what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import parse_qsl

import jsonschema_rs

HTTP_METHODS = frozenset({"get", "put", "post", "delete", "options", "head", "patch", "trace"})
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}", re.ASCII)
_JSON_MEDIA_TYPE = re.compile(r"application/(?:[a-z.-]+\+)?json", re.ASCII)


@dataclass(frozen=True)
class _Field:
    """A parameter or a header: its name, in lower case if it is a header's, and its schema."""

    name: str
    required: bool
    integer: bool
    schema: jsonschema_rs.Draft202012Validator

    def fits(self, text: str | None) -> bool:
        if text is None:
            return not self.required
        if not self.integer:
            return self.schema.is_valid(text)
        return _INTEGER.fullmatch(text) is not None and self.schema.is_valid(int(text))


@dataclass(frozen=True)
class _Reply:
    """What a status answers with: headers, and the schema of the body by media type."""

    headers: tuple[_Field, ...]
    bodies: Mapping[str, jsonschema_rs.Draft202012Validator]


@dataclass(frozen=True)
class _Operation:
    name: str
    path: Mapping[str, _Field]
    query: Mapping[str, _Field]
    headers: tuple[_Field, ...]
    has_body: bool
    bodies: Mapping[str, jsonschema_rs.Draft202012Validator]
    replies: Mapping[int, _Reply]


class Sieve:
    """Compiled schemas of every message of an OpenAPI document.

    Args:
        document: the document, without any reference in it.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._compiled: dict[str, jsonschema_rs.Draft202012Validator] = {}
        self._routes: list[tuple[re.Pattern[str], dict[str, _Operation]]] = []
        for template, item in document["paths"].items():
            operations = {
                method: self._operation(value, item.get("parameters", ()))
                for method, value in item.items()
                if method in HTTP_METHODS
            }
            literal = re.sub(r"\\\{([a-z_]+)\\\}", r"(?P<\1>[^/%]+)", re.escape(template))
            self._routes.append((re.compile(literal), operations))

    def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Hashable | None:
        """Return what kind of request this is if it certainly fits, else None.

        Args:
            method: the HTTP method.
            url: with path and query; scheme and host are not looked at.
            headers: all that are sent.
            body: None if none is sent.
        """
        path, query = _split(url)
        found = self._find(method, path)
        named = _by_name(headers.items())
        if found is None or named is None:
            return None
        operation, values = found
        given = dict(query)
        if len(given) != len(query) or not given.keys() <= operation.query.keys() or "" in given.values():
            return None
        fits = (
            all(one.fits(values.get(name)) for name, one in operation.path.items())
            and all(one.fits(given.get(name)) for name, one in operation.query.items())
            and all(one.fits(named.get(one.name)) for one in operation.headers)
        )
        media = named.get("content-type", "")
        if not fits or not (_fits(operation.bodies, media, body) if operation.has_body else body is None):
            return None
        return operation.name, media

    def response(
        self, method: str, url: str, status: int, headers: Sequence[tuple[str, str]], body: bytes
    ) -> Hashable | None:
        """Return what kind of response this is if it certainly fits, else None.

        Args:
            method: the request's method.
            url: the request's.
            status: the HTTP status.
            headers: all of the response.
            body: its bytes.
        """
        found = self._find(method, _split(url)[0])
        named = _by_name(headers)
        if found is None or named is None:
            return None
        reply = found[0].replies.get(status)
        if reply is None or not all(one.fits(named.get(one.name)) for one in reply.headers):
            return None
        media = named.get("content-type", "").partition(";")[0].strip().lower()
        if not _fits(reply.bodies, media, body):
            return None
        return found[0].name, status, media

    # --- inside ---

    def _find(self, method: str, path: str) -> tuple[_Operation, Mapping[str, str]] | None:
        for pattern, operations in self._routes:
            match = pattern.fullmatch(path)
            if match is not None and method.lower() in operations:
                return operations[method.lower()], match.groupdict()
        return None

    def _operation(self, value: Mapping[str, Any], shared: Iterable[Mapping[str, Any]]) -> _Operation:
        parameters = [*shared, *value.get("parameters", ())]
        fields: dict[str, dict[str, _Field]] = {"path": {}, "query": {}, "header": {}, "cookie": {}}
        for one in parameters:
            fields[one["in"]][one["name"]] = self._field(one["name"], one)
        replies = {
            int(status): self._reply(reply) for status, reply in value["responses"].items() if status.isdecimal()
        }
        bodies, has_body = self._bodies(value.get("requestBody", {})), "requestBody" in value
        headers = tuple(fields["header"].values())
        return _Operation(value["operationId"], fields["path"], fields["query"], headers, has_body, bodies, replies)

    def _reply(self, reply: Mapping[str, Any]) -> _Reply:
        headers = tuple(self._field(name, one) for name, one in reply.get("headers", {}).items())
        return _Reply(headers, self._bodies(reply))

    def _bodies(self, holder: Mapping[str, Any]) -> dict[str, jsonschema_rs.Draft202012Validator]:
        return {
            media: self._schema(one["schema"])
            for media, one in holder.get("content", {}).items()
            if _JSON_MEDIA_TYPE.fullmatch(media)
        }

    def _field(self, name: str, one: Mapping[str, Any]) -> _Field:
        key = name if one.get("in", "header") != "header" else name.lower()
        schema = one["schema"]
        return _Field(key, bool(one.get("required")), _is_integer(schema), self._schema(schema))

    def _schema(self, schema: Mapping[str, Any]) -> jsonschema_rs.Draft202012Validator:
        text = json.dumps(schema, sort_keys=True)
        if text not in self._compiled:
            self._compiled[text] = jsonschema_rs.Draft202012Validator(dict(schema))
        return self._compiled[text]


def _split(url: str) -> tuple[str, list[tuple[str, str]]]:
    """Return path and query of a URL."""
    rest = url.partition("://")[2]
    path, _, query = ("/" + rest.partition("/")[2]).partition("?")
    return path, parse_qsl(query, keep_blank_values=True) if query else []


def _by_name(headers: Iterable[tuple[str, str]]) -> dict[str, str] | None:
    """Return headers by name in lower case, or None if one comes twice."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = dict(pairs)
    return named if len(named) == len(pairs) else None


def _fits(bodies: Mapping[str, jsonschema_rs.Draft202012Validator], media: str, body: bytes | None) -> bool:
    schema = bodies.get(media)
    if schema is None or not body:
        return False
    try:
        return schema.is_valid(json.loads(body, parse_constant=_refuse))
    except ValueError:
        return False


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _is_integer(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "integer" or any(_is_integer(one) for one in schema.get("allOf", ()))
