# SPDX-License-Identifier: Apache-2.0
"""Which token rows belong to what: to a result, to a saved turn, to a live attempt. Pure, over a ledger connection.

The rows of one sample may lie under several attempts: attempt 1 that continued attempt 0 after 2 turns owns the turns
from 3 on, the turns 1 and 2 stay where attempt 0 put them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reference_rl.dataplane import RowKey
from spec.messages import IndexRecord


def owners_of_turns(con: sqlite3.Connection, rollout_id: str, attempt: int) -> list[tuple[int, int, int | None]]:
    """Return who owns which turns of an attempt: (attempt, first turn, last turn or ``None``), the latest first."""
    spans: list[tuple[int, int, int | None]] = []
    last: int | None = None
    current: int | None = attempt
    while current is not None:
        row = con.execute(
            "SELECT continues, turns_kept FROM attempts WHERE rollout_id = ? AND attempt = ?", (rollout_id, current)
        ).fetchone()
        kept = row["turns_kept"] if row is not None and row["continues"] is not None else 0
        spans.append((current, kept + 1, last))
        # A later continuation may have kept fewer turns than an earlier one; what lies beyond was redone.
        last = kept if last is None else min(last, kept)
        current = row["continues"] if row is not None else None
    return spans


def rows_of_attempt(
    con: sqlite3.Connection, rollout_id: str, attempt: int, listed: Iterable[RowKey], turns: int | None = None
) -> set[RowKey]:
    """Return the stored rows that make up an attempt, up to ``turns`` when given.

    Requirements: CKPT-DUTY-026.
    """
    spans = owners_of_turns(con, rollout_id, attempt)
    found = set()
    for key in listed:
        if key.rollout_id != rollout_id or (turns is not None and key.turn > turns):
            continue
        for owner, first, last in spans:
            if key.attempt == owner and first <= key.turn and (last is None or key.turn <= last):
                found.add(key)
    return found


def rows_of_results(con: sqlite3.Connection, listed: Sequence[RowKey]) -> set[RowKey]:
    """Return the stored rows that saved results refer to, by their references or by their attempt."""
    by_rollout = _by_rollout(listed)
    found: set[RowKey] = set()
    for row in con.execute("SELECT rollout_id, attempt, result FROM results WHERE kind = 'body'"):
        mine = by_rollout.get(row["rollout_id"], [])
        if mine:
            refs = json.loads(row["result"]).get("info", {}).get("data_refs", ())
            found |= named_by(refs, mine) | rows_of_attempt(con, row["rollout_id"], row["attempt"], mine)
    return found


def rows_of_sample(con: sqlite3.Connection, rollout_id: str, listed: Sequence[RowKey]) -> dict[int, RowKey]:
    """Return turn → the stored row that a training sample is made of: one for each turn of its result's attempt.

    Requirements: CKPT-DUTY-026.
    """
    row = con.execute("SELECT attempt FROM results WHERE rollout_id = ?", (rollout_id,)).fetchone()
    return {key.turn: key for key in rows_of_attempt(con, rollout_id, row["attempt"], listed)} if row else {}


def turns_of_sample(con: sqlite3.Connection, rollout_id: str) -> int:
    """Return how many turns the saved result of a rollout has, 0 when there is none."""
    row = con.execute("SELECT result FROM results WHERE rollout_id = ? AND kind = 'body'", (rollout_id,)).fetchone()
    return int(json.loads(row["result"])["body"].get("turns", 0)) if row else 0


def rows_of_cut(con: sqlite3.Connection, index: Iterable[IndexRecord], listed: Sequence[RowKey]) -> set[RowKey]:
    """Return the stored rows of the saved turns of an index."""
    by_rollout = _by_rollout(listed)
    found: set[RowKey] = set()
    for record in index:
        mine = by_rollout.get(record.rollout_id, [])
        if mine and record.state != "restart":
            # A prefix also covers rows of turns that came after the cut: they are no saved turns.
            named = named_by([ref.to_object() for ref in record.data_refs], mine)
            found |= {key for key in named if key.turn <= record.turns_done}
            found |= rows_of_attempt(con, record.rollout_id, record.attempt, mine, record.turns_done)
    return found


def rows_of_live(con: sqlite3.Connection, listed: Sequence[RowKey]) -> set[RowKey]:
    """Return the stored rows of the current attempts of unfinished rollouts."""
    by_rollout = _by_rollout(listed)
    found: set[RowKey] = set()
    for row in con.execute("SELECT rollout_id, attempt FROM rollouts WHERE state = 'unfinished'"):
        mine = by_rollout.get(row["rollout_id"], [])
        if mine:
            found |= rows_of_attempt(con, row["rollout_id"], row["attempt"], mine)
    return found


def named_by(refs: Iterable[Mapping[str, Any]], listed: Iterable[RowKey]) -> set[RowKey]:
    """Return the stored rows that references name, by key or by prefix."""
    refs = list(refs)
    keys = {ref["key"] for ref in refs if ref.get("key") is not None}
    prefixes = tuple(ref["prefix"] for ref in refs if ref.get("prefix") is not None)
    return {key for key in listed if str(key) in keys or (prefixes and str(key).startswith(prefixes))}


def _by_rollout(listed: Iterable[RowKey]) -> dict[str, list[RowKey]]:
    grouped: dict[str, list[RowKey]] = {}
    for key in listed:
        grouped.setdefault(key.rollout_id, []).append(key)
    return grouped
