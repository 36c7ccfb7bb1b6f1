# SPDX-License-Identifier: Apache-2.0
"""What a restore of the suite lists, when a cut holds more than this check's rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from conformance.case import Case
from conformance.cuts import Cut, Part, plan


class Book:
    """A check's book of attempts, with a Gym whose agent owns the rollouts."""

    def __init__(self, attempts: Mapping[str, int]) -> None:
        self.attempts = dict(attempts)
        self.agent = SimpleNamespace(name="agent")

    def next_attempt(self, rollout_id: str) -> int:
        """Reserve the next attempt of a rollout."""
        self.attempts[rollout_id] = self.attempts.get(rollout_id, -1) + 1
        return self.attempts[rollout_id]


def row(rollout_id: str, attempt: int, state: str = "turn") -> dict[str, Any]:
    """A row of an index."""
    return {"rollout_id": rollout_id, "attempt": attempt, "state": state, "turns_done": 2, "task_digest": "d"}


def cut(agent: list[dict[str, Any]], sessions: list[dict[str, Any]]) -> Cut:
    """A cut of two participants."""

    def part(name: str, rows: list[dict[str, Any]]) -> Part:
        return Part(name, {}, Path(), {}, {row["rollout_id"]: row for row in rows})

    return Cut("5-1", {"agent": part("agent", agent), "sessions": part("sessions", sessions)}, {})


def test_a_session_whose_rollout_has_ended_is_not_listed() -> None:
    """With a log the owner of sessions keeps one over the kill in which the owner of rollouts loses the rollout."""
    book = Book({"own": 1})
    lists = plan(cast(Case, book), cut([row("own", 1)], [row("own", 1), row("ended", 1)]))
    assert {"agent": ["own"], "sessions": ["own"]} == {
        name: [entry["rollout_id"] for entry in rows] for name, rows in lists.rollouts.items()
    }
    assert ({"own": 2}, []) == (lists.next_attempts, lists.fences)


def test_what_an_earlier_check_left_is_fenced_as_it_is() -> None:
    """Nobody knows its highest attempt any more: it is not continued, and its row says through which it is fenced."""
    book = Book({"own": 0})
    lists = plan(cast(Case, book), cut([row("own", 0), row("other", 3)], [row("own", 0), row("other", 3)]))
    assert {"own": 1} == lists.next_attempts
    assert [{"rollout_id": "other", "through_attempt": 3}] == lists.fences


def test_what_cannot_continue_everywhere_is_fenced() -> None:
    """A session that says `restart` keeps its rollout from being continued."""
    lists = plan(cast(Case, Book({"own": 0})), cut([row("own", 0)], [row("own", 0, "restart")]))
    assert ({}, [{"rollout_id": "own", "through_attempt": 0}]) == (lists.next_attempts, lists.fences)
