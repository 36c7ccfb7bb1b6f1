# SPDX-License-Identifier: Apache-2.0
"""A restore from its judgement to what is told about it; ``restorer`` is the work between the two."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from reference_gym.participant import failpoints
from reference_gym.participant.clock import within
from reference_gym.participant.commits import Commits
from reference_gym.participant.directories import confine
from reference_gym.participant.errors import InvalidPhase, StaleAttempt, StaleCheckpoint, Unavailable
from reference_gym.participant.machine import Step
from reference_gym.participant.phases import Answer
from reference_gym.participant.restorer import Restorer
from reference_gym.participant.restoring import compared, require_above_fences
from spec.messages import RestoreRequest
from spec.wire import CheckpointId

_TURNS = 50
"""How many turns of the event loop a failure may take from its timer to its outcome; about ten are needed."""
_FEW = 100
"""How many rollouts and receipts of a restore may be compared on the event loop."""


class Restores(Commits):
    """What the operation ``restore`` is made of."""

    async def _compared(self, request: RestoreRequest) -> str:
        """Return what two calls of one id are compared by."""
        few = len(request.rollouts) + len(request.results) + len(request.fences) <= _FEW
        return compared(request) if few else await asyncio.to_thread(compared, request)

    async def _begin_restore(
        self, checkpoint_id: CheckpointId, request: RestoreRequest, key: str, deadline: float
    ) -> None:
        """Judge a restore, and begin it if it is the one that does."""
        lease_ms = self.config.limits.lease_ms(request.lease_ms)

        def judge() -> Step:
            return self.machine.restore(checkpoint_id, request.run_id, key, lease_ms, self.clock.now())

        directory: Path | None = None
        try:
            step = judge()
            if step.answer is Answer.ACCEPTED:
                directory, stale = await self._arguments(request)
                step = judge()  # Again: meanwhile another call may have come first, perhaps its twin, which then ...
                if stale is not None and step.answer is Answer.ACCEPTED:
                    raise stale  # ... has raised the fences itself.
        except InvalidPhase:
            await self._source(request)  # Arguments are judged before the phase (CKPT-ORDER-001).
            raise
        if step.answer is Answer.ACCEPTED:
            if self.draining:
                raise Unavailable("the participant is draining")
            self.accept(step)
            self._restorer = Restorer(self, request, directory, deadline)
            failpoints.reach("restore.begun")
        elif self._is_open(checkpoint_id):
            self.accept(step)

    async def _arguments(self, request: RestoreRequest) -> tuple[Path | None, StaleAttempt | None]:
        """Return the directory of a restore's source, and the refusal of attempts that are not above their fences.

        Raises:
            ForbiddenTarget: the source is not inside a root.
        """
        directory = await self._source(request)
        try:
            await require_above_fences(request, self.highest)
        except StaleAttempt as stale:
            return directory, stale
        return directory, None

    async def _restore_outcome(
        self, outcome: asyncio.Future[None], deadline: float, checkpoint_id: CheckpointId
    ) -> None:
        """Wait for a restore; the failure that the end of its wait brings goes before that of this call.

        Both waits end together, and on a busy loop in the same step: what is due is let happen (CKPT-RESTORE-009).
        """
        if not await within(self.clock, deadline, outcome):
            for _ in range(_TURNS):
                await asyncio.sleep(0)
        await self._outcome(outcome, deadline, checkpoint_id)

    async def _source(self, request: RestoreRequest) -> Path | None:
        source = request.source
        if source is None:
            return None
        if source.scheme == "file":
            return await asyncio.to_thread(confine, source.path, self.config.storage_roots)
        return None if self.staging is None else self.staging.uploaded(source.checkpoint_id)

    def _restored(self, checkpoint_id: CheckpointId) -> dict[str, Any]:
        """Return the recorded outcome of a restore."""
        for known in (self.machine.open, self.machine.last):
            if known is not None and known.checkpoint_id == checkpoint_id and known.outcome is not None:
                return dict(known.outcome)
        raise StaleCheckpoint(f"checkpoint {checkpoint_id} is over")
