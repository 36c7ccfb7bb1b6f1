# SPDX-License-Identifier: Apache-2.0
"""An ACK releases the result of its rollout and attempt, whatever digest it names."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.registry import Registry
from reference_gym.participant.result import Receipt
from tests.mutants.seam import wrap

TARGETS = "ack"
BREAKS = ("CKPT-ACK-006", "CKPT-ACK-007")


def apply() -> None:
    """Break it."""

    @wrap(Registry, "acknowledge")
    def acknowledge(original: Any, self: Registry, receipt: Receipt) -> Any:
        finished = self._shared.feed.get(receipt.rollout_id)
        if finished is not None and finished.receipt.attempt == receipt.attempt:
            receipt = finished.receipt
        return original(self, receipt)
