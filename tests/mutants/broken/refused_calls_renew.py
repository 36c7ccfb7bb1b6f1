# SPDX-License-Identifier: Apache-2.0
"""Every mutating call of the controller renews the lease, also one that is refused or names no checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference_gym.participant.core import Caller
from reference_gym.participant.judging import Judging
from tests.mutants.seam import wrap

TARGETS = "lease"
SHOWS = "answer"
BREAKS = ("CKPT-LEASE-005", "CKPT-LEASE-007")


def apply() -> None:
    """Break it."""

    @wrap(Judging, "_admit")
    def admit(original: Any, self: Judging, caller: Caller) -> None:
        original(self, caller)
        machine = self.machine
        if machine.open is not None and machine.lease_until is not None:
            until = max(machine.lease_until, self.clock.now() + machine.open.lease_ms / 1000)
            self.machine = replace(machine, lease_until=until)
            self._order_lease()
