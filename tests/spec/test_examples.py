# SPDX-License-Identifier: Apache-2.0
"""Every example is valid or invalid as filed, for two validators and for the typed messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest

from spec.messages import MESSAGES
from tests.spec.schemas import MESSAGE_NAMES, SCHEMAS, V1, rust_validator, validator

EXAMPLES = V1 / "examples"


def filed(kind: str) -> list[Any]:
    """Return a parameter per example file, named after it."""
    paths = sorted(EXAMPLES.glob(f"*/{kind}/*.json"))
    return [pytest.param(path, id=f"{path.parent.parent.name}/{path.stem}") for path in paths]


def accepted_by_message(name: str, value: Any) -> bool:
    """Return whether the typed message takes ``value`` as it is, unknown enumeration values refused."""
    try:
        MESSAGES[name].model_validate_json(json.dumps(value))
    except pydantic.ValidationError:
        return False
    return True


def verdicts(path: Path) -> dict[str, bool]:
    """Return what each of the three judges says of one example."""
    name, value = path.parent.parent.name, json.loads(path.read_text(encoding="utf-8"))
    return {
        "jsonschema": validator(name).is_valid(value),
        "jsonschema-rs": rust_validator(name).is_valid(value),
        "message": accepted_by_message(name, value),
    }


@pytest.mark.parametrize("path", filed("valid"))
def test_a_valid_example_is_valid(path: Path) -> None:
    """Each judge accepts an example that is filed as valid."""
    assert {"jsonschema": True, "jsonschema-rs": True, "message": True} == verdicts(path)


@pytest.mark.parametrize("path", filed("invalid"))
def test_an_invalid_example_is_invalid(path: Path) -> None:
    """C14 and its kind: each judge refuses an example that is filed as invalid."""
    assert {"jsonschema": False, "jsonschema-rs": False, "message": False} == verdicts(path)


@pytest.mark.parametrize("name", MESSAGE_NAMES)
def test_a_schema_has_two_valid_examples_and_an_invalid_one(name: str) -> None:
    """No schema is without examples of both kinds."""
    assert 2 <= len(list((EXAMPLES / name / "valid").glob("*.json")))
    assert 1 <= len(list((EXAMPLES / name / "invalid").glob("*.json")))


def test_every_example_belongs_to_a_schema() -> None:
    """No directory of examples is left over from a schema that is gone."""
    assert set(MESSAGE_NAMES) == {path.name for path in EXAMPLES.iterdir()}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_itself_valid_and_names_itself(name: str) -> None:
    """Each schema file follows the 2020-12 meta-schema, and its $id is its file name under the version."""
    type(validator(name)).check_schema(SCHEMAS[name])
    assert f"https://gym-checkpoint.example/v1/schemas/{name}.json" == SCHEMAS[name]["$id"]


def test_every_result_in_an_example_matches_its_receipt() -> None:
    """The digests of the feed's examples are over exactly the bytes of the result string, and its content is valid."""
    from spec import wire

    pages = [json.loads(path.read_text()) for path in sorted((EXAMPLES / "results-page" / "valid").glob("*.json"))]
    for result in (result for page in pages for result in page["results"]):
        assert wire.result_digest(result["result"]) == result["receipt"]["digest"]
        assert validator("result").is_valid(json.loads(result["result"]))
