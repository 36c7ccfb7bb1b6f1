# SPDX-License-Identifier: Apache-2.0
"""The ledger's tables and how an older file becomes a current one."""

from __future__ import annotations

import sqlite3
from typing import Final

from reference_rl.errors import LedgerVersion

SCHEMA_VERSION: Final = 1
"""Version of the tables; raised with a migration whenever they change."""

# `rollouts` holds the present of each rollout, `attempts` its history. `continues` is the saved attempt that the
# current one was reserved to continue (NULL: it starts at turn 1). `sent` is set before a start can leave the
# process, `answered` when the participant has confirmed that the current attempt is known to it.
_V1: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE epochs (
    epoch INTEGER PRIMARY KEY, controller_id TEXT NOT NULL, claimed_at REAL NOT NULL
);
CREATE TABLE trainer (
    id INTEGER PRIMARY KEY CHECK (id = 1), step INTEGER NOT NULL, weights_version INTEGER NOT NULL
);
CREATE TABLE groups (
    grp INTEGER PRIMARY KEY, source TEXT NOT NULL, gym TEXT NOT NULL,
    granularity TEXT NOT NULL CHECK (granularity IN ('sibling', 'prompt_group'))
);
CREATE TABLE rollouts (
    rollout_id TEXT PRIMARY KEY, grp INTEGER NOT NULL REFERENCES groups, sibling INTEGER NOT NULL,
    gym TEXT NOT NULL, agent TEXT, environment TEXT NOT NULL, task TEXT NOT NULL, task_digest TEXT NOT NULL,
    seed INTEGER, limits TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'unfinished' CHECK (state IN ('unfinished', 'finished', 'failed')),
    attempt INTEGER NOT NULL DEFAULT 0, continues INTEGER, sent INTEGER NOT NULL DEFAULT 0,
    answered INTEGER NOT NULL DEFAULT 0, failures INTEGER NOT NULL DEFAULT 0, detail TEXT,
    UNIQUE (grp, sibling)
) WITHOUT ROWID;
CREATE INDEX rollouts_open ON rollouts (gym, state, sent);
CREATE TABLE attempts (
    rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, origin TEXT NOT NULL, continues INTEGER,
    turns_kept INTEGER NOT NULL DEFAULT 0, epoch INTEGER NOT NULL, reserved_at REAL NOT NULL, outcome TEXT,
    PRIMARY KEY (rollout_id, attempt)
) WITHOUT ROWID;
CREATE TABLE results (
    rollout_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, digest TEXT NOT NULL, result TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('body', 'failure')), weights_version INTEGER NOT NULL,
    saved_step INTEGER NOT NULL, saved_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE ack_debts (
    gym TEXT NOT NULL, rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY (gym, rollout_id, attempt, digest)
) WITHOUT ROWID;
CREATE TABLE surplus (
    gym TEXT NOT NULL, rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, digest TEXT NOT NULL,
    reason TEXT NOT NULL, noted_at REAL NOT NULL,
    PRIMARY KEY (gym, rollout_id, attempt, digest)
) WITHOUT ROWID;
CREATE TABLE keep (
    gym TEXT NOT NULL, rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY (gym, rollout_id, attempt, digest)
) WITHOUT ROWID;
CREATE TABLE consumption (rollout_id TEXT PRIMARY KEY, step INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE participants (
    gym TEXT NOT NULL, name TEXT NOT NULL, incarnation TEXT NOT NULL, PRIMARY KEY (gym, name)
) WITHOUT ROWID;
CREATE TABLE open_restores (gym TEXT PRIMARY KEY, epoch INTEGER NOT NULL, opened_at REAL NOT NULL) WITHOUT ROWID;
"""

_MIGRATIONS: Final[dict[int, str]] = {}
"""From version n to n + 1; empty while there is one version."""


def prepare(con: sqlite3.Connection, run_id: str) -> None:
    """Create the tables, or bring an older file up to date, in one transaction.

    Raises:
        LedgerVersion: the file was written by a newer schema, or belongs to another run.
    """
    con.execute("BEGIN IMMEDIATE")
    try:
        version = _readable_version(con)
        if version == 0:
            _script(con, _V1)
            con.executemany("INSERT INTO meta VALUES (?, ?)", [("run_id", run_id), ("revision", "0")])
            con.execute("INSERT INTO trainer VALUES (1, 0, 0)")
        else:
            for old in range(version, SCHEMA_VERSION):
                _script(con, _MIGRATIONS[old])
        _check_run(con, run_id)
        con.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        con.execute("COMMIT")
    except BaseException:
        con.execute("ROLLBACK")
        raise


def _readable_version(con: sqlite3.Connection) -> int:
    version = int(con.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise LedgerVersion(f"the ledger has schema version {version}, this program reads up to {SCHEMA_VERSION}")
    return version


def _check_run(con: sqlite3.Connection, run_id: str) -> None:
    found = con.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()[0]
    if found != run_id:
        raise LedgerVersion(f"the ledger belongs to run {found!r}, not to {run_id!r}")


def _script(con: sqlite3.Connection, text: str) -> None:
    # Not executescript(): that commits first, and the whole preparation is one transaction.
    for statement in text.split(";"):
        if statement.strip():
            con.execute(statement)
