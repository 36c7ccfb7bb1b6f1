# SPDX-License-Identifier: Apache-2.0
"""Which cells the matrix has: points, victims, and their pairs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

VICTIMS: Final = ("rl", "agent", "model", "resources", "all")
"""`all` is RL and the whole Gym at once; its disk survives."""

WORK: Final = {"result.saved": 1, "result.acked": 1, "start.marked": 2, "start.answered": 2}
"""Points of normal work → the visit that counts: the second start is sent while earlier rollouts hold turns."""

SAVE: Final = (
    "snapshot.begun",
    "snapshot.prepared",
    "snapshot.captured",
    "snapshot.resumed",
    "snapshot.ledger_copied",
    "snapshot.durable",
    "snapshot.assembled",
    "snapshot.manifest_written",
    "snapshot.renamed",
    "snapshot.retained",
)
"""Points of a snapshot; the second one of a run counts, so that there is one to fall back to."""

RESTART: Final = (
    "restart.claimed",
    "restart.known",
    "restart.feeds_read",
    "restart.reserved",
    "restart.rows_restored",
    "restart.participants_restored",
    "restart.ledger_restored",
    "restart.resumed",
    "restart.closed",
)
"""Points of a restart of RL."""

IN_PLACE: Final = RESTART[5:]
"""Points that a restore passes while RL lives on."""

Kind = Literal["work", "save", "restart", "save+restart", "save+restore"]


@dataclass(frozen=True)
class Cell:
    """One crash, or two.

    Attributes:
        kind: `save+restart`: everything is lost at the save step, disk of the Gym included, and the victim dies at a
            step of the restart; `save+restore`: the Gym alone is lost, RL lives and restores it.
        first: point of the first crash.
        second: point of the second crash.
        victim: who dies; with a pair, in the second crash.
    """

    kind: Kind
    first: str
    second: str | None
    victim: str

    @property
    def name(self) -> str:
        """Return the name under which the cell is recorded."""
        points = self.first if self.second is None else f"{self.first}+{self.second}"
        return f"{self.kind}:{points}:{self.victim}"


def every_cell() -> list[Cell]:
    """Return all cells, in the order of a run: singly first."""
    singly: list[Cell] = [Cell("work", point, None, victim) for point in WORK for victim in VICTIMS]
    singly += [Cell("save", point, None, victim) for point in SAVE for victim in VICTIMS]
    singly += [Cell("restart", point, None, victim) for point in RESTART for victim in VICTIMS]
    pairs = [Cell("save+restart", a, b, victim) for a in SAVE for b in RESTART for victim in VICTIMS]
    pairs += [Cell("save+restore", a, b, victim) for a in SAVE for b in IN_PLACE for victim in VICTIMS]
    return singly + pairs


def part(cells: list[Cell], number: int, of: int) -> list[Cell]:
    """Return every ``of``-th cell, beginning with the ``number``-th (from 1)."""
    return cells[number - 1 :: of]


def seeded(cells: list[Cell], seed: int) -> list[Cell]:
    """Return the cells in an order that a seed gives: whatever time is left, another part of the matrix is seen."""
    order = list(cells)
    random.Random(seed).shuffle(order)
    return order


def sample(seed: int) -> list[Cell]:
    """Return one cell of every kind, each with another victim."""
    rng = random.Random(seed)
    victims = rng.sample(VICTIMS, len(VICTIMS))
    kinds: tuple[Kind, ...] = ("work", "save", "restart", "save+restart", "save+restore")
    cells = every_cell()
    return [
        rng.choice([cell for cell in cells if cell.kind == kind and cell.victim == victim])
        for kind, victim in zip(kinds, victims, strict=True)
    ]
