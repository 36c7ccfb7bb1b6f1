# SPDX-License-Identifier: Apache-2.0
"""The data plane: where token rows live. An interface, and an embedded default.

A row is what the policy side stores for one turn (token ids, log-probabilities), under (rollout, attempt, turn). A
Gym only refers to rows, by the text form of that key or by a prefix of it, e.g. ``run_g0_s1/0/`` for everything of
attempt 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from spec import durable

Row = Mapping[str, Any]


class RowKey(NamedTuple):
    """Names the token row of one turn of one attempt."""

    rollout_id: str
    attempt: int
    turn: int

    def __str__(self) -> str:
        return f"{self.rollout_id}/{self.attempt}/{self.turn}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the key that a reference names.

        Raises:
            ValueError: the text is not ``<rollout>/<attempt>/<turn>``.
        """
        rollout_id, attempt, turn = text.split("/")
        return cls(rollout_id, int(attempt), int(turn))


class DataPlane(Protocol):
    """What the controller needs of a data plane; every method may be called from any coroutine.

    ``pin`` holds rows under a name against deletion, ``unpin`` lets them go; a deletion of a pinned row is put off
    until no pin is left. ``flush`` returns when everything that was put is durable.

    Requirements: CKPT-DUTY-026, CKPT-SNAP-007.
    """

    async def put(self, key: RowKey, row: Row) -> None:
        """Store one row; the same key again replaces it."""

    async def get(self, key: RowKey) -> Row | None:
        """Return one row, or ``None``."""

    async def list(self, prefix: str = "") -> Sequence[RowKey]:
        """Return the keys whose text begins with ``prefix``, sorted."""

    async def delete(self, keys: Iterable[RowKey]) -> int:
        """Delete rows; return how many are gone now (pinned ones go later)."""

    async def pin(self, name: str, keys: Iterable[RowKey] | None = None) -> None:
        """Hold rows, or every row when ``keys`` is ``None``, until ``unpin(name)``."""

    async def unpin(self, name: str) -> None:
        """Let go what ``name`` held."""

    async def flush(self) -> None:
        """Return when everything that was put before is durable."""

    async def close(self) -> None:
        """Release what the data plane holds."""


_TABLES = """
CREATE TABLE IF NOT EXISTS rows (
    rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, turn INTEGER NOT NULL, row TEXT NOT NULL,
    doomed INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (rollout_id, attempt, turn)
) WITHOUT ROWID
"""


class EmbeddedDataPlane:
    """Token rows in one SQLite file beside the ledger; other processes may put rows at the same time.

    Pins live in memory: they guard a snapshot that is being taken, and a controller that dies takes none.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, durable.FILE_MODE))
        self._con = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
        self._con.execute("PRAGMA journal_mode = WAL")
        # NORMAL: a row is durable at the next checkpoint of the log, which flush() forces.
        self._con.execute("PRAGMA synchronous = NORMAL")
        self._con.execute(_TABLES)
        self._lock = threading.Lock()
        self._pins: dict[str, frozenset[RowKey] | None] = {}

    async def put(self, key: RowKey, row: Row) -> None:
        """Store one row; the same key again replaces it."""
        await self.put_many([(key, row)])

    async def put_many(self, rows: Iterable[tuple[RowKey, Row]]) -> None:
        """Store rows in one transaction."""
        values = [(*key, json.dumps(row)) for key, row in rows]
        await asyncio.to_thread(self._write, "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, 0)", values)

    async def get(self, key: RowKey) -> Row | None:
        """Return one row, or ``None``."""
        found = await asyncio.to_thread(
            self._query, "SELECT row FROM rows WHERE (rollout_id, attempt, turn) = (?, ?, ?)", tuple(key)
        )
        return json.loads(found[0][0]) if found else None

    async def list(self, prefix: str = "") -> Sequence[RowKey]:
        """Return the keys whose text begins with ``prefix``, sorted."""
        rollout_id = prefix.partition("/")[0] if "/" in prefix else None
        query = "SELECT rollout_id, attempt, turn FROM rows WHERE ? IS NULL OR rollout_id = ? ORDER BY 1, 2, 3"
        found = await asyncio.to_thread(self._query, query, (rollout_id, rollout_id))
        return [key for key in (RowKey(*row) for row in found) if str(key).startswith(prefix)]

    async def delete(self, keys: Iterable[RowKey]) -> int:
        """Delete rows; pinned ones go when their last pin does."""
        wanted = list(keys)
        free = [key for key in wanted if not self._is_pinned(key)]
        held = [key for key in wanted if self._is_pinned(key)]
        doom = "UPDATE rows SET doomed = 1 WHERE (rollout_id, attempt, turn) = (?, ?, ?)"
        await asyncio.to_thread(self._write, doom, held)
        delete = "DELETE FROM rows WHERE (rollout_id, attempt, turn) = (?, ?, ?)"
        return await asyncio.to_thread(self._write, delete, free)

    async def pin(self, name: str, keys: Iterable[RowKey] | None = None) -> None:
        """Hold rows, or every row when ``keys`` is ``None``, until ``unpin(name)``."""
        self._pins[name] = None if keys is None else frozenset(keys)

    async def unpin(self, name: str) -> None:
        """Let go what ``name`` held, and delete what waited for it."""
        self._pins.pop(name, None)
        doomed = await asyncio.to_thread(self._query, "SELECT rollout_id, attempt, turn FROM rows WHERE doomed = 1", ())
        if doomed:
            await self.delete([RowKey(*row) for row in doomed])

    async def flush(self) -> None:
        """Return when everything that was put before is durable."""
        await asyncio.to_thread(self._query, "PRAGMA wal_checkpoint(FULL)", ())

    async def close(self) -> None:
        """Close the file."""
        self._con.close()

    def _is_pinned(self, key: RowKey) -> bool:
        return any(keys is None or key in keys for keys in self._pins.values())

    def _write(self, statement: str, values: Sequence[Sequence[Any]]) -> int:
        with self._lock:
            self._con.execute("BEGIN IMMEDIATE")
            try:
                changed = self._con.executemany(statement, values).rowcount
            except BaseException:
                self._con.execute("ROLLBACK")
                raise
            self._con.execute("COMMIT")
            return max(changed, 0)

    def _query(self, statement: str, values: Sequence[Any]) -> Sequence[Any]:
        with self._lock:
            return self._con.execute(statement, values).fetchall()


async def export_rows(plane: DataPlane, keys: Iterable[RowKey], path: Path) -> int:
    """Write rows into a new synced file, one JSON line each; return how many there were."""
    lines = []
    for key in sorted(set(keys)):
        row = await plane.get(key)
        if row is not None:
            lines.append(json.dumps({"key": str(key), "row": row}).encode() + b"\n")
    await asyncio.to_thread(durable.write_file, path, lines)
    return len(lines)


async def import_rows(plane: DataPlane, path: Path) -> int:
    """Put the rows of a snapshot back that the data plane does not have; return how many were missing."""
    missing = 0
    for line in (await asyncio.to_thread(path.read_text)).splitlines():
        record = json.loads(line)
        key = RowKey.parse(record["key"])
        if await plane.get(key) is None:
            await plane.put(key, record["row"])
            missing += 1
    return missing
