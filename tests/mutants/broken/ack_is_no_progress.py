# SPDX-License-Identifier: Apache-2.0
"""An ACK does not raise `progress`: a snapshot after it is skipped as if nothing had changed.

Two replies of one `progress` then differ in their counts, which could as well be a reply of two instants.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference_gym.participant.registry import Registry
from reference_gym.participant.result import Receipt
from tests.mutants.seam import wrap

TARGETS = "ack"
SHOWS = "state"
FROM_THE_TEXT = True
BREAKS = ("CKPT-STATUS-006", "CKPT-STATUS-027")


def apply() -> None:
    """Break it."""

    @wrap(Registry, "acknowledge")
    def acknowledge(original: Any, self: Registry, receipt: Receipt) -> Any:
        shared, self._shared = self._shared, replace(self._shared, progressed=lambda: None)
        try:
            return original(self, receipt)
        finally:
            self._shared = shared
