# SPDX-License-Identifier: Apache-2.0
"""Environments from `gymnasium` (Taxi-v4, FrozenLake-v1) as tool-calling rollouts whose random generator is state.

One gymnasium instance serves every session of an environment: a session is data (position, step count, generator),
which is put into the instance for the length of one step. So a session is small, and a restored one is by construction
the same thing as one that was never interrupted (CKPT-ENV-003, CKPT-SEC-013).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from reference_gym.environments.base import (
    Continuation,
    EffectContext,
    Observation,
    Outcome,
    StateInvalid,
    TaskInvalid,
    Verdict,
    VerifyMode,
)
from reference_gym.environments.simulator import EpisodeState, Simulator, export_rng, restore_rng
from reference_gym.participant.jsontext import is_integer
from reference_gym.participant.policy_call import ToolSpec

MAX_SEED = 2**53 - 1
INVALID = '{"error":"invalid"}'
OVER = '{"error":"episode is over"}'


Describe = Callable[[Simulator, EpisodeState], dict[str, Any]]


class ToyTextSession:
    """One episode."""

    def __init__(self, environment: ToyTextEnvironment, state: EpisodeState) -> None:
        self._environment = environment
        self.state = state

    def _text(self, **more: Any) -> str:
        shown = self._environment.describe(self._environment.simulator, self.state) | more
        return json.dumps(shown, sort_keys=True, ensure_ascii=True)

    def opening(self) -> list[dict[str, Any]]:
        """One user message: the job, then the initial observation."""
        return [
            {
                "role": "user",
                "content": f"{self._environment.instruction}\n{self._text()}",
            }
        ]

    async def call(self, tool: str, args: object, context: EffectContext) -> Observation:
        """Run one step; arguments that do not fit, and steps after the end, change nothing."""
        del context
        actions = self._environment.actions
        if tool != "step" or not isinstance(args, dict) or set(args) != {"action"} or args["action"] not in actions:
            return Observation(INVALID, self._ended())
        if self._ended() is not None:
            return Observation(OVER, self._ended())
        reward = self._environment.simulator.step(self.state, actions.index(args["action"]))
        return Observation(self._text(reward=reward), self._ended())

    def _ended(self) -> Outcome | None:
        if self.state.terminated:
            return "completed"
        return "truncated" if self.state.truncated else None

    async def verify(self, rollout_id: str, attempt: int) -> Verdict:
        """The sum of the rewards of all steps."""
        del rollout_id, attempt
        final = {
            "position": self.state.position,
            "steps": self.state.elapsed,
            "terminated": self.state.terminated,
        }
        return Verdict(self.state.reward, final)

    def export(self) -> dict[str, Any]:
        """The episode as JSON data, its random generator included."""
        state = self.state
        return {
            "position": state.position,
            "last_action": state.last_action,
            "elapsed": state.elapsed,
            "reward": state.reward,
            "terminated": state.terminated,
            "truncated": state.truncated,
            "extra": dict(state.extra),
            "rng": export_rng(state.rng),
        }


class ToyTextEnvironment:
    """A gymnasium toy-text environment with one tool, `step`.

    Args:
        name: its name in this protocol.
        instruction: what the policy is told first.
        actions: names of the actions, in the order of gymnasium's numbers.
        simulator: the instance.
        describe: what of a state an observation shows.
    """

    continuation: Continuation = "export_restore"
    verify_mode: VerifyMode = "repeat"
    state_version = "1"

    def __init__(
        self,
        *,
        name: str,
        instruction: str,
        actions: tuple[str, ...],
        simulator: Simulator,
        describe: Describe,
    ) -> None:
        self.name = name
        self.instruction = instruction
        self.actions = actions
        self.simulator = simulator
        self.describe = describe
        self.tools = (
            ToolSpec(
                "step",
                "Take one action.",
                {
                    "type": "object",
                    "properties": {"action": {"type": "string", "enum": list(actions)}},
                    "required": ["action"],
                    "additionalProperties": False,
                },
            ),
        )

    def reaches_outside(self, tool: str) -> bool:
        """Nothing leaves the simulator."""
        del tool
        return False

    def check(self, task: Mapping[str, Any], seed: int | None) -> None:
        """Raise `TaskInvalid` unless the task is at most `{"seed": integer}` and a seed is known."""
        if set(task) - {"seed"}:
            raise TaskInvalid("the task has members other than seed")
        if not is_integer(task.get("seed", seed), 0, MAX_SEED):
            raise TaskInvalid(f"seed is not an integer from 0 to {MAX_SEED}")

    def open(self, task: Mapping[str, Any], seed: int | None) -> ToyTextSession:
        """An episode at its beginning; the task's own seed goes before that of the start call."""
        self.check(task, seed)
        return ToyTextSession(self, self.simulator.reset(int(task.get("seed", seed))))

    def restore(self, task: Mapping[str, Any], state: Mapping[str, Any]) -> ToyTextSession:
        """An episode as it was exported; raises `StateInvalid`."""
        del task
        last, reward, extra, rng = (state.get(key) for key in ("last_action", "reward", "extra", "rng"))
        fits = (
            is_integer(state.get("position"), 0, self.simulator.positions - 1)
            and (last is None or is_integer(last, 0, len(self.actions) - 1))
            and is_integer(state.get("elapsed"), 0, 2**53)
            and isinstance(reward, (int, float))
            and math.isfinite(reward)
            and isinstance(state.get("terminated"), bool)
            and isinstance(state.get("truncated"), bool)
            and isinstance(extra, dict)
            and isinstance(rng, dict)
        )
        if not fits or not isinstance(extra, dict) or not isinstance(rng, dict) or reward is None:
            raise StateInvalid("the saved state does not fit this environment")
        return ToyTextSession(
            self,
            EpisodeState(
                position=state["position"],
                last_action=last,
                elapsed=state["elapsed"],
                reward=float(reward),
                terminated=state["terminated"],
                truncated=state["truncated"],
                rng=restore_rng(rng),
                extra=dict(extra),
            ),
        )

    async def aclose(self) -> None:
        """Nothing is shared that would need closing."""


_TAXI_STOPS = ("red", "green", "yellow", "blue", "taxi")


def _describe_taxi(simulator: Simulator, state: EpisodeState) -> dict[str, Any]:
    row, column, passenger, destination = simulator.decode(state.position)
    return {
        "row": row,
        "column": column,
        "passenger": _TAXI_STOPS[passenger],
        "destination": _TAXI_STOPS[destination],
        "over": state.terminated or state.truncated,
    }


def _describe_lake(simulator: Simulator, state: EpisodeState) -> dict[str, Any]:
    row, column = divmod(state.position, simulator.columns)
    cell = {"S": "start", "F": "frozen", "H": "hole", "G": "goal"}[simulator.cell(row, column)]
    return {
        "row": row,
        "column": column,
        "cell": cell,
        "over": state.terminated or state.truncated,
    }


def taxi() -> ToyTextEnvironment:
    """Taxi-v4: fetch a passenger and drop them at their destination."""
    return ToyTextEnvironment(
        name="taxi",
        instruction=(
            "You drive a taxi on a grid of 5 by 5 (row 0 is north, column 0 is west; red is at row 0 column 0, green "
            "at row 0 column 4, yellow at row 4 column 0, blue at row 4 column 3). Fetch the passenger and drop them "
            "off at the destination. Call the tool step for each action."
        ),
        actions=("south", "north", "east", "west", "pickup", "dropoff"),
        simulator=Simulator("Taxi-v4", ("fickle_step", "taxi_orientation"), {}),
        describe=_describe_taxi,
    )


def frozen_lake() -> ToyTextEnvironment:
    """FrozenLake-v1, slippery: the state of the random generator decides where a step ends."""
    return ToyTextEnvironment(
        name="frozen_lake",
        instruction=(
            "You walk on a frozen lake of 4 by 4 (row 0 is north, column 0 is west) from the start to the goal at row "
            "3 column 3. The ice is slippery, and there are holes. Call the tool step for each action."
        ),
        actions=("left", "down", "right", "up"),
        simulator=Simulator("FrozenLake-v1", (), {"is_slippery": True}),
        describe=_describe_lake,
    )
