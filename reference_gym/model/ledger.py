# SPDX-License-Identifier: Apache-2.0
"""The ledger: one row per completed policy call of a rollout, kept by turn.

A turn that is generated again after a restore replaces its row. A restore keeps the rows of the listed rollouts up to
their `turns_done`, and no other. Implements CKPT-ENV-019, -021, -022 and CKPT-DIR-033, -034.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reference_gym.participant.jsontext import is_integer
from reference_gym.participant.policy_call import TurnId
from reference_gym.participant.state import Captured, Owns, Restored

MAX_TURN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One completed policy call: its turn, the digest of the reply's bytes, and what the reply reported."""

    turn: int
    reply_digest: str
    reply_bytes: int
    usage: Mapping[str, int]
    version: int | None

    def as_json(self) -> dict[str, Any]:
        """The form that is saved."""
        return {
            "turn": self.turn,
            "reply_digest": self.reply_digest,
            "reply_bytes": self.reply_bytes,
            "usage": dict(self.usage),
            "version": self.version,
        }


@dataclass(frozen=True, slots=True)
class _Book:
    attempt: int
    rows: Mapping[int, Row]


class Ledger:
    """The rows of all rollouts; a `Part` of the participant that owns them.

    Args:
        changed: told the rollout after each row.
    """

    name = "ledger"
    owns: Owns = "ledger"

    def __init__(self, changed: Callable[[str], None]) -> None:
        self._changed = changed
        self._books: dict[str, _Book] = {}

    def add(self, turn: TurnId, row: Row) -> None:
        """Record a completed policy call; one of a lower attempt than the recorded one is left out."""
        book = self._books.get(turn.rollout_id)
        if book is not None and book.attempt > turn.attempt:
            return
        rows = dict(book.rows) if book is not None else {}
        rows[row.turn] = row
        self._books[turn.rollout_id] = _Book(turn.attempt, rows)
        self._changed(turn.rollout_id)

    def rows(self, rollout_id: str) -> list[Row]:
        """The rows of one rollout, by turn."""
        book = self._books.get(rollout_id)
        return [] if book is None else [book.rows[turn] for turn in sorted(book.rows)]

    def capture(self, rollout_id: str) -> Captured | None:
        """The rows as they are now."""
        book = self._books.get(rollout_id)
        if book is None:
            return None
        rows = self.rows(rollout_id)
        versions = [row.version for row in rows if row.version is not None]
        return Captured(
            attempt=book.attempt,
            turns_done=max(book.rows, default=0),
            data=[row.as_json() for row in rows],
            policy_version=max(versions, default=None),
        )

    async def build(self, rollouts: Sequence[Restored]) -> dict[str, _Book]:
        """The books of these rollouts, cut at their `turns_done`; raises `ValueError` when a row is damaged."""
        built = {}
        for rollout in rollouts:
            rows = [_row(saved) for saved in rollout.data or ()]
            kept = {row.turn: row for row in rows if row.turn <= rollout.turns_done}
            built[rollout.rollout_id] = _Book(rollout.attempt, kept)
        return built

    def install(self, built: dict[str, _Book]) -> None:
        """Make the built books the only ones."""
        self._books = dict(built)

    async def discard(self, built: dict[str, _Book]) -> None:
        """Nothing to free."""

    def forget(self, rollout_id: str, attempt: int) -> None:
        """Forget the rows of one rollout, unless they are those of a higher attempt."""
        book = self._books.get(rollout_id)
        if book is not None and book.attempt <= attempt:
            self.drop(rollout_id)
            self._changed(rollout_id)

    def drop(self, rollout_id: str) -> None:
        """Forget the rows of one rollout."""
        self._books.pop(rollout_id, None)


def _row(saved: Mapping[str, Any]) -> Row:
    version = saved.get("version")
    fits = (
        is_integer(saved.get("turn"), 1, MAX_TURN)
        and isinstance(saved.get("reply_digest"), str)
        and is_integer(saved.get("reply_bytes"), 0, 2**53)
        and isinstance(saved.get("usage"), dict)
        and (version is None or is_integer(version, 0, 2**53))
    )
    if not fits:
        raise ValueError("a row of the ledger is damaged")
    return Row(saved["turn"], saved["reply_digest"], saved["reply_bytes"], saved["usage"], version)
