# SPDX-License-Identifier: Apache-2.0
"""A way to the policy that records every completed call of a rollout in the ledger.

Implements CKPT-FENCE-002 with the participant's fences.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from reference_gym.model.ledger import Ledger, Row
from reference_gym.participant.conversation import MalformedReply, parse_reply
from reference_gym.participant.policy_call import PolicyAnswer, TurnId
from reference_gym.participant.policy_http import PolicyHttp
from reference_gym.participant.state import Policy
from spec import wire

Settled = Callable[[], Awaitable[None]]
"""Returns once everything that has changed in the participant would survive the process."""
Observe = Callable[[str, int], None]
"""Tells the participant of a call by (rollout, attempt): fences lower ones, raises `StaleAttempt` for a fenced one."""


class RecordingPolicy:
    """A way to the policy that records one row per completed call of a rollout.

    Args:
        proxy: the direct way.
        ledger: where the rows go.
        observe: see `Observe`.
        settled: see `Settled`; awaited before the policy hears of an attempt that fences lower ones.
    """

    def __init__(self, proxy: PolicyHttp, ledger: Ledger, observe: Observe, settled: Settled) -> None:
        self._proxy = proxy
        self._ledger = ledger
        self._observe = observe
        self._settled = settled

    async def call(self, address: Policy, request: Mapping[str, Any], turn: TurnId | None) -> PolicyAnswer:
        """Make one call and record it; raises `StaleAttempt`, also for a reply that came after the fence."""
        if turn is None:
            return await self._proxy.call(address, request, None)
        self._observe(turn.rollout_id, turn.attempt)
        await self._settled()
        answer = await self._proxy.call(address, request, turn)
        self._observe(turn.rollout_id, turn.attempt)
        if answer.status == 200:
            self._ledger.add(turn, _describe(address, answer, turn.turn))
        return answer

    async def forget(self, rollout_id: str, attempt: int) -> None:
        """Keep the rows: where the rollout is owned as well they go with its release."""


def _describe(address: Policy, answer: PolicyAnswer, turn: int) -> Row:
    try:
        usage = parse_reply(address.api, answer.body, turn, answer.version).usage
    except MalformedReply:
        # The call is completed and paid for, whatever it brought.
        usage = {}
    return Row(turn, wire.bytes_digest(answer.body), len(answer.body), usage, answer.version)
