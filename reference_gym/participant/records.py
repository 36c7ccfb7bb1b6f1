# SPDX-License-Identifier: Apache-2.0
"""Boundaries: what is kept of each rollout at its last boundary, encoded once, and cuts of it taken by reference.

``BoundaryStore`` is the seam: ``put`` at each boundary, ``cut`` at one instant. ``MemoryStore`` holds references in a
dictionary, and notes what it is given in the journal; a cut copies the dictionary and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from reference_gym.participant.fences import Tombstone
from reference_gym.participant.journal import Journal, NoJournal
from reference_gym.participant.log_writer import Mark
from reference_gym.participant.result import Finished

IndexState = Literal["turn", "finished", "restart"]


@dataclass(frozen=True, slots=True)
class Record:
    """One rollout at its last boundary.

    ``payload`` is the participant's own JSON text, in pieces that are joined when it is written; ``effects``
    counts effects by environment. ``restart`` is why the rollout cannot continue, or None.
    """

    rollout_id: str
    attempt: int
    turns_done: int
    task_digest: str | None
    environment: str | None
    effects: Mapping[str, int]
    payload: tuple[bytes, ...]
    policy_version: int | None = None
    data_refs: tuple[Any, ...] = ()
    restart: str | None = None

    @property
    def size(self) -> int:
        """The length of the payload in bytes."""
        return sum(map(len, self.payload))

    def as_header(self) -> dict[str, Any]:
        """Return everything but the payload, as the log keeps it."""
        return {
            "rollout_id": self.rollout_id,
            "attempt": self.attempt,
            "turns_done": self.turns_done,
            "task_digest": self.task_digest,
            "environment": self.environment,
            "effects": dict(self.effects),
            "policy_version": self.policy_version,
            "data_refs": self.data_refs,
            "restart": self.restart,
        }

    @classmethod
    def of(cls, header: Mapping[str, Any], payload: tuple[bytes, ...]) -> Record:
        """Return the record that ``as_header`` described."""
        return cls(
            rollout_id=header["rollout_id"],
            attempt=header["attempt"],
            turns_done=header["turns_done"],
            task_digest=header["task_digest"],
            environment=header["environment"],
            effects=dict(header["effects"]),
            payload=payload,
            policy_version=header["policy_version"],
            data_refs=tuple(header["data_refs"]),
            restart=header["restart"],
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """The boundaries captured together, by reference; nothing changes it afterwards (CKPT-COMMIT-012, CKPT-COMMIT-013).

    ``restarts`` gives the reason of every rollout of ``records`` that starts again. ``mark`` is this instant in the
    boundary log, whose segments hold the same payloads; None: they are written from memory.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    restarts: Mapping[str, str] = field(default_factory=dict)
    results: tuple[Finished, ...] = ()
    tombstones: Mapping[str, Tombstone] = field(default_factory=dict)
    mark: Future[Mark] | None = None

    @property
    def counts(self) -> dict[IndexState, int]:
        """The rows of its index by state."""
        return {
            "turn": len(self.records) - len(self.restarts),
            "finished": len(self.results),
            "restart": len(self.restarts),
        }


class BoundaryStore(Protocol):
    """Where boundaries go."""

    def put(self, record: Record) -> None:
        """Keep a boundary in place of the rollout's earlier one."""
        ...

    def get(self, rollout_id: str) -> Record | None:
        """Return the last boundary of a rollout, or None."""
        ...

    def drop(self, rollout_id: str) -> None:
        """Forget a rollout."""
        ...

    def clear(self) -> Mapping[str, Record]:
        """Forget all; return what was there."""
        ...

    def aside(self, journal: Journal) -> BoundaryStore:
        """Return an empty store of the same kind, for what a restore builds; it notes what it is given there."""
        ...

    def replace(self, built: BoundaryStore) -> Mapping[str, Record]:
        """Hold what was built aside, and nothing else; return what was there."""
        ...

    @property
    def unable(self) -> Mapping[str, str]:
        """The rollouts that cannot continue from their last boundary, with the reason; not to be changed."""
        ...

    def attempts(self) -> list[tuple[str, int]]:
        """Return every rollout with the attempt of its last boundary."""
        ...

    @property
    def empty(self) -> bool:
        """Whether nothing is held."""
        ...

    def cut(self) -> tuple[Mapping[str, Record], Mapping[str, str]]:
        """Return all last boundaries as they are now, by reference, and why some of them cannot continue."""
        ...


class MemoryStore:
    """Boundaries in memory.

    Args:
        max_record_bytes: a longer payload makes its rollout start again (CKPT-DIR-022).
        journal: where changes are noted.
    """

    def __init__(self, max_record_bytes: int, journal: Journal | None = None) -> None:
        self._max = max_record_bytes
        self._journal = journal or NoJournal()
        self._records: dict[str, Record] = {}
        self._unable: dict[str, str] = {}

    @property
    def unable(self) -> Mapping[str, str]:
        """The rollouts that cannot continue from their last boundary, with the reason; not to be changed."""
        return self._unable

    def attempts(self) -> list[tuple[str, int]]:
        """Return every rollout with the attempt of its last boundary."""
        return [(rollout_id, record.attempt) for rollout_id, record in self._records.items()]

    def put(self, record: Record) -> None:
        """Keep a boundary in place of the rollout's earlier one."""
        self._records[record.rollout_id] = record
        reason = record.restart or ("record_too_large" if record.size > self._max else None)
        if reason is not None:
            self._unable[record.rollout_id] = reason
        else:
            self._unable.pop(record.rollout_id, None)
        self._journal.note("put", *record.payload, **record.as_header())

    def get(self, rollout_id: str) -> Record | None:
        """Return the last boundary of a rollout, or None."""
        return self._records.get(rollout_id)

    def drop(self, rollout_id: str) -> None:
        """Forget a rollout."""
        if self._records.pop(rollout_id, None) is not None:
            self._journal.note("drop", rollout_id=rollout_id)
        self._unable.pop(rollout_id, None)

    def clear(self) -> Mapping[str, Record]:
        """Forget all; return what was there."""
        gone, self._records, self._unable = self._records, {}, {}
        self._journal.note("clear")
        return gone

    def aside(self, journal: Journal) -> MemoryStore:
        """Return an empty store of the same kind, for what a restore builds; it notes what it is given there."""
        journal.note("clear")
        return MemoryStore(self._max, journal)

    def replace(self, built: BoundaryStore) -> Mapping[str, Record]:
        """Hold what was built aside, and nothing else; return what was there."""
        gone = self._records
        records, unable = built.cut()
        self._records, self._unable = dict(records), dict(unable)
        return gone

    @property
    def empty(self) -> bool:
        """Whether nothing is held."""
        return not self._records

    def cut(self) -> tuple[Mapping[str, Record], Mapping[str, str]]:
        """Return all last boundaries as they are now, by reference, and why some of them cannot continue."""
        return dict(self._records), dict(self._unable)
