# SPDX-License-Identifier: Apache-2.0
"""The typed messages accept exactly what the schemas accept, integers strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import jsonschema
import pydantic
import pytest
from hypothesis import Phase, given, settings

from spec import messages
from spec.messages import MESSAGES, Message
from tests.spec.schemas import MESSAGE_NAMES, SCHEMAS, V1, parts, resolve, rust_validator, rust_validator_of, validator
from tests.spec.values import near_misses, part, valid, with_


def accepts(message: type[Message], value: Any) -> bool:
    """Return whether the message takes the value as JSON text, unknown enumeration values refused."""
    try:
        message.model_validate_json(json.dumps(value))
    except pydantic.ValidationError:
        return False
    return True


def example(schema: str, name: str) -> Any:
    """Return one of the valid examples."""
    return json.loads((V1 / "examples" / schema / "valid" / f"{name}.json").read_text(encoding="utf-8"))


def disagreements(name: str, message: type[Message], value: Any) -> Iterator[str]:
    """Return the near misses of ``value`` about which schema and message differ."""
    for miss in near_misses(value):
        if rust_validator(name).is_valid(miss.asked) != accepts(message, miss.value):
            yield miss.change


@pytest.mark.parametrize("name", MESSAGE_NAMES)
def test_a_message_accepts_what_its_schema_accepts(name: str) -> None:
    """Generated values are accepted by both validators and by the message."""

    @settings(max_examples=20, phases=[Phase.generate])
    @given(valid(name))
    def accepted(value: Any) -> None:
        assert validator(name).is_valid(value)
        assert accepts(MESSAGES[name], value)

    accepted()


@pytest.mark.parametrize("name", MESSAGE_NAMES)
def test_a_message_refuses_what_its_schema_refuses(name: str) -> None:
    """C14 and its kind: of all near misses of generated values, schema and message accept the same ones."""

    @settings(max_examples=5, phases=[Phase.generate])
    @given(valid(name))
    def agree(value: Any) -> None:
        assert [] == list(disagreements(name, MESSAGES[name], value))

    agree()


@pytest.mark.parametrize("name", MESSAGE_NAMES)
def test_a_message_gives_back_what_it_read(name: str) -> None:
    """Reading, writing and reading again changes nothing, and what is written is valid."""

    @settings(max_examples=25, phases=[Phase.generate])
    @given(valid(name))
    def round_trip(value: Any) -> None:
        message = MESSAGES[name].of(value)
        assert value == message.to_object()
        assert message == MESSAGES[name].read(message.to_json())

    round_trip()


@pytest.mark.parametrize("reward", [2**60, -(2**60) + 1, 1, 1.0, 0.1 + 0.2, 1e300])
def test_a_reward_stays_the_number_that_it_was(reward: float) -> None:
    """N10: a whole number beyond 2**53 is not rounded to the nearest float."""
    examples = (
        json.loads(f.read_text(encoding="utf-8")) for f in sorted((V1 / "examples/result/valid").glob("*.json"))
    )
    value = next(example for example in examples if "body" in example)
    value["body"]["reward"] = reward
    written = MESSAGES["result"].of(value).to_object()["body"]["reward"]
    assert (reward, type(reward)) == (written, type(written))
    assert value == MESSAGES["result"].read(MESSAGES["result"].of(value).to_json()).to_object()


def unknown_values() -> Iterator[Any]:
    """Return a parameter per enumeration of a response: an example with an unknown value in it, and the fallback."""
    seen: set[tuple[str, str]] = set()
    for file in sorted((V1 / "examples").glob("*/valid/*.json")):
        name, value = file.parent.parent.name, json.loads(file.read_text(encoding="utf-8"))
        for path, schema in parts(value, SCHEMAS[name], name):
            where = ".".join(str(step) for step in path if isinstance(step, str))
            if "x-unknown-value" in schema and (name, where) not in seen:
                seen.add((name, where))
                yield pytest.param(name, value, path, schema["x-unknown-value"], id=f"{name}/{where}")


@pytest.mark.parametrize(("name", "value", "path", "fallback"), list(unknown_values()))
def test_an_unknown_value_of_a_response_becomes_its_fallback(
    name: str, value: Any, path: tuple[Any, ...], fallback: str
) -> None:
    """A newer participant's value does not break an older reader; only ``read`` and ``of`` are so lenient."""
    newer = with_(value, path, "of_a_later_version")
    assert not accepts(MESSAGES[name], newer)
    for message in (MESSAGES[name].of(newer), MESSAGES[name].read(json.dumps(newer))):
        got: Any = message.to_object()
        for step in path:
            got = got[step]
        assert fallback == got


def test_unknown_names_are_left_out_of_what_a_participant_lists() -> None:
    """A later profile, kind of ownership or storage scheme is ignored by an older reader."""
    value = example("capabilities", "agent")
    newer = {**value, "profiles": [*value["profiles"], "x"], "owns": ["x", "rollouts"], "storage": ["s3", "file"]}
    message = messages.Capabilities.of(newer)
    assert (tuple(value["profiles"]), ("rollouts",), ("file",)) == (message.profiles, message.owns, message.storage)
    assert not accepts(messages.Capabilities, newer)


@pytest.mark.parametrize("text", ["a\n", "a\r", "\na", "a\u2028", "a-a1\n"])
def test_a_line_end_is_no_part_of_an_id(text: str) -> None:
    """C14: a trailing newline passes no judge, whatever its dialect says about `$`."""
    receipt = {**example("receipt", "attempt_0"), "rollout_id": text}
    assert (False, False, False) == (
        validator("receipt").is_valid(receipt),
        rust_validator("receipt").is_valid(receipt),
        accepts(messages.Receipt, receipt),
    )


PATTERNED = tuple(name for name, schema in SCHEMAS["common"]["$defs"].items() if "pattern" in schema)


@pytest.mark.parametrize("name", PATTERNED)
def test_a_patterned_string_refuses_a_trailing_newline(name: str) -> None:
    """Each pattern of the shared definitions refuses every valid value with a newline after it."""
    schema = SCHEMAS["common"]["$defs"][name]

    @settings(max_examples=10, phases=[Phase.generate])
    @given(part(schema))
    def refused(text: str) -> None:
        for judge in (jsonschema.Draft202012Validator(schema), rust_validator_of(schema)):
            assert (True, False) == (judge.is_valid(text), judge.is_valid(text + "\n"))

    refused()


@pytest.mark.parametrize("token", ["1.0", "1e0", "true", '"1"', "null", "-1", "9223372036854775808", "NaN"])
def test_an_attempt_is_an_integer_token_within_its_bounds(token: str) -> None:
    """C14: no other token stands for attempt 1."""
    text = json.dumps(example("receipt", "attempt_0")).replace('"attempt": 0', f'"attempt": {token}')
    with pytest.raises(pydantic.ValidationError):
        messages.Receipt.read(text)


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e400", '"1"', "true", "null"])
def test_a_reward_is_a_finite_number(token: str) -> None:
    """N10: what is no finite number is no reward."""
    text = json.dumps(example("result", "success")).replace('"reward": -5.0', f'"reward": {token}')
    assert token in text
    with pytest.raises(pydantic.ValidationError):
        messages.Result.read(text)


@pytest.mark.parametrize("token", ["NaN", "[Infinity]", '{"a": 1e400}', '"\\ud800"', '{"\\udfff": 1}'])
def test_a_task_is_json_that_has_a_utf8_form(token: str) -> None:
    """N10: numbers that are not finite and lone surrogates are refused also where any JSON is taken."""
    text = json.dumps(example("start-request", "group")).replace('"task": {"seed": 7}', f'"task": {{"x": {token}}}')
    assert token in text
    with pytest.raises(pydantic.ValidationError):
        messages.StartRequest.read(text)


def test_a_field_left_out_and_null_are_told_apart() -> None:
    """None in an optional field of the constructor means absent, on the wire null is refused."""
    made = messages.CommitRequest(
        checkpoint_id="4-12",
        target=messages.HttpTarget(scheme="http"),
        wait="durable",
        leave_out_blocked=None,
        timeout_ms=1,
    )
    assert "leave_out_blocked" not in made.to_object()
    with pytest.raises(pydantic.ValidationError):
        messages.CommitRequest.of({**made.to_object(), "leave_out_blocked": None})


def test_a_nullable_field_is_written_as_null() -> None:
    """What is always present stays present."""
    assert {"lease_remaining_ms": None} == messages.RenewResponse(lease_remaining_ms=None).to_object()


def test_a_message_is_frozen() -> None:
    """A value that several places hold does not change under one of them."""
    message = messages.RenewResponse(lease_remaining_ms=None)
    with pytest.raises(pydantic.ValidationError):
        message.lease_remaining_ms = 3  # type: ignore[misc]  # that it is refused is the point


def test_there_is_one_class_per_schema() -> None:
    """Names of classes and schemas go together."""
    assert {name: "".join(map(str.capitalize, name.split("-"))) for name in MESSAGE_NAMES} == {
        name: message.__name__ for name, message in MESSAGES.items()
    }


@pytest.mark.parametrize("name", MESSAGE_NAMES)
def test_fields_and_bounds_of_message_and_schema_are_equal(name: str) -> None:
    """Bounds too large to try out (a million items) are compared as they are written."""
    model = MESSAGES[name].model_json_schema()
    assert [] == list(differences(SCHEMAS[name], name, model, model.get("$defs", {}), name))


def alternatives(schema: Any) -> list[Any]:
    """Return the branches of a schema, those of branches included; conditions on fields are no branches."""
    branches = [branch for branch in schema.get("anyOf", schema.get("oneOf", ())) if branch.keys() != {"required"}]
    return [inner for branch in branches for inner in alternatives(branch) or [branch]]


_BOUNDS = ("minimum", "maximum", "minItems", "maxItems", "maxProperties", "enum", "const")


def differences(schema: Any, inside: str, model: Any, defs: Any, where: str) -> Iterator[str]:
    """Return in which fields and bounds a schema and the one derived from its message differ."""
    while "$ref" in schema:
        schema, inside = resolve(schema["$ref"], inside)
    while "$ref" in model:
        model = defs[model["$ref"].rsplit("/", 1)[1]]
    branches, choices = alternatives(schema), alternatives(model)
    if branches or choices:
        if len(branches) != len(choices):
            yield f"{where}: {len(branches)} branches, {len(choices)} in the message"
        for branch, choice in zip(branches, choices, strict=False):
            yield from differences(branch, inside, choice, defs, where)
        return
    for word in _BOUNDS if schema.get("type") != "number" else ():
        if schema.get(word) != model.get(word):
            yield f"{where}: {word} is {schema.get(word)}, {model.get(word)} in the message"
    if "pattern" not in schema and schema.get("maxLength") != model.get("maxLength"):
        yield f"{where}: maxLength is {schema.get('maxLength')}, {model.get('maxLength')} in the message"
    fields, own = schema.get("properties", {}), model.get("properties", {})
    if fields.keys() != own.keys():
        yield f"{where}: fields {sorted(fields.keys() ^ own.keys())}"
    if set(schema.get("required", ())) != set(model.get("required", ())):
        yield f"{where}: required {sorted(set(schema.get('required', ())) ^ set(model.get('required', ())))}"
    for field in fields.keys() & own.keys():
        part = own[field]
        if field not in model.get("required", ()):
            part = next(choice for choice in part["anyOf"] if choice.get("type") != "null")
        yield from differences(fields[field], inside, part, defs, f"{where}.{field}")
    if "items" in schema:
        yield from differences(schema["items"], inside, model["items"], defs, f"{where}[]")


# Each pair: a schema, and a change that a careless edit of its class could be.
DRIFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "an attempt without its upper bound": (
        "receipt",
        {"attempt": (Annotated[int, pydantic.Field(ge=0, strict=True)], ...)},
    ),
    "an attempt that is coerced": (
        "receipt",
        {"attempt": (Annotated[int, pydantic.Field(ge=0, le=2**31 - 1, strict=False)], ...)},
    ),
    "a digest of any form": ("receipt", {"digest": (str, ...)}),
    "a rollout id without the reserved ending": (
        "receipt",
        {"rollout_id": (Annotated[str, pydantic.Field(max_length=128, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")], ...)},
    ),
    "an optional field that takes null": ("commit-request", {"leave_out_blocked": (bool | None, None)}),
    "a nullable field that may be absent": (
        "renew-response",
        {"lease_remaining_ms": (Annotated[int, pydantic.Field(ge=0, le=2**53 - 1)] | None, None)},
    ),
    "a field too many": ("renew-response", {"added": (int, ...)}),
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_a_message_that_drifts_from_its_schema_is_found(drift: str) -> None:
    """The comparison can fail: each of these drifted classes disagrees with the schema on some generated value."""
    name, fields = DRIFTS[drift]
    drifted = pydantic.create_model("Drifted", __base__=MESSAGES[name], **fields)  # type: ignore[call-overload]  # fields are data here

    found: set[str] = set()

    @settings(max_examples=10, phases=[Phase.generate])
    @given(valid(name))
    def collect(value: Any) -> None:
        found.update(disagreements(name, drifted, value))

    collect()
    assert found
