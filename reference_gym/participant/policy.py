# SPDX-License-Identifier: Apache-2.0
"""The policy client of an agent: forms, retries while the policy is unavailable, and an address that may change.

Implements CKPT-GATE-018 to -021 and -024, and CKPT-ROLL-033.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from reference_gym.participant.budget import EpisodeBudget
from reference_gym.participant.conversation import MalformedReply, Reply, build_request, parse_reply
from reference_gym.participant.policy_call import (
    EpisodeOver,
    Message,
    PolicyAnswer,
    PolicyPort,
    PolicyRefused,
    PolicyUnavailable,
    ToolSpec,
    TurnId,
)
from reference_gym.participant.state import Policy, RolloutFailure, Start, Usage

UNAVAILABLE = frozenset({None, 429, 502, 503, 504})
REFUSED_AGAIN = frozenset({400, 413, 422})
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
SHORTEST_WAIT_S = 0.05
LOOK_S = 0.2
"""How often a waiting rollout looks whether it got another address."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one policy call is about.

    Args:
        messages: the conversation so far, in the chat form.
        tools: what is offered.
        seed: forwarded, if the start call gave one.
        number: the turn, from 1.
        turn: the headers; None for a rollout of the older route.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSpec]
    seed: int | None
    number: int
    turn: TurnId | None


class Asking(Protocol):
    """What is needed of a rollout to ask for its next turn; `rollout.Rollout` is one."""

    start: Start
    attempt: int
    policy: Policy
    turns_done: int

    def policy_call(self) -> AbstractContextManager[None]:
        """Mark the rollout as waiting for the policy."""
        ...

    def note_policy(self, usage: Usage) -> None:
        """Note what a policy call reported."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyClient:
    """Calls the policy for the agent.

    Args:
        port: the way to the policy.
        retry_ms: how long an unavailable policy is tried again, in milliseconds.
        clock: monotonic seconds.
    """

    port: PolicyPort
    retry_ms: int
    clock: Callable[[], float]

    async def generate(self, policy: Callable[[], Policy], about: Conversation, budget: EpisodeBudget) -> Reply:
        """One policy call, repeated while the policy is unavailable; the budget does not run meanwhile.

        Args:
            policy: the present address; a restore or a repeated start replaces it, and the next try uses it.
            about: the conversation.
            budget: of the episode.

        Raises:
            PolicyUnavailable: for longer than `retry_ms`.
            PolicyRefused: another status, or a malformed reply.
            EpisodeOver: the budget ended first.
            StaleAttempt: the attempt is fenced.
        """
        failing_since: float | None = None
        delay = FIRST_DELAY_S
        while True:
            address = policy()
            began = self.clock()
            answer = await self._within_budget(address, about, budget)
            if answer.status not in UNAVAILABLE:
                return _read(address, answer, about.number)
            now = self.clock()
            budget.refund(now - began)
            failing_since = began if failing_since is None else failing_since
            left = failing_since + self.retry_ms / 1000 - now
            if left <= 0:
                raise PolicyUnavailable(f"the policy was unavailable for {self.retry_ms} ms (last: {answer.status})")
            wanted = delay * random.uniform(0.5, 1.0)
            if answer.retry_after_ms is not None:
                wanted = max(wanted, answer.retry_after_ms / 1000)
            with budget.stopped():
                replaced = await self._replaced_within(min(wanted, left), policy, address)
            failing_since = None if replaced else failing_since
            delay = FIRST_DELAY_S if replaced else min(delay * 2, LONGEST_DELAY_S)

    async def ask(
        self,
        rollout: Asking,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        budget: EpisodeBudget,
        *,
        headers: bool = True,
    ) -> Reply:
        """Make the policy call of a rollout's coming turn, and note what it reported.

        Args:
            rollout: whose turn it is.
            messages: the conversation so far, in the chat form.
            tools: what is offered.
            budget: of the episode.
            headers: whether the call carries the headers of the protocol (not in unmanaged rollouts).

        Raises:
            RolloutFailure: `episode_timeout`, `policy_unavailable` or `policy_error`.
            StaleAttempt: the attempt is fenced.
        """
        start, number = rollout.start, rollout.turns_done + 1
        turn = TurnId(start.rollout_id, rollout.attempt, number) if headers else None
        about = Conversation(messages, tools, start.seed, number, turn)
        if budget.exhausted:
            raise RolloutFailure("episode_timeout", "the time budget ended", terminal=False, stage="policy")
        try:
            with rollout.policy_call():
                reply = await self.generate(lambda: rollout.policy, about, budget)
        except EpisodeOver as error:
            raise RolloutFailure("episode_timeout", str(error), terminal=False, stage="policy") from error
        except PolicyUnavailable as error:
            raise RolloutFailure("policy_unavailable", str(error), terminal=False, stage="policy") from error
        except PolicyRefused as error:
            raise RolloutFailure("policy_error", str(error), terminal=error.terminal, stage="policy") from error
        rollout.note_policy(Usage(version=reply.version, usage=reply.usage, data_ref=reply.data_ref))
        return reply

    async def forget(self, rollout_id: str, attempt: int) -> None:
        """Let the owner of the ledger free what it holds of a rollout that has its result."""
        await self.port.forget(rollout_id, attempt)

    async def _replaced_within(self, seconds: float, policy: Callable[[], Policy], address: Policy) -> bool:
        """Wait so long, or until the address is replaced; tells whether it was."""
        end = self.clock() + seconds
        while policy() == address:
            left = end - self.clock()
            if left <= 0:
                return False
            await asyncio.sleep(min(left, LOOK_S))
        return True

    async def _within_budget(self, address: Policy, about: Conversation, budget: EpisodeBudget) -> PolicyAnswer:
        """One call; the budget may stand still meanwhile, so its end is looked for instead of computed."""
        request = build_request(address.api, address.model, about.messages, about.tools, about.seed)
        call = asyncio.ensure_future(self.port.call(address, request, about.turn))
        try:
            while not call.done():
                left = budget.left_s
                if left == 0:
                    raise EpisodeOver("the time budget ended during a policy call")
                await asyncio.wait([call], timeout=None if left is None else max(left, SHORTEST_WAIT_S))
            return await call
        finally:
            call.cancel()


def _read(address: Policy, answer: PolicyAnswer, turn: int) -> Reply:
    if answer.status != 200:
        raise PolicyRefused(f"the policy answered {answer.status}", terminal=answer.status in REFUSED_AGAIN)
    try:
        return parse_reply(address.api, answer.body, turn, answer.version)
    except MalformedReply as error:
        raise PolicyRefused(str(error), terminal=False) from error
