# SPDX-License-Identifier: Apache-2.0
"""Fences and tombstones: what is remembered of rollouts after everything else of them is gone.

A fence is the highest refused attempt of a rollout; it only rises, and lives as long as the incarnation. A
tombstone is what is kept of a released or retired rollout; a restore replaces the tombstones by those of its
source, and the replaced ones leave their attempt as a fence. Both are kept under a hash of the rollout id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reference_gym.participant.errors import StaleAttempt
from reference_gym.participant.journal import Journal, NoJournal
from reference_gym.participant.log_format import Entry
from reference_gym.participant.slices import Slices


def hashed(rollout_id: str) -> str:
    """Return what stands for a rollout id in fences and tombstones."""
    return hashlib.sha256(rollout_id.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What is kept of a released or retired rollout.

    ``digest`` is that of the released result (None for a retired rollout). ``final`` says that no later attempt
    may start: true of a released success or terminal failure (CKPT-FENCE-006 to CKPT-FENCE-008, CKPT-ROLL-011).
    """

    attempt: int
    kind: Literal["released", "retired"]
    digest: str | None = None
    final: bool = False

    def as_list(self) -> list[Any]:
        """Return it as the log keeps it."""
        return [self.attempt, self.kind, self.digest, self.final]


@dataclass(frozen=True, slots=True)
class Mark:
    """What a discard leaves of one rollout: a fence, perhaps a tombstone, and what the log is told of both."""

    through: int
    stone: Tombstone | None
    notes: tuple[Entry, ...] = ()

    @classmethod
    def of(cls, key: str, through: int, *, buried: bool, kept: bool) -> Mark:
        """Return the mark of a rollout.

        Args:
            key: its hashed id.
            through: the attempt that was installed.
            buried: whether rollouts are owned here, so that it leaves a tombstone.
            kept: whether there is a log.
        """
        stone = Tombstone(through, "retired") if buried else None
        notes = [Entry({"op": "fence", "key": key, "through": through})]
        if stone is not None:
            notes.append(Entry({"op": "bury", "key": key, "stone": stone.as_list()}))
        return cls(through, stone, tuple(notes) if kept else ())


class Fences:
    """The fences and tombstones of one participant; ``changes`` counts how often a fence was raised.

    Args:
        journal: where changes are noted.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal or NoJournal()
        self._fences: dict[str, int] = {}
        self._tombstones: dict[str, Tombstone] = {}
        self._released = 0
        self._risen = -1
        self.changes = 0

    @property
    def released(self) -> int:
        """How many tombstones are of released rollouts."""
        return self._released

    @property
    def retired(self) -> int:
        """How many tombstones are of retired rollouts."""
        return len(self._tombstones) - self._released

    def through(self, rollout_id: str) -> int:
        """Return the highest fenced attempt, -1 if none is."""
        return self._fences.get(hashed(rollout_id), -1)

    def check(self, rollout_id: str, attempt: int) -> None:
        """Refuse a fenced attempt; changes nothing.

        Raises:
            StaleAttempt: naming the fence.
        """
        through = self.through(rollout_id)
        if attempt <= through:
            raise StaleAttempt.of(rollout_id, attempt, through)

    def raise_to(self, rollout_id: str, through: int) -> bool:
        """Fence every attempt up to ``through``; return whether that changed anything (CKPT-FENCE-005)."""
        return through >= 0 and self._raise(hashed(rollout_id), through)

    def tombstone(self, rollout_id: str) -> Tombstone | None:
        """Return the tombstone of a rollout, or None."""
        return self._tombstones.get(hashed(rollout_id))

    def bury(self, rollout_id: str, tombstone: Tombstone) -> None:
        """Keep a tombstone, in place of an earlier one."""
        key = hashed(rollout_id)
        self._unbury(key)
        self._tombstones[key] = tombstone
        self._journal.note("bury", key=key, stone=tombstone.as_list())
        self._released += tombstone.kind == "released"

    def unbury(self, rollout_id: str) -> None:
        """Forget a tombstone, because a higher attempt starts."""
        key = hashed(rollout_id)
        if self._unbury(key):
            self._journal.note("unbury", key=key)

    def load(self, fences: Mapping[str, int], tombstones: Mapping[str, Tombstone]) -> None:
        """Hold what an earlier life of this incarnation held."""
        self._fences = dict(fences)
        self._set(tombstones)

    def tombstones(self) -> Mapping[str, Tombstone]:
        """Return all tombstones as they are now, by hashed id."""
        return dict(self._tombstones)

    def held(self, rollout_id: str) -> int:
        """Return the highest attempt that is fenced or has a tombstone, -1 if there is none."""
        key = hashed(rollout_id)
        through, stone = self._fences.get(key, -1), self._tombstones.get(key)
        return through if stone is None else max(through, stone.attempt)

    async def rise(self, built: Fences) -> None:
        """Leave of the fences that were built aside those above the present ones, in slices, before ``replace``."""
        slices = Slices()
        built._risen = self.changes
        for key, through in list(built._fences.items()):
            if through <= self._fences.get(key, -1):
                del built._fences[key]
            await slices.give_way()

    def replace(self, built: Fences) -> None:
        """Raise to what a restore has built aside, and take its tombstones in place of all (CKPT-FENCE-009, -010)."""
        if built._risen == self.changes:
            self._fences.update(built._fences)
        else:  # A fence was raised meanwhile, perhaps higher.
            for key, through in built._fences.items():
                self._fences[key] = max(through, self._fences.get(key, -1))
        self._set(built._tombstones)

    def discard(self, marks: Mapping[str, Mark]) -> None:
        """Fence and bury what a restore installed and nobody resumed, but for what has a tombstone by now."""
        notes: list[Entry] = []
        for key, mark in marks.items():
            if key in self._tombstones:
                continue
            if mark.through > self._fences.get(key, -1):
                self._fences[key] = mark.through
            if mark.stone is not None:
                self._tombstones[key] = mark.stone
                self._released += mark.stone.kind == "released"
            notes += mark.notes
        self.changes += 1
        self._journal.note_all(notes)

    async def build(self, journal: Journal, tombstones: Mapping[str, Tombstone], kept: Mapping[str, int]) -> Fences:
        """Return, aside, the tombstones of a restore, and the fences that the present ones leave (CKPT-FENCE-011).

        Args:
            journal: where what is built is noted.
            tombstones: those of the source.
            kept: the results that the restore makes current: rollout id to attempt. Their own attempt stays free.
        """
        built, slices = Fences(journal), Slices()
        free = {hashed(rollout_id): attempt for rollout_id, attempt in kept.items()}
        for key, gone in list(self._tombstones.items()):
            built._raise(key, gone.attempt - (free.get(key) == gone.attempt))
            await slices.give_way()
        journal.note("tombs", stones={})
        for key, stone in tombstones.items():
            journal.note("bury", key=key, stone=stone.as_list())
            await slices.give_way()
        built._set(tombstones)
        return built

    def stale(self, attempts: Iterable[tuple[str, int]]) -> StaleAttempt | None:
        """Return one refusal that names every fenced attempt of these (rollout id, attempt), or None."""
        named = [
            {"rollout_id": rollout_id, "through_attempt": through}
            for rollout_id, attempt in attempts
            if attempt <= (through := self.through(rollout_id))
        ]
        if not named:
            return None
        first = named[0]
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        text = f"{first['rollout_id']} is fenced through attempt {first['through_attempt']}{more}"
        return StaleAttempt(text, rollouts=named)

    def _raise(self, key: str, through: int) -> bool:
        if through <= self._fences.get(key, -1):
            return False
        self._fences[key] = through
        self.changes += 1
        self._journal.note("fence", key=key, through=through)
        return True

    def _unbury(self, key: str) -> bool:
        gone = self._tombstones.pop(key, None)
        self._released -= gone is not None and gone.kind == "released"
        return gone is not None

    def _set(self, tombstones: Mapping[str, Tombstone]) -> None:
        self._tombstones = dict(tombstones)
        self._released = sum(tombstone.kind == "released" for tombstone in self._tombstones.values())
