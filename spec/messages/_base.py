# SPDX-License-Identifier: Apache-2.0
"""What every message has in common: strictness, absence, open enumerations, and the bounded scalar types.

The JSON Schemas are the source of truth; these types follow them and tests hold the two together. Stricter than JSON
Schema in one place, as the specification allows (CKPT-ID-004): the token of an integer has neither fraction nor
exponent. Unknown fields are refused in requests (CKPT-ERR-001) and ignored in responses (CKPT-ERR-002).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationInfo

T = TypeVar("T")
_READING: Final = {"unknown_values": "fall back"}


class Message(BaseModel):
    """One message or file of the protocol: frozen, nothing coerced.

    Build one with keyword arguments, where None in an optional field means absent. Take one from the wire with ``read``
    or ``of``, where null in an optional field is refused.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="ignore")

    @classmethod
    def read(cls, text: bytes | str) -> Self:
        """Return the message that JSON text holds; unknown enumeration values of a response become their fallback.

        Implements CKPT-VER-008 and CKPT-VER-009.

        Args:
            text: JSON text in UTF-8.

        Raises:
            pydantic.ValidationError: the text is not JSON or not this message.
        """
        return cls.model_validate_json(text, context=_READING)

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the message that a parsed JSON value is; otherwise as ``read``.

        Args:
            value: what a JSON parser returned.

        Raises:
            pydantic.ValidationError: the value is not this message.
        """
        return cls.model_validate(value, context=_READING)

    def to_object(self) -> dict[str, Any]:
        """Return the message as a JSON value, absent fields left out."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """Return the message as JSON text, absent fields left out."""
        return self.model_dump_json()


class Request(Message):
    """A message that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")


class Response(Message):
    """A message, or a file, whose reader ignores unknown fields."""


def _refuse_null(value: Any, info: ValidationInfo) -> Any:
    if value is None and (info.context is not None or info.mode == "json"):
        raise ValueError("null is not the way to leave a field out")
    return value


def _is_none(value: Any) -> bool:
    return value is None


Absent = Annotated[T | None, BeforeValidator(_refuse_null), Field(exclude_if=_is_none)]
"""An optional field, ``Absent[X] = None``: left out of the JSON when it is None."""

Items = Annotated[tuple[T, ...], Strict(False)]
"""A list; it is a tuple in Python, and a list is taken for one."""


def is_reading(info: ValidationInfo) -> bool:
    """Return whether ``read`` or ``of`` is validating, where a later version's values are met with patience."""
    return info.context is _READING


def fallback(to: str, literal: object) -> BeforeValidator:
    """Return a validator that turns an unknown value of an enumeration into its fallback, in ``read`` and ``of``."""
    known = get_args(literal)

    def replace(value: Any, info: ValidationInfo) -> Any:
        unknown = is_reading(info) and isinstance(value, str) and value not in known
        return to if unknown else value

    return BeforeValidator(replace)


def known_only(literal: object) -> BeforeValidator:
    """Return a validator that leaves unknown strings out of a list, in ``read`` and ``of``."""
    known = get_args(literal)

    def keep(value: Any, info: ValidationInfo) -> Any:
        if not is_reading(info) or not isinstance(value, list):
            return value
        return [item for item in value if not isinstance(item, str) or item in known]

    return BeforeValidator(keep)


def known_fields_only(*names: str) -> BeforeValidator:
    """Return a validator that refuses unknown fields where a request holds what is elsewhere part of responses."""

    def refuse(value: Any) -> Any:
        if isinstance(value, Mapping) and not value.keys() <= set(names):
            raise ValueError("unknown field")
        return value

    return BeforeValidator(refuse)


def _without(forbidden: str) -> AfterValidator:
    pattern = re.compile(forbidden)

    def refuse(value: str) -> str:
        if pattern.search(value):
            raise ValueError(f"must not hold {forbidden}")
        return value

    return AfterValidator(refuse)


def _is_json(value: Any) -> Any:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if not all(isinstance(key, str) for key in item):
                raise ValueError("an object's names are strings")
            waiting += item.values()
            waiting += item.keys()
        elif isinstance(item, list | tuple):
            waiting += item
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise ValueError("JSON has no number that is not finite")
        elif isinstance(item, str):
            if re.search("[\ud800-\udfff]", item):
                raise ValueError("a string is a sequence of Unicode scalar values")
        elif item is not None and not isinstance(item, int):
            raise ValueError(f"{type(item).__name__} is not a JSON value")
    return value


def _unique(items: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(items)) != len(items):
        raise ValueError("the items are not unique")
    return items


UNIQUE: Final = AfterValidator(_unique)
SAFE: Final = 2**53 - 1
MAX_ITEMS: Final = 10_000
MAX_LIST: Final = 1_000_000

_NAMED: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_VISIBLE: Final = r"^[!-~]+$"

JsonObject = Annotated[dict[str, Any], AfterValidator(_is_json)]
RolloutId = Annotated[str, Field(max_length=128, pattern=_NAMED), _without(r"-a[0-9]+\Z")]
Attempt = Annotated[int, Field(ge=0, le=2**31 - 1)]
Turn = Annotated[int, Field(ge=1, le=2**31 - 1)]
TurnsDone = Annotated[int, Field(ge=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=SAFE)]
Milliseconds = Annotated[int, Field(ge=0, le=SAFE)]
TimeoutMs = Annotated[int, Field(ge=0, le=86_400_000)]
LeaseMs = Annotated[int, Field(ge=1, le=86_400_000)]
CheckpointId = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,14}-(0|[1-9][0-9]{0,14})$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
TaskDigest = Annotated[str, Field(max_length=128, pattern=_VISIBLE)]
Name = Annotated[str, Field(max_length=64, pattern=_NAMED)]
LongName = Annotated[str, Field(max_length=128, pattern=_NAMED)]
"""A run id, controller id, incarnation, feed or file name."""
EnvironmentName = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")]
Epoch = Annotated[int, Field(ge=1, le=10**15 - 1)]
RelativePath = Annotated[
    str, Field(max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$")
]
AbsolutePath = Annotated[str, Field(max_length=4096, pattern=r"^/[^\x00-\x1f\x7f]*$")]
Url = Annotated[
    str,
    Field(max_length=2048, pattern=r"^https?://[^/?#]"),
    _without(r"[\x00-\x20\x7f]"),
    _without(r"^https?://[^/?#]*@"),
]
BaseUrl = Annotated[Url, _without(r"[?#]")]
Cursor = Annotated[str, Field(max_length=1024)]
Detail = Annotated[str, Field(max_length=4096)]
ProtocolVersion = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})$")]
SchemaVersion = Annotated[int, Field(ge=1, le=1_000_000)]
StateVersion = Annotated[str, Field(max_length=64, pattern=_VISIBLE)]
RequestId = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}/[1-9][0-9]{0,9}/[1-9][0-9]{0,9}$"),
    _without(r"-a[0-9]+/"),
]
DataKey = Annotated[str, Field(max_length=1024, pattern=_VISIBLE)]
PolicyVersion = Annotated[int, Field(ge=0, le=SAFE)]
Seed = Annotated[int, Field(ge=0, le=SAFE)]
Kind = Annotated[str, Field(max_length=64, pattern=r"^[a-z][a-z0-9_]*$")]
Labels = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=256)]],
    Field(max_length=32),
]
