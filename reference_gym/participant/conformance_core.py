# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the conformance environment as a pure value: no I/O, no clock, held against the published vector.

The environment has two names and one behaviour; see `conformance` for the thin shell that talks to the world.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from reference_gym.participant.jsontext import is_integer

MODULUS = 2**31
RNG_MODULUS = 2**32
MAX_STEP = 10**6
MAX_GROW = 67_108_864
MAX_TAG = 64
PATTERN = 251
REFUSED = '{"error":"refused"}'
INVALID = '{"error":"invalid"}'

_CYCLE = bytes(range(PATTERN))


def observation(**values: int | str) -> str:
    """The one form of an observation: ASCII JSON, sorted keys, no spaces."""
    return json.dumps(values, ensure_ascii=True, sort_keys=True, separators=(",", ":"))


def fits(tool: str, args: object) -> bool:
    """Whether `tool` exists and `args` are exactly its arguments."""
    if not isinstance(args, dict):
        return False
    match tool:
        case "add":
            return set(args) == {"n"} and is_integer(args["n"], -MAX_STEP, MAX_STEP)
        case "world":
            return set(args) == {"tag"} and isinstance(args["tag"], str) and len(args["tag"]) <= MAX_TAG
        case "grow":
            return set(args) == {"bytes"} and is_integer(args["bytes"], 0, MAX_GROW)
        case "refuse":
            return not args
    return False


class CoreState:
    """`counter`, `rng`, `effects` and the blob, with one method per tool that changes them."""

    __slots__ = ("_digest", "_encoded", "blob", "counter", "effects", "rng")

    def __init__(self, seed: int) -> None:
        self.counter = 0
        self.rng = seed
        self.effects = 0
        self.blob = bytearray()
        self._digest = hashlib.sha256()
        self._encoded: str | None = None

    @property
    def blob_sha256(self) -> str:
        """SHA-256 of the blob in lower-case hex."""
        return self._digest.hexdigest()

    def add(self, n: int) -> str:
        """Draw once and add `n` and the draw to the counter."""
        self.rng = (1664525 * self.rng + 1013904223) % RNG_MODULUS
        draw = self.rng >> 16
        self.counter = (self.counter + n + draw) % MODULUS
        self.effects += 1
        return observation(counter=self.counter, draw=draw, effects=self.effects)

    def world(self, value: int) -> str:
        """Add what the world answered to the counter."""
        self.counter = (self.counter + value) % MODULUS
        self.effects += 1
        return observation(counter=self.counter, effects=self.effects, value=value)

    def grow(self, count: int) -> str:
        """Append `count` bytes, each its own position modulo 251."""
        offset = len(self.blob) % PATTERN
        piece = memoryview(_CYCLE * (count // PATTERN + 2))[offset : offset + count]
        self.blob += piece
        self._digest.update(piece)
        self._encoded = None
        self.effects += 1
        return observation(blob_sha256=self.blob_sha256, counter=self.counter, effects=self.effects)

    def reward(self) -> float:
        """What verification pays for this counter: 0 ≤ reward < 1."""
        return (self.counter % 1024) / 1024

    def final(self) -> dict[str, int | str]:
        """The final state as the result shows it."""
        return {
            "blob_bytes": len(self.blob),
            "blob_sha256": self.blob_sha256,
            "counter": self.counter,
            "effects": self.effects,
            "rng": self.rng,
        }

    def export(self) -> dict[str, Any]:
        """Everything as JSON data; the blob travels as base64, encoded once per growth."""
        if self._encoded is None:
            self._encoded = base64.b64encode(self.blob).decode("ascii")
        return {
            "blob": self._encoded,
            "counter": self.counter,
            "effects": self.effects,
            "rng": self.rng,
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> CoreState:
        """The state that `export` gave; raises ValueError."""
        if set(state) != {"blob", "counter", "effects", "rng"}:
            raise ValueError("the state of a conformance session has other keys than blob, counter, effects, rng")
        for key, limit in (
            ("counter", MODULUS),
            ("rng", RNG_MODULUS),
            ("effects", 2**53),
        ):
            if not is_integer(state[key], 0, limit - 1):
                raise ValueError(f"{key} is not an integer in its range")
        try:
            blob = base64.b64decode(state["blob"], validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            raise ValueError("the blob is not base64") from error
        core = cls(state["rng"])
        core.counter, core.effects = state["counter"], state["effects"]
        core.blob += blob
        core._digest.update(blob)
        core._encoded = state["blob"]
        return core
