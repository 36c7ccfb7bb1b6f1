# SPDX-License-Identifier: Apache-2.0
"""What the crash test calls sound: reached, while an unfinished rollout held a turn, and nothing was missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.gym.crash.known import Known
from tests.gym.crash.points import Verdict, Visit

AT = Visit("one", "all", "boundary.crossed")


@pytest.mark.parametrize(
    ("hit", "held", "kept", "fault", "expected"),
    [
        (True, True, True, None, "ok"),
        (True, False, True, None, "RED no turn was held"),
        (True, True, False, None, "RED a new incarnation"),
        (True, True, None, None, "RED a new incarnation"),
        (True, True, True, "a turn is missing", "RED a turn is missing"),
        (False, True, True, None, "not reached"),
    ],
)
def test_only_a_visit_that_proves_something_is_sound(
    hit: bool,
    held: bool,
    kept: bool | None,
    fault: str | None,
    expected: str,
) -> None:
    """A point that was never reached while an unfinished rollout held a turn proves nothing, so it is not sound."""
    verdict = Verdict(AT, hit, held, kept, fault)
    assert (expected == "ok", expected) == (verdict.sound, verdict.word)


@dataclass
class _Asked:
    rollout_id: str
    turn: str
    attempt: str = "0"


@dataclass
class _Policy:
    asked: list[Any] = field(default_factory=list)


@pytest.mark.parametrize(
    ("asked", "gone", "expected"),
    [
        ([], (), False),
        ([("a", 1)], (), False),
        ([("a", 1), ("a", 2)], (), True),
        ([("a", 1), ("a", 2)], ("a",), False),
        ([("a", 1), ("a", 2), ("b", 1)], ("a",), False),
        ([("a", 1), ("a", 2), ("b", 1), ("b", 2)], ("a",), True),
    ],
)
def test_a_turn_is_held_by_who_was_asked_for_a_later_one_and_has_no_result(
    asked: list[tuple[str, int]],
    gone: tuple[str, ...],
    expected: bool,
) -> None:
    """Turn 2 is asked for only when turn 1 has ended; who has its result, or was fenced, holds nothing more."""
    policy: Any = _Policy([_Asked(name, str(turn)) for name, turn in asked])
    known = Known(policy)
    known.fenced.update(dict.fromkeys(gone, 0))
    assert expected == known.held_turn()
