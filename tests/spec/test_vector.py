# SPDX-License-Identifier: Apache-2.0
"""The vector of the conformance environment, computed from the chapter's formulas and compared with what it prints."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import spec

CHAPTER = (spec.load("1.0").root / "environments.md").read_text(encoding="utf-8")
VECTOR = CHAPTER[CHAPTER.index("### The vector") :]
WORLD_ANSWER = 11


@dataclass
class Environment:
    """The formulas of the chapter, and nothing else."""

    rng: int
    counter: int = 0
    effects: int = 0
    blob: bytes = b""

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Return the observation of one tool call of the vector, as text."""
        if tool == "refuse":
            return '{"error":"refused"}'
        shown: dict[str, Any] = {}
        if tool == "add":
            self.rng = (1664525 * self.rng + 1013904223) % 2**32
            shown["draw"] = self.rng >> 16
            self.counter = (self.counter + arguments["n"] + shown["draw"]) % 2**31
        elif tool == "world":
            shown["value"] = WORLD_ANSWER
            self.counter = (self.counter + WORLD_ANSWER) % 2**31
        else:
            length = len(self.blob) + arguments["bytes"]
            self.blob = bytes(i % 251 for i in range(length))
            shown["blob_sha256"] = hashlib.sha256(self.blob).hexdigest()
        self.effects += 1
        shown |= {"counter": self.counter, "effects": self.effects}
        return json.dumps(shown, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def final(self) -> dict[str, Any]:
        """Return what the result's `final` holds."""
        return {
            "blob_bytes": len(self.blob),
            "blob_sha256": hashlib.sha256(self.blob).hexdigest(),
            "counter": self.counter,
            "effects": self.effects,
            "rng": self.rng,
        }


def printed_calls() -> list[tuple[str, dict[str, Any], str]]:
    """Return tool, arguments and observation of each row of the chapter's table."""
    rows = re.findall(r"^\| `(\w+) (\{.*?\})` \| `(\{.*\})` \|$", VECTOR, re.MULTILINE)
    return [(tool, json.loads(arguments), observation) for tool, arguments, observation in rows]


def test_the_vector_has_the_calls_that_it_is_about() -> None:
    """Seed 7: add, add with a negative number, refuse, world, grow, add."""
    assert "Seed 7" in VECTOR
    assert f"answers `world` with {WORLD_ANSWER}" in VECTOR
    assert ["add", "add", "refuse", "world", "grow", "add"] == [tool for tool, _, _ in printed_calls()]


def test_the_printed_observations_follow_from_the_formulas() -> None:
    """Each observation is equal byte by byte."""
    environment = Environment(rng=7)
    for tool, arguments, observation in printed_calls():
        assert environment.call(tool, arguments) == observation


def test_the_printed_end_follows_from_the_formulas() -> None:
    """The final state and the reward are those of the last row."""
    environment = Environment(rng=7)
    for tool, arguments, _ in printed_calls():
        environment.call(tool, arguments)
    block = re.search(r"```json\n(\{.*?\})\n```", VECTOR, re.DOTALL)
    reward = re.search(r"`reward` ([0-9.]+)", VECTOR)
    assert block is not None and reward is not None
    assert environment.final() == json.loads(block.group(1))
    assert Fraction(environment.counter % 1024, 1024) == Fraction(reward.group(1))


def test_the_vector_is_the_agreed_one() -> None:
    """The numbers that implementations in other languages were checked with."""
    environment = Environment(rng=7)
    observations = [json.loads(environment.call(tool, arguments)) for tool, arguments, _ in printed_calls()]
    assert [15648, 59866, 40140] == [seen["draw"] for seen in observations if "draw" in seen]
    assert [15653, 75516, 75527, 75527, 115667] == [seen["counter"] for seen in observations if "counter" in seen]
    assert (5, 2630631676) == (environment.effects, environment.rng)
    assert "4e4c294b331f7a2099a379bec34b9f9fc03dc46ab465d998f4d683da53487e6d" == environment.final()["blob_sha256"]
    assert 0.9560546875 == (environment.counter % 1024) / 1024
