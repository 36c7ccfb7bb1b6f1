# SPDX-License-Identifier: Apache-2.0
"""What saving and restoring share: fresh ids, leases that stay renewed, abort everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from reference_rl.client import Controller
from reference_rl.deployment import Outcome, Participant, everywhere
from reference_rl.epochs import Claim
from reference_rl.errors import InvariantViolated, RlError, Superseded
from spec import wire


@dataclass
class Tenure:
    """One controller's time in office: its claim, its checkpoint ids, and the lock of everything that closes gates.

    Attributes:
        controller: who is calling; its epoch is set when the claim is made.
        claim: the claim in the run directory, ``None`` before it is made.
        lock: held while a snapshot is captured or a Gym is restored; the two exclude each other.
    """

    controller: Controller
    claim: Claim | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sequence: int = 0

    def take_office(self, claim: Claim) -> None:
        """Call under this claim from now on."""
        self.claim = claim
        self.controller.epoch = claim.epoch
        self._sequence = 0

    @property
    def epoch(self) -> int:
        """Return the claimed epoch."""
        if self.claim is None:
            raise RuntimeError("no epoch is claimed")
        return self.claim.epoch

    def first_id(self) -> wire.CheckpointId:
        """Return ``<epoch>-0``, the id of the abort that makes this controller known."""
        return wire.CheckpointId(self.epoch, 0)

    def next_id(self) -> wire.CheckpointId:
        """Return an id that was never used."""
        self._sequence += 1
        return wire.CheckpointId(self.epoch, self._sequence)

    def check(self) -> None:
        """Return when the claim still is the highest.

        Raises:
            Superseded: it is not.
        """
        if self.claim is not None:
            self.claim.check()


class Leases:
    """Renews the lease of every participant whose gate is closed, each third of it, until told that it is open.

    Use as an asynchronous context; leaving it stops all renewals.

    Args:
        checkpoint_id: the open checkpoint.
        lease_ms: the lease asked for, in milliseconds.

    Requirements: CKPT-LEASE-015.
    """

    def __init__(self, checkpoint_id: str, lease_ms: int) -> None:
        self._checkpoint_id = checkpoint_id
        self._lease_ms = lease_ms
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.failures = 0
        self.superseded: Superseded | None = None

    async def __aenter__(self) -> Leases:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.release_all()

    def hold(self, participant: Participant) -> None:
        """Renew this participant's lease from now on."""
        if id(participant) not in self._tasks:
            self._tasks[id(participant)] = asyncio.create_task(self._renew(participant))

    async def release(self, participant: Participant) -> None:
        """Stop renewing: its gate is open, or its lease shall end."""
        task = self._tasks.pop(id(participant), None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def release_all(self) -> None:
        """Stop every renewal."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _renew(self, participant: Participant) -> None:
        limits = participant.capabilities.limits
        lease_ms = min(max(self._lease_ms, limits.min_lease_ms), limits.max_lease_ms)
        while True:
            await asyncio.sleep(lease_ms / 3000)
            try:
                await participant.client.renew(self._checkpoint_id, lease_ms=lease_ms)
            except Superseded as error:
                self.superseded = error
                return
            except RlError:
                # Not fatal by itself: if the lease really ends, the next verb is told so.
                self.failures += 1


async def abort_everywhere(participants: Iterable[Participant], checkpoint_id: str, timeout_ms: int) -> list[Outcome]:
    """Abort one id on all participants at once, never stopping at a failure; repeat where the writer had not stopped.

    Returns:
        One outcome for each participant; a failed abort is left to the lease.

    Requirements: CKPT-STAGE-008, CKPT-STAGE-009.
    """

    async def abort(participant: Participant) -> str | None:
        reply = await participant.client.abort(checkpoint_id, timeout_ms=timeout_ms)
        return reply.ended_as

    return await everywhere(participants, abort)


async def best_effort(work: Coroutine[Any, Any, object], limit_s: float) -> bool:
    """Await work whose failure or delay must not matter; a supersession does.

    Returns:
        Whether it was done in time.

    Raises:
        Superseded: whatever else may fail, this ends the controller.
    """
    try:
        async with asyncio.timeout(limit_s):
            await work
    except (Superseded, InvariantViolated):
        raise
    except (RlError, TimeoutError, OSError):
        return False
    return True
