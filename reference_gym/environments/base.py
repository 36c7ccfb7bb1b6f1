# SPDX-License-Identifier: Apache-2.0
"""What an environment is: a name, its tools, and sessions that can be exported as plain JSON data and restored.

An environment is a factory; a session is the state of one rollout. Everything that a session exports is JSON data, so
that restoring one executes nothing (no pickle, no code in a snapshot).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from reference_gym.participant.policy_call import ToolSpec

Continuation = Literal["export_restore", "stateless", "restart_only"]
VerifyMode = Literal["wait", "repeat"]
Outcome = Literal["completed", "truncated"]
Json = dict[str, Any]


class TaskInvalid(Exception):
    """The task does not fit this environment; the message says why and is shown to the controller."""


class StateInvalid(Exception):
    """An exported state does not fit this environment (damaged, or of another version)."""


class VerificationFailed(Exception):
    """The verification could not judge the rollout; a later attempt may succeed (the failure is not terminal)."""


@dataclass(frozen=True, slots=True)
class EffectContext:
    """Who causes an effect: what the outside is told about it."""

    rollout_id: str
    attempt: int
    turn: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer to one effect: the text for the policy, and the outcome when the environment has ended."""

    text: str
    ended: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification found: a finite reward, and what of the final state belongs in the result."""

    reward: float
    final: Mapping[str, Any] | None = field(default=None)


class Session(Protocol):
    """The state of one rollout in one environment."""

    def opening(self) -> list[Json]:
        """The messages with which the conversation starts."""
        ...

    async def call(self, tool: str, args: object, context: EffectContext) -> Observation:
        """Run one effect; an exception means that the handler died and nobody knows what it changed."""
        ...

    async def verify(self, rollout_id: str, attempt: int) -> Verdict:
        """Judge the state as it is; raises `VerificationFailed`."""
        ...

    def export(self) -> Json:
        """The whole state as JSON data, random generator included."""
        ...


class Environment(Protocol):
    """A factory of sessions, and what capabilities say about it."""

    @property
    def name(self) -> str:
        """How start calls name it."""
        ...

    @property
    def continuation(self) -> Continuation:
        """What a restore can do for a rollout in it."""
        ...

    @property
    def verify_mode(self) -> VerifyMode:
        """Whether a prepare waits for a verification, or it is repeated after a restore."""
        ...

    @property
    def state_version(self) -> str:
        """The form of what its sessions export."""
        ...

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """What is offered to the policy, in this order."""
        ...

    def reaches_outside(self, tool: str) -> bool:
        """Whether an effect of a tool may change anything but its session."""
        ...

    def check(self, task: Mapping[str, Any], seed: int | None) -> None:
        """Raise `TaskInvalid` when `open` would."""
        ...

    def open(self, task: Mapping[str, Any], seed: int | None) -> Session:
        """A session at its beginning; raises `TaskInvalid`."""
        ...

    def restore(self, task: Mapping[str, Any], state: Mapping[str, Any]) -> Session:
        """A session as `export` saw it; raises `StateInvalid`, and then has changed nothing."""
        ...

    async def aclose(self) -> None:
        """Free what all sessions share (connections)."""
        ...
