# SPDX-License-Identifier: Apache-2.0
"""What happens to each rollout of a Gym that is adopted as it lives. Pure: from ledger rows and the Gym's own list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from reference_rl.records import Reservation, RolloutRow
from spec.messages import Rollout

_ENDED: Final = ("finished", "failed")
_TOMBSTONE: Final = ("released", "retired")


@dataclass
class AdoptionPlan:
    """What adopting a Gym takes.

    Attributes:
        retire: (rollout, attempt): whatever runs under another attempt than the ledger's, or is no longer wanted.
        reserve: a next attempt for what the Gym does not hold.
        repeat: live rollouts whose start is repeated, so that they learn the present policy address.
        fates: (rollout, how, turns done, reason) for the report.
    """

    retire: list[tuple[str, int]] = field(default_factory=list)
    reserve: list[Reservation] = field(default_factory=list)
    repeat: list[str] = field(default_factory=list)
    fates: list[tuple[RolloutRow, str, int, str]] = field(default_factory=list)

    def start_again(self, row: RolloutRow, why: str, above: int = -1) -> None:
        """Give a rollout a next attempt from turn 1."""
        self.reserve.append(Reservation(row.rollout_id, f"adopt: {why}", above))
        self.fates.append((row, "restarted", 0, why))


def plan_adoption(rows: Iterable[RolloutRow], listed: Mapping[str, Rollout]) -> AdoptionPlan:
    """Reconcile the ledger's unfinished rollouts with what the Gym holds.

    Args:
        rows: what the ledger calls unfinished.
        listed: rollout → what ``GET /rollouts`` says, tombstones included.

    Requirements: CKPT-RESTART-007, CKPT-RESTART-008, CKPT-RESTART-009.
    """
    plan = AdoptionPlan()
    wanted = set()
    for row in rows:
        wanted.add(row.rollout_id)
        held = listed.get(row.rollout_id)
        if held is None:
            if row.sent:
                plan.start_again(row, "the Gym does not have it")
        elif held.state in _TOMBSTONE:
            plan.start_again(row, f"the Gym calls it {held.state}", held.attempt)
        elif held.state == "restart" or (held.attempt != row.attempt and held.state not in _ENDED):
            plan.retire.append((row.rollout_id, held.attempt))
            plan.start_again(row, f"the Gym holds attempt {held.attempt} as {held.state}", held.attempt)
        else:
            plan.repeat.append(row.rollout_id)
            plan.fates.append((row, "adopted", held.turns_done or 0, f"the Gym holds it as {held.state}"))
    for rollout_id, held in listed.items():
        if rollout_id not in wanted and held.state not in (*_ENDED, *_TOMBSTONE):
            plan.retire.append((rollout_id, held.attempt))
    return plan
