# SPDX-License-Identifier: Apache-2.0
"""The values that the ledger takes and gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Granularity = Literal["sibling", "prompt_group"]


class Receipt(NamedTuple):
    """Names one finished result exactly."""

    rollout_id: str
    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """One sibling of one prompt group, before anything was sent."""

    rollout_id: str
    group: int
    sibling: int
    gym: str
    environment: str
    task: Mapping[str, Any]
    task_digest: str
    seed: int | None
    limits: Mapping[str, int]
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """The siblings of one prompt that training compares."""

    group: int
    source: str
    gym: str
    granularity: Granularity
    rollouts: tuple[PlannedRollout, ...]


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One rollout as the ledger holds it.

    ``continues`` is the saved attempt that the current one was reserved to continue; ``None`` says that it starts at
    turn 1. ``answered`` says that a participant confirmed the current attempt.
    """

    rollout_id: str
    group: int
    sibling: int
    gym: str
    environment: str
    agent: str | None
    task: Mapping[str, Any]
    task_digest: str
    seed: int | None
    limits: Mapping[str, int]
    state: Literal["unfinished", "finished", "failed"]
    attempt: int
    continues: int | None
    sent: bool
    answered: bool
    failures: int

    @classmethod
    def of(cls, row: Any) -> RolloutRow:
        """Return the value of one row of the table ``rollouts``."""
        return cls(
            rollout_id=row["rollout_id"],
            group=row["grp"],
            sibling=row["sibling"],
            gym=row["gym"],
            environment=row["environment"],
            agent=row["agent"],
            task=json.loads(row["task"]),
            task_digest=row["task_digest"],
            seed=row["seed"],
            limits=json.loads(row["limits"]),
            state=row["state"],
            attempt=row["attempt"],
            continues=row["continues"],
            sent=bool(row["sent"]),
            answered=bool(row["answered"]),
            failures=row["failures"],
        )


@dataclass(frozen=True, slots=True)
class ServedResult:
    """One entry of a results page, its digest already checked against its text."""

    receipt: Receipt
    text: str
    content: Mapping[str, Any]

    @property
    def failure(self) -> Mapping[str, Any] | None:
        """Return the failure, or ``None`` for a success."""
        found = self.content.get("failure")
        return found if isinstance(found, dict) else None

    @property
    def weights_version(self) -> int | None:
        """Return the highest policy version that took part, or ``None`` when none is a number."""
        versions = self.content.get("info", {}).get("policy_versions", ())
        numbers = [int(v) for v in versions if str(v).isdigit()]
        return max(numbers, default=None)


Decision = Literal["saved", "saved_failure", "retry", "again", "surplus", "session_lost"]


@dataclass(frozen=True, slots=True)
class Settled:
    """What the ledger did with one served result, and why."""

    receipt: Receipt
    decision: Decision
    reason: str
    group: int | None = None
    sibling: int | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """A wish for a next attempt above ``above``: continuing a saved one after ``turns_kept`` turns, or from turn 1."""

    rollout_id: str
    origin: str
    above: int = -1
    continues: int | None = None
    turns_kept: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One trained sample: identified by its rollout alone."""

    group: int
    sibling: int
    rollout_id: str
    attempt: int
    step: int
    content: Mapping[str, Any]
