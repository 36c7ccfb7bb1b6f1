# SPDX-License-Identifier: Apache-2.0
"""The kit's conformance environments in the form of this Gym's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from reference_gym.environments.base import (
    Continuation,
    EffectContext,
    Observation,
    StateInvalid,
    TaskInvalid,
    Verdict,
    VerificationFailed,
    VerifyMode,
)
from reference_gym.participant import conformance as kit
from reference_gym.participant.policy_call import Message
from reference_gym.participant.state import EffectCall, RolloutFailure, TaskRefused


class ConformanceSession:
    """One rollout in the conformance environment."""

    def __init__(self, session: kit.ConformanceSession) -> None:
        self._session = session

    def opening(self) -> list[Message]:
        """One user message and no system message."""
        return self._session.opening

    async def call(self, tool: str, args: object, context: EffectContext) -> Observation:
        """Run one of the four tools; an exception when the world does not play along."""
        who = (context.rollout_id, context.attempt, context.turn, context.request_id)
        return Observation(await self._session.apply(EffectCall(*who, tool, args, None)))

    async def verify(self, rollout_id: str, attempt: int) -> Verdict:
        """Pay for the counter, after the world has agreed if the task wants that."""
        try:
            reward, final = await self._session.verify(rollout_id, attempt)
        except RolloutFailure as failure:
            raise VerificationFailed(failure.reason) from failure
        return Verdict(reward, final)

    def export(self) -> dict[str, Any]:
        """The state as JSON data."""
        return dict(self._session.save()["state"])


class ConformanceEnvironment:
    """The environment under one of its names; `conformance` continues after a restore, `conformance-restart` does not.

    Args:
        name: which of them.
        module: the kit's, shared by both.
    """

    verify_mode: VerifyMode = "wait"
    state_version = kit.STATE_VERSION
    tools = kit.TOOLS

    def __init__(self, name: Literal["conformance", "conformance-restart"], module: kit.Conformance) -> None:
        self.name: str = name
        self.continuation: Continuation = "export_restore" if name == "conformance" else "restart_only"
        self._module = module

    def reaches_outside(self, tool: str) -> bool:
        """Only `world` asks somebody else."""
        return tool == "world"

    def check(self, task: Mapping[str, Any], seed: int | None) -> None:
        """Raise `TaskInvalid` unless the task has exactly its three members; `seed` is ignored."""
        del seed
        try:
            self._module.check(task)
        except TaskRefused as refusal:
            raise TaskInvalid(str(refusal)) from refusal

    def open(self, task: Mapping[str, Any], seed: int | None) -> ConformanceSession:
        """A session at its beginning."""
        self.check(task, seed)
        return ConformanceSession(self._module.open(task))

    def restore(self, task: Mapping[str, Any], state: Mapping[str, Any]) -> ConformanceSession:
        """A session as it was exported; raises `StateInvalid`."""
        try:
            return ConformanceSession(self._module.load({"task": task, "state": state}))
        except ValueError as error:
            raise StateInvalid(str(error)) from error

    async def aclose(self) -> None:
        """Close the connections to the world."""
        await self._module.aclose()
