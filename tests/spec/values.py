# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies that draw values from the schemas: mostly valid ones, and near misses of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import strategies as st

from tests.spec.schemas import SCHEMAS, resolve, rust_validator_of

VISIBLE = st.characters(min_codepoint=0x21, max_codepoint=0x7E)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    SCALARS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
# What a careless sender puts in the place of a value.
WRONG: tuple[Any, ...] = (
    None,
    True,
    False,
    "3",
    "",
    0.5,
    0,
    -1,
    2**31,
    2**53,
    10**400,
    [],
    {},
    [None],
    "a\n",
    "é",
)


@cache
def valid(name: str) -> st.SearchStrategy[Any]:
    """Return valid values of one schema."""
    return _of(SCHEMAS[name], name)


def part(schema: Any) -> st.SearchStrategy[Any]:
    """Return valid values of one of the shared definitions."""
    return _of(schema, "common")


@dataclass(frozen=True)
class NearMiss:
    """A value with one thing changed in it.

    Args:
        value: what is sent.
        asked: what a validator is asked that takes 1.0 for an integer: 1.5 in the place of 1.0 asks the same strictly.
        change: the change in words.
    """

    value: Any
    asked: Any
    change: str


def near_misses(value: Any) -> Iterator[NearMiss]:
    """Return every value that differs from ``value`` in one place, in each way that a careless sender might choose."""
    for path, old in _places(value, ()):
        where = ".".join(map(str, path)) or "the whole"
        for new in (*WRONG, *_one_off(old)):
            yield NearMiss(with_(value, path, new), with_(value, path, new), f"{where}: {new!r:.40}")
        if not isinstance(old, dict | list):
            whole = float(old) if isinstance(old, int) and abs(old) < 2**51 else 1.0
            yield NearMiss(with_(value, path, whole), with_(value, path, whole + 0.5), f"{where}: {whole!r}")
        if path:
            left = _changed(value, path[:-1], lambda container, key=path[-1]: _without(container, key))
            yield NearMiss(left, left, f"{where}: left out")


def _of(schema: Any, inside: str) -> st.SearchStrategy[Any]:
    drawn = _unchecked(schema, inside)
    # Drawing goes by types, fields and patterns; these words are met by trying again.
    if schema.keys() & {"not", "oneOf", "if", "allOf", "uniqueItems", "propertyNames"}:
        return drawn.filter(rust_validator_of(schema).is_valid)
    return drawn


def _unchecked(schema: Any, inside: str) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        target, file = resolve(schema["$ref"], inside)
        return _of(target, file)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for word in ("anyOf", "oneOf"):
        if word in schema and "type" not in schema:
            return st.one_of([_of(branch, inside) for branch in schema[word]])
    return _BY_TYPE[schema["type"]](schema, inside)


def _object(schema: Any, inside: str) -> st.SearchStrategy[Any]:
    properties = {name: _of(part, inside) for name, part in schema.get("properties", {}).items()}
    if not properties:
        more = schema.get("additionalProperties", True)
        keys = st.sampled_from(["taxi", "a", "Frozen-Lake_1", "x/y:z"])
        return st.dictionaries(keys, ANYTHING if more is True else _of(more, inside), max_size=2)
    required = set(schema.get("required", ()))
    # Of alternatives that each require a field, one is drawn and the fields of the others are left out.
    branches = [set(branch["required"]) for branch in schema.get("oneOf", ())] or [set()]
    others = set().union(*branches)
    return st.one_of(
        [
            st.fixed_dictionaries(
                {name: part for name, part in properties.items() if name in required | branch},
                optional={name: part for name, part in properties.items() if name not in required | others},
            )
            for branch in branches
        ]
    )


def _array(schema: Any, inside: str) -> st.SearchStrategy[Any]:
    return st.lists(_of(schema["items"], inside), min_size=schema.get("minItems", 0), max_size=2)


def _string(schema: Any, _inside: str) -> st.SearchStrategy[Any]:
    if "pattern" in schema:
        return _matching(schema["pattern"], schema["maxLength"])
    longest = schema["maxLength"]
    some = st.text(st.characters(codec="utf-8"), min_size=schema.get("minLength", 0), max_size=min(longest, 8))
    return some | st.just("é" * min(longest, 4096))


@cache
def _matching(pattern: str, longest: int) -> st.SearchStrategy[str]:
    fitting = st.from_regex(pattern, alphabet=VISIBLE).filter(lambda text: len(text) <= longest)
    return fitting | fitting.map(lambda text: _stretched(text, pattern, longest))


def _stretched(text: str, pattern: str, longest: int) -> str:
    """Return the longest string that repeats the last character of ``text``, if the pattern lets it be."""
    long = text + text[-1] * (longest - len(text))
    return long if re.search(pattern, long) else text


def _integer(schema: Any, _inside: str) -> st.SearchStrategy[Any]:
    low, high = schema["minimum"], schema["maximum"]
    return st.sampled_from([low, high]) | st.integers(low, high)


def _number(_schema: Any, _inside: str) -> st.SearchStrategy[Any]:
    return st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**60), 2**60)


_BY_TYPE: dict[str, Callable[[Any, str], st.SearchStrategy[Any]]] = {
    "object": _object,
    "array": _array,
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda _schema, _inside: st.booleans(),
    "null": lambda _schema, _inside: st.none(),
}


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def _changed(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """Return a copy of ``value`` in which what lies at ``path`` is changed."""
    if not path:
        return change(value)
    copied = value.copy()
    copied[path[0]] = _changed(value[path[0]], path[1:], change)
    return copied


def with_(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of ``value`` with ``new`` at ``path``."""
    return _changed(value, path, lambda _old: new)


def _without(container: Any, key: Any) -> Any:
    if isinstance(container, dict):
        return {name: item for name, item in container.items() if name != key}
    return [item for place, item in enumerate(container) if place != key]


def _one_off(old: Any) -> Iterator[Any]:
    """Return a number moved by one, a string by one character, a list repeated, an object with a field too many."""
    if isinstance(old, dict):
        yield {**old, "x_unknown": None}
    elif isinstance(old, list):
        yield old + old
        if old:
            yield (old * 101)[:101]
    elif isinstance(old, str):
        yield from (old + "\n", old + "a", old[1:], old + "-a1", f" {old}", old + "é", old.upper())
    elif isinstance(old, int) and not isinstance(old, bool):
        yield from (old - 1, old + 1, str(old))
