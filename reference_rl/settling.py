# SPDX-License-Identifier: Apache-2.0
"""Which results are saved, which are surplus, when an ACK is owed and cleared: one function, one transaction each.

Handed to :meth:`reference_rl.ledger.Ledger.do` like every other transition.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Any

from reference_rl.errors import InvariantViolated
from reference_rl.records import Receipt, Reservation, RolloutRow, ServedResult, Settled
from reference_rl.transitions import reserve


def settle(con: sqlite3.Connection, gym: str, page: Sequence[ServedResult], max_failures: int) -> list[Settled]:
    """Save, or settle as surplus, every result of one page, and owe an ACK for each, in one transaction.

    A result is saved only for the current attempt of its rollout, for a receipt on the keep list or, while no restore
    of that Gym is open, as a success of a lower attempt when no start of the current one was confirmed. A failure of
    kind ``session_lost`` that may be retried is left alone here: it is judged after the incarnations were read
    (:func:`settle_session_lost`).

    Args:
        con: the writer's connection.
        gym: alias of the Gym that served the page.
        page: the results, in the order of the page.
        max_failures: after so many non-terminal failures a rollout counts as failed.

    Requirements: CKPT-ACK-016, CKPT-ACK-017, CKPT-ACK-023…025, CKPT-ACK-028…031, CKPT-RESULT-018, CKPT-RESULT-019,
    CKPT-FEED-015, CKPT-INV-004.
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
        fact: every incarnation was the known one and no restore is open, so the session was really lost by itself.
            Otherwise attempt and origin stay, and the rollout goes into the coming restore.

    Requirements: CKPT-RESTART-055…057, CKPT-RESTART-063.
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

    Requirements: CKPT-ACK-018, CKPT-ACK-020, CKPT-ACK-021.
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

    Requirements: CKPT-ACK-026, CKPT-ACK-027.
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
    made_with = trainer["weights_version"] if served.weights_version is None else served.weights_version
    con.execute(
        "INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (*receipt, served.text, kind, made_with, trainer["step"], time.time()),
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
