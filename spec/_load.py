# SPDX-License-Identifier: Apache-2.0
"""Read the data files of the specification, in a checkout and in an installed wheel alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from spec._model import Cell, Condition, ErrorSpec, Event, Requirement, Specification, StateMachine

SUPPORTED_VERSIONS: tuple[str, ...] = ("1.0",)

# The C form of the safe loader parses the requirements about ten times as fast; not every build of the library has it.
_SAFE_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DRAFTS = {"1.0": "1.0-draft"}
_PACKAGE = Path(__file__).resolve().parent


class SpecificationError(ValueError):
    """A data file of the specification is missing or contradicts itself."""


@cache
def load(version: str = "1.0") -> Specification:
    """Return the specification of one protocol version.

    Args:
        version: ``major.minor``, one of ``SUPPORTED_VERSIONS``.

    Raises:
        SpecificationError: the version is unknown, or a data file is missing or malformed.
    """
    if version not in SUPPORTED_VERSIONS:
        raise SpecificationError(f"version {version!r} is unknown; this package has {', '.join(SUPPORTED_VERSIONS)}")
    root = _PACKAGE / f"v{version.split('.')[0]}"
    schemas = {path.stem: _json(path) for path in sorted((root / "schemas").glob("*.json"))}
    return Specification(
        version=_DRAFTS.get(version, version),
        requirements=_requirements(root),
        errors=_errors(root),
        machine=_machine(root),
        schemas=schemas,
        openapi=_bundle(_openapi_path(root), schemas),
        root=root,
    )


def _openapi_path(root: Path) -> Path:
    """Return the OpenAPI document: beside the package in a checkout, inside it in a wheel."""
    for path in (root / "openapi.yaml", _PACKAGE.parent / "openapi.yaml"):
        if path.is_file():
            return path
    raise SpecificationError("openapi.yaml is neither in the package nor beside it")


def _yaml(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_SAFE_LOADER)  # noqa: S506 - it is a safe loader
    except (OSError, yaml.YAMLError) as error:
        raise SpecificationError(f"{path.name}: {error}") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecificationError(f"{path.name}: {error}") from error


def _requirements(root: Path) -> Mapping[str, Requirement]:
    found: dict[str, Requirement] = {}
    for entry in _yaml(root / "requirements.yaml"):
        try:
            requirement = Requirement(**{**entry, "checks": tuple(entry.get("checks", ()))})
        except TypeError as error:
            raise SpecificationError(f"requirement {entry.get('id')}: {error}") from error
        if requirement.id in found:
            raise SpecificationError(f"requirement {requirement.id} is there twice")
        if sum(map(bool, (requirement.checks, requirement.planned, requirement.excluded))) != 1:
            raise SpecificationError(f"requirement {requirement.id}: exactly one of checks, planned, excluded")
        found[requirement.id] = requirement
    return found


def _errors(root: Path) -> Mapping[str, ErrorSpec]:
    rows = [{**row, "indefinite_for": frozenset(row.get("indefinite_for", ()))} for row in _yaml(root / "errors.yaml")]
    return {row["code"]: ErrorSpec(**row) for row in rows}


def _machine(root: Path) -> StateMachine:
    data = _yaml(root / "state-machine.yaml")
    return StateMachine(
        phases=data["phases"],
        ids=data["ids"],
        operations=data["operations"],
        cells=tuple(cell for row in data["cells"] for cell in _cells(row)),
        events=tuple(event for row in data["events"] for event in _events(row)),
    )


def _condition(row: Mapping[str, Any]) -> Condition:
    facts = {name: tuple(v) if isinstance(v, list) else (v,) for name, v in row.get("when", {}).items()}
    return Condition(facts)


def _cells(row: Mapping[str, Any]) -> Iterator[Cell]:
    rest = {key: row[key] for key in ("gate", "ends", "state", "error", "item") if key in row}
    for phase, id in product(row["phases"], row.get("ids", [None])):
        yield Cell(row["operation"], phase, id, _condition(row), row["answer"], row.get("next", phase), **rest)


def _events(row: Mapping[str, Any]) -> Iterator[Event]:
    rest = {key: row[key] for key in ("gate", "ends", "state", "impossible") if key in row}
    for phase in row["phases"]:
        yield Event(row["event"], phase, _condition(row), row.get("next", phase), **rest)


def _bundle(path: Path, schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the OpenAPI document with every schema file taken into its components, under the file's stem."""
    document = _yaml(path) or {}
    components = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in schemas.items():
        components[name] = _rewrite({k: v for k, v in schema.items() if k not in ("$id", "$schema")}, name)
    bundled: dict[str, Any] = _rewrite(document, None)
    return bundled


def _rewrite(node: Any, inside: str | None) -> Any:
    """Return ``node`` with references to schema files turned into references to components.

    Args:
        node: any JSON value.
        inside: the stem of the schema file that the node comes from, for its references to itself.
    """
    if isinstance(node, list):
        return [_rewrite(item, inside) for item in node]
    if not isinstance(node, dict):
        return node
    done = {key: _rewrite(value, inside) for key, value in node.items() if key != "$ref"}
    if isinstance(node.get("$ref"), str):
        done["$ref"] = _target(node["$ref"], inside)
    elif "$ref" in node:
        done["$ref"] = _rewrite(node["$ref"], inside)
    return done


def _target(ref: str, inside: str | None) -> str:
    file, _, pointer = ref.partition("#")
    if not file and (inside is None or ref.startswith("#/components/")):
        return ref
    stem = Path(file).stem if file else inside
    return f"#/components/schemas/{stem}{pointer}"
