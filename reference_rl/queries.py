# SPDX-License-Identifier: Apache-2.0
"""What is asked of the ledger; each function takes the reading connection first."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any, Final

from reference_rl.records import Receipt, RolloutRow, Sample


def to_dispatch(con: sqlite3.Connection, gym: str, limit: int) -> list[RolloutRow]:
    """Return rollouts whose current attempt was never sent and that no kept receipt will finish."""
    return _unsent(con, gym, limit, answered=0)


def to_repeat(con: sqlite3.Connection, gym: str, limit: int) -> list[RolloutRow]:
    """Return live rollouts whose start shall be repeated, so that they learn the present policy address."""
    return _unsent(con, gym, limit, answered=1)


def live_count(con: sqlite3.Connection, gym: str) -> int:
    """Return how many rollouts the Gym is taken to run."""
    query = "SELECT count(*) FROM rollouts WHERE gym = ? AND state = 'unfinished' AND answered = 1"
    return int(con.execute(query, (gym,)).fetchone()[0])


def _unsent(con: sqlite3.Connection, gym: str, limit: int, *, answered: int) -> list[RolloutRow]:
    rows = con.execute(
        "SELECT * FROM rollouts r WHERE gym = ? AND state = 'unfinished' AND sent = 0 AND answered = ? AND NOT EXISTS"
        " (SELECT 1 FROM keep k WHERE k.rollout_id = r.rollout_id AND k.gym = r.gym) ORDER BY grp, sibling LIMIT ?",
        (gym, answered, limit),
    )
    return [RolloutRow.of(row) for row in rows]


def unconfirmed(con: sqlite3.Connection, gym: str, limit: int) -> list[RolloutRow]:
    """Return rollouts whose start was sent and never confirmed."""
    rows = con.execute(
        "SELECT * FROM rollouts r WHERE gym = ? AND state = 'unfinished' AND sent = 1 AND answered = 0 AND NOT EXISTS"
        " (SELECT 1 FROM keep k WHERE k.rollout_id = r.rollout_id AND k.gym = r.gym) ORDER BY grp, sibling LIMIT ?",
        (gym, limit),
    )
    return [RolloutRow.of(row) for row in rows]


def unfinished(con: sqlite3.Connection, gym: str) -> list[RolloutRow]:
    """Return what still needs a result, in order of group and sibling."""
    rows = con.execute("SELECT * FROM rollouts WHERE gym = ? AND state = 'unfinished' ORDER BY grp, sibling", (gym,))
    return [RolloutRow.of(row) for row in rows]


def rollouts(con: sqlite3.Connection) -> list[RolloutRow]:
    """Return every rollout, in order of group and sibling."""
    return [RolloutRow.of(row) for row in con.execute("SELECT * FROM rollouts ORDER BY grp, sibling")]


def rollout(con: sqlite3.Connection, rollout_id: str) -> RolloutRow | None:
    """Return one rollout."""
    row = con.execute("SELECT * FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    return None if row is None else RolloutRow.of(row)


def kept(con: sqlite3.Connection, gym: str) -> list[Receipt]:
    """Return the receipts whose results must still come."""
    rows = con.execute("SELECT rollout_id, attempt, digest FROM keep WHERE gym = ?", (gym,))
    return [Receipt(*row) for row in rows]


def debts(con: sqlite3.Connection, gym: str, limit: int = -1) -> list[Receipt]:
    """Return receipts whose ACK is owed."""
    rows = con.execute(
        "SELECT rollout_id, attempt, digest FROM ack_debts WHERE gym = ? ORDER BY rollout_id LIMIT ?", (gym, limit)
    )
    return [Receipt(*row) for row in rows]


def debt_count(con: sqlite3.Connection) -> int:
    """Return how many ACKs are owed to all Gyms."""
    return int(con.execute("SELECT count(*) FROM ack_debts").fetchone()[0])


def result_receipts(con: sqlite3.Connection) -> dict[str, Receipt]:
    """Return the receipt of every saved result by rollout."""
    return {row[0]: Receipt(*row) for row in con.execute("SELECT rollout_id, attempt, digest FROM results")}


def incarnations(con: sqlite3.Connection, gym: str) -> dict[str, str]:
    """Return the known incarnation of each participant."""
    return dict(con.execute("SELECT name, incarnation FROM participants WHERE gym = ?", (gym,)).fetchall())


def restore_is_open(con: sqlite3.Connection, gym: str) -> bool:
    """Return whether a restore of this Gym was begun and not carried to its end."""
    return con.execute("SELECT 1 FROM open_restores WHERE gym = ?", (gym,)).fetchone() is not None


def highest_epoch(con: sqlite3.Connection) -> int:
    """Return the highest epoch that the ledger holds, 0 when none."""
    return int(con.execute("SELECT coalesce(max(epoch), 0) FROM epochs").fetchone()[0])


def trainer(con: sqlite3.Connection) -> tuple[int, int]:
    """Return the trainer's (step, weights version)."""
    row = con.execute("SELECT step, weights_version FROM trainer").fetchone()
    return row[0], row[1]


def consumption(con: sqlite3.Connection) -> dict[str, int]:
    """Return rollout_id → the step that consumed it."""
    return dict(con.execute("SELECT rollout_id, step FROM consumption").fetchall())


def counts(con: sqlite3.Connection) -> dict[str, int]:
    """Return how many rollouts are unfinished, finished and failed, and how many samples were trained."""
    found = dict(con.execute("SELECT state, count(*) FROM rollouts GROUP BY state").fetchall())
    trained = con.execute("SELECT count(*) FROM consumption").fetchone()[0]
    return {name: found.get(name, 0) for name in ("unfinished", "finished", "failed")} | {"trained": trained}


def ready(con: sqlite3.Connection) -> list[list[str]]:
    """Return what training may take next: for each unit, the rollout ids.

    With granularity ``sibling`` each finished rollout is a unit; with ``prompt_group`` the finished rollouts of a
    group in which nothing is unfinished.

    Requirements: CKPT-RESTART-058, CKPT-RESTART-059.
    """
    singles = con.execute(
        "SELECT r.rollout_id FROM rollouts r JOIN groups g USING (grp) WHERE g.granularity = 'sibling' AND"
        " r.state = 'finished' AND r.rollout_id NOT IN (SELECT rollout_id FROM consumption) ORDER BY grp, sibling"
    )
    units = [[row[0]] for row in singles]
    grouped = con.execute(
        "SELECT grp, r.rollout_id FROM rollouts r JOIN groups g USING (grp) WHERE g.granularity = 'prompt_group' AND"
        " r.state = 'finished' AND r.rollout_id NOT IN (SELECT rollout_id FROM consumption) AND NOT EXISTS"
        " (SELECT 1 FROM rollouts u WHERE u.grp = r.grp AND u.state = 'unfinished') ORDER BY grp, sibling"
    )
    by_group: dict[int, list[str]] = {}
    for grp, rollout_id in grouped:
        by_group.setdefault(grp, []).append(rollout_id)
    return units + list(by_group.values())


def samples(con: sqlite3.Connection) -> list[Sample]:
    """Return every trained sample, sorted by group and sibling."""
    rows = con.execute(
        "SELECT r.grp, r.sibling, coalesce(r.detail, r.rollout_id), s.attempt, c.step, s.result FROM consumption c"
        " JOIN rollouts r USING (rollout_id) JOIN results s USING (rollout_id) ORDER BY r.grp, r.sibling"
    )
    return [Sample(row[0], row[1], row[2], row[3], row[4], json.loads(row[5])) for row in rows]


def result_text(con: sqlite3.Connection, rollout_id: str) -> str | None:
    """Return the saved result of a rollout as it was served, or ``None``."""
    row = con.execute("SELECT result FROM results WHERE rollout_id = ?", (rollout_id,)).fetchone()
    return None if row is None else str(row[0])


def result_rows(con: sqlite3.Connection) -> list[Mapping[str, Any]]:
    """Return the saved results, whole."""
    return [dict(row) for row in con.execute("SELECT * FROM results")]


def results_newer_than(con: sqlite3.Connection, weights_version: int) -> list[str]:
    """Return the rollouts whose result was made with weights newer than these."""
    return [
        row[0] for row in con.execute("SELECT rollout_id FROM results WHERE weights_version > ?", (weights_version,))
    ]


_REPLAY_STATES: Final = ("open", "waiting", "ready", "claimed", "consumed", "failed")


def replay_index(con: sqlite3.Connection) -> dict[str, Any]:
    """Return the siblings of each group by state.

    States: open, waiting for their siblings, ready, claimed, consumed, failed. Nothing is ever claimed here: the
    reference trainer claims and consumes in one transaction.

    Requirements: CKPT-SNAP-015.
    """
    consumed = {row[0] for row in con.execute("SELECT rollout_id FROM consumption")}
    waiting = {rollout_id for unit in ready(con) for rollout_id in unit}
    groups: dict[int, dict[str, list[str]]] = {}
    for grp, rollout_id, state in con.execute("SELECT grp, rollout_id, state FROM rollouts ORDER BY grp, sibling"):
        entry = groups.setdefault(grp, {state: [] for state in _REPLAY_STATES})
        if rollout_id in consumed:
            entry["consumed"].append(rollout_id)
        elif rollout_id in waiting:
            entry["ready"].append(rollout_id)
        elif state == "finished":
            entry["waiting"].append(rollout_id)
        else:
            entry["failed" if state == "failed" else "open"].append(rollout_id)
    step, weights_version = trainer(con)
    return {"step": step, "weights_version": weights_version, "groups": groups}


def surplus(con: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return every result that was settled without being trained, with the reason."""
    return [dict(row) for row in con.execute("SELECT * FROM surplus ORDER BY noted_at")]


def surplus_count(con: sqlite3.Connection) -> int:
    """Return how many results were settled without being trained."""
    return int(con.execute("SELECT count(*) FROM surplus").fetchone()[0])


def attempt_count(con: sqlite3.Connection) -> int:
    """Return how many attempts there were: first ones that may have left, and every reserved one."""
    first = con.execute(
        "SELECT count(*) FROM rollouts r WHERE sent = 1 OR state != 'unfinished' OR EXISTS"
        " (SELECT 1 FROM attempts a WHERE a.rollout_id = r.rollout_id)"
    ).fetchone()[0]
    return int(first) + int(con.execute("SELECT count(*) FROM attempts").fetchone()[0])


def attempt_origins(con: sqlite3.Connection) -> dict[str, int]:
    """Return how many attempts were reserved, by the first words of their origin."""
    return dict(
        con.execute("SELECT substr(origin, 1, 12), count(*) FROM attempts GROUP BY substr(origin, 1, 12)").fetchall()
    )


def prompt_groups(con: sqlite3.Connection) -> set[int]:
    """Return the groups of granularity ``prompt_group``."""
    return {row[0] for row in con.execute("SELECT grp FROM groups WHERE granularity = 'prompt_group'")}


def attempts(con: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return the history of reservations."""
    return [dict(row) for row in con.execute("SELECT * FROM attempts ORDER BY rollout_id, attempt")]
