# SPDX-License-Identifier: Apache-2.0
"""What happens to each rollout of one Gym when it is restored. Pure: from ledger rows and indexes to lists.

A row of a snapshot is continued when its attempt is the ledger's current one, or the saved one that the current one was
reserved to continue; whatever else is unfinished starts at turn 1 with a new attempt, and says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from reference_rl.records import Receipt, Reservation, RolloutRow
from spec.messages import IndexRecord

How = Literal["continued", "kept", "restarted"]


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one unfinished rollout, and why.

    Attributes:
        row: the rollout in the ledger.
        how: it continues after ``turns_done`` turns, its saved result will be served again, or it starts at turn 1.
        saved_attempt: the attempt under which the snapshot holds it.
        turns_done: turns that are not generated again.
        reason: a sentence.
        receipt: of the result that will be served again.
    """

    row: RolloutRow
    how: How
    turns_done: int
    reason: str
    saved_attempt: int | None = None
    receipt: Receipt | None = None


@dataclass(frozen=True)
class SavedGym:
    """One Gym in a snapshot.

    Attributes:
        snapshot_id: which one, for reports.
        owner: the participant whose index says what each rollout was doing.
        indexes: participant → its index.
        restarts: rollout → why the snapshot itself says that it starts at turn 1.
    """

    snapshot_id: str
    owner: str
    indexes: Mapping[str, Mapping[str, IndexRecord]]
    restarts: Mapping[str, str]


@dataclass(frozen=True)
class RestorePlan:
    """The lists of one restore, before attempts are reserved.

    Attributes:
        saved: the snapshot's part, or ``None`` for a clean start.
        fates: every unfinished rollout of the Gym.
        keep: receipts that the owner of rollouts is asked to keep: awaited ones and those whose ACK is owed.
        highest: rollout → the highest attempt seen anywhere outside the ledger.
    """

    saved: SavedGym | None
    fates: tuple[Fate, ...]
    keep: tuple[Receipt, ...]
    highest: Mapping[str, int] = field(default_factory=dict)

    def reservations(self, origin: str) -> list[Reservation]:
        """Return the attempts to reserve: one for each rollout that continues or starts again."""
        return [
            Reservation(
                fate.row.rollout_id,
                f"{origin}: {fate.how}",
                self.highest.get(fate.row.rollout_id, -1),
                fate.saved_attempt if fate.how == "continued" else None,
                fate.turns_done if fate.how == "continued" else 0,
            )
            for fate in self.fates
            if fate.how != "kept"
        ]

    def awaited(self) -> list[Receipt]:
        """Return the receipts whose results the ledger does not have and expects to be served again."""
        return [fate.receipt for fate in self.fates if fate.receipt is not None]

    def request(self, participant: str, attempts: Mapping[str, int]) -> dict[str, Any]:
        """Return the lists for one participant: what its own index holds.

        Args:
            participant: its name.
            attempts: rollout → the reserved attempt.

        Requirements: CKPT-RESTORE-045…048.
        """
        fences = [
            {"rollout_id": fate.row.rollout_id, "through_attempt": attempts[fate.row.rollout_id] - 1}
            for fate in self.fates
            if fate.how == "restarted"
        ]
        if self.saved is None:
            return {"rollouts": [], "results": [], "fences": fences}
        index = self.saved.indexes.get(participant, {})
        rollouts = []
        for fate in self.fates:
            saved = index.get(fate.row.rollout_id)
            if fate.how == "continued" and saved is not None and saved.state == "turn":
                rollouts.append(
                    {
                        "rollout_id": saved.rollout_id,
                        "attempt": saved.attempt,
                        "next_attempt": attempts[saved.rollout_id],
                        "turns_done": saved.turns_done,
                        "task_digest": saved.task_digest or fate.row.task_digest,
                    }
                )
        results = [receipt._asdict() for receipt in self.keep] if participant == self.saved.owner else []
        return {"rollouts": rollouts, "results": results, "fences": fences}

    def continued(self, attempts: Mapping[str, int]) -> list[tuple[str, int]]:
        """Return (rollout, reserved attempt) of what continues."""
        return [(f.row.rollout_id, attempts[f.row.rollout_id]) for f in self.fates if f.how == "continued"]


def plan_restore(
    rows: Iterable[RolloutRow],
    saved: SavedGym | None,
    *,
    owed: Iterable[Receipt] = (),
    surplus: Iterable[Receipt] = (),
    highest: Mapping[str, int] | None = None,
    forced: Mapping[str, str] | None = None,
) -> RestorePlan:
    """Decide the fate of every unfinished rollout of one Gym.

    Args:
        rows: the rollouts that the ledger calls unfinished.
        saved: the snapshot's part, or ``None`` for a clean start.
        owed: receipts whose ACK the ledger owes to this Gym.
        surplus: receipts that were settled before; a result of these is never awaited.
        highest: rollout → the highest attempt that a participant showed.
        forced: rollout → why it must start at turn 1 whatever the snapshot says.

    Requirements: CKPT-RESTART-036, CKPT-RESTART-037, CKPT-RESTART-053, CKPT-SNAP-013.
    """
    seen = dict(highest or {})
    settled = set(surplus)
    owner_index = saved.indexes.get(saved.owner, {}) if saved else {}
    for index in saved.indexes.values() if saved else ():
        for record in index.values():
            seen[record.rollout_id] = max(seen.get(record.rollout_id, -1), record.attempt)
    fates = tuple(_fate(row, owner_index.get(row.rollout_id), saved, settled, forced or {}) for row in rows)
    finished = {_receipt(r) for r in owner_index.values() if r.receipt is not None and r.state == "finished"}
    keep = [fate.receipt for fate in fates if fate.receipt is not None]
    keep += [receipt for receipt in owed if receipt in finished and receipt not in keep]
    return RestorePlan(saved, fates, tuple(keep), seen)


def _fate(
    row: RolloutRow,
    record: IndexRecord | None,
    saved: SavedGym | None,
    settled: set[Receipt],
    forced: Mapping[str, str],
) -> Fate:
    if row.rollout_id in forced:
        return Fate(row, "restarted", 0, forced[row.rollout_id])
    if saved is None:
        return Fate(row, "restarted", 0, "there is no snapshot to continue from")
    if record is None:
        return Fate(row, "restarted", 0, f"snapshot {saved.snapshot_id} does not hold it")
    if record.state == "finished" and record.receipt is not None:
        receipt = _receipt(record)
        if receipt in settled:
            return Fate(row, "restarted", 0, "its saved result was settled as surplus")
        return Fate(row, "kept", record.turns_done, "its result is in the snapshot", record.attempt, receipt)
    if row.rollout_id in saved.restarts:
        return Fate(row, "restarted", 0, saved.restarts[row.rollout_id])
    if record.state != "turn":
        return Fate(row, "restarted", 0, f"the snapshot lists it as restart: {record.reason}")
    if record.attempt not in (row.attempt, row.continues):
        return Fate(row, "restarted", 0, f"the snapshot holds attempt {record.attempt}, the ledger {row.attempt}")
    if record.task_digest not in (None, row.task_digest):
        return Fate(row, "restarted", 0, "its task is another one now")
    return Fate(row, "continued", record.turns_done, f"snapshot {saved.snapshot_id}", record.attempt)


def _receipt(record: IndexRecord) -> Receipt:
    assert record.receipt is not None
    return Receipt(record.receipt.rollout_id, record.receipt.attempt, record.receipt.digest)
