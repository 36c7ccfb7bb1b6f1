# SPDX-License-Identifier: Apache-2.0
"""The policy's log read back: which calls there were, and which completed turns were generated again.

The counting rule, in full: a *completed turn* is a call that the policy finished generating. For each sibling and
turn, every completion but the last one was thrown away. A call that was asked and never completed (held at the
crash, or cut off in the middle) is no completed turn, so asking for it again costs nothing here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Call:
    """One policy call, from the moment it was asked (times are seconds since the Unix epoch)."""

    number: int
    sibling: int
    turn: int
    asked: float
    held: float | None = None
    released: float | None = None
    completed: float | None = None
    dropped: float | None = None
    tokens: int = 0
    attempt: int | None = None
    rollout_id: str | None = None

    @property
    def is_held(self) -> bool:
        """True while the policy holds the call and its caller still waits."""
        return self.held is not None and self.released is None and self.dropped is None


@dataclass(frozen=True)
class Count:
    """What one sibling cost."""

    asked: int = 0
    completed: int = 0
    turns: int = 0
    thrown_away: int = 0
    tokens_thrown_away: int = 0
    cut_off: int = 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file; none if it does not exist; a last line without its end is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1] if line]


class Tail:
    """A JSON-lines file that grows: every look parses only what is new.

    Args:
        path: the file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines: list[dict[str, Any]] = []

    def lines(self) -> list[dict[str, Any]]:
        """All complete lines so far."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        self._lines += [json.loads(line) for line in whole.split(b"\n") if line]
        return list(self._lines)


def read_calls(path: Path) -> list[Call]:
    """The calls of one policy log, in the order in which they were asked."""
    return calls_of(read_lines(path))


def calls_of(events: Iterable[dict[str, Any]]) -> list[Call]:
    """The calls that a sequence of policy events describes."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        number = event["call"]
        if event["event"] == "asked":
            found[number] = {
                "number": number,
                "sibling": event["sibling"],
                "turn": event["turn"],
                "attempt": event.get("attempt"),
                "rollout_id": event.get("rollout_id"),
            }
        found[number][event["event"]] = event["t"]
        if "tokens" in event:
            found[number]["tokens"] = event["tokens"]
    return [Call(**fields) for fields in found.values()]


def completions(calls: Iterable[Call]) -> dict[tuple[int, int], list[Call]]:
    """The completed calls of each (sibling, turn), earliest completion first."""
    done: dict[tuple[int, int], list[Call]] = {}
    for call in sorted((c for c in calls if c.completed is not None), key=lambda c: (c.completed, c.number)):
        done.setdefault((call.sibling, call.turn), []).append(call)
    return done


def thrown_away(calls: Iterable[Call]) -> list[Call]:
    """The completed calls whose turn was generated again later: everything but the last of each (sibling, turn)."""
    return [call for copies in completions(calls).values() for call in copies[:-1]]


def kind_of(call: Call, copies: Sequence[Call]) -> str:
    """What became of a call, given all completions of its turn: `kept`, `lost`, `again` (a second time) or `held`."""
    if call.completed is None:
        return "held"
    if call is not copies[-1]:
        return "lost"
    return "again" if len(copies) > 1 else "kept"


def turns_thrown_away(calls: Iterable[Call]) -> int:
    """How many completed turns had to be generated again."""
    return len(thrown_away(calls))


def count_siblings(calls: Iterable[Call], siblings: int) -> list[Count]:
    """What each sibling cost, in the order of the siblings."""
    calls = list(calls)
    wasted = thrown_away(calls)
    done = completions(calls)
    asked = Counter(call.sibling for call in calls)
    unfinished = Counter(call.sibling for call in calls if call.completed is None)
    return [
        Count(
            asked=asked[sibling],
            completed=sum(len(copies) for key, copies in done.items() if key[0] == sibling),
            turns=sum(key[0] == sibling for key in done),
            thrown_away=sum(call.sibling == sibling for call in wasted),
            tokens_thrown_away=sum(call.tokens for call in wasted if call.sibling == sibling),
            cut_off=unfinished[sibling],
        )
        for sibling in range(siblings)
    ]


def completed_turns(calls: Iterable[Call]) -> Counter[int]:
    """Number of different completed turns per sibling."""
    return Counter(sibling for sibling, _ in completions(calls))


def held_turns(calls: Iterable[Call]) -> dict[int, int]:
    """Where siblings are held at this moment: sibling → turn."""
    return {call.sibling: call.turn for call in calls if call.is_held}
