# SPDX-License-Identifier: Apache-2.0
"""The handle that an agent loop holds: one attempt of one rollout, its turns, its verification.

The two places in a loop::

    async def run(self, rollout):
        state = rollout.state or await self.begin(rollout)
        while not done:
            with rollout.policy_call():                      # waiting for the policy is never a blocker
                reply = await policy(rollout.policy, headers=rollout.policy_headers())
            rollout.note_policy(Usage(...))
            async with rollout.turn() as turn:               # 1: opens; waits here while the gate is closed
                for call in reply.tool_calls:
                    text = await turn.effect(call.name, call.args, perform)
                turn.close(state)                            # 2: the boundary, crossed when the block is left
        async with rollout.verification() as verification:
            verification.finish(Success(...))                # counts from when the block is left
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Literal, Protocol

from reference_gym.participant import failpoints
from reference_gym.participant.errors import SessionLost, StaleAttempt
from reference_gym.participant.gate import Gate
from reference_gym.participant.state import (
    EffectCall,
    Json,
    Policy,
    RolloutFailure,
    SessionUncertain,
    Start,
    Success,
    Usage,
)
from spec import wire

logger = logging.getLogger(__name__)

Perform = Callable[[EffectCall], Awaitable[Json]]
Activity = Literal["running", "parked", "waiting_policy"]


class Host(Protocol):
    """What the handle needs of the participant that it lives in."""

    @property
    def gate(self) -> Gate:
        """The participant's gate."""
        ...

    def now(self) -> float:
        """Return the participant's monotonic time in seconds."""
        ...

    def holds(self, rollout: Rollout) -> bool:
        """Return whether this attempt is still the current one of its rollout."""
        ...

    async def settled(self) -> None:
        """Return once what was recorded would survive the process."""
        ...

    def boundary(self, rollout: Rollout) -> None:
        """Record the present state as the rollout's last boundary."""
        ...

    def verifying(self, rollout: Rollout) -> AbstractContextManager[object]:
        """Hold while a verification runs: a blocker where the environment's ``verify`` is ``wait``."""
        ...

    def finish(self, rollout: Rollout, outcome: Success | RolloutFailure) -> None:
        """End the attempt with a result."""
        ...

    def stop(self, rollout: Rollout, reason: str) -> None:
        """End the attempt's work; it stays in state ``restart`` until it is retired."""
        ...


class Rollout:
    """One attempt of one rollout, from its start or its restore to its end.

    ``state`` is what the last boundary recorded (None before the first record), ``turns_done`` and ``effects``
    the counts of that boundary, ``policy`` where the next policy call goes. Once ``ended`` (finished, stopped, or
    fenced by a higher attempt) every method raises ``StaleAttempt``, so that a loop that swallows its
    cancellation can change nothing. ``while_parked`` may be set to a factory of a context that holds while the
    rollout waits at the gate, e.g. one that stops a time budget.
    """

    def __init__(self, start: Start, host: Host, *, attempt: int | None = None, policy: Policy | None = None) -> None:
        self._host = host
        self.start = start
        self.attempt = start.attempt if attempt is None else attempt
        self.policy = policy or start.policy
        self.state: Json = None
        self.turns_done = 0
        self.effects = 0
        self.policy_versions: list[int] = []
        self.data_refs: list[Json] = []
        self.usage: dict[str, int] = {}
        self.since = host.now()
        self._activity: Activity = "running"
        self.open_turn: int | None = None
        self._ended = False
        self.while_parked: Callable[[], AbstractContextManager[object]] = nullcontext
        self._noted: Usage | None = None

    @property
    def rollout_id(self) -> str:
        """The id, the same for every attempt."""
        return self.start.rollout_id

    @property
    def activity(self) -> Activity:
        """What it is doing; ``since`` is when that began, in monotonic seconds."""
        return self._activity

    @activity.setter
    def activity(self, activity: Activity) -> None:
        if activity != self._activity:
            self._activity = activity
            self.since = self._host.now()

    @property
    def key(self) -> str:
        """The key of this attempt, under which RL's data plane keeps its token rows."""
        return wire.rollout_key(self.rollout_id, self.attempt)

    @property
    def ended(self) -> bool:
        """Whether this attempt is over: finished, stopped, fenced, or dropped by a restore."""
        return self._ended or not self._host.holds(self)

    @ended.setter
    def ended(self, ended: bool) -> None:
        self._ended = ended

    def policy_headers(self) -> dict[str, str]:
        """Return the headers that the next policy call, or a call to another participant, carries."""
        return {
            wire.HEADER_ROLLOUT_ID: self.rollout_id,
            wire.HEADER_ATTEMPT: str(self.attempt),
            wire.HEADER_TURN: str(self.open_turn or self.turns_done + 1),
        }

    @contextmanager
    def policy_call(self) -> Iterator[None]:
        """Mark the rollout as waiting for the policy; its turn is not open and never blocks a prepare."""
        self._check()
        self.activity = "waiting_policy"
        try:
            yield
        finally:
            self.activity = "running"

    def note_policy(self, usage: Usage) -> None:
        """Note what the policy call of the coming turn reported; it counts from that turn's boundary on."""
        self._check()
        self._noted = usage

    async def record(self, state: Json) -> None:
        """Record a state without crossing a boundary, e.g. the opening messages; waits while the gate is closed."""
        await self._parked_until_open()
        self.state = state
        self._host.boundary(self)
        await self._host.settled()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Open the next turn, waiting while the gate is closed, and cross its boundary when the block is left.

        Leaving it by an exception crosses no boundary: ``SessionUncertain`` stops the rollout in state ``restart``,
        ``SessionLost`` and ``RolloutFailure`` end it with a failure, ``StaleAttempt`` ends it without a trace.

        Raises:
            StaleAttempt: the attempt is fenced.
        """
        await self._parked_until_open()
        number = self.turns_done + 1
        turn = Turn(self, number)
        self.open_turn = number
        failpoints.reach("turn.opened")
        try:
            with self._host.gate.running("effect", self.rollout_id, self.attempt, turn=number):
                try:
                    yield turn
                    await self._unsealed()
                    self._cross(turn)
                except Exception as error:
                    await self._fail_in_scope(error)
                    raise
        except Exception:
            await self._host.settled()  # Whatever the author's loop does next depends on the failure.
            raise
        finally:
            self.open_turn = None
        await self._host.settled()
        failpoints.reach("boundary.written")

    @asynccontextmanager
    async def verification(self) -> AsyncIterator[Verification]:
        """Begin the verification, waiting while the gate is closed; with ``verify: wait`` a prepare waits for its end.

        Raises:
            StaleAttempt: the attempt is fenced.
        """
        await self._parked_until_open()
        verification = Verification()
        try:
            with self._host.verifying(self):
                failpoints.reach("verification.begun")
                try:
                    yield verification
                except Exception as error:
                    await self._fail_in_scope(error)
                    raise
                failpoints.reach("verification.judged")
                if verification.success is not None:
                    await self._unsealed()
                    self._check()
                    self._host.finish(self, verification.success)
        finally:
            await self._host.settled()
        failpoints.reach("finish.written")

    async def finish(self, outcome: Success | RolloutFailure) -> None:
        """End the attempt with a result, outside of a turn or a verification; waits while the gate is closed."""
        await self._parked_until_open()
        self._host.finish(self, outcome)
        await self._host.settled()
        failpoints.reach("finish.written")

    def _check(self) -> None:
        if self.ended:
            raise StaleAttempt.of(self.rollout_id, self.attempt)

    async def _parked_until_open(self) -> None:
        """Wait at the gate; on return it is open, and nothing has run since it was found so."""
        self._check()
        if not self._host.gate.is_open:
            self.activity = "parked"
            try:
                with self.while_parked():
                    await self._host.gate.wait_open(self.rollout_id)
            finally:
                self.activity = "running"
            self._check()

    async def _unsealed(self) -> None:
        """Wait while nothing may change: because a commit left this rollout out, or a restore closed the gate.

        What waits here runs no more: a restore that waited for it would never install (CKPT-RESTORE-007).
        """
        if self._host.gate.sealed:
            self._host.gate.judged(self.rollout_id, self.attempt)
        while self._host.gate.sealed and not self.ended:
            with self.while_parked():
                await self._host.gate.wait_open(self.rollout_id)
        self._check()

    async def _fail_in_scope(self, error: Exception) -> None:
        """End the rollout while its open turn or verification still counts, so that no cut sees it half ended."""
        if self.ended or isinstance(error, StaleAttempt):
            return
        if isinstance(error, SessionUncertain):
            self._host.stop(self, "uncertain")
            return
        await self._unsealed()
        match error:
            case SessionLost():
                failure = RolloutFailure("session_lost", error.detail, terminal=False)
                self._host.finish(self, failure)
            case RolloutFailure():
                self._host.finish(self, error)
            case _:
                self._host.finish(self, internal_failure(self, error))

    def _cross(self, turn: Turn) -> None:
        """Cross the boundary of ``turn``; if it cannot be recorded, it is not crossed."""
        self._check()
        before = self.state, self.turns_done, self.policy_versions, self.data_refs, self.usage
        self.state = turn.take_state()
        self.turns_done = turn.number
        if (noted := self._noted) is not None:
            self._count(noted)
        try:
            self._host.boundary(self)
        except BaseException:
            self.state, self.turns_done, self.policy_versions, self.data_refs, self.usage = before
            raise
        self._noted = None

    def _count(self, noted: Usage) -> None:
        if noted.version is not None and noted.version not in self.policy_versions:
            self.policy_versions = [*self.policy_versions, noted.version]
        if noted.data_ref is not None:
            self.data_refs = [*self.data_refs, noted.data_ref]
        self.usage = {**self.usage, **{name: self.usage.get(name, 0) + n for name, n in noted.usage.items()}}


def internal_failure(rollout: Rollout, error: Exception) -> RolloutFailure:
    """Return the failure of a rollout whose own code raised; only the type's name is told, the log has the rest."""
    logger.error("the agent of rollout %s raised", rollout.key, exc_info=error)
    return RolloutFailure("internal", f"the agent raised {type(error).__name__}", terminal=False)


class Turn:
    """One open turn: its number, its effects in order, and the state at its boundary."""

    def __init__(self, rollout: Rollout, number: int) -> None:
        self.number = number
        self._rollout = rollout
        self._ordinal = 0
        self._state: tuple[Json] | None = None

    async def effect(self, tool: str, args: Json, perform: Perform) -> Json:
        """Have one effect performed and count it.

        Args:
            tool: the tool's name as the policy gave it.
            args: its arguments, any JSON value.
            perform: sends the call to the owner of the session (``Sessions.effect``, or a client of one) and
            returns the
                reply. It repeats a call whose reply was lost with the same request id.

        Raises:
            StaleAttempt, SessionLost, SessionUncertain: as ``perform`` raised them; leave the turn's block with them.
        """
        rollout = self._rollout
        await rollout._unsealed()
        self._ordinal += 1
        call = EffectCall(
            rollout_id=rollout.rollout_id,
            attempt=rollout.attempt,
            turn=self.number,
            request_id=wire.request_id(rollout.rollout_id, self.number, self._ordinal),
            tool=tool,
            args=args,
            effects_done=rollout.effects,
        )
        reply = await perform(call)
        rollout._check()
        rollout.effects += 1
        return reply

    def close(self, state: Json) -> None:
        """Give the state to be recorded at this turn's boundary; the boundary is crossed when the block is left.

        The state is not changed afterwards: hand over copies or immutable values.
        """
        self._state = (state,)

    def take_state(self) -> Json:
        """Return the state given to ``close``.

        Raises:
            RuntimeError: the block was left without ``close``.
        """
        if self._state is None:
            raise RuntimeError("a turn was left without turn.close(state)")
        return self._state[0]


class Verification:
    """One running verification; ``finish`` gives the result that counts when its block is left."""

    success: Success | None = None

    def finish(self, success: Success) -> None:
        """End the rollout with this success as soon as the verification's block is left."""
        self.success = success
