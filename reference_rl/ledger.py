# SPDX-License-Identifier: Apache-2.0
"""The ledger: what the controller knows durably about every rollout, attempt, result and debt.

One SQLite file in WAL mode with ``synchronous = FULL``. One thread writes; transitions that wait at the same time share
one commit, each inside a savepoint of its own, so that one that fails takes no other with it. Reads use a second
connection and never wait for the writer. What can be done to a ledger is in :mod:`reference_rl.transitions`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from reference_rl import ledger_schema
from reference_rl.errors import LedgerError, Superseded
from spec import durable

P = ParamSpec("P")
T = TypeVar("T")

LOCK_WAIT_S: Final = 60.0
"""How long a write waits for another process that holds the file's write lock, in seconds."""

_MAX_GROUP: Final = 256


class Ledger:
    """A run's ledger, open for reading and writing.

    Use :meth:`do` for transitions from a coroutine, :meth:`call` from other code, :meth:`read` for queries. Closing
    waits for what was handed in.

    Args:
        path: the SQLite file; created with mode 0600 when missing.
        run_id: whose ledger it is.
        lock_wait_s: how long a write waits for a foreign lock, in seconds.

    Raises:
        LedgerVersion: the file is newer than this program or another run's.
    """

    def __init__(self, path: Path, run_id: str, *, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self.path = path
        self.run_id = run_id
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, durable.FILE_MODE))
        self._lock_wait_s = lock_wait_s
        self._writer_connection = self._connect()
        ledger_schema.prepare(self._writer_connection, run_id)
        self._reader = self._connect()
        self._reader.execute("PRAGMA query_only = ON")
        self._read_lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Callable[[sqlite3.Connection], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._write_loop, name="ledger-writer", daemon=True)
        self._thread.start()
        self._closed = False
        self._epoch: int | None = None

    def _connect(self) -> sqlite3.Connection:
        con = sqlite3.connect(self.path, timeout=self._lock_wait_s, isolation_level=None, check_same_thread=False)
        con.row_factory = sqlite3.Row
        con.execute("PRAGMA journal_mode = WAL")
        con.execute("PRAGMA synchronous = FULL")
        con.execute("PRAGMA foreign_keys = ON")
        return con

    def call(
        self, transition: Callable[Concatenate[sqlite3.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run one transition and return when it is durable."""
        return self._submit(lambda con: transition(con, *args, **kwargs)).result()

    async def do(
        self, transition: Callable[Concatenate[sqlite3.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run one transition without holding up the event loop; returns when it is durable.

        A caller that is cancelled does not cancel the transition: what was handed in is carried out.
        """
        return await asyncio.wrap_future(self._submit(lambda con: transition(con, *args, **kwargs)))

    def read(self, query: Callable[Concatenate[sqlite3.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one query on the last committed state."""
        with self._read_lock:
            self._reader.execute("BEGIN")
            try:
                return query(self._reader, *args, **kwargs)
            finally:
                self._reader.execute("COMMIT")

    def bind(self, epoch: int) -> None:
        """Write for this epoch from now on: once the ledger holds a higher one, every transition is refused.

        A controller that was frozen through a takeover and wakes up can thus neither save nor train anything.
        """
        self._epoch = epoch

    def _check_epoch(self, con: sqlite3.Connection) -> None:
        if self._epoch is None:
            return
        highest = con.execute("SELECT coalesce(max(epoch), 0) FROM epochs").fetchone()[0]
        if highest > self._epoch:
            raise Superseded(f"the ledger is written by epoch {highest} now, this controller holds {self._epoch}")

    def revision(self) -> int:
        """Return a counter that rises with every change of content."""
        return self.read(_revision)

    def copy_to(self, path: Path) -> int:
        """Write a consistent copy into a new file, sync it, and return its revision.

        Raises:
            FileExistsError: something is there already.
        """
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, durable.FILE_MODE))
        source = self._connect()
        target = sqlite3.connect(path, isolation_level=None)
        try:
            source.backup(target)
            # One plain file, readable without its log: that is what a manifest can name.
            target.execute("PRAGMA journal_mode = DELETE")
            revision = _revision(target)
        finally:
            target.close()
            source.close()
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return revision

    def close(self) -> None:
        """Finish what was handed in and close the file."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._writer_connection.close()
        self._reader.close()

    def _submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        if self._closed:
            raise LedgerError("the ledger is closed")
        future: Future[T] = Future()
        self._queue.put((work, future))
        return future

    def _write_loop(self) -> None:
        while True:
            item = self._queue.get()
            batch = [] if item is None else [item]
            last = item is None
            while not last and len(batch) < _MAX_GROUP:
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
                if item is None:
                    last = True
                else:
                    batch.append(item)
            if batch:
                self._write_group(batch)
            if last:
                return

    def _write_group(self, batch: list[tuple[Callable[[sqlite3.Connection], Any], Future[Any]]]) -> None:
        con = self._writer_connection
        done: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            con.execute("BEGIN IMMEDIATE")
            self._check_epoch(con)
            for work, future in batch:
                done.append((future, *_in_savepoint(con, work)))
            con.execute("COMMIT")
        except (sqlite3.Error, Superseded) as error:
            if con.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    con.execute("ROLLBACK")
            failure = error if isinstance(error, Superseded) else LedgerError(f"nothing was written: {error}")
            done = [(future, None, failure) for _, future in batch]
        for future, value, problem in done:
            if not future.set_running_or_notify_cancel():
                continue
            if problem is not None:
                future.set_exception(problem)
            else:
                future.set_result(value)


def open_copy(path: Path) -> sqlite3.Connection:
    """Open a ledger copy of a snapshot for reading only; nothing is created beside it."""
    con = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
    con.row_factory = sqlite3.Row
    return con


def _revision(con: sqlite3.Connection) -> int:
    return int(con.execute("SELECT value FROM meta WHERE key = 'revision'").fetchone()[0])


def _in_savepoint(
    con: sqlite3.Connection, work: Callable[[sqlite3.Connection], Any]
) -> tuple[Any, BaseException | None]:
    con.execute("SAVEPOINT transition")
    before = con.total_changes
    try:
        value = work(con)
        if con.total_changes != before:
            con.execute("UPDATE meta SET value = CAST(value AS INTEGER) + 1 WHERE key = 'revision'")
    except BaseException as error:
        con.execute("ROLLBACK TO transition")
        con.execute("RELEASE transition")
        return None, error
    con.execute("RELEASE transition")
    return value, None
