# SPDX-License-Identifier: Apache-2.0
"""The agent loop: one policy call per turn, its effects in order, a boundary, and at the end the verification.

Implements CKPT-CONF-008 to -014, CKPT-GATE-003, CKPT-ROLL-036, -037, -064 and CKPT-ENV-006, -012, -029 with the kit.

The same loop drives rollouts of the protocol (through the kit's `Rollout`) and unmanaged ones of the older route.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from reference_gym.environments.base import Environment, TaskInvalid, VerificationFailed
from reference_gym.errors import PeerRefused, PeerUnavailable
from reference_gym.participant.budget import EpisodeBudget
from reference_gym.participant.conversation import tool_message
from reference_gym.participant.errors import SessionLost, StaleAttempt
from reference_gym.participant.policy import PolicyClient
from reference_gym.participant.policy_call import Message
from reference_gym.participant.rollout import Perform, Verification
from reference_gym.participant.state import (
    Policy,
    RolloutFailure,
    SessionUncertain,
    Start,
    Success,
    TaskRefused,
    Usage,
)
from reference_gym.ports import ResourcesPort, SessionSpec

DEFAULT_MAX_TURNS = 1_000


class OpenTurn(Protocol):
    """One open turn, as the loop sees it."""

    async def effect(self, tool: str, args: Any, perform: Perform) -> Any:
        """Have one effect performed."""
        ...

    def close(self, state: Any) -> None:
        """Give the state of the boundary."""
        ...


class Drive(Protocol):
    """What the loop needs of a rollout; the kit's `Rollout` is one, an unmanaged rollout another."""

    start: Start
    attempt: int
    policy: Policy
    state: Any
    turns_done: int
    effects: int
    ended: bool

    def policy_call(self) -> AbstractContextManager[None]:
        """Mark the rollout as waiting for the policy."""
        ...

    def note_policy(self, usage: Usage) -> None:
        """Note what a policy call reported."""
        ...

    def turn(self) -> AbstractAsyncContextManager[OpenTurn]:
        """Open the next turn."""
        ...

    def verification(self) -> AbstractAsyncContextManager[Verification]:
        """Begin the verification."""
        ...

    async def finish(self, outcome: Success | RolloutFailure) -> None:
        """End the attempt with a result, outside of a turn or a verification."""
        ...


@dataclass(frozen=True, slots=True)
class LoopState:
    """What a boundary records of the loop.

    Args:
        messages: the conversation, in the chat form.
        used_ms: the used part of the time budget.
        outcome: how it ended, None while it goes on.
    """

    messages: tuple[Message, ...]
    used_ms: int
    outcome: str | None

    def as_json(self) -> dict[str, Any]:
        """The form that is saved."""
        return {"messages": list(self.messages), "used_ms": self.used_ms, "outcome": self.outcome}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> LoopState:
        """The state that `as_json` gave."""
        return cls(tuple(saved["messages"]), int(saved["used_ms"]), saved["outcome"])


@dataclass(frozen=True, slots=True)
class Ways:
    """How the agent reaches what is not its own.

    Args:
        resources: the sessions.
        policy: the policy.
        clock: seconds of the time budgets; they stand still while the gate is closed.
    """

    resources: ResourcesPort
    policy: PolicyClient
    clock: Callable[[], float]


class GymAgent:
    """The agent of this Gym.

    Args:
        environments: by name; only what they say about themselves is used here, the sessions are behind `resources`.
        ways: how it reaches sessions and policy; asked for when a rollout runs, because a participant is made with its
            agent and the ways are made with the participant.
        headers: whether calls carry the headers of the protocol (not in unmanaged rollouts).
    """

    def __init__(
        self, environments: Mapping[str, Environment], ways: Callable[[], Ways], *, headers: bool = True
    ) -> None:
        self._environments = environments
        self._ways = ways
        self._headers = headers

    def check(self, start: Start) -> None:
        """Refuse a task that its environment would not open; raises `TaskRefused`."""
        try:
            self._environments[start.environment].check(start.task, start.seed)
        except TaskInvalid as error:
            raise TaskRefused(str(error)) from error

    async def run(self, rollout: Drive) -> Success:
        """Run one attempt to its end; raises `RolloutFailure` and what the kit's turns raise."""
        try:
            success = await self._episode(rollout)
        except RolloutFailure as failure:
            if not rollout.ended:
                await rollout.finish(failure)
            await self._free(rollout)
            raise
        await self._free(rollout)
        return success

    async def _free(self, rollout: Drive) -> None:
        """Free session and rows once the result is recorded; what cannot be reached now goes by its own limits."""
        ways, rollout_id = self._ways(), rollout.start.rollout_id
        with suppress(PeerUnavailable, PeerRefused, StaleAttempt, SessionLost, SessionUncertain):
            await ways.resources.close(rollout_id, rollout.attempt)
            if self._headers:
                await ways.policy.forget(rollout_id, rollout.attempt)

    async def _episode(self, rollout: Drive) -> Success:
        start = rollout.start
        saved = rollout.state
        budget = EpisodeBudget(start.episode_ms, 0 if saved is None else int(saved["used_ms"]), self._ways().clock)
        state = await self._begin(rollout) if saved is None else LoopState.of(saved)
        while state.outcome is None:
            state = await self._turn(rollout, state, budget)
        return await self._judge(rollout, state)

    async def _begin(self, rollout: Drive) -> LoopState:
        start = rollout.start
        spec = SessionSpec(start.environment, start.task, start.task_digest, start.seed)
        try:
            messages = await self._ways().resources.open(start.rollout_id, rollout.attempt, spec)
        except PeerUnavailable as error:
            raise RolloutFailure("session_lost", str(error), terminal=False, stage="session") from error
        except (PeerRefused, TaskInvalid) as error:
            raise RolloutFailure("session_refused", str(error), terminal=True, stage="session") from error
        return LoopState(tuple(messages), 0, None)

    async def _turn(self, rollout: Drive, state: LoopState, budget: EpisodeBudget) -> LoopState:
        tools = self._environments[rollout.start.environment].tools
        reply = await self._ways().policy.ask(rollout, state.messages, tools, budget, headers=self._headers)
        async with rollout.turn() as turn:
            messages = [*state.messages, reply.message]
            ended = None if reply.calls else "completed"
            for call in reply.calls:
                answer = await turn.effect(call.name, call.args, self._ways().resources.effect)
                messages.append(tool_message(call.call_id, answer["text"]))
                ended = answer["ended"] or ended
            if ended is None and rollout.turns_done + 1 >= (rollout.start.max_turns or DEFAULT_MAX_TURNS):
                ended = "truncated"
            state = LoopState(tuple(messages), budget.used_ms, ended)
            turn.close(state.as_json())
        return state

    async def _judge(self, rollout: Drive, state: LoopState) -> Success:
        start = rollout.start
        async with rollout.verification() as verification:
            try:
                verdict = await self._ways().resources.verify(start.rollout_id, rollout.attempt, rollout.effects)
            except VerificationFailed as error:
                raise RolloutFailure("verification_failed", str(error), terminal=False, stage="verification") from error
            except (PeerUnavailable, PeerRefused) as error:
                raise RolloutFailure("verification_failed", str(error), terminal=False, stage="verification") from error
            success = Success(
                outcome="truncated" if state.outcome == "truncated" else "completed",
                reward=verdict.reward,
                messages=list(state.messages),
                final=None if verdict.final is None else dict(verdict.final),
            )
            verification.finish(success)
        return success
