# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document is valid, and agrees with the schemas, the error catalogue and the requirements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import openapi_spec_validator
import pytest
from openapi_spec_validator.readers import read_from_filename

import spec
from spec import wire
from tests.spec.schemas import MESSAGE_NAMES, rust_validator

FILE = Path(__file__).resolve().parents[2] / "openapi.yaml"
METHODS = ("get", "put", "post", "delete", "patch")
OPERATION_IDS = {
    *("getCapabilities", "getCheckpoint", "prepare", "commit", "resume", "abort", "renew", "restore", "retire"),
    *("getArtifact", "putArtifact", "startRollouts", "listRollouts", "getRollout", "getResults", "ackResults"),
    "probeEffect",
}
CONTROLLER_HEADERS = {wire.HEADER_CONTROLLER_ID, wire.HEADER_CONTROLLER_EPOCH, wire.HEADER_EXPECT_INCARNATION}
SPECIFICATION = spec.load("1.0")


def operations() -> Mapping[str, tuple[str, str, Any]]:
    """Return path, method and operation by operation id, from the self-contained document."""
    paths = SPECIFICATION.openapi["paths"]
    found = [(path, method, item[method]) for path, item in paths.items() for method in METHODS if method in item]
    return {operation["operationId"]: (path, method, operation) for path, method, operation in found}


def resolved(node: Any) -> Any:
    """Return what a reference into the self-contained document points to."""
    while "$ref" in node:
        target: Any = SPECIFICATION.openapi
        for step in node["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        node = target
    return node


def responses(operation: Any) -> Iterator[tuple[int, Any]]:
    """Return status and response of one operation, references followed."""
    for status, response in operation["responses"].items():
        yield int(status), resolved(response)


EVERY = pytest.mark.parametrize("operation_id", sorted(OPERATION_IDS))


def test_the_document_is_valid_openapi() -> None:
    """The file with its references to the schemas, and the self-contained form, are both valid OpenAPI 3.1."""
    written, base = read_from_filename(str(FILE))
    openapi_spec_validator.validate(written, base_uri=base)
    openapi_spec_validator.validate(dict(SPECIFICATION.openapi))


def test_every_operation_is_there_and_nothing_else() -> None:
    """The operation ids are those that client, server and suite know."""
    assert OPERATION_IDS == operations().keys()
    for path, _, operation in operations().values():
        probe = operation["operationId"] == "probeEffect"
        assert probe == (path == wire.PROBE_PATH)
        assert probe or path.startswith(f"{wire.PREFIX}/")


def test_every_error_code_is_used_by_an_operation_and_none_is_unknown() -> None:
    """The catalogue and the operations name the same codes."""
    used = {code for _, _, operation in operations().values() for code in operation["x-error-codes"]}
    assert set(SPECIFICATION.errors) == used


def test_the_enumerations_of_the_schemas_are_those_of_the_data_files() -> None:
    """Error codes, phases and ways to end have one list each, written in a schema and in a data file alike."""
    definitions = SPECIFICATION.schemas["common"]["$defs"]
    assert list(SPECIFICATION.errors) == definitions["errorCode"]["enum"]
    assert list(SPECIFICATION.machine.phases) == definitions["phase"]["enum"]
    cells, events = SPECIFICATION.machine.cells, SPECIFICATION.machine.events
    assert {part.ends for part in (*cells, *events)} - {None} == set(definitions["endedAs"]["enum"])


@EVERY
def test_error_responses_and_listed_codes_agree(operation_id: str) -> None:
    """Each listed code has a response of its status that allows it, and each response allows listed codes alone."""
    operation = operations()[operation_id][2]
    allowed: list[str] = []
    for status, response in responses(operation):
        if status >= 400:
            problem, narrowed = response["content"][wire.PROBLEM_MEDIA_TYPE]["schema"]["allOf"]
            assert {"$ref": "#/components/schemas/problem"} == problem
            codes = narrowed["properties"]["code"]["enum"]
            assert {status} == {SPECIFICATION.errors[code].status for code in codes}
            allowed += codes
    assert sorted(operation["x-error-codes"]) == sorted(allowed)


@EVERY
def test_requirements_of_an_operation_exist_and_their_errors_are_listed(operation_id: str) -> None:
    """A requirement that refuses with a code is listed only where that code can be answered."""
    operation = operations()[operation_id][2]
    assert operation["x-requirements"]
    for requirement in (SPECIFICATION.requirements[id] for id in operation["x-requirements"]):
        assert requirement.binds == "gym"
        assert requirement.error in (None, *operation["x-error-codes"]), requirement.id


def test_every_refusal_of_a_gym_belongs_to_an_operation() -> None:
    """A requirement that names an error is reachable from an operation."""
    listed = {id for _, _, operation in operations().values() for id in operation["x-requirements"]}
    refusing = {id for id, r in SPECIFICATION.requirements.items() if r.binds == "gym" and r.error}
    assert set() == refusing - listed


@EVERY
def test_mutating_calls_require_the_controller_headers(operation_id: str) -> None:
    """POST and PUT under the prefix require all three headers; nothing else takes one."""
    _, method, operation = operations()[operation_id]
    required = {
        p["name"] for p in map(resolved, operation.get("parameters", ())) if p["in"] == "header" and p["required"]
    }
    mutating = method != "get" and operation_id != "probeEffect"
    assert (CONTROLLER_HEADERS if mutating else set()) == required


@EVERY
def test_every_response_carries_the_incarnation(operation_id: str) -> None:
    """Also errors carry Gym-Incarnation; a server that is no participant, and the probe, have none."""
    for status, response in responses(operations()[operation_id][2]):
        without = operation_id == "probeEffect" or (operation_id, status) == ("getCapabilities", 404)
        assert without != (wire.HEADER_INCARNATION in response.get("headers", {}))


@EVERY
def test_a_refusal_for_now_may_say_when_to_come_again(operation_id: str) -> None:
    """Every 503 may carry Retry-After."""
    for status, response in responses(operations()[operation_id][2]):
        assert status != 503 or "Retry-After" in response["headers"]


@EVERY
def test_the_token_is_that_of_the_plane(operation_id: str) -> None:
    """The control token opens the prefix, the data token the probe."""
    security = operations()[operation_id][2].get("security", SPECIFICATION.openapi["security"])
    assert [{"dataToken" if operation_id == "probeEffect" else "controlToken": []}] == security


@EVERY
def test_limits_are_names_of_the_capabilities(operation_id: str) -> None:
    """What x-limits names is declared by every participant."""
    limits = SPECIFICATION.schemas["capabilities"]["properties"]["limits"]["properties"]
    assert set(operations()[operation_id][2].get("x-limits", ())) <= limits.keys()


def contents() -> list[Any]:
    """Return a parameter per media type object with examples, wherever it lies in the document."""
    found: list[Any] = []

    def walk(node: Any, where: tuple[str, ...]) -> None:
        if isinstance(node, list):
            for place, item in enumerate(node):
                walk(item, (*where, str(place)))
        elif isinstance(node, dict):
            if "schema" in node and "examples" in node:
                found.append(pytest.param(node, id=" ".join(where[1:]).replace("/gym-checkpoint/v1", "")))
            for name, item in node.items():
                walk(item, (*where, name))

    walk({part: SPECIFICATION.openapi[part] for part in ("paths", "webhooks")}, ())
    walk(SPECIFICATION.openapi["components"]["responses"], ("components",))
    return found


@pytest.mark.parametrize("content", contents())
def test_every_example_of_the_document_is_valid(content: Any) -> None:
    """Examples of requests and responses follow the schemas that they stand beside."""
    components = {"components": SPECIFICATION.openapi["components"]}
    judge = jsonschema_rs.validator_for({**components, **content["schema"]})
    for name, example in content["examples"].items():
        assert judge.is_valid(resolved(example)["value"]), name


def test_parameter_examples_are_valid() -> None:
    """Examples of headers, path and query parameters follow their schemas."""
    components = SPECIFICATION.openapi["components"]
    for parameter in (*components["parameters"].values(), *components["headers"].values()):
        judge = jsonschema_rs.validator_for({"components": components, **parameter["schema"]})
        assert judge.is_valid(parameter["example"]), parameter["description"]


def test_every_problem_example_tells_what_the_catalogue_tells() -> None:
    """One example per code, with the catalogue's title, status and retryable; nothing indefinite is called definite."""
    examples = SPECIFICATION.openapi["components"]["examples"]
    assert set(SPECIFICATION.errors) == examples.keys()
    for code, error in SPECIFICATION.errors.items():
        value = examples[code]["value"]
        assert rust_validator("problem").is_valid(value)
        assert (code, error.title, error.status, error.retryable) == tuple(
            value[field] for field in ("code", "title", "status", "retryable")
        )
        assert value["definite"] <= all(map(error.definite_on, operations_with(code)))


def operations_with(code: str) -> list[str]:
    """Return the ids of the operations that may answer with a code."""
    return [id for id, (_, _, operation) in operations().items() if code in operation["x-error-codes"]]


@EVERY
def test_links_lead_to_operations_and_their_parameters(operation_id: str) -> None:
    """A link names an operation of this document, and sets parameters that it has."""
    for _, response in responses(operations()[operation_id][2]):
        for link in response.get("links", {}).values():
            target = operations()[link["operationId"]][2]
            known = {p["name"] for p in map(resolved, target.get("parameters", ()))}
            assert {name.removeprefix("header.") for name in link.get("parameters", {})} <= known


def test_every_message_of_the_wire_is_used_by_the_document() -> None:
    """Only the schemas of files are used by no operation and no other message."""
    files = {
        *("participant-manifest", "index-record", "snapshot-manifest", "restart-record", "fallback-marker"),
        # The content of the result string, and the messages of webhooks, are reached through other words than $ref.
        "result",
    }
    text = FILE.read_text(encoding="utf-8")
    direct = {name for name in MESSAGE_NAMES if f"schemas/{name}.json" in text}
    inner = {"receipt", "policy"}
    assert set(MESSAGE_NAMES) == direct | inner | files
