# SPDX-License-Identifier: Apache-2.0
"""The typed request of a body: judged by its schema, on a thread and in pieces where it is long.

The libraries that judge a value and make a message of it keep the interpreter's lock until they are done: with the ten
thousand rollouts of a restore for some tens of milliseconds, in which the event loop would serve nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema_rs
from pydantic import ValidationError

import spec
from reference_gym.participant.errors import InvalidRequest
from reference_gym.participant.jsontext import NotJson, decode
from reference_gym.participant.result import validator
from reference_gym.participant.slices import Rests
from spec.messages import MESSAGES

LARGE = 64 * 1024
"""A body beyond so many bytes is read on a thread."""
PIECE = 200
"""How many items of a list are judged at once."""


def read_json(data: bytes) -> Any:
    """Return the JSON value of a body.

    Raises:
        InvalidRequest: it is not JSON.
    """
    try:
        return decode(data)
    except NotJson as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def read_message(schema: str, data: bytes) -> Any:
    """Return the typed request of a body.

    Raises:
        InvalidRequest: it is not JSON or does not match its schema; the detail names the first offending field.
    """
    value = read_json(data)
    long, rests = _long_lists(schema, value), Rests()
    if not long:
        return _judged(schema, value)
    short = {**value, **{name: items[:PIECE] for name, items in long.items()}}
    message = _judged(schema, short)
    whole = {}
    for name, items in long.items():
        found = list(getattr(message, name))
        for begin in range(PIECE, len(items), PIECE):
            rests.rest()
            piece = _judged(schema, {**short, name: items[begin : begin + PIECE]}, {name: begin})
            found += getattr(piece, name)
        whole[name] = tuple(found)
    return message.model_copy(update=whole)


async def read_large(schema: str, data: bytes) -> Any:
    """Return what ``read_message`` does; a large body is read on a thread, so that others are served meanwhile."""
    if len(data) <= LARGE:
        return read_message(schema, data)
    return await asyncio.to_thread(read_message, schema, data)


def _long_lists(schema: str, value: Any) -> dict[str, list[Any]]:
    """Return the lists of a request that are judged in pieces; one that is longer than it may be is judged whole."""
    if not isinstance(value, dict):
        return {}
    known = spec.load("1.0").schemas[schema]["properties"]
    return {
        name: items
        for name, items in value.items()
        if isinstance(items, list) and PIECE < len(items) <= known.get(name, {}).get("maxItems", 0)
    }


def _judged(schema: str, value: Any, begins: Mapping[str, int] | None = None) -> Any:
    """Return the message of a value, in which a list may be a piece of a longer one."""
    try:
        validator(schema).validate(value)
        return MESSAGES[schema].of(value)
    except jsonschema_rs.ValidationError as error:
        where = _where(error.instance_path, begins or {}) or "the body"
        raise InvalidRequest(f"{where}: {error.message[:500]}") from error
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise InvalidRequest(f"{_where(fault['loc'], begins or {})}: {fault['msg'][:500]}") from error


def _where(path: Sequence[str | int], begins: Mapping[str, int]) -> str:
    steps = list(path)
    if len(steps) > 1 and isinstance(steps[1], int):
        steps[1] += begins.get(str(steps[0]), 0)
    return "/".join(map(str, steps))
