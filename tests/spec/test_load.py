# SPDX-License-Identifier: Apache-2.0
"""The specification reaches code whole and consistent."""

from __future__ import annotations

import json

import pytest

import spec


def test_an_unknown_version_is_refused_with_the_known_ones() -> None:
    """Loading a version that this package does not have names those that it has."""
    with pytest.raises(spec.SpecificationError, match=r"1\.0"):
        spec.load("9.9")


def test_loading_twice_gives_the_same_value() -> None:
    """The files are read once."""
    assert spec.load("1.0") is spec.load("1.0")


def test_the_bundled_openapi_document_refers_only_to_itself() -> None:
    """Every reference of the bundled document resolves inside it."""
    document = spec.load("1.0").openapi
    references = [r for r in _references(document) if isinstance(r, str)]
    assert references
    for reference in references:
        assert reference.startswith("#/"), reference
        node = document
        for part in reference[2:].split("/"):
            node = node[part.replace("~1", "/").replace("~0", "~")]


def test_every_schema_is_a_component_of_the_bundled_document() -> None:
    """A schema file that the bundle forgets would be invisible to whoever reads only the OpenAPI document."""
    specification = spec.load("1.0")
    assert set(specification.schemas) <= set(specification.openapi["components"]["schemas"])
    assert json.dumps(specification.openapi)


def test_a_cell_is_found_by_operation_phase_and_id() -> None:
    """The table answers the specimen: a commit in `preparing` is refused with `not_ready`."""
    cell = spec.load("1.0").machine.cell("commit", "preparing", "open", leave_out_blocked=False)
    assert ("refused", "not_ready", "preparing") == (cell.answer, cell.error, cell.next)


def test_a_cell_that_does_not_exist_is_an_error() -> None:
    """Looking up an open id in idle, where none is open, is a mistake of the caller."""
    with pytest.raises(LookupError):
        spec.load("1.0").machine.cell("commit", "idle", "open", leave_out_blocked=False)


def test_an_error_can_be_indefinite_on_some_operations_only() -> None:
    """`deadline_exceeded` on prepare changed nothing for good; on commit the work goes on."""
    error = spec.load("1.0").errors["deadline_exceeded"]
    assert (True, False) == (error.definite_on("prepare"), error.definite_on("commit"))


def _references(node: object) -> list[object]:
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [r for value in node.values() for r in _references(value)]
    if isinstance(node, list):
        return [r for value in node for r in _references(value)]
    return []
