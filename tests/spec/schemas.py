# SPDX-License-Identifier: Apache-2.0
"""Validators over the schema files, in two libraries, for the tests of the specification."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs
import referencing.jsonschema
from jsonschema.protocols import Validator

BASE = "https://gym-checkpoint.example/v1/schemas/"
V1 = Path(__file__).resolve().parents[2] / "spec" / "v1"
SCHEMAS: Mapping[str, Any] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((V1 / "schemas").glob("*.json"))
}
MESSAGE_NAMES: tuple[str, ...] = tuple(name for name in SCHEMAS if name != "common")


@cache
def validator(name: str) -> Validator:
    """Return the ``jsonschema`` validator of one schema."""
    registry: Any = referencing.jsonschema.SchemaRegistry()
    for schema in SCHEMAS.values():
        registry = referencing.jsonschema.DRAFT202012.create_resource(schema) @ registry
    made: Validator = jsonschema.Draft202012Validator(SCHEMAS[name], registry=registry)
    return made


@cache
def rust_validator(name: str) -> Any:
    """Return the ``jsonschema-rs`` validator of one schema."""
    return rust_validator_of(SCHEMAS[name])


def rust_validator_of(schema: Any) -> Any:
    """Return the ``jsonschema-rs`` validator of a part of a schema file."""
    return jsonschema_rs.validator_for({"$id": BASE + "part.json", **schema}, registry=_rust_registry())


@cache
def _rust_registry() -> Any:
    return jsonschema_rs.Registry([(schema["$id"], schema) for schema in SCHEMAS.values()])


def resolve(ref: str, inside: str) -> tuple[Any, str]:
    """Return what a reference in the schema file ``inside`` points to, and the file in which that lies."""
    file, _, pointer = ref.partition("#")
    stem = Path(file).stem if file else inside
    node = SCHEMAS[stem]
    for part in filter(None, pointer.split("/")):
        node = node[part]
    return node, stem


def parts(value: Any, schema: Any, inside: str, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Return each place of a value together with the schema that describes it, references followed."""
    if "$ref" in schema:
        target, file = resolve(schema["$ref"], inside)
        yield from parts(value, target, file, path)
        return
    yield path, schema
    for branch in schema.get("anyOf", ()):
        if value is not None and branch.get("type") != "null":
            yield from parts(value, branch, inside, path)
    if isinstance(value, dict):
        for name, part in schema.get("properties", {}).items():
            if name in value:
                yield from parts(value[name], part, inside, (*path, name))
    if isinstance(value, list):
        for place, item in enumerate(value):
            yield from parts(item, schema["items"], inside, (*path, place))
