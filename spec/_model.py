# SPDX-License-Identifier: Apache-2.0
"""The values that the data files of the specification are read into; immutable, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Level = Literal["MUST", "MUST NOT", "SHOULD", "SHOULD NOT", "MAY"]


@dataclass(frozen=True, slots=True)
class Requirement:
    """One testable sentence of the specification.

    Exactly one of ``checks``, ``planned`` and ``excluded`` is set: names of the checks that exercise it, what will show
    it later, or the reason why nobody outside can observe it.
    """

    id: str
    level: Level
    binds: Literal["gym", "controller"]
    scope: str
    chapter: str
    text: str
    error: str | None = None
    checks: tuple[str, ...] = ()
    planned: str | None = None
    excluded: str | None = None

    @property
    def area(self) -> str:
        """Return the middle part of the id, e.g. ``COMMIT`` of ``CKPT-COMMIT-003``."""
        return self.id.split("-")[1]


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """One row of the error catalogue."""

    code: str
    status: int
    title: str
    retryable: bool
    definite: bool
    meaning: str
    indefinite_for: frozenset[str] = frozenset()

    def definite_on(self, operation: str) -> bool:
        """Return whether this error on ``operation`` says that nothing was changed and nothing will be."""
        return self.definite and operation not in self.indefinite_for


@dataclass(frozen=True, slots=True)
class Condition:
    """What narrows a cell: each entry names a fact and the values for which the cell applies."""

    facts: Mapping[str, tuple[str | bool, ...]] = field(default_factory=dict)

    def holds(self, facts: Mapping[str, str | bool]) -> bool:
        """Return whether every named fact has one of its values; a fact that is left out raises ``KeyError``."""
        return all(facts[name] in values for name, values in self.facts.items())


@dataclass(frozen=True, slots=True)
class Cell:
    """What one operation does in one phase, for one relation of its checkpoint id (``None``: it carries none)."""

    operation: str
    phase: str
    id: str | None
    when: Condition
    answer: Literal["accepted", "joins", "replies", "refused"]
    next: str
    gate: str | None = None
    ends: str | None = None
    state: str | None = None
    error: str | None = None
    item: str | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """What happens to the machine without a call of its controller."""

    event: str
    phase: str
    when: Condition
    next: str
    gate: str | None = None
    ends: str | None = None
    state: str | None = None
    impossible: str | None = None


@dataclass(frozen=True, slots=True)
class StateMachine:
    """The phase machine of one participant, as ``state-machine.yaml`` gives it."""

    phases: Mapping[str, Mapping[str, Any]]
    ids: Mapping[str, str]
    operations: Mapping[str, Mapping[str, Any]]
    cells: tuple[Cell, ...]
    events: tuple[Event, ...]

    def cell(self, operation: str, phase: str, id: str | None = None, **facts: str | bool) -> Cell:
        """Return the one cell that applies.

        Args:
            operation: a key of ``operations``.
            phase: a key of ``phases``.
            id: a key of ``ids``, or ``None`` for an operation without a checkpoint id.
            facts: what the conditions of this cell ask for: ``gate``, ``last``, ``leave_out_blocked``.

        Raises:
            LookupError: no cell or more than one applies, or a fact that the conditions ask for is missing.
        """
        found = [
            cell
            for cell in self.cells
            if (cell.operation, cell.phase, cell.id) == (operation, phase, id) and cell.when.holds(facts)
        ]
        if len(found) != 1:
            raise LookupError(f"{len(found)} cells for {operation} in {phase} with id {id} and {facts}")
        return found[0]

    def on(self, event: str, phase: str, **facts: str | bool) -> Event | None:
        """Return what ``event`` does in ``phase``, or ``None`` where it cannot happen."""
        found = [e for e in self.events if (e.event, e.phase) == (event, phase) and e.when.holds(facts)]
        if len(found) > 1:
            raise LookupError(f"{len(found)} rows for {event} in {phase} with {facts}")
        return found[0] if found and found[0].impossible is None else None


@dataclass(frozen=True, slots=True)
class Specification:
    """Everything that one version of the protocol says, for code.

    ``schemas`` maps the stem of each schema file to the parsed schema; ``openapi`` is one self-contained document whose
    references point into its own ``components``; ``root`` is the directory of the chapters and examples.
    """

    version: str
    requirements: Mapping[str, Requirement]
    errors: Mapping[str, ErrorSpec]
    machine: StateMachine
    schemas: Mapping[str, Mapping[str, Any]]
    openapi: Mapping[str, Any]
    root: Path
