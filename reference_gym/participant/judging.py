# SPDX-License-Identifier: Apache-2.0
"""How a call is judged before anything is done: who calls, which checkpoint it names, what is served here, how long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from reference_gym.participant import failpoints
from reference_gym.participant.clock import within
from reference_gym.participant.core import Caller, Core
from reference_gym.participant.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    StaleCheckpoint,
    StaleIncarnation,
    Unsupported,
)
from reference_gym.participant.phases import EndedAs
from reference_gym.participant.registry import Registry
from spec.wire import CheckpointId, parse_checkpoint_id

T = TypeVar("T")


class Judging(Core):
    """What every operation asks before it does something, and what its refusals carry."""

    async def _admit_verb(self, caller: Caller, deadline: float) -> None:
        """Judge incarnation and controller, and wait for what an adoption ends to have ended (CKPT-CTRL-004)."""
        known = self.machine.controller
        self._admit(caller)
        if self.machine.controller != known:
            while self.machine.open is not None and self.machine.open.ending is not None:
                if not await self.wait_move(deadline):
                    break

    def _admit(self, caller: Caller) -> None:
        """Judge incarnation and controller; a higher pair is adopted and ends what a lower one left open.

        Raises:
            StaleIncarnation: another incarnation is expected (CKPT-ID-036).
            StaleController: a higher pair was adopted (CKPT-CTRL-005).
        """
        if caller.expect_incarnation != self.incarnation:
            raise StaleIncarnation("this is another incarnation than the expected one")
        known = self.machine.controller
        self.move(self.machine.adopt(caller.controller, self.clock.now()))
        if self.machine.controller != known:
            failpoints.reach("controller.adopted")

    def _checkpoint(self, caller: Caller, text: str) -> CheckpointId:
        """Return a checkpoint id, which carries its controller's epoch.

        Raises:
            InvalidRequest: another epoch than the header's (CKPT-CKID-002).
        """
        checkpoint_id = parse_checkpoint_id(text)
        if checkpoint_id.epoch != caller.controller.epoch:
            raise InvalidRequest(f"checkpoint_id {text} is not of epoch {caller.controller.epoch}")
        return checkpoint_id

    def _deadline(self, timeout_ms: int) -> float:
        return self.clock.now() + self.config.limits.wait_s(timeout_ms)

    def _require_batch(self, items: Sequence[object]) -> None:
        if len(items) > self.config.limits.max_batch:
            raise PayloadTooLarge(f"more items than max_batch {self.config.limits.max_batch}")

    def _require_scheme(self, scheme: str) -> None:
        if scheme not in self.storage:
            raise Unsupported(f"the storage scheme {scheme} is not offered here")

    def _page_items(self, limit: int | None) -> int:
        most = self.config.limits.max_page_items
        return most if limit is None else min(limit, most)

    def _rollouts(self) -> Registry:
        if self.registry is None:
            raise NotFound("this participant owns no rollouts")
        return self.registry

    def _is_open(self, checkpoint_id: CheckpointId) -> bool:
        return self.machine.open is not None and self.machine.open.checkpoint_id == checkpoint_id

    def _require_open(self, checkpoint_id: CheckpointId, *ended: EndedAs) -> None:
        """Refuse to go on with a checkpoint that has ended meanwhile, unless in one of these ways (CKPT-PHASE-005)."""
        machine = self.machine
        if machine.open is not None and machine.open.checkpoint_id == checkpoint_id and machine.open.ending is None:
            return
        last = machine.last
        if machine.open is None and last is not None and last.checkpoint_id == checkpoint_id and last.ended_as in ended:
            return
        raise StaleCheckpoint(f"checkpoint {checkpoint_id} is over", phase=machine.phase.value)

    async def _outcome(self, work: asyncio.Future[T], deadline: float, checkpoint_id: CheckpointId) -> T:
        """Return what shared work comes to.

        Raises:
            DeadlineExceeded: not in time; the work goes on.
            ProtocolError: that of the work.
        """
        if not await within(self.clock, deadline, work):
            raise DeadlineExceeded("the work goes on; a repeat of this call joins it", **self._continues(checkpoint_id))
        return work.result()

    def _about_open(self) -> dict[str, Any]:
        """Return what an error about the open checkpoint carries (CKPT-CKID-031)."""
        opened = self.machine.open
        return {} if opened is None else {"checkpoint_id": str(opened.checkpoint_id), "phase": self.machine.phase.value}

    def _continues(self, checkpoint_id: CheckpointId) -> Mapping[str, Any]:
        return {"continues": True, "checkpoint_id": str(checkpoint_id), "phase": self.machine.phase.value}

    @contextmanager
    def _serving(self, checkpoint_id: CheckpointId) -> Iterator[None]:
        """Hold the lease still while an accepted POST of the open id is served (CKPT-LEASE-008)."""
        if not self._is_open(checkpoint_id):
            yield
            return
        self.machine = self.machine.begin_serving()
        self._order_lease()
        try:
            yield
        finally:
            self.machine = self.machine.end_serving(checkpoint_id, self.clock.now())
            self._order_lease()
