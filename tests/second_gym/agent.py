# SPDX-License-Identifier: Apache-2.0
"""The agent: one thread per attempt, from its first policy call to its result."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from tests.second_gym import policy
from tests.second_gym.book import Book
from tests.second_gym.border import Border
from tests.second_gym.calls import Call, Reply, post_to_world
from tests.second_gym.entries import Rollout
from tests.second_gym.gate import Gate, Handler
from tests.second_gym.refusals import Refusal
from tests.second_gym.sessions import Effect

LOG = logging.getLogger("second_gym")
NOT_NOW = {429, 502, 503, 504}
MAX_TURNS = 1000
TERMINAL = {"result_too_large", "result_not_representable"}
Json = dict[str, Any]


class Over(Exception):
    """The attempt is no longer this thread's: retired, replaced, or its session uncertain."""


class Failed(Exception):
    """The rollout ends with a failure of this kind."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Agent:
    """Runs rollouts.

    Args:
        gate: what holds their turns.
        book: what their results go to.
        token: the credential for policy calls, None for none.
    """

    def __init__(self, gate: Gate, book: Book, token: str | None) -> None:
        self.gate = gate
        self.book = book
        self.border = Border(gate, book)
        self._token = token

    def run(self, rollout: Rollout) -> None:
        """Run one attempt to its end; what a thread of it does."""
        messages: list[Json] = []
        try:
            try:
                part = self._play(rollout, messages)
            except Failed as failed:
                part = self._failure(rollout, failed.kind, str(failed))
            except Refusal as refusal:
                part = self._failure(rollout, "session_lost", refusal.detail)
            self._finish(rollout, part)
        except Over:
            pass
        except Exception:  # a fault of this agent ends one rollout, not the Gym
            LOG.exception("rollout %s", rollout.rollout_id)
            with self.gate.lock:
                rollout.session.uncertain = True
                self.book.changed()

    # --- a rollout ---

    def _play(self, rollout: Rollout, messages: list[Json]) -> Json:
        messages.append({"role": "user", "content": f"conformance seed={rollout.start['task']['seed']}"})
        most = rollout.start.get("limits", {}).get("max_turns", MAX_TURNS)
        outcome = "truncated"
        while rollout.turns_done < most and outcome != "completed":
            said = self._ask(rollout, messages)
            with self.gate.lock:
                self._hold(rollout, lambda: self.gate.open)
                rollout.open_turn, rollout.busy_since = rollout.turns_done + 1, time.monotonic()
                rollout.now("running")
            messages.append(said.message)
            for number, call in enumerate(said.calls, 1):
                messages.append({"role": "tool", "tool_call_id": call.id, "content": self._act(rollout, number, call)})
            if not said.calls:
                outcome = "completed"
            with self.gate.lock:
                self._hold(rollout, lambda: self.gate.open or self.gate.finishing)
                rollout.turns_done, rollout.open_turn = rollout.turns_done + 1, None
                rollout.effects_saved = rollout.effects
                if said.version is not None and said.version not in rollout.versions:
                    rollout.versions.append(said.version)
                if said.data_ref is not None:
                    rollout.data_refs.append(said.data_ref)
                self.book.changed()
        self._verify(rollout)
        session = rollout.session
        return {
            "body": {
                "outcome": outcome,
                "reward": (session.counter % 1024) / 1024,
                "turns": rollout.turns_done,
                "messages": messages,
                "final": session.final,
            }
        }

    def _act(self, rollout: Rollout, number: int, call: policy.ToolCall) -> str:
        turn = rollout.turns_done + 1
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = None
        effect = Effect(
            rollout_id=rollout.rollout_id,
            attempt=rollout.attempt,
            turn=turn,
            request_id=f"{rollout.rollout_id}/{turn}/{number}",
            tool=call.name,
            arguments=arguments,
            effects_done=rollout.effects,
        )
        self._check(rollout)
        try:
            observation = self.border.effect(effect, lambda: self.gate.open or self.gate.finishing)
        except Refusal as refusal:
            if rollout.session.uncertain or refusal.code == "stale_attempt":
                raise Over from refusal
            raise
        rollout.effects += 1
        return observation

    def _verify(self, rollout: Rollout) -> None:
        task = rollout.start["task"]
        handler = Handler(time.monotonic(), "verification", rollout.rollout_id, rollout.attempt)
        with self.gate.lock:
            self._hold(rollout, lambda: self.gate.open)
            if rollout.effects != rollout.session.recorded_count:
                raise Failed("session_lost", "Agent and session have recorded different numbers of effects.")
            rollout.verifying, rollout.busy_since = True, handler.since
            rollout.now("running")
            self.gate.handlers.append(handler)
        try:
            if task["verify_in_world"]:
                asked = {"rollout_id": rollout.rollout_id, "attempt": rollout.attempt}
                answer = post_to_world(f"{rollout.session.world_url}/verify", asked) if task["world_url"] else None
                if not isinstance(answer, dict):
                    raise Failed("verification_failed", "The world did not answer with an object.")
        except (OSError, ValueError) as error:
            raise Failed("verification_failed", f"The world did not verify ({type(error).__name__}).") from error
        finally:
            with self.gate.lock:
                self.gate.handlers.remove(handler)
                self.gate.lock.notify_all()

    def _finish(self, rollout: Rollout, part: Json) -> None:
        text = self._text(rollout, part)
        with self.gate.lock:
            # What prepare waits for may finish while it does; everything else waits for the gate.
            self._hold(
                rollout,
                lambda: self.gate.open or (self.gate.finishing and rollout.blocks),
                budget=False,
            )
            self.book.finish(rollout, text)

    def _text(self, rollout: Rollout, part: Json) -> str:
        info: Json = {"attempt": rollout.attempt, "policy_versions": rollout.versions, "data_refs": rollout.data_refs}
        if "labels" in rollout.start:
            info["labels"] = rollout.start["labels"]
        named = {name: rollout.start[name] for name in ("rollout_id", "environment", "task_digest")}
        try:
            text = json.dumps({**named, **part, "info": info}, ensure_ascii=False, allow_nan=False)
            size = len(text.encode("utf-8"))
        except ValueError as error:
            return self._text(rollout, self._failure(rollout, "result_not_representable", type(error).__name__))
        if size > self.book.limits["max_result_bytes"]:
            return self._text(rollout, self._failure(rollout, "result_too_large", f"{size} bytes"))
        return text

    @staticmethod
    def _failure(rollout: Rollout, kind: str, reason: str) -> Json:
        """Return the failure that a rollout ends with."""
        said = {"kind": kind, "reason": reason[:1000], "terminal": kind in TERMINAL, "turns": rollout.turns_done}
        return {"failure": said}

    # --- waiting ---

    def _check(self, rollout: Rollout) -> None:
        if rollout.ended or rollout.session.uncertain:
            raise Over
        if rollout.spent:
            raise Failed("episode_timeout", f"The budget of {rollout.start['limits']['episode_ms']} ms is used up.")

    def used(self, rollout: Rollout) -> float:
        """Return the seconds of running time that an attempt has used."""
        now = self.gate.clock() if rollout.down_since is None else rollout.down_since
        return now - rollout.began - rollout.down

    def _hold(self, rollout: Rollout, until: Callable[[], bool], *, budget: bool = True) -> None:
        """Wait, holding the lock, until the gate lets an attempt go on."""
        while True:
            if rollout.ended or rollout.session.uncertain:
                raise Over
            if until():
                break
            if rollout.open_turn is None:
                rollout.now("parked")
            self.gate.lock.wait()
        if budget:
            self._check(rollout)

    # --- the policy ---

    def _ask(self, rollout: Rollout, messages: list[Json]) -> policy.Said:
        """Make one policy call, as often as it takes, and return what it said."""
        pause = 0.02
        while True:
            reply, api = self._call(rollout, messages)
            with self.gate.lock:
                self._check(rollout)
                if reply is None or reply.status in NOT_NOW:
                    waited = self.gate.clock() - (rollout.down_since or 0.0)
                    if waited * 1000 >= self.book.limits["policy_retry_ms"]:
                        raise Failed("policy_unavailable", f"The policy was unavailable for {waited:.1f} s.")
                    self.gate.wait(lambda: rollout.ended, time.monotonic() + pause)
                    pause = min(2 * pause, 0.5)
                    continue
            if reply.status == 200:
                try:
                    return policy.understand(api, reply)
                except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                    raise Failed("policy_not_understood", f"The policy's reply has no known form: {error!r}") from error
            if b'"stale_attempt"' in reply.body:
                self._give_up(rollout)
            raise Failed("policy_refused", f"The policy answered {reply.status}.")

    def _call(self, rollout: Rollout, messages: list[Json]) -> tuple[Reply | None, str]:
        headers = {
            "Gym-Rollout-Id": rollout.rollout_id,
            "Gym-Attempt": str(rollout.attempt),
            "Gym-Turn": str(rollout.turns_done + 1),
        }
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        with self.gate.lock:
            self._check(rollout)
            where = rollout.policy
            url, body = policy.request(where, messages, rollout.start.get("seed"))
            rollout.call = call = Call(url, body, headers)
            rollout.now("waiting_policy")
            began = self.gate.clock()
        try:
            reply = call.make()
        except OSError:
            reply = None
        with self.gate.lock:
            rollout.call = None
            if reply is None or reply.status in NOT_NOW:
                rollout.down_since = began if rollout.down_since is None else rollout.down_since
            elif rollout.down_since is not None:
                rollout.down, rollout.down_since = rollout.down + began - rollout.down_since, None
        return reply, where["api"]

    def _give_up(self, rollout: Rollout) -> None:
        """End an attempt that the policy's side calls stale: there is nothing for it to finish."""
        with self.gate.lock:
            self._hold(rollout, lambda: self.gate.open)
            self.book.give_up(rollout)
        raise Over
