# SPDX-License-Identifier: Apache-2.0
"""The cross-check of a Gym's indexes: which saved turns every participant agrees on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spec.messages import IndexRecord


@dataclass(frozen=True, slots=True)
class Cut:
    """One participant's index, and the environments in which it must have a row wherever effects are counted."""

    participant: str
    owns_rollouts: bool
    continuing: frozenset[str]
    index: Mapping[str, IndexRecord]


@dataclass(frozen=True, slots=True)
class Restart:
    """A rollout that a restart begins at turn 1, and why."""

    rollout_id: str
    attempt: int
    turns_done: int
    reason: str
    detail: str


def cross_check(cuts: Iterable[Cut]) -> list[Restart]:
    """Return the rollouts whose rows do not add up to a state that can continue, sorted by rollout.

    A rollout restarts when any index calls it ``restart``, when a row is missing where the owner of rollouts counts
    effects in one of that participant's continuing environments, when the numbers of effects differ, or when the rows
    are of different attempts.

    Requirements: CKPT-SNAP-010…012.
    """
    cuts = tuple(cuts)
    owners = [cut for cut in cuts if cut.owns_rollouts]
    others = [cut for cut in cuts if not cut.owns_rollouts]
    found: dict[str, Restart] = {}
    for cut in cuts:
        for row in cut.index.values():
            if row.state == "restart" and row.rollout_id not in found:
                reason = row.reason or "other"
                found[row.rollout_id] = _restart(row, reason, f"{cut.participant} lists it as restart")
    for owner in owners:
        for row in owner.index.values():
            if row.state == "turn" and row.rollout_id not in found:
                problem = _disagreement(row, others)
                if problem is not None:
                    found[row.rollout_id] = problem
    return [found[rollout_id] for rollout_id in sorted(found)]


def _disagreement(row: IndexRecord, others: Iterable[Cut]) -> Restart | None:
    for cut in others:
        theirs = cut.index.get(row.rollout_id)
        counted = {name: n for name, n in row.effects.items() if n and name in cut.continuing}
        if theirs is None:
            if counted:
                return _restart(row, "row_missing", f"{cut.participant} has no row and the agent counts {counted}")
            continue
        if theirs.attempt != row.attempt:
            return _restart(row, "other", f"{cut.participant} holds attempt {theirs.attempt}")
        held = {name: n for name, n in theirs.effects.items() if n and name in cut.continuing}
        if counted != held:
            return _restart(row, "effects_differ", f"the agent counts {counted}, {cut.participant} {held}")
    return None


def _restart(row: IndexRecord, reason: str, detail: str) -> Restart:
    return Restart(row.rollout_id, row.attempt, row.turns_done, reason, detail)
