# SPDX-License-Identifier: Apache-2.0
"""A run inside a trainer's own loop: the trainer says when it trains and when it saves; the rest goes on beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx

from reference_rl import queries, transitions
from reference_rl.checkpointer import SnapshotContext
from reference_rl.dataplane import Row
from reference_rl.errors import SettingsError
from reference_rl.managed import ManagedSession
from reference_rl.rows import rows_of_sample
from reference_rl.settings import RunSettings
from reference_rl.snapshots import Snapshot


class EmbeddedRun(ManagedSession):
    """A run that was brought back, or begun, and whose rollouts run while the trainer trains.

    Make one with :func:`open_run`. Whatever ends a run (a violated invariant, a higher controller, a Gym that cannot
    be used) is raised by :meth:`next_unit`.
    """

    @property
    def restored_from(self) -> Snapshot | None:
        """Return the snapshot at which training goes on, with the trainer's own files in it; ``None`` for no snapshot.

        With ``trainer.survives`` training goes on where the ledger is, and this is the newest snapshot all the same.
        """
        return self.report.point.snapshot

    @property
    def step(self) -> int:
        """Return the trainer's step."""
        return self.ledger.read(queries.trainer)[0]

    async def next_unit(self) -> Sequence[str] | None:
        """Return the rollouts that training may take next, or ``None`` when everything is trained.

        A unit is one finished rollout or, with granularity ``prompt_group``, the finished ones of a whole group. It is
        returned again until :meth:`record_step` has consumed it.

        Raises:
            RlError: the run cannot go on; its ``exit_code`` says why.
        """
        while True:
            self.changed.clear()
            for unit in self.ledger.read(queries.ready):
                return unit
            if self.ledger.read(queries.counts)["unfinished"] == 0:
                return None
            changed = asyncio.create_task(self.changed.wait())
            try:
                done, _ = await asyncio.wait([changed, *self.background], return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            for task in done - {changed}:
                task.result()

    def result(self, rollout_id: str) -> Mapping[str, Any]:
        """Return the saved result of a finished rollout, as the Gym wrote it.

        Raises:
            KeyError: there is none.
        """
        text = self.ledger.read(queries.result_text, rollout_id)
        if text is None:
            raise KeyError(rollout_id)
        return dict(json.loads(text))

    async def rows(self, rollout_id: str) -> list[Row]:
        """Return the token rows of a finished rollout, turn by turn, from whichever attempt made each."""
        listed = await self.plane.list(f"{rollout_id}/")
        keys = self.ledger.read(rows_of_sample, rollout_id, listed)
        found = [await self.plane.get(key) for _, key in sorted(keys.items())]
        return [row for row in found if row is not None]

    async def record_step(self, unit: Sequence[str], weights_version: int) -> int:
        """Consume a unit into the next training step, durably; return that step.

        Raises:
            LedgerError: nothing was written.
            Superseded: a higher controller has taken over.
        """
        step = self.step + 1
        await self.ledger.do(transitions.record_step, step, weights_version, unit)
        self.events.emit("trained", step=step, rollouts=list(unit))
        return step

    def snapshot(self) -> SnapshotContext:
        """Return ``async with``: see :meth:`Checkpointer.snapshot`; add the trainer's own files inside."""
        assert self.checkpointer is not None
        return self.checkpointer.snapshot()


@contextlib.asynccontextmanager
async def open_run(
    settings: RunSettings, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[EmbeddedRun]:
    """Begin a run, or bring it back after a crash, and let its rollouts run until the block ends.

    Args:
        settings: the run, in column 2 or 3.
        transport: another way to the Gyms than the network.

    Raises:
        SettingsError: the column keeps no rollouts.
        RlError: the run could not be brought back.
    """
    if not settings.switches.tracks_rollouts:
        raise SettingsError("column: a run that is embedded in a trainer needs column 2 or 3")
    run = EmbeddedRun(settings, transport)
    try:
        async with run.opened():
            yield run
    finally:
        run.close()
