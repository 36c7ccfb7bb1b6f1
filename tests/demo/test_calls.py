# SPDX-License-Identifier: Apache-2.0
"""Counting in the policy's log: what is thrown away and what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reference_rl.demo.calls import (
    Tail,
    calls_of,
    completed_turns,
    count_siblings,
    held_turns,
    kind_of,
    read_lines,
    thrown_away,
    turns_thrown_away,
)
from reference_rl.demo.scenario import COLUMNS, Scenario
from tests.demo.synthetic import policy_events


class Log:
    """Writes a policy log by hand; every event is one second after the one before."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def call(self, sibling: int, turn: int, *then: str) -> None:
        """A new call, asked, and what became of it."""
        number = 1 + sum(event["event"] == "asked" for event in self.events)
        for event in ("asked", *then):
            line = {"t": float(len(self.events)), "event": event, "call": number, "sibling": sibling, "turn": turn}
            self.events.append(line)


def test_a_turn_completed_once_is_not_thrown_away() -> None:
    """The plain case: nothing is generated twice."""
    log = Log()
    log.call(0, 1, "completed")
    log.call(0, 2, "completed")
    assert 0 == turns_thrown_away(calls_of(log.events))


def test_a_turn_completed_again_was_thrown_away_once() -> None:
    """The earlier completion is the one that was thrown away."""
    log = Log()
    log.call(0, 1, "completed")
    log.call(0, 1, "completed")
    assert [1] == [call.number for call in thrown_away(calls_of(log.events))]


def test_a_turn_completed_three_times_was_thrown_away_twice() -> None:
    """Every completion but the last one was in vain."""
    log = Log()
    for _ in range(3):
        log.call(1, 4, "completed")
    assert 2 == turns_thrown_away(calls_of(log.events))


def test_the_same_turn_of_two_siblings_is_two_turns() -> None:
    """Siblings are counted apart."""
    log = Log()
    log.call(0, 1, "completed")
    log.call(1, 1, "completed")
    assert 0 == turns_thrown_away(calls_of(log.events))


@pytest.mark.parametrize("end", [("held",), ("held", "dropped"), ("dropped",), ()])
def test_a_call_that_never_completed_is_no_completed_turn(end: tuple[str, ...]) -> None:
    """Held at the crash or cut off in the middle: asking again throws nothing away."""
    log = Log()
    log.call(2, 5, *end)
    log.call(2, 5, "completed")
    assert 0 == turns_thrown_away(calls_of(log.events))
    assert 1 == count_siblings(calls_of(log.events), 3)[2].cut_off


def test_a_held_call_is_held_until_it_is_released_or_dropped() -> None:
    """Positions at the crash are read from the log in the same way as the counts."""
    log = Log()
    log.call(0, 1, "completed")
    log.call(1, 3, "held")
    log.call(2, 5, "held", "dropped")
    log.call(3, 2, "held", "released")
    assert {1: 3} == held_turns(calls_of(log.events))
    assert {0: 1} == completed_turns(calls_of(log.events))


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("scenario", [Scenario(), Scenario(64, 20), Scenario(2, 2)])
def test_the_made_up_log_of_each_column_counts_as_expected(scenario: Scenario, column: int) -> None:
    """The rule and the expectation, computed apart, agree."""
    calls = calls_of(policy_events(scenario, column)[0])
    assert scenario.expected(column) == turns_thrown_away(calls)
    counts = count_siblings(calls, scenario.siblings)
    assert scenario.expected(column) == sum(count.thrown_away for count in counts)
    assert all(scenario.turns == count.turns for count in counts)


def test_kinds_name_what_became_of_a_call() -> None:
    """Kept, lost, again, held."""
    log = Log()
    log.call(0, 1, "completed")
    log.call(0, 1, "completed")
    log.call(0, 2, "held")
    first, second, third = calls_of(log.events)
    assert ["lost", "again", "held", "kept"] == [
        kind_of(first, [first, second]),
        kind_of(second, [first, second]),
        kind_of(third, []),
        kind_of(second, [second]),
    ]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    """A reader that looks in the middle of a write sees whole lines only, and none of a file that is not there."""
    path = tmp_path / "log.jsonl"
    assert [] == read_lines(path)
    path.write_text(json.dumps({"a": 1}) + '\n{"a": ', encoding="utf-8")
    assert [{"a": 1}] == read_lines(path)


def test_a_tail_sees_what_was_added_and_never_half_a_line(tmp_path: Path) -> None:
    """The progress looks at a log that is being written."""
    path = tmp_path / "log.jsonl"
    tail = Tail(path)
    assert [] == tail.lines()
    path.write_text('{"a": 1}\n{"a"', encoding="utf-8")
    assert [{"a": 1}] == tail.lines()
    with path.open("a", encoding="utf-8") as file:
        file.write(": 2}\n")
    assert [{"a": 1}, {"a": 2}] == tail.lines() == tail.lines() == read_lines(path)
