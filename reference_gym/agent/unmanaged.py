# SPDX-License-Identifier: Apache-2.0
"""Rollouts of the Gym's older route: same loop, no turn gate, no header of the protocol, nothing saved."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from reference_gym.environments.base import EffectContext, Environment, Session, Verdict
from reference_gym.participant.policy_call import Message
from reference_gym.participant.rollout import Perform, Verification
from reference_gym.participant.state import EffectCall, Policy, RolloutFailure, Start, Success, Usage
from reference_gym.ports import SessionSpec
from spec import wire


class UnmanagedResources:
    """The session of one unmanaged rollout, held by the rollout itself."""

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        self._environments = environments
        self._session: Session | None = None

    async def open(self, rollout_id: str, attempt: int, spec: SessionSpec) -> list[Message]:
        """Open the session; raises `TaskInvalid`."""
        del rollout_id, attempt
        self._session = self._environments[spec.environment].open(spec.task, spec.seed)
        return self._session.opening()

    async def effect(self, call: EffectCall) -> Any:
        """Run one effect."""
        context = EffectContext(call.rollout_id, call.attempt, call.turn, call.request_id)
        observation = await self._opened().call(call.tool, call.args, context)
        return {"text": observation.text, "ended": observation.ended}

    async def verify(self, rollout_id: str, attempt: int, effects_done: int) -> Verdict:
        """Judge the session; raises `VerificationFailed`."""
        del effects_done
        return await self._opened().verify(rollout_id, attempt)

    async def close(self, rollout_id: str, attempt: int) -> None:
        """Free the session."""
        del rollout_id, attempt
        self._session = None

    def _opened(self) -> Session:
        assert self._session is not None, "the loop opens the session first"
        return self._session


class UnmanagedRollout:
    """What the loop drives; nobody else ever sees it."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.attempt = start.attempt
        self.policy: Policy = start.policy
        self.state: Any = None
        self.turns_done = 0
        self.effects = 0
        self.ended = False
        self.policy_versions: list[int] = []
        self.usage: dict[str, int] = {}

    @contextmanager
    def policy_call(self) -> Iterator[None]:
        """Nothing to mark."""
        yield

    def note_policy(self, usage: Usage) -> None:
        """Add up what the policy reports."""
        if usage.version is not None and usage.version not in self.policy_versions:
            self.policy_versions.append(usage.version)
        for name, count in usage.usage.items():
            self.usage[name] = self.usage.get(name, 0) + count

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[UnmanagedTurn]:
        """The next turn; nothing is waited for."""
        turn = UnmanagedTurn(self)
        yield turn
        self.turns_done += 1

    @asynccontextmanager
    async def verification(self) -> AsyncIterator[Verification]:
        """The verification; nothing is waited for."""
        yield Verification()

    async def finish(self, outcome: Success | RolloutFailure) -> None:
        """Nothing to record: the caller of the route gets the outcome."""
        del outcome
        self.ended = True


class UnmanagedTurn:
    """One turn of an unmanaged rollout."""

    def __init__(self, rollout: UnmanagedRollout) -> None:
        self._rollout = rollout
        self._ordinal = 0

    async def effect(self, tool: str, args: Any, perform: Perform) -> Any:
        """Have one effect performed."""
        rollout = self._rollout
        self._ordinal += 1
        name = wire.request_id(rollout.start.rollout_id, rollout.turns_done + 1, self._ordinal)
        reply = await perform(
            EffectCall(
                rollout_id=rollout.start.rollout_id,
                attempt=rollout.attempt,
                turn=rollout.turns_done + 1,
                request_id=name,
                tool=tool,
                args=args,
                effects_done=rollout.effects,
            )
        )
        rollout.effects += 1
        return reply

    def close(self, state: Any) -> None:
        """Keep the state; it is saved nowhere else."""
        self._rollout.state = state
