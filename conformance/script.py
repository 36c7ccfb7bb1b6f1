# SPDX-License-Identifier: Apache-2.0
"""Scripts: what the witness answers, turn by turn; and the tools of the conformance environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """One tool call of a turn.

    Args:
        name: the tool, `add`, `world`, `grow` or `refuse` (or a name that does not exist, on purpose).
        arguments: the JSON object that is passed.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


Turn = tuple[ToolCall, ...] | str
"""What the policy answers once: tool calls that make a turn, or a final text."""


@dataclass(frozen=True)
class Script:
    """What the policy says in one rollout, by turn, from turn 1 on; past the end it says `done`."""

    turns: tuple[Turn, ...]

    def turn(self, number: int) -> Turn:
        """Return the answer of turn `number` (from 1)."""
        return self.turns[number - 1] if number <= len(self.turns) else "done"

    @property
    def effect_turns(self) -> int:
        """How many turns of the script hold tool calls."""
        return sum(1 for turn in self.turns if not isinstance(turn, str))


def script(*turns: ToolCall | Sequence[ToolCall] | str) -> Script:
    """Write a script: each argument is a turn: one call, a list of calls, or a final text."""
    written: list[Turn] = []
    for turn in turns:
        if isinstance(turn, (str, ToolCall)):
            written.append(turn if isinstance(turn, str) else (turn,))
        else:
            written.append(tuple(turn))
    return Script(tuple(written))


def add(n: int) -> ToolCall:
    """Call `add{n}`."""
    return ToolCall("add", {"n": n})


def world(tag: str) -> ToolCall:
    """Call `world{tag}`: an effect that the suite's world begins, ends, fails and counts."""
    return ToolCall("world", {"tag": tag})


def grow(size: int) -> ToolCall:
    """Call `grow{bytes}`."""
    return ToolCall("grow", {"bytes": size})


def refuse() -> ToolCall:
    """Call `refuse{}`."""
    return ToolCall("refuse", {})


VECTOR_SEED = 7
VECTOR_WORLD_TAG = "vector"
VECTOR_WORLD_VALUE = 11
VECTOR = script(add(5), add(-3), refuse(), world(VECTOR_WORLD_TAG), grow(1000), add(0), "done")
"""The script of the specification's vector; the world answers 11 to its tag."""
