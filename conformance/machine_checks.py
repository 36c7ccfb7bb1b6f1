# SPDX-License-Identifier: Apache-2.0
"""The checks that the machine judges, as the registry knows them."""

from __future__ import annotations

from typing import Any, Final

from conformance import registry
from conformance.registry import Check


def _body(case: Any) -> None:
    """Stand in for the machine, which the runner does not call as a check."""


def _check(name: str, sentence: str, *requirements: str, level: int = 0) -> Check:
    def body(case: Any) -> None:
        _body(case)

    body.__name__, body.__doc__ = name, sentence
    check = Check(
        name=name,
        chapter=registry.MACHINE,
        requirements=requirements,
        profile="checkpoint",
        each="gym",
        level=level,
        features=("conformance",),
        needs_world=True,
        needs_storage=True,
        needs_shared_dir=False,
        budgets=("quick", "demo", "default"),
        body=body,
    )
    registry.register(check)
    return check


CYCLES = _check(
    "machine_cycles",
    "Two full cycles: restored into the living Gym, twice from one cut, with other policies: ends as uninterrupted.",
    "CKPT-ENV-026",
    "CKPT-ENV-027",
    "CKPT-ENV-028",
    "CKPT-INV-002",
    "CKPT-RESTORE-044",
    "CKPT-RESTORE-035",
    "CKPT-RESTORE-036",
)
WALK = _check(
    "machine_walk",
    "Random walks through the Gym: every answer, status and row is one that the model of the protocol allows.",
    "CKPT-PHASE-001",
    "CKPT-PHASE-002",
    "CKPT-PHASE-003",
    "CKPT-PHASE-004",
    "CKPT-PHASE-005",
    "CKPT-REPEAT-014",
    "CKPT-INV-001",
    "CKPT-INV-002",
    "CKPT-STATUS-001",
    "CKPT-STATUS-014",
    "CKPT-STATUS-007",
    "CKPT-ORDER-001",
    "CKPT-ORDER-004",
    "CKPT-CTRL-002",
    "CKPT-CTRL-004",
    "CKPT-ROLL-004",
    "CKPT-ACK-003",
    "CKPT-RETIRE-001",
    "CKPT-DIR-009",
    "CKPT-FEED-001",
    "CKPT-COMMIT-026",
    "CKPT-COMMIT-028",
    "CKPT-EFFECT-001",
    "CKPT-EFFECT-008",
    "CKPT-EFFECT-010",
    "CKPT-EFFECT-017",
)
TABLE = _check(
    "machine_table",
    "Every cell of the phase table, phase by operation by relation of the id, is tried and answers as the table says.",
    "CKPT-PHASE-001",
    "CKPT-CKID-022",
    "CKPT-CKID-023",
    "CKPT-CKID-024",
)


PROCESS = _check(
    "machine_process",
    "Random walks that kill, end, stop and restart the Gym's process: what is true then is what the model allows.",
    "CKPT-PHASE-008",
    "CKPT-PHASE-009",
    "CKPT-PHASE-010",
    "CKPT-PHASE-011",
    "CKPT-PHASE-013",
    "CKPT-PHASE-015",
    "CKPT-PHASE-018",
    "CKPT-ID-020",
    "CKPT-ID-027",
    level=1,
)


BY_CHANCE: Final = frozenset(
    {
        "CKPT-COMMIT-026",
        "CKPT-COMMIT-028",
        "CKPT-EFFECT-001",
        "CKPT-EFFECT-008",
        "CKPT-EFFECT-010",
        "CKPT-EFFECT-017",
        "CKPT-PHASE-018",
    }
)
"""What a walk may never come to: the machine counts its visits there, and leaves out what had none."""

MACHINE_CHECKS: Final = (CYCLES, WALK, TABLE, PROCESS)
"""All of them, in the order in which they are run."""
