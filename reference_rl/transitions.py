# SPDX-License-Identifier: Apache-2.0
"""Every change of the ledger, one function and one transaction each.

Each function takes the writer's connection first and is handed to :meth:`reference_rl.ledger.Ledger.do`. None of them
talks to anybody.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from reference_rl.errors import EpochTaken
from reference_rl.records import PlannedGroup, PlannedRollout, Receipt, Reservation

_RESULT_COLUMNS: Final = (
    *("rollout_id", "attempt", "digest", "result", "kind"),
    *("weights_version", "saved_step", "saved_at"),
)


def plan(con: sqlite3.Connection, groups: Iterable[PlannedGroup]) -> int:
    """Add the groups that are not there yet; return how many were added."""
    added = 0
    for group in groups:
        cursor = con.execute(
            "INSERT OR IGNORE INTO groups VALUES (?, ?, ?, ?)",
            (group.group, group.source, group.gym, group.granularity),
        )
        if not cursor.rowcount:
            continue
        added += 1
        con.executemany(
            "INSERT INTO rollouts (rollout_id, grp, sibling, gym, agent, environment, task, task_digest, seed, limits)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (r.rollout_id, r.group, r.sibling, r.gym, r.agent, r.environment, *_task_columns(r))
                for r in group.rollouts
            ],
        )
    return added


def _task_columns(rollout: PlannedRollout) -> tuple[str, str, int | None, str]:
    return json.dumps(rollout.task), rollout.task_digest, rollout.seed, json.dumps(rollout.limits)


def claim_epoch(con: sqlite3.Connection, epoch: int, controller_id: str) -> None:
    """Record this controller's epoch.

    Raises:
        EpochTaken: the ledger knows this epoch or a higher one.
    """
    highest = con.execute("SELECT max(epoch) FROM epochs").fetchone()[0]
    if highest is not None and highest >= epoch:
        raise EpochTaken(f"the ledger holds epoch {highest}, {epoch} is not above it")
    con.execute("INSERT INTO epochs VALUES (?, ?, ?)", (epoch, controller_id, time.time()))


def mark_sent(con: sqlite3.Connection, rollout_ids: Sequence[str]) -> None:
    """Note, before they leave, that starts of the current attempts may be under way."""
    con.executemany("UPDATE rollouts SET sent = 1 WHERE rollout_id = ? AND sent = 0", [(r,) for r in rollout_ids])


def mark_unsent_again(con: sqlite3.Connection, rollout_ids: Iterable[str]) -> None:
    """Have the starts of live attempts repeated, so that they learn the present policy address."""
    con.executemany(
        "UPDATE rollouts SET sent = 0 WHERE rollout_id = ? AND state = 'unfinished'", [(r,) for r in rollout_ids]
    )


def mark_answered(con: sqlite3.Connection, attempts: Iterable[tuple[str, int]]) -> None:
    """Note that a participant has confirmed these attempts (start answered, or continued after a restore)."""
    con.executemany(
        "UPDATE rollouts SET sent = 1, answered = 1 WHERE rollout_id = ? AND attempt = ? AND state = 'unfinished'",
        list(attempts),
    )


def mark_unsent(con: sqlite3.Connection, attempts: Iterable[tuple[str, int]]) -> None:
    """Put attempts whose start was definitely not accepted back in the queue."""
    con.executemany(
        "UPDATE rollouts SET sent = 0 WHERE rollout_id = ? AND attempt = ? AND answered = 0 AND state = 'unfinished'",
        list(attempts),
    )


def reserve(con: sqlite3.Connection, wishes: Iterable[Reservation], epoch: int) -> dict[str, int]:
    """Reserve a next attempt for each rollout, before it is sent to anybody; reserved numbers are never used again.

    Returns:
        rollout_id → the reserved attempt.

    Requirements: CKPT-RESTART-025…029.
    """
    reserved = {}
    for wish in wishes:
        current = con.execute("SELECT attempt FROM rollouts WHERE rollout_id = ?", (wish.rollout_id,)).fetchone()[0]
        following = max(current, wish.above) + 1
        con.execute(
            "UPDATE rollouts SET attempt = ?, continues = ?, sent = 0, answered = 0 WHERE rollout_id = ?",
            (following, wish.continues, wish.rollout_id),
        )
        con.execute(
            "INSERT INTO attempts (rollout_id, attempt, origin, continues, turns_kept, epoch, reserved_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (wish.rollout_id, following, wish.origin, wish.continues, wish.turns_kept, epoch, time.time()),
        )
        reserved[wish.rollout_id] = following
    return reserved


def open_restore(
    con: sqlite3.Connection, gym: str, epoch: int, wishes: Iterable[Reservation], keep: Iterable[Receipt]
) -> dict[str, int]:
    """Begin a restore of one Gym: its attempts, its keep list and its open flag in one transaction.

    Requirements: CKPT-RESTART-005, CKPT-RESTART-024.
    """
    con.execute("INSERT OR REPLACE INTO open_restores VALUES (?, ?, ?)", (gym, epoch, time.time()))
    con.execute("DELETE FROM keep WHERE gym = ?", (gym,))
    con.executemany("INSERT OR IGNORE INTO keep VALUES (?, ?, ?, ?)", [(gym, *receipt) for receipt in keep])
    return reserve(con, wishes, epoch)


def open_recovery(
    con: sqlite3.Connection,
    epoch: int,
    controller_id: str,
    gyms: Mapping[str, tuple[Iterable[Reservation], Iterable[Receipt]]],
) -> dict[str, dict[str, int]]:
    """Begin a restart: the new epoch and every next attempt of every Gym that is restored, in one transaction.

    Returns:
        alias → rollout_id → the reserved attempt.
    """
    claim_epoch(con, epoch, controller_id)
    return {alias: open_restore(con, alias, epoch, wishes, keep) for alias, (wishes, keep) in gyms.items()}


def close_restore(
    con: sqlite3.Connection, gym: str, incarnations: Mapping[str, str], continued: Iterable[tuple[str, int]]
) -> None:
    """End a restore: every participant is resumed, and these attempts continue.

    Requirements: CKPT-RESTART-006.
    """
    con.execute("DELETE FROM open_restores WHERE gym = ?", (gym,))
    record_incarnations(con, gym, incarnations)
    mark_answered(con, continued)


def record_incarnations(con: sqlite3.Connection, gym: str, incarnations: Mapping[str, str]) -> None:
    """Record under which incarnations the participants of a Gym are known."""
    con.execute("DELETE FROM participants WHERE gym = ?", (gym,))
    con.executemany("INSERT INTO participants VALUES (?, ?, ?)", [(gym, n, i) for n, i in incarnations.items()])


def fail_rollout(con: sqlite3.Connection, rollout_id: str, detail: str) -> None:
    """Give up a rollout that cannot be started at all."""
    con.execute(
        "UPDATE rollouts SET state = 'failed', detail = ? WHERE rollout_id = ? AND state = 'unfinished'",
        (detail, rollout_id),
    )


def record_step(con: sqlite3.Connection, step: int, weights_version: int, rollout_ids: Iterable[str]) -> None:
    """Consume finished rollouts into one training step: each rollout once, whatever its attempts were.

    Requirements: CKPT-ID-007, CKPT-INV-004.
    """
    con.executemany("INSERT INTO consumption VALUES (?, ?)", [(r, step) for r in rollout_ids])
    con.execute("UPDATE trainer SET step = ?, weights_version = ?", (step, weights_version))


def roll_back_training(
    con: sqlite3.Connection, step: int, weights_version: int, consumed: Mapping[str, int], dropped: Iterable[str]
) -> None:
    """Return training to the state of a snapshot; results are facts and stay, but for those that are not salvaged.

    Args:
        con: the writer's connection.
        step: the trainer's step in the snapshot.
        weights_version: its weights version there.
        consumed: rollout_id → step, the consumption of the snapshot.
        dropped: rollouts whose result is not kept; each is unfinished again.

    Requirements: CKPT-RESTART-044, CKPT-RESTART-045.
    """
    con.execute("DELETE FROM consumption")
    con.executemany("INSERT INTO consumption VALUES (?, ?)", list(consumed.items()))
    con.execute("UPDATE trainer SET step = ?, weights_version = ?", (step, weights_version))
    drop_results(con, dropped, "made with newer weights than the restored ones")


def drop_results(con: sqlite3.Connection, rollout_ids: Iterable[str], reason: str) -> None:
    """Settle the saved results of some rollouts as surplus; each is unfinished again."""
    query = "SELECT r.attempt, r.digest, o.gym FROM results r JOIN rollouts o USING (rollout_id) WHERE r.rollout_id = ?"
    for rollout_id in rollout_ids:
        row = con.execute(query, (rollout_id,)).fetchone()
        if row is not None:
            _drop_result(con, row["gym"], Receipt(rollout_id, row["attempt"], row["digest"]), reason)


def merge_results(con: sqlite3.Connection, rows: Iterable[Mapping[str, Any]], attempts: Mapping[str, int]) -> None:
    """Take over what an older copy of the ledger knows and this one does not: results and attempt numbers."""
    con.executemany(
        "UPDATE rollouts SET attempt = max(attempt, ?) WHERE rollout_id = ?", [(a, r) for r, a in attempts.items()]
    )
    known = {row[0] for row in con.execute("SELECT rollout_id FROM rollouts")}
    for row in rows:
        if row["rollout_id"] not in known:
            continue  # its group was redone under other names since
        # Of several results of one rollout the one of the lowest attempt counts.
        con.execute("DELETE FROM results WHERE rollout_id = ? AND attempt > ?", (row["rollout_id"], row["attempt"]))
        cursor = con.execute(
            "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            tuple(row[name] for name in _RESULT_COLUMNS),
        )
        if cursor.rowcount:
            state = "finished" if row["kind"] == "body" else "failed"
            con.execute("UPDATE rollouts SET state = ? WHERE rollout_id = ?", (state, row["rollout_id"]))


def redo_rollouts(con: sqlite3.Connection, rollout_ids: Iterable[str], reason: str) -> dict[str, str]:
    """Put a new rollout, with a name that was never sent, in the place of each given one.

    The old names stay what they are to a Gym, released ones for example, and what it still serves under them is
    surplus.

    Returns:
        The old rollout_id → the new one.

    Requirements: CKPT-RESTART-060, CKPT-RESTART-065.
    """
    replaced = {}
    for old in rollout_ids:
        stem, _, number = old.rpartition(".r")
        new = f"{stem}.r{int(number) + 1}" if stem and number.isdecimal() else f"{old}.r1"
        drop_results(con, [old], reason)
        con.execute("DELETE FROM keep WHERE rollout_id = ?", (old,))
        con.execute(
            "UPDATE rollouts SET rollout_id = ?, state = 'unfinished', attempt = 0, continues = NULL, sent = 0,"
            " answered = 0, failures = 0, detail = NULL WHERE rollout_id = ?",
            (new, old),
        )
        replaced[old] = new
    return replaced


def _drop_result(con: sqlite3.Connection, gym: str, receipt: Receipt, reason: str) -> None:
    con.execute("INSERT OR IGNORE INTO surplus VALUES (?, ?, ?, ?, ?, ?)", (gym, *receipt, reason, time.time()))
    con.execute("DELETE FROM results WHERE rollout_id = ?", (receipt.rollout_id,))
    con.execute("UPDATE rollouts SET state = 'unfinished', detail = NULL WHERE rollout_id = ?", (receipt.rollout_id,))
