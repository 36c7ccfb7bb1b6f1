# SPDX-License-Identifier: Apache-2.0
"""A new segment of the log does not take the tombstones over: a restart after it has forgotten what was released."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.log_state import LogState
from tests.mutants.seam import wrap

TARGETS = "durability"
SHOWS = "crash"
LOG = True
BREAKS = (
    "CKPT-FENCE-006",
    "CKPT-FENCE-007",
    "CKPT-ACK-005",
    "CKPT-ROLL-011",
    "CKPT-ROLL-041",
    "CKPT-STATUS-015",
    "CKPT-STATUS-020",
    "CKPT-ID-020",
)


def apply() -> None:
    """Break it."""

    @wrap(LogState, "base")
    def base(original: Any, self: LogState, inode: int) -> Any:
        return [entry for entry in original(self, inode) if entry.header.get("what") != "tombstones"]
