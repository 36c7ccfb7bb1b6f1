# SPDX-License-Identifier: Apache-2.0
"""Who is held where at the crash, and what each column of the capability table is expected to cost.

The worked example is 3 siblings of 5 turns: A has finished, B is held in turn 3, C in turn 5. Any other size follows
the same rule: the first sibling finishes, the others are held at turns spread over the whole length.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_uppercase

from reference_rl.demo.errors import UsageError
from reference_rl.settings import sibling_seed

COLUMNS = (0, 1, 2, 3)
COLUMN_NAMES = {
    0: "plain snapshot",
    1: "+ participants",
    2: "+ rollout state",
    3: "+ turn recovery",
}
MAX_SIBLINGS = 256
MAX_TURNS = 60


@dataclass(frozen=True)
class Scenario:
    """One prompt group and the turn in which each unfinished sibling is held when everything is killed.

    Args:
        siblings: number of rollouts in the group, at least 2 (the first one finishes before the crash).
        turns: turns of each rollout (`max_turns`), at least 2.
        seed: seed of the task, the same for all siblings.

    Raises:
        UsageError: if the numbers make no example.
    """

    siblings: int = 3
    turns: int = 5
    seed: int = 11

    def __post_init__(self) -> None:
        if not 2 <= self.siblings <= MAX_SIBLINGS:
            raise UsageError(f"--siblings must be 2 … {MAX_SIBLINGS}, got {self.siblings}")
        if not 2 <= self.turns <= MAX_TURNS:
            raise UsageError(f"--turns must be 2 … {MAX_TURNS}, got {self.turns}")

    @property
    def held(self) -> dict[int, int]:
        """The turn in which each held sibling waits: sibling → turn (1 = the first)."""
        steps, gaps = self.turns - 1, self.siblings - 1
        return {i: 1 + (2 * i * steps + gaps) // (2 * gaps) for i in range(1, self.siblings)}

    @property
    def completed_at_crash(self) -> dict[int, int]:
        """Completed turns of every sibling at the crash: sibling → turns."""
        return {0: self.turns} | {sibling: turn - 1 for sibling, turn in self.held.items()}

    def expected(self, column: int) -> int:
        """Turns that the given column is expected to throw away: all of the unfinished siblings', or none."""
        return 0 if column == 3 else sum(turn - 1 for turn in self.held.values())

    def name(self, sibling: int) -> str:
        """The name of a sibling on the page: a letter while the alphabet lasts, a number beyond."""
        if self.siblings <= len(ascii_uppercase):
            return ascii_uppercase[sibling]
        return f"{sibling + 1:0{len(str(self.siblings))}d}"

    @property
    def policy_seeds(self) -> dict[int, int]:
        """The seed by which the policy tells the siblings apart: seed → sibling."""
        return {sibling_seed(0, sibling): sibling for sibling in range(self.siblings)}
