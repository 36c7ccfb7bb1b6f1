# SPDX-License-Identifier: Apache-2.0
"""A process that has lost everything comes back under its old incarnation.

A kept incarnation promises that controller, `last`, fences, progress and rollouts are kept as well: every requirement
that begins with it is broken.
"""

from __future__ import annotations

import hashlib
from typing import Any

from reference_gym.participant.core import Core
from tests.mutants.seam import wrap

TARGETS = "durability"
SHOWS = "crash"
BREAKS = (
    "CKPT-ID-020",
    "CKPT-ID-026",
    "CKPT-ID-021",
    "CKPT-CTRL-007",
    "CKPT-CKID-010",
    "CKPT-CKID-014",
    "CKPT-FENCE-004",
    "CKPT-PHASE-009",
    "CKPT-PHASE-011",
    "CKPT-PHASE-012",
    "CKPT-PHASE-013",
    "CKPT-PHASE-015",
    "CKPT-PHASE-017",
    "CKPT-PHASE-018",
    "CKPT-PHASE-019",
    "CKPT-GATE-023",
    "CKPT-STATUS-007",
)


def apply() -> None:
    """Break it."""

    @wrap(Core, "__init__")
    def init(original: Any, self: Core, config: Any, *nothing: Any, **options: Any) -> None:
        digest = hashlib.sha256(f"{config.name} {config.staging}".encode()).hexdigest()
        original(self, config, **{**options, "incarnation": f"i{digest[:24]}"})
