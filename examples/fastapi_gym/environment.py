# SPDX-License-Identifier: Apache-2.0
"""The game of Pig: roll a die as often as you dare and bank the pot; a one loses the pot."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from reference_gym.participant import EffectCall, EnvironmentInfo, TaskRefused
from reference_gym.participant.policy_call import ToolSpec

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
LOSES = 1


class Game:
    """One game: what the seed and the number of rolls do not tell is the score.

    Args:
        seed: of the die.
        goal: how many points win.
        rolls, banked, pot: where a saved game stood.
    """

    tools = (ToolSpec("roll", "Roll the die.", NOTHING), ToolSpec("bank", "Keep the pot.", NOTHING))

    def __init__(self, seed: int, goal: int, rolls: int = 0, banked: int = 0, pot: int = 0) -> None:
        self.seed, self.goal, self.rolls, self.banked, self.pot = seed, goal, rolls, banked, pot

    @property
    def opening(self) -> list[dict[str, Any]]:
        """The messages with which a conversation starts."""
        return [{"role": "user", "content": f"Bank {self.goal} points. A {LOSES} loses the pot."}]

    @property
    def outcome(self) -> Literal["completed"] | None:
        """How the game ended; None while it goes on."""
        return "completed" if self.banked >= self.goal else None

    async def apply(self, call: EffectCall) -> str:
        """Run one effect: a tool call of the policy."""
        seen: dict[str, Any] = {}
        if call.tool == "roll" and call.args == {}:
            seen["die"] = hashlib.sha256(f"{self.seed}/{self.rolls}".encode()).digest()[0] % 6 + 1
            self.rolls += 1
            self.pot = 0 if seen["die"] == LOSES else self.pot + seen["die"]
        elif call.tool == "bank" and call.args == {}:
            self.banked, self.pot = self.banked + self.pot, 0
        else:
            seen["error"] = "there is no such move"
        return json.dumps(seen | {"banked": self.banked, "pot": self.pot})

    async def verify(self, _rollout_id: str, _attempt: int) -> tuple[float, Any]:
        """Return reward and final state."""
        return min(1.0, self.banked / self.goal), {"banked": self.banked, "rolls": self.rolls}

    def save(self) -> Any:
        """Return everything as JSON data, the random generator included: here it is two numbers."""
        return vars(self).copy()

    def close(self) -> None:
        """Nothing outside of memory is held."""


class Pig:
    """The environment: tasks and games."""

    info = EnvironmentInfo("pig", "export_restore", "repeat", "1")

    def check(self, task: Any) -> None:
        """Refuse a task that is no game."""
        if set(task) != {"seed", "goal"} or not all(type(task[key]) is int and 0 < task[key] < 10**6 for key in task):
            raise TaskRefused("a task is {seed, goal}, both from 1 to 999999")

    def open(self, task: Any) -> Game:
        """Begin a game."""
        self.check(task)
        return Game(**task)

    def load(self, saved: Any) -> Game:
        """Return a game as it was saved."""
        return Game(**saved)
