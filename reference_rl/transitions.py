# SPDX-License-Identifier: Apache-2.0
"""Every change of the ledger, one function and one transaction each.

Each function takes the writer's connection first and is handed to :meth:`reference_rl.ledger.Ledger.do`. None of them talks
to anybody.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reference_rl.errors import EpochTaken, InvariantViolated
from reference_rl.records import PlannedGroup, Receipt, Reservation, RolloutRow, ServedResult, Settled


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
                (r.rollout_id, r.group, r.sibling, r.gym, r.agent, r.environment)
                + (json.dumps(r.task), r.task_digest, r.seed, json.dumps(r.limits))
                for r in group.rollouts
            ],
        )
    return added


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


def settle(con: sqlite3.Connection, gym: str, page: Sequence[ServedResult], max_failures: int) -> list[Settled]:
    """Save, or settle as surplus, every result of one page, and owe an ACK for each, in one transaction.

    A result is saved only for the current attempt of its rollout, for a receipt on the keep list or, while no restore of that
    Gym is open, as a success of a lower attempt when no start of the current one was confirmed. A failure of kind
    ``session_lost`` that may be retried is left alone here: it is judged after the incarnations were read
    (:func:`settle_session_lost`).

    Args:
        con: the writer's connection.
        gym: alias of the Gym that served the page.
        page: the results, in the order of the page.
        max_failures: after so many non-terminal failures a rollout counts as failed.
    """
    return [_settle_one(con, gym, served, max_failures) for served in page]


def settle_session_lost(
    con: sqlite3.Connection, gym: str, served: ServedResult, max_failures: int, *, fact: bool
) -> Settled:
    """Settle a retryable ``session_lost`` after the incarnations of the Gym were read.

    Args:
        con: the writer's connection.
        gym: alias of the Gym.
        served: the failure.
        max_failures: as for :func:`settle`.
        fact: every incarnation was the known one and no restore is open, so the session was really lost by itself. Otherwise
            attempt and origin stay, and the rollout goes into the coming restore.
    """
    if fact:
        return _settle_one(con, gym, served, max_failures, judged=True)
    _owe(con, gym, served.receipt)
    _note_outcome(con, served.receipt, "session_lost, left to the restore")
    return _settled(con, served.receipt, "session_lost", "the session was lost with its participant")


def save_unmanaged(con: sqlite3.Connection, rollout_id: str, run_name: str, served: ServedResult) -> bool:
    """Save what the Gym's older route returned for a sibling: no receipt, no ACK, the name is random for each run.

    Returns:
        Whether it was saved: not when the sibling has a result already.
    """
    kind, state = ("body", "finished") if served.failure is None else ("failure", "failed")
    if con.execute("SELECT 1 FROM results WHERE rollout_id = ?", (rollout_id,)).fetchone():
        return False
    _save(con, served, kind, state)
    con.execute("UPDATE rollouts SET detail = ? WHERE rollout_id = ?", (run_name, rollout_id))
    return True


def clear_debts(con: sqlite3.Connection, gym: str, outcomes: Iterable[tuple[Receipt, str]]) -> dict[str, int]:
    """Clear the debts that a participant has settled; return how often each outcome came.

    Raises:
        InvariantViolated: a ``mismatch``: the participant holds another result under a receipt that it issued.
    """
    counts: dict[str, int] = {}
    for receipt, outcome in outcomes:
        counts[outcome] = counts.get(outcome, 0) + 1
        if outcome == "mismatch":
            raise InvariantViolated(
                f"{gym} holds another result for {receipt.rollout_id}, attempt {receipt.attempt}, than it has served",
                {
                    "gym": gym,
                    "receipt": receipt._asdict(),
                    "answer": outcome,
                    "ledger": _evidence(con, receipt.rollout_id),
                },
            )
        con.execute("DELETE FROM ack_debts WHERE (gym, rollout_id, attempt, digest) = (?, ?, ?, ?)", (gym, *receipt))
    return counts


def keep_receipt(con: sqlite3.Connection, gym: str, receipt: Receipt) -> bool:
    """Put a receipt that an ``already_finished`` or a retire named on the keep list.

    Returns:
        Whether its result can still come: not when it was settled as surplus before.
    """
    key = (gym, *receipt)
    row = con.execute("SELECT state FROM rollouts WHERE rollout_id = ?", (receipt.rollout_id,)).fetchone()
    if row is None or row["state"] != "unfinished":
        return True
    if con.execute("SELECT 1 FROM surplus WHERE (gym, rollout_id, attempt, digest) = (?, ?, ?, ?)", key).fetchone():
        return False
    con.execute("INSERT OR IGNORE INTO keep VALUES (?, ?, ?, ?)", key)
    return True


def forget_keep(con: sqlite3.Connection, gym: str, rollout_ids: Iterable[str]) -> None:
    """Take rollouts off the keep list: what it promised did not come."""
    con.executemany("DELETE FROM keep WHERE gym = ? AND rollout_id = ?", [(gym, r) for r in rollout_ids])


def reserve(con: sqlite3.Connection, wishes: Iterable[Reservation], epoch: int) -> dict[str, int]:
    """Reserve a next attempt for each rollout, before it is sent to anybody; reserved numbers are never used again.

    Returns:
        rollout_id → the reserved attempt.
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
    """Begin a restore of one Gym: its attempts, its keep list and its open flag in one transaction."""
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
    """End a restore: every participant is resumed, and these attempts continue."""
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
    """Consume finished rollouts into one training step: each rollout once, whatever its attempts were."""
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
    """
    con.execute("DELETE FROM consumption")
    con.executemany("INSERT INTO consumption VALUES (?, ?)", list(consumed.items()))
    con.execute("UPDATE trainer SET step = ?, weights_version = ?", (step, weights_version))
    for rollout_id in dropped:
        query = (
            "SELECT r.attempt, r.digest, o.gym FROM results r JOIN rollouts o USING (rollout_id) WHERE r.rollout_id = ?"
        )
        row = con.execute(query, (rollout_id,)).fetchone()
        if row is not None:
            _drop_result(con, row["gym"], Receipt(rollout_id, row["attempt"], row["digest"]))


def merge_results(con: sqlite3.Connection, rows: Iterable[Mapping[str, Any]], attempts: Mapping[str, int]) -> None:
    """Take over what an older copy of the ledger knows and this one does not: results and attempt numbers."""
    con.executemany(
        "UPDATE rollouts SET attempt = max(attempt, ?) WHERE rollout_id = ?", [(a, r) for r, a in attempts.items()]
    )
    for row in rows:
        # Of several results of one rollout the one of the lowest attempt counts.
        con.execute("DELETE FROM results WHERE rollout_id = ? AND attempt > ?", (row["rollout_id"], row["attempt"]))
        cursor = con.execute(
            "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            tuple(
                row[name]
                for name in ("rollout_id", "attempt", "digest", "result", "kind", "weights_version", "saved_step")
            )
            + (row["saved_at"],),
        )
        if cursor.rowcount:
            state = "finished" if row["kind"] == "body" else "failed"
            con.execute("UPDATE rollouts SET state = ? WHERE rollout_id = ?", (state, row["rollout_id"]))


def _settle_one(
    con: sqlite3.Connection, gym: str, served: ServedResult, max_failures: int, *, judged: bool = False
) -> Settled:
    receipt = served.receipt
    row = con.execute("SELECT * FROM rollouts WHERE rollout_id = ?", (receipt.rollout_id,)).fetchone()
    if row is None or row["gym"] != gym:
        return _surplus(con, gym, receipt, "the ledger does not know this rollout")
    rollout = RolloutRow.of(row)
    if rollout.state != "unfinished":
        return _settle_again(con, gym, receipt)
    reason = _why_saved(con, gym, rollout, served)
    if reason is None:
        return _surplus(con, gym, receipt, f"attempt {rollout.attempt} is the current one")
    failure = served.failure
    if failure is None:
        _save(con, served, "body", "finished")
        _owe(con, gym, receipt)
        return _settled(con, receipt, "saved", reason)
    if not judged and failure.get("kind") == "session_lost" and not failure.get("terminal"):
        return _settled(con, receipt, "session_lost", "to be judged by the incarnations")
    _owe(con, gym, receipt)
    _note_outcome(con, receipt, f"failed: {failure.get('kind')}")
    con.execute("DELETE FROM keep WHERE rollout_id = ?", (receipt.rollout_id,))
    if failure.get("terminal") or rollout.failures + 1 >= max_failures:
        _save(con, served, "failure", "failed")
        return _settled(con, receipt, "saved_failure", str(failure.get("kind")))
    con.execute("UPDATE rollouts SET failures = failures + 1 WHERE rollout_id = ?", (receipt.rollout_id,))
    epoch = con.execute("SELECT coalesce(max(epoch), 0) FROM epochs").fetchone()[0]
    reserve(con, [Reservation(receipt.rollout_id, f"retry after {failure.get('kind')}", receipt.attempt)], epoch)
    return _settled(con, receipt, "retry", str(failure.get("kind")))


def _why_saved(con: sqlite3.Connection, gym: str, rollout: RolloutRow, served: ServedResult) -> str | None:
    receipt = served.receipt
    if receipt.attempt == rollout.attempt:
        return "current attempt"
    key = (gym, *receipt)
    if con.execute("SELECT 1 FROM keep WHERE (gym, rollout_id, attempt, digest) = (?, ?, ?, ?)", key).fetchone():
        return "on the keep list"
    restoring = con.execute("SELECT 1 FROM open_restores WHERE gym = ?", (gym,)).fetchone()
    if served.failure is None and receipt.attempt < rollout.attempt and not rollout.answered and not restoring:
        return "success of a lower attempt, the current one is not confirmed"
    return None


def _settle_again(con: sqlite3.Connection, gym: str, receipt: Receipt) -> Settled:
    saved = con.execute(
        "SELECT 1 FROM results WHERE (rollout_id, attempt, digest) = (?, ?, ?)", tuple(receipt)
    ).fetchone()
    if saved is None:
        return _surplus(con, gym, receipt, "the rollout has a result already")
    _owe(con, gym, receipt)
    return _settled(con, receipt, "again", "this result is saved already")


def _save(con: sqlite3.Connection, served: ServedResult, kind: str, state: str) -> None:
    receipt = served.receipt
    trainer = con.execute("SELECT step, weights_version FROM trainer").fetchone()
    version = served.weights_version
    con.execute(
        "INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (*receipt, served.text, kind)
        + (trainer["weights_version"] if version is None else version, trainer["step"], time.time()),
    )
    con.execute("UPDATE rollouts SET state = ? WHERE rollout_id = ?", (state, receipt.rollout_id))
    con.execute("DELETE FROM keep WHERE rollout_id = ?", (receipt.rollout_id,))
    _note_outcome(con, receipt, state)


def _note_outcome(con: sqlite3.Connection, receipt: Receipt, outcome: str) -> None:
    con.execute(
        "UPDATE attempts SET outcome = ? WHERE rollout_id = ? AND attempt = ?",
        (outcome, receipt.rollout_id, receipt.attempt),
    )


def _surplus(con: sqlite3.Connection, gym: str, receipt: Receipt, reason: str) -> Settled:
    con.execute("INSERT OR IGNORE INTO surplus VALUES (?, ?, ?, ?, ?, ?)", (gym, *receipt, reason, time.time()))
    _owe(con, gym, receipt)
    return _settled(con, receipt, "surplus", reason)


def _owe(con: sqlite3.Connection, gym: str, receipt: Receipt) -> None:
    con.execute("INSERT OR IGNORE INTO ack_debts VALUES (?, ?, ?, ?)", (gym, *receipt))


def _settled(con: sqlite3.Connection, receipt: Receipt, decision: Any, reason: str) -> Settled:
    row = con.execute("SELECT grp, sibling FROM rollouts WHERE rollout_id = ?", (receipt.rollout_id,)).fetchone()
    return Settled(receipt, decision, reason, *(row or (None, None)))


def _evidence(con: sqlite3.Connection, rollout_id: str) -> dict[str, Any]:
    row = con.execute("SELECT * FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    return dict(row) if row is not None else {}


def _drop_result(con: sqlite3.Connection, gym: str, receipt: Receipt) -> None:
    con.execute(
        "INSERT OR IGNORE INTO surplus VALUES (?, ?, ?, ?, ?, ?)",
        (gym, *receipt, "made with newer weights than the restored ones", time.time()),
    )
    con.execute("DELETE FROM results WHERE rollout_id = ?", (receipt.rollout_id,))
    con.execute("UPDATE rollouts SET state = 'unfinished', detail = NULL WHERE rollout_id = ?", (receipt.rollout_id,))
