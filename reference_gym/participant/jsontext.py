# SPDX-License-Identifier: Apache-2.0
"""JSON text, read strictly and written exactly.

Reading refuses what a lenient parser would let through: duplicate keys, NaN and infinities, lone surrogates,
nesting beyond ``MAX_DEPTH``, bytes that are not UTF-8.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 200
"""How deeply objects and arrays may be nested."""


class NotJson(ValueError):
    """The text is not JSON as it is accepted here; the message says what is wrong."""


class NotRepresentable(ValueError):
    """The value has no exact JSON text in UTF-8."""


def decode(data: bytes) -> Any:
    """Return the value of JSON text.

    Raises:
        NotJson: with the first thing that is wrong.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except NotJson:
        raise
    except UnicodeDecodeError as error:
        raise NotJson(f"the text is not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise NotJson(f"nested more than {MAX_DEPTH} deep") from error
    except ValueError as error:
        raise NotJson(str(error)) from error
    if b"\\ud" in data or b"\\uD" in data:
        _no_surrogates(value)
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _not_deep(value)
    return value


def encode(value: Any) -> bytes:
    """Return the compact JSON text of a value in UTF-8.

    Raises:
        NotRepresentable: it holds NaN, an infinity, a lone surrogate, or something that is no JSON value.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    except (ValueError, TypeError, RecursionError) as error:
        raise NotRepresentable(str(error)) from error


def encode_private(value: Any) -> bytes:
    """Return JSON text for this program's own files: exact also for lone surrogates, NaN and infinities.

    Raises:
        NotRepresentable: it holds something that is no JSON value.
    """
    try:
        return encode(value)
    except NotRepresentable:
        pass
    try:
        return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    except (ValueError, TypeError, RecursionError) as error:
        raise NotRepresentable(str(error)) from error


def decode_private(text: bytes) -> Any:
    """Return the value that ``encode_private`` wrote.

    Raises:
        NotJson: it did not write this.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise NotJson(f"the key {key!r} is there twice")
            seen.add(key)
    return found


def _no_constant(name: str) -> NoReturn:
    raise NotJson(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise NotJson(f"the number {text[:40]} is too large")
    return value


def _no_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise NotJson("a string holds a lone surrogate") from error


def _not_deep(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return
    raise NotJson(f"nested more than {MAX_DEPTH} deep")


def is_integer(value: object, low: int, high: int) -> bool:
    """Whether `value` is a JSON integer within `low` … `high` (true and 1.0 are none)."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
