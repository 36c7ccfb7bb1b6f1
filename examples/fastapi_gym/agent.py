# SPDX-License-Identifier: Apache-2.0
"""The agent loop. The kit is met at three places: a turn opens, its boundary is crossed, the result is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from reference_gym.participant import Rollout, RolloutFailure, Sessions, Start, Success
from reference_gym.participant.budget import EpisodeBudget
from reference_gym.participant.conversation import tool_message
from reference_gym.participant.policy import PolicyClient

MOST_TURNS = 100


class ToolAgent:
    """Calls the policy, lets it call tools, and has the end judged.

    Args:
        environments: by name: `check`, `open` and `load` of each.
        policy: the way to the policy.
    """

    sessions: Sessions
    clock: Callable[[], float]

    def __init__(self, environments: Mapping[str, Any], policy: PolicyClient) -> None:
        self.environments = environments
        self.policy = policy

    def connect(self, sessions: Sessions, clock: Callable[[], float]) -> None:
        """Give what only the participant can give: sessions, and seconds that stand still while the gate is closed."""
        self.sessions, self.clock = sessions, clock

    def check(self, start: Start) -> None:
        """Refuse a task that cannot be run."""
        self.environments[start.environment].check(start.task)

    async def run(self, rollout: Rollout) -> Success:
        """Run one attempt, from its beginning or from the last boundary of a snapshot."""
        try:
            success = await self._episode(rollout, self.sessions)
        except RolloutFailure as failure:
            if not rollout.ended:
                await rollout.finish(failure)
            await self.sessions.close(rollout.rollout_id, rollout.attempt)
            raise
        await self.sessions.close(rollout.rollout_id, rollout.attempt)
        return success

    async def _episode(self, rollout: Rollout, sessions: Sessions) -> Success:
        start, state = rollout.start, rollout.state
        if state is None:
            opened = self.environments[start.environment].open(start.task)
            await sessions.open(rollout.rollout_id, rollout.attempt, start.environment, start.task_digest, opened)
            state = {"messages": opened.opening, "used_ms": 0, "outcome": None}
        budget = EpisodeBudget(start.episode_ms, state["used_ms"], self.clock)
        while state["outcome"] is None:
            state = await self._turn(rollout, sessions, state["messages"], budget)
        async with rollout.verification() as verification:
            game: Any = sessions.at(rollout.rollout_id, rollout.attempt, rollout.effects)
            reward, final = await game.verify(rollout.rollout_id, rollout.attempt)
            success = Success(state["outcome"], reward, state["messages"], final)
            verification.finish(success)
        return success

    async def _turn(self, rollout: Rollout, sessions: Sessions, messages: list[Any], budget: EpisodeBudget) -> Any:
        game: Any = sessions.get(rollout.rollout_id, rollout.attempt)
        reply = await self.policy.ask(rollout, messages, game.tools, budget)
        async with rollout.turn() as turn:
            messages = [*messages, reply.message]
            for call in reply.calls:
                text = await turn.effect(call.name, call.args, sessions.effect)
                messages.append(tool_message(call.call_id, text))
            outcome = game.outcome if reply.calls else "completed"
            if outcome is None and turn.number >= (rollout.start.max_turns or MOST_TURNS):
                outcome = "truncated"
            state = {"messages": messages, "used_ms": budget.used_ms, "outcome": outcome}
            turn.close(state)
        return state
