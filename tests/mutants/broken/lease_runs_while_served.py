# SPDX-License-Identifier: Apache-2.0
"""The lease is renewed when a call arrives and when it is answered, and runs while the call waits in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from reference_gym.participant.judging import Judging
from spec.wire import CheckpointId
from tests.mutants.seam import wrap

TARGETS = "lease"
SHOWS = "race"
BREAKS = ("CKPT-LEASE-008", "CKPT-STATUS-005")


def apply() -> None:
    """Break it."""

    @wrap(Judging, "_serving")
    @contextmanager
    def serving(original: Any, self: Judging, checkpoint_id: CheckpointId) -> Iterator[None]:
        def renew() -> None:
            if self._is_open(checkpoint_id) and (opened := self.machine.open) is not None:
                until = max(self.machine.lease_until or 0.0, self.clock.now() + opened.lease_ms / 1000)
                self.machine = replace(self.machine, lease_until=until)
                self._order_lease()

        renew()
        yield
        renew()
