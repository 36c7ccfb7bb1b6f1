# SPDX-License-Identifier: Apache-2.0
"""Which cells the matrix has: steps, victims, and their pairs.

A step of RL is one of its named points (`snapshot.durable`); RL stops itself there and the victim gets SIGKILL. A step
of the Gym is a point of one of its processes (`agent/commit.files`); that process gets SIGKILL there, from itself.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from reference_gym.participant.failpoints import points_of

ROLES: Final = ("agent", "model", "resources")
ONE: Final = "gym"
"""The Gym as one process."""

VICTIMS: Final = ("rl", *ROLES, "all", ONE)
"""`all` is RL and the whole Gym at once; its disk survives. `gym` is the Gym in one process."""

OF_THREE: Final = VICTIMS[:5]
"""Victims where the Gym is three processes."""

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

ADOPTION: Final = RESTART[:5]
"""Points of a restart that finds every participant with the incarnation that it had."""

GYM_POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "work": (
        *("start.judged", "start.answered", "session.opened", "session.closed", "part.changed", "call.answered"),
        *("turn.opened", "effect.begun", "effect.done", "effect.recorded", "boundary.crossed", "boundary.written"),
        *("verification.begun", "verification.judged", "finish.recorded", "finish.written", "results.answered"),
        *("acks.released", "acks.answered", "log.append", "log.half", "log.written", "log.appended", "log.compacted"),
    ),
    "save": (
        *("prepare.closed", "prepare.quiescent", "prepare.answered", "commit.captured", "commit.linked"),
        *("commit.record", "commit.file", "commit.files", "commit.unnamed", "commit.manifest", "commit.durable"),
        "commit.answered",
        *("resume.opened", "resume.answered", "log.append", "log.half", "log.written", "log.appended"),
        *("log.based", "log.ended", "log.sealed", "log.named", "log.removed"),
    ),
    "restart": (
        *("controller.adopted", "abort.ended", "abort.stopped", "abort.answered", "restore.begun", "restore.read"),
        *("restore.verified", "restore.quiesced", "restore.parts", "restore.built", "restore.dropped"),
        *("restore.installed", "restore.answered", "resume.opened", "resume.answered"),
        *("log.append", "log.appended", "log.sealed", "log.named"),
    ),
    "adopt": (
        *("recover.read", "recover.built", "recover.current", "recover.based", "recover.sealed", "recover.opened"),
        *("recover.ended", "recover.listening", "controller.adopted", "abort.ended", "abort.answered"),
        "start.answered",
    ),
    "restore": ("restore.verified", "restore.built", "restore.installed", "restore.answered", "resume.opened"),
}
"""Operation → the Gym's points that it passes. The log's writer has the same steps whatever it writes for."""

DISCARDED: Final = "restore.discarded"
"""The Gym's point in the abort of a restore."""

NOT_HERE: Final[Mapping[str, str]] = {
    **dict.fromkeys(("retire.fenced", "retire.freed", "retire.answered"), "nothing is retired in this story"),
    **dict.fromkeys(("renew.extended", "renew.answered", "lease.ended"), "no checkpoint stays open for long"),
    **dict.fromkeys(("agent/log.compacted", "gym/log.compacted"), "too little work to be sure of it"),
    **dict.fromkeys(("upload.unnamed", "upload.finished"), "the Gym sees the directory of the snapshots"),
}
"""Points of the Gym, or of one of its processes, that no cell has, and why; `tests.gym.crash` kills at all of them."""

OF_THE_LOG: Final = ("log.", "recover.", "commit.linked")
"""Points that are passed only where there is a log."""

Kind = Literal[
    "work",
    "save",
    "restart",
    "adopt",
    "restore",
    "save+restart",
    "save+adopt",
    "save+restore",
    "save+abort",
    "restart+abort",
]


@dataclass(frozen=True)
class Cell:
    """One crash, or two.

    Attributes:
        kind: the operations in which the crashes are. Before `restart` everything is lost, disk of the Gym included;
            before `adopt` everything is killed and the disk is kept; before `restore` the Gym alone is lost, and RL
            lives. With a pair that happens at a step of the save; singly, at a quiet moment. With `+abort` two
            processes of the Gym die: one in the save or in the restart, the other in the abort that follows.
        first: step of the first crash.
        second: step of the second crash.
        victim: who dies; with a pair, in the second crash.
        log: whether the Gym has a boundary log.
    """

    kind: Kind
    first: str
    second: str | None
    victim: str
    log: bool = False

    @property
    def name(self) -> str:
        """Return the name under which the cell is recorded."""
        points = self.first if self.second is None else f"{self.first}+{self.second}"
        return f"{self.kind}:{points}:{self.victim}" + (":log" if self.log else "")

    @property
    def last(self) -> str:
        """Return the step of the last crash."""
        return self.second or self.first

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the processes of the Gym."""
        return (ONE,) if ONE in (self.victim, role_of(self.first), role_of(self.last)) else ROLES


def role_of(step: str) -> str:
    """Return the process of the Gym whose point a step is; empty for a step of RL."""
    role, slash, _ = step.partition("/")
    return role if slash else ""


def point_of(step: str) -> str:
    """Return the point of a step."""
    return step.rpartition("/")[2]


def gym_steps(kind: str, *, log: bool, roles: tuple[str, ...] = ROLES) -> list[str]:
    """Return the steps of the Gym in one operation; those of the log only where there is one."""
    return [
        f"{role}/{point}"
        for role in roles
        for point in GYM_POINTS[kind]
        if point in points_of("all" if role == ONE else role)
        and (log or not point.startswith(OF_THE_LOG))
        and f"{role}/{point}" not in NOT_HERE
    ]


def singles() -> list[Cell]:
    """Return the cells with one crash: every step of RL × victim, every step of the Gym; without and with a log."""
    steps: tuple[tuple[Kind, tuple[str, ...]], ...] = (("work", tuple(WORK)), ("save", SAVE), ("restart", RESTART))
    cells = [
        Cell(kind, point, None, victim, log)
        for log in (False, True)
        for kind, points in (*steps, *((("adopt", ADOPTION),) if log else ()))
        for point in points
        for victim in VICTIMS
    ]
    for log in (False, True):
        for kind in ("work", "save", "restart", "restore", *(("adopt",) if log else ())):
            for roles in (ROLES, (ONE,)):
                cells += [Cell(kind, step, None, role_of(step), log) for step in gym_steps(kind, log=log, roles=roles)]
    return cells


def pairs_of_rl() -> list[Cell]:
    """Return the pairs of two steps of RL, without a log: all of them."""
    found = [Cell("save+restart", a, b, victim) for a in SAVE for b in RESTART for victim in OF_THREE]
    return found + [Cell("save+restore", a, b, victim) for a in SAVE for b in IN_PLACE for victim in OF_THREE]


def pairs_with_a_log() -> list[Cell]:
    """Return the pairs of two steps of RL, with a log; which lives on, or is lost."""
    found = [Cell("save+adopt", a, b, victim, log=True) for a in SAVE for b in ADOPTION for victim in OF_THREE]
    found += [Cell("save+restart", a, b, victim, log=True) for a in SAVE for b in RESTART for victim in OF_THREE]
    return found + [Cell("save+restore", a, b, victim, log=True) for a in SAVE for b in IN_PLACE for victim in OF_THREE]


def pairs_of_both() -> list[Cell]:
    """Return the pairs of a step of the Gym and one of RL, and of two steps of the Gym."""
    found = []
    for log in (False, True):
        saving = gym_steps("save", log=log)
        restarting: tuple[tuple[Kind, tuple[str, ...]], ...] = (("save+restart", RESTART), ("save+restore", IN_PLACE))
        if log:
            restarting = (*restarting, ("save+adopt", ADOPTION))
        for kind, steps in restarting:
            found += [Cell(kind, a, b, victim, log) for a in saving for b in steps for victim in OF_THREE]
            theirs = gym_steps(kind.partition("+")[2], log=log)
            found += [Cell(kind, a, b, role_of(b), log) for a in (*SAVE, *saving) for b in theirs]
    return found


def aborts() -> list[Cell]:
    """Return the pairs of two processes of the Gym of which one dies in the abort of what the other made fail."""
    found = []
    for log in (False, True):
        others = [(a, b) for a in ROLES for b in ROLES if a != b]
        found += [Cell("save+abort", f"{a}/commit.captured", f"{b}/abort.ended", b, log) for a, b in others]
        # Callees are restored before callers: whoever is restored already has something to discard.
        order = [("agent", "model"), ("agent", "resources"), ("model", "resources")]
        found += [Cell("restart+abort", f"{a}/restore.verified", f"{b}/{DISCARDED}", b, log) for a, b in order]
    return found


SEEDED: Final = {"with a log": 200, "of both": 200}
"""How many of the pairs that are too many for one run are in it."""


def every_cell(seed: int = 1) -> list[Cell]:
    """Return all cells of a run: singles, pairs of RL, aborts, and what a seed draws from the other pairs."""
    rng = random.Random(f"pairs {seed}")
    drawn = rng.sample(pairs_with_a_log(), SEEDED["with a log"]) + rng.sample(pairs_of_both(), SEEDED["of both"])
    return singles() + pairs_of_rl() + aborts() + drawn


def left_out() -> int:
    """Return how many pairs a run does not draw."""
    return len(pairs_with_a_log()) + len(pairs_of_both()) - sum(SEEDED.values())


def part(cells: list[Cell], number: int, of: int) -> list[Cell]:
    """Return every ``of``-th cell, beginning with the ``number``-th (from 1)."""
    return cells[number - 1 :: of]


def seeded(cells: list[Cell], seed: int) -> list[Cell]:
    """Return the cells in an order that a seed gives, one crash before two: a run that is cut short says something."""
    order = list(cells)
    random.Random(seed).shuffle(order)
    return sorted(order, key=lambda cell: cell.second is not None)


def sample(seed: int) -> list[Cell]:
    """Return a few cells for every day: kinds, victims and the log in a mixture that a seed gives."""
    rng = random.Random(seed)
    cells = every_cell(seed)
    victims = rng.sample(OF_THREE, len(OF_THREE))
    kinds: tuple[Kind, ...] = ("work", "save", "restart", "save+restart", "save+restore")
    found = [
        rng.choice([cell for cell in cells if cell.kind == kind and cell.victim == victim and not role_of(cell.last)])
        for kind, victim in zip(kinds, victims, strict=True)
    ]
    for kind in ("work", "save", "restart", "adopt"):
        log = kind != "restart"
        steps = [cell for cell in cells if cell.kind == kind and cell.log == log and role_of(cell.first)]
        found.append(rng.choice(steps))
    return found
