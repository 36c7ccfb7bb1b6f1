# SPDX-License-Identifier: Apache-2.0
"""After a restart of the process `last` is there, but not what its commit or restore was answered."""

from __future__ import annotations

from typing import Any

from reference_gym.participant import log_values
from tests.mutants.seam import wrap

TARGETS = "durability"
SHOWS = "crash"
LOG = True
BREAKS = ("CKPT-CKID-014", "CKPT-CKID-016", "CKPT-CKID-010")


def apply() -> None:
    """Break it."""

    @wrap(log_values, "_last_value")
    def last_value(original: Any, last: Any) -> Any:
        return {**original(last), "outcome": None}
