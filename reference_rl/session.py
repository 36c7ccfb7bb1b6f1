# SPDX-License-Identifier: Apache-2.0
"""What every column of a run shares: its files, its trainer, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx

from reference_rl import epochs, metrics, queries, transitions
from reference_rl.checkpointer import Checkpointer, Report
from reference_rl.client import Controller
from reference_rl.control import Tenure
from reference_rl.dataplane import EmbeddedDataPlane
from reference_rl.errors import InvariantViolated, SnapshotDamaged
from reference_rl.events import Events
from reference_rl.ledger import Ledger
from reference_rl.rows import rows_of_sample, turns_of_sample
from reference_rl.settings import RunSettings
from reference_rl.snapshots import LEDGER_FILE, RL_PART, Snapshot, SnapshotStore
from spec import durable

EXIT_DONE: Final = 0
EXIT_TERMINATED: Final = 128 + signal.SIGTERM
LEDGER: Final = "ledger.sqlite"
RESULTS: Final = "results.jsonl"


class Session:
    """One process of one run: opened, run to its end or to a signal, closed.

    Args:
        settings: the run.
        transport: another way to the Gyms than the network.
    """

    def __init__(self, settings: RunSettings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.settings = settings
        self.transport = transport
        _make_private(settings.run_dir)
        self.is_restart = epochs.highest(settings.run_dir) > 0
        self.events = Events(settings.run_dir / "events.jsonl")
        self.store = SnapshotStore(settings.run_dir / "snapshots", settings.run_id, settings.run_dir)
        self.tenure = Tenure(Controller(f"{settings.run_id}.{uuid4().hex[:12]}"))
        self.plane = EmbeddedDataPlane(settings.run_dir / "dataplane.sqlite")
        self.ledger = self.open_ledger()
        self.ledger.call(transitions.plan, settings.groups())
        self.changed = asyncio.Event()
        self.snapshot_wanted = asyncio.Event()
        self.stop_wanted = asyncio.Event()
        self.checkpointer: Checkpointer | None = None
        self._last_checkpoint_step = 0
        # The end of a run may come while the thread of its last snapshot still writes them.
        self._writing_metrics = threading.Lock()

    def open_ledger(self) -> Ledger:
        """Open the live ledger; when it is lost, begin with the copy of the newest snapshot that verifies."""
        path = self.settings.run_dir / LEDGER
        if not path.exists():
            self.copy_ledger(path)
        return Ledger(path, self.settings.run_id)

    def copy_ledger(self, path: Path) -> Snapshot | None:
        """Put the ledger of the newest snapshot that verifies in place of a missing one."""
        for checkpoint_id in self.store.ids():
            try:
                snapshot = self.store.verify(checkpoint_id, RL_PART)
            except SnapshotDamaged as error:
                self.events.emit("snapshot_refused", checkpoint_id=str(checkpoint_id), reason=str(error))
                continue
            temporary = path.with_suffix(".copy")
            shutil.copyfile(snapshot.path / LEDGER_FILE, temporary)
            temporary.chmod(durable.FILE_MODE)
            temporary.replace(path)
            durable.sync_dir(path.parent)
            return snapshot
        return None

    async def run(self) -> int:
        """Run to the end or to SIGTERM; return the exit code."""
        raise NotImplementedError

    def close(self) -> None:
        """Close every file."""
        self.ledger.close()
        with contextlib.suppress(Exception):
            self.plane._con.close()
        self.events.close()

    # --- training ---------------------------------------------------------------------------------------------

    async def train_until_done(self) -> None:
        """Consume finished units, each exactly once, until nothing is unfinished and nothing waits."""
        while True:
            self.changed.clear()
            for unit in self.ledger.read(queries.ready):
                step, weights_version = self.ledger.read(queries.trainer)
                rows = {"rows": await self._rows_of(unit)} if self.keeps_rows else {}
                await self.ledger.do(transitions.record_step, step + 1, weights_version, unit)
                self.events.emit("trained", step=step + 1, rollouts=unit, **rows)
                await self._trainer_checkpoint(step + 1)
            if self.ledger.read(queries.counts)["unfinished"] == 0 and not self.ledger.read(queries.ready):
                return
            await self.changed.wait()

    @property
    def keeps_rows(self) -> bool:
        """Return whether the policy gateway keeps the token rows of this run."""
        return self.settings.gateway and self.settings.switches.tracks_rollouts

    async def _rows_of(self, unit: Sequence[str]) -> int:
        """Read the token rows of a training unit from the data plane; return how many there are."""
        found = 0
        for rollout_id in unit:
            listed = await self.plane.list(f"{rollout_id}/")
            keys = self.ledger.read(rows_of_sample, rollout_id, listed)
            rows = {turn: await self.plane.get(key) for turn, key in keys.items()}
            turns = range(1, self.ledger.read(turns_of_sample, rollout_id) + 1)
            missing = [turn for turn in turns if rows.get(turn) is None]
            if missing:
                self.events.emit("rows_missing", rollout_id=rollout_id, turns=missing, reason="no token row is stored")
            found += len(turns) - len(missing)
        return found

    async def _trainer_checkpoint(self, step: int) -> None:
        every = self.settings.trainer.checkpoint_every
        if not every or step - self._last_checkpoint_step < every:
            return
        self._last_checkpoint_step = step
        await asyncio.to_thread(self.write_marker, f"step-{step}")
        self.snapshot_wanted.set()

    def write_marker(self, trainer_checkpoint: str) -> None:
        """Write the fallback marker of a trainer checkpoint; its snapshot follows."""
        step, weights_version = self.ledger.read(queries.trainer)
        rows = [row for row in self.ledger.read(queries.rollouts) if row.state == "unfinished"]
        self.store.write_marker(
            {
                "trainer_checkpoint": trainer_checkpoint,
                "trainer_step": step,
                "weights_version": weights_version,
                "rollouts": [
                    {
                        "gym": row.gym,
                        "rollout_id": row.rollout_id,
                        "attempt": row.attempt,
                        "task_digest": row.task_digest,
                    }
                    for row in rows
                ],
            }
        )

    # --- snapshots --------------------------------------------------------------------------------------------

    async def snapshot_loop(self) -> None:
        """Take snapshots when asked, and at each interval."""
        assert self.checkpointer is not None
        interval = self.settings.snapshot.interval_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self.snapshot_wanted.wait()
            asked = self.snapshot_wanted.is_set()
            self.snapshot_wanted.clear()
            health = self.checkpointer.health
            # In the fallback a full snapshot is tried at each interval, however many have failed.
            if not asked and not health.reduced and time.monotonic() < health.not_before:
                continue
            await self.take_snapshot()

    async def take_snapshot(self) -> Report:
        """Take one snapshot now."""
        assert self.checkpointer is not None
        report = await self.checkpointer.take()
        await asyncio.to_thread(self.write_metrics)
        return report

    def values(self) -> dict[str, float]:
        """Return every metric as it is now."""
        health = self.checkpointer.health if self.checkpointer is not None else None
        return metrics.collect(self.settings.switches, self.ledger, self.events, health, keeps_rows=self.keeps_rows)

    def write_metrics(self) -> dict[str, float]:
        """Publish `metrics.json` and return what it holds."""
        with self._writing_metrics:
            values = self.values()
            metrics.write(self.settings.run_dir, values)
        return values

    # --- signals and the end ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Listen: SIGUSR1 takes a snapshot now, SIGTERM takes one and stops."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals belong to the process, and this loop is a guest in it
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self.snapshot_wanted.set)
        loop.add_signal_handler(signal.SIGTERM, self.stop_wanted.set)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)
            loop.remove_signal_handler(signal.SIGTERM)

    async def until_done(self, *background: asyncio.Task[None]) -> int:
        """Train until everything is consumed or SIGTERM comes; return the exit code.

        Args:
            background: tasks whose failure ends the run.
        """
        training = asyncio.create_task(self.train_until_done())
        stopping = asyncio.create_task(self.stop_wanted.wait())
        everything = {training, stopping, *background}
        try:
            done, _ = await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task is not stopping:
                    task.result()
            if training in done:
                return EXIT_DONE
            report = await self.take_snapshot()
            self.events.emit("stopped", signal="SIGTERM", snapshot=report.outcome, checkpoint_id=report.checkpoint_id)
            return EXIT_TERMINATED
        finally:
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    def write_results(self) -> None:
        """Write one line for each trained sample, sorted by group and sibling."""
        lines = [
            json.dumps(
                {
                    "group": sample.group,
                    "sibling": sample.sibling,
                    "rollout_id": sample.rollout_id,
                    "attempt": sample.attempt,
                    "body": sample.content["body"],
                },
                sort_keys=True,
            )
            for sample in self.ledger.read(queries.samples)
        ]
        durable.publish_file(self.settings.run_dir / RESULTS, "".join(line + "\n" for line in lines).encode())

    def is_done(self) -> bool:
        """Return whether an earlier process brought the run to its end, its last ACKs included."""
        owed = any(self.ledger.read(queries.debts, gym.alias, 1) for gym in self.settings.gyms)
        return (self.settings.run_dir / RESULTS).exists() and not owed

    def save_evidence(self, error: InvariantViolated) -> Path:
        """Save what an invariant was violated by, for people to look at.

        Requirements: CKPT-DUTY-023, CKPT-DUTY-024.
        """
        path = self.settings.run_dir / f"evidence-{uuid4().hex[:8]}.json"
        content: dict[str, Any] = {"text": str(error), "evidence": error.evidence, "t": time.time()}
        durable.publish_file(path, json.dumps(content, indent=1, default=str).encode() + b"\n")
        return path


def _make_private(path: Path) -> None:
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            durable.make_dir(path)
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written")
