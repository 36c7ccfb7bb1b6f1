# SPDX-License-Identifier: Apache-2.0
"""ACKs that are owed to one Gym: sent in batches, and not again while an answer may still come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from reference_rl import failpoints, queries, settling
from reference_rl.batching import batches
from reference_rl.deployment import Deployment
from reference_rl.events import Events
from reference_rl.ledger import Ledger
from reference_rl.records import Receipt


class AckDebts:
    """Settles the debts of one Gym.

    Args:
        gym: discovered and obeying this controller.
        ledger: the run's ledger, which knows what is owed.
        events: where what happened is written.

    Requirements: CKPT-ACK-018, CKPT-ACK-020, CKPT-ACK-021.
    """

    def __init__(self, gym: Deployment, ledger: Ledger, events: Events) -> None:
        self._gym = gym
        self._ledger = ledger
        self._events = events
        self._settling = asyncio.Lock()
        self._sending: asyncio.Task[int] | None = None

    async def settle(self) -> int:
        """Send owed ACKs until none is left; return how many were settled.

        Whoever is cancelled in here leaves the ACKs on their way: the next one takes up their answer.

        Raises:
            GymError: the owner of rollouts could not be told; the debts stay.
            InvariantViolated: a mismatch.
        """
        settled = 0
        async with self._settling:
            while True:
                if self._sending is None:
                    owed = self._ledger.read(queries.debts, self._gym.alias, 1000)
                    if not owed:
                        return settled
                    self._sending = asyncio.create_task(self._send(owed))
                try:
                    settled += await asyncio.shield(self._sending)
                finally:
                    if self._sending.done():
                        self._sending = None

    async def give_up(self) -> None:
        """Forget the ACKs that are on their way and for whose answer nobody waits: they are owed, and sent again."""
        async with self._settling:
            if self._sending is not None:
                self._sending.cancel()
                await asyncio.gather(self._sending, return_exceptions=True)
                self._sending = None

    async def _send(self, owed: Sequence[Receipt]) -> int:
        """Send as many ACKs as one call may hold, and clear the debts that it settles; return how many."""
        receipts = next(batches(owed, self._gym.owner.capabilities.limits, Receipt._asdict))
        reply = await self._gym.owner.client.acks(receipts)
        failpoints.hit("result.acked")
        pairs = [(receipt, o.outcome) for receipt, o in zip(receipts, reply.outcomes, strict=True)]
        counts = await self._ledger.do(settling.clear_debts, self._gym.alias, pairs)
        self._events.emit("acked", gym=self._gym.alias, **counts)
        return len(pairs)
