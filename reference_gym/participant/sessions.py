# SPDX-License-Identifier: Apache-2.0
"""Sessions: environment state by rollout, changed by effects that are deduplicated and admitted by the gate.

An effect is judged in this order (CKPT-EFFECT-007): attempt, repeat, session, gate. A repeat is answered with the
recorded reply, also while the gate is closed. An effect that may not begin yet is held. A handler that raises makes its
session uncertain: nobody knows what it changed, so its rollout stops.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from reference_gym.participant import failpoints
from reference_gym.participant.core import Core
from reference_gym.participant.errors import ArgumentConflict, Internal, SessionLost, StaleAttempt
from reference_gym.participant.session import Reply, Session, SessionState
from reference_gym.participant.slices import Slices
from reference_gym.participant.state import Captured, EffectCall, Json, Owns, Restored

logger = logging.getLogger(__name__)


class Sessions:
    """The sessions of one participant; a ``Part`` of it.

    Args:
        participant: whose gate and fences hold; the part adds itself to it.
        load: builds the author's state from an environment's name, what ``SessionState.save`` gave, and the rollout; it
            may raise ``CannotContinue`` or any error, having freed what it made.
        name: the key of the sessions in the payload.
        contained: tells of an environment and a tool whether its effects change nothing but the session, so that one
            that ends with the process has never happened; by default every effect reaches outside.
    """

    def __init__(
        self,
        participant: Core,
        load: Callable[[str, Json, Restored], SessionState],
        *,
        name: str = "sessions",
        contained: Callable[[str, str], bool] = lambda _environment, _tool: False,
    ) -> None:
        self._participant = participant
        self._load = load
        self._name = name
        self._contained = contained
        self._sessions: dict[str, Session] = {}
        self._closing: set[asyncio.Task[None]] = set()
        participant.add(self)

    def __len__(self) -> int:
        return len(self._sessions)

    # --- for the author's servers -------------------------------------------------------------------------------------

    async def open(
        self, rollout_id: str, attempt: int, environment: str, task_digest: str | None, state: SessionState
    ) -> None:
        """Open a session, held while the gate is closed; one in which nothing has happened yet is replaced.

        Raises:
            StaleAttempt: the attempt is fenced.
            SessionLost: there is a session of this attempt in which effects were recorded.
        """
        participant = self._participant
        participant.check(rollout_id, attempt)
        while not participant.gate.is_open:
            await participant.gate.wait_change(rollout_id)
            participant.check(rollout_id, attempt)
        held = self._sessions.get(rollout_id)
        if held is not None and held.attempt == attempt and (held.effects or held.running or held.uncertain):
            state.close()
            raise SessionLost(f"{rollout_id} has a session with {held.effects} effects already")
        participant.observe(rollout_id, attempt)
        self.drop(rollout_id)
        self._sessions[rollout_id] = Session(rollout_id, attempt, environment, task_digest, state)
        participant.changed(rollout_id)
        failpoints.reach("session.opened")

    async def effect(self, call: EffectCall) -> Json:
        """Run one effect once, and return its reply; held while the gate does not admit it.

        The handler runs to its end although the caller goes away.

        Raises:
            StaleAttempt: the attempt is fenced (CKPT-EFFECT-008).
            ArgumentConflict: the request id is recorded with another tool or input; the session is uncertain now.
            SessionLost: no such session, or another number of effects.
            Internal: the handler raised, now or before: the session is uncertain.
        """
        while True:
            session, reply = self._judge(call)
            if reply is not None:
                return reply.reply
            if session.running is not None:
                running, task = session.running
                if running.request_id == call.request_id:
                    self._require_same(session, call, running.tool, running.args)
                    return await asyncio.shield(task)
                await asyncio.wait([task])
            elif self._admits(session, call):
                task = asyncio.get_running_loop().create_task(self._apply(session, call), name=call.request_id)
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
                session.running = (call, task)
                return await asyncio.shield(task)
            else:
                await self._participant.gate.wait_change(call.rollout_id)

    def get(self, rollout_id: str, attempt: int) -> SessionState:
        """Return the author's state of a session.

        Raises:
            StaleAttempt: the attempt is fenced.
            SessionLost: there is no such session.
        """
        self._participant.check(rollout_id, attempt)
        return self._find(rollout_id, attempt).state

    def at(self, rollout_id: str, attempt: int, effects_done: int) -> SessionState:
        """Return the author's state of a session that stands where the caller does, e.g. to judge it (CKPT-ENV-032).

        Raises:
            StaleAttempt: the attempt is fenced.
            SessionLost: there is none, or it has recorded another number of effects.
            Internal: nobody knows what an effect has changed in it.
        """
        self._participant.check(rollout_id, attempt)
        session = self._find(rollout_id, attempt)
        if session.uncertain:
            raise Internal(f"the session of {rollout_id} is uncertain")
        if session.effects != effects_done:
            raise SessionLost(f"the session of {rollout_id} does not stand at {effects_done} effects")
        return session.state

    @asynccontextmanager
    async def verification(self, rollout_id: str, attempt: int) -> AsyncIterator[SessionState]:
        """Run a verification that another participant asks for, held while the gate is closed.

        Raises:
            StaleAttempt: the attempt is fenced.
            SessionLost: there is no such session.
        """
        participant = self._participant
        self.get(rollout_id, attempt)
        while not participant.gate.is_open:
            await participant.gate.wait_change(rollout_id)
            self.get(rollout_id, attempt)
        session = self._find(rollout_id, attempt)
        environment = participant.config.environment(session.environment)
        blocks = environment is None or environment.verify == "wait"
        with participant.gate.running("verification", rollout_id, attempt, handler=True, blocks=blocks):
            yield session.state

    async def close(self, rollout_id: str, attempt: int) -> None:
        """Close the session of a rollout that has its result, held while nothing may change.

        Nothing happens, and nobody waits, if there is none any more: the kit itself closes what is retired, fenced or
        dropped. Where rollouts are owned an uncertain session stays until then (CKPT-EFFECT-018).
        """
        participant = self._participant
        while (session := self._ending(rollout_id, attempt)) is not None and participant.gate.sealed:
            await participant.gate.wait_change(rollout_id)
        if session is not None:
            self.drop(rollout_id)
            participant.changed(rollout_id)
            failpoints.reach("session.closed")

    def _ending(self, rollout_id: str, attempt: int) -> Session | None:
        """Return the session that a call of ``close`` is about, or None if it is not to be closed."""
        session = self._sessions.get(rollout_id)
        if session is None or session.attempt != attempt:
            return None
        return None if session.uncertain and "rollouts" in self._participant.owns else session

    # --- the part -----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The key of the sessions in the payload."""
        return self._name

    @property
    def owns(self) -> Owns:
        """What this part stores."""
        return "sessions"

    def capture(self, rollout_id: str) -> Captured | None:
        """Return a session as it is now, recorded replies included (CKPT-EFFECT-006)."""
        session = self._sessions.get(rollout_id)
        if session is None:
            return None
        environment = self._participant.config.environment(session.environment)
        restart = "uncertain" if session.uncertain else None
        if restart is None and (environment is None or environment.continuation == "restart_only"):
            restart = "restart_only"
        return Captured(
            attempt=session.attempt,
            turns_done=session.turn,
            data=None if restart else session.saved(),
            effects=session.effects,
            task_digest=session.task_digest,
            environment=session.environment,
            restart=restart,
        )

    async def build(self, rollouts: Sequence[Restored]) -> dict[str, Session]:
        """Build sessions aside; when one fails, those built before it are closed again."""
        built: dict[str, Session] = {}
        slices = Slices()
        try:
            for restored in rollouts:
                if restored.data is not None:
                    built[restored.rollout_id] = Session.built(restored, self._load)
                await slices.give_way()
        except BaseException:
            await self.discard(built)
            raise
        return built

    def install(self, built: dict[str, Session]) -> None:
        """Make the built sessions current; the others are closed, in slices, when this step is over."""
        earlier, self._sessions = self._sessions, built
        if earlier:
            task = asyncio.get_running_loop().create_task(self.discard(earlier), name="closing of sessions")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def lose(self, rollout: Restored) -> None:
        """Remember a session that ended with the process: it is there, and nobody knows its state."""
        self._sessions[rollout.rollout_id] = Session.lost(rollout)

    async def discard(self, built: dict[str, Session]) -> None:
        """Close sessions that nobody installed."""
        slices = Slices()
        while built:
            built.pop(next(iter(built))).close()
            await slices.give_way()

    def drop(self, rollout_id: str) -> None:
        """Close the session of a rollout."""
        session = self._sessions.pop(rollout_id, None)
        if session is not None:
            session.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _find(self, rollout_id: str, attempt: int) -> Session:
        session = self._sessions.get(rollout_id)
        if session is None or session.attempt != attempt:
            raise SessionLost(f"there is no session of {rollout_id} at attempt {attempt}")
        return session

    def _judge(self, call: EffectCall) -> tuple[Session, Reply | None]:
        """Judge attempt, repeat and session; return the session, and the recorded reply of a repeat."""
        self._participant.check(call.rollout_id, call.attempt)
        session = self._find(call.rollout_id, call.attempt)
        if (reply := session.replies.get(call.request_id)) is not None:
            self._require_same(session, call, reply.tool, reply.args)
            return session, reply
        if session.uncertain:
            raise Internal(f"the session of {call.rollout_id} is uncertain")
        running = session.running is not None and session.running[0].request_id == call.request_id
        if not running and call.effects_done is not None and call.effects_done != session.effects:
            told = f"the caller has recorded {call.effects_done}"
            raise SessionLost(f"the session of {call.rollout_id} has {session.effects} effects, {told}")
        return session, None

    def _admits(self, session: Session, call: EffectCall) -> bool:
        """Return whether the gate lets an effect begin.

        Where rollouts are owned the agent's open turns decide; elsewhere a turn goes on of which an effect has run.
        """
        begun = None if "rollouts" in self._participant.owns else session.turn or None
        return self._participant.gate.admits_effect(call.rollout_id, call.turn, begun)

    def _require_same(self, session: Session, call: EffectCall, tool: str, args: Json) -> None:
        """Refuse a request id that comes with another tool or input (CKPT-EFFECT-003, CKPT-EFFECT-004)."""
        if _input(tool, args) != _input(call.tool, call.args):
            self._uncertain(session)
            raise ArgumentConflict(f"effect {call.request_id} was another one before")

    async def _apply(self, session: Session, call: EffectCall) -> Json:
        """Run the handler of one effect and record its reply."""
        gate = self._participant.gate
        with gate.running("effect", call.rollout_id, call.attempt, handler=True):
            if call.turn > session.turn:
                session.turn = call.turn
                session.replies.clear()
            journal, who = self._participant.journal, {"rollout_id": call.rollout_id, "request_id": call.request_id}
            if leaves := self._leaves(session, call):
                journal.note("begin", turn=call.turn, **who)
                await self._participant.settled()
            failpoints.reach("effect.begun")
            try:
                reply = await session.state.apply(call)
                failpoints.reach("effect.done")
            except Exception as error:
                logger.exception("the handler of effect %s raised", call.request_id)
                session.running = None
                self._uncertain(session)
                raise Internal(f"the handler of effect {call.request_id} raised {type(error).__name__}") from error
            session.running = None
            if self._sessions.get(call.rollout_id) is not session:
                session.close()
                raise StaleAttempt.of(call.rollout_id, call.attempt)
            session.effects += 1
            session.replies[call.request_id] = Reply(call.tool, call.args, reply)
            if leaves:
                journal.note("ran", **who)
            self._record(session, call)
            failpoints.reach("effect.recorded")
            return reply

    def _record(self, session: Session, call: EffectCall) -> None:
        """Record an effect that has run; where what it left cannot be recorded, nobody could go on from it.

        Raises:
            Internal: it cannot be; the session is uncertain.
        """
        try:
            self._participant.changed(call.rollout_id)
        except (TypeError, ValueError) as error:
            logger.exception("what effect %s has left cannot be recorded", call.request_id)
            del session.replies[call.request_id]
            self._uncertain(session)
            raise Internal(f"what effect {call.request_id} has left cannot be recorded") from error

    def _leaves(self, session: Session, call: EffectCall) -> bool:
        """Return whether somebody outside of what one record holds will know of an effect: its tool, or its caller.

        Where rollouts are owned an effect is recorded with its turn; one outside of the agent's turns (the conformance
        probe) is told before that.
        """
        if not self._contained(session.environment, call.tool):
            return True
        return "rollouts" in self._participant.owns and self._participant.gate.turn_of(call.rollout_id) != call.turn

    def _uncertain(self, session: Session) -> None:
        if self._sessions.get(session.rollout_id) is session and not session.uncertain:
            session.uncertain = True
            self._participant.uncertain(session.rollout_id)


def _input(tool: str, args: Json) -> str:
    """Return what is compared of an effect: JSON text, because in Python true equals 1."""
    return json.dumps([tool, args], sort_keys=True)
