# SPDX-License-Identifier: Apache-2.0
"""The border between agent and environment, at which effects are judged; the probe reaches it from outside."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.second_gym.book import Book
from tests.second_gym.entries import Rollout
from tests.second_gym.gate import Gate, Handler
from tests.second_gym.refusals import Refusal
from tests.second_gym.sessions import Effect


class Border:
    """Judges effects in the order attempt, repeat, session, gate, and runs each at most once."""

    def __init__(self, gate: Gate, book: Book) -> None:
        self.gate = gate
        self.book = book

    def effect(self, effect: Effect, may_run: Callable[[], bool]) -> str:
        """Carry out one effect, or answer its repeat.

        Args:
            effect: what to do.
            may_run: whether the gate lets it begin.

        Raises:
            Refusal: `stale_attempt`, `argument_conflict`, `session_lost`, or `internal` when its handler raised.
        """
        with self.gate.lock:
            while True:
                session = self._live(effect).session
                content, reply = session.known(effect.request_id)
                if content not in (None, effect.content):
                    session.uncertain = True
                    self.book.changed()
                    raise Refusal("argument_conflict", "This request id had another tool or input.")
                if reply is not None:
                    return reply
                if content is None:
                    if session.uncertain:
                        raise Refusal("internal", "The handler of an earlier effect died; nobody knows the state.")
                    if effect.effects_done not in (None, session.recorded_count):
                        raise Refusal("session_lost", f"The session has recorded {session.recorded_count} effects.")
                    if session.running is None and may_run():
                        break
                self.gate.lock.wait()
            if effect.turn > session.recorded_turn:
                session.replies.clear()
                session.recorded_turn = effect.turn
            session.running = (effect.request_id, effect.content)
            handler = Handler(time.monotonic(), "effect", effect.rollout_id, effect.attempt)
            self.gate.handlers.append(handler)
        observation = None
        try:
            observation = session.apply(effect)
        except Exception as error:
            raise Refusal("internal", f"The handler of the effect died ({type(error).__name__}).") from error
        finally:
            with self.gate.lock:
                self.gate.handlers.remove(handler)
                session.running = None
                if observation is None:
                    session.uncertain = True
                    self.book.changed()
                else:
                    session.recorded_count += 1
                    session.replies[effect.request_id] = (effect.content, observation)
                self.gate.lock.notify_all()
        return observation

    def _live(self, effect: Effect) -> Rollout:
        held = self.book.held(effect.rollout_id)
        fence = self.book.fence(effect.rollout_id)
        if held is not None:
            fence = max(fence, held.attempt - 1)
        if effect.attempt <= fence:
            named = {"rollout_id": effect.rollout_id, "through_attempt": fence}
            raise Refusal("stale_attempt", f"Attempt {effect.attempt} is fenced.", {"rollouts": [named]})
        if not isinstance(held, Rollout) or held.attempt != effect.attempt:
            raise Refusal("session_lost", "There is no session of this attempt.")
        return held
