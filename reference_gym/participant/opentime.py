# SPDX-License-Identifier: Apache-2.0
"""Time that runs only while the gate is open: the clock of time budgets and idle limits (CKPT-GATE-016)."""

from __future__ import annotations

from collections.abc import Callable

from reference_gym.participant.gate import Gate


class OpenTime:
    """Monotonic seconds without those during which the gate was closed.

    Args:
        gate: of the participant.
        clock: monotonic seconds.
    """

    def __init__(self, gate: Gate, clock: Callable[[], float]) -> None:
        self._gate = gate
        self._clock = clock
        self._closed_s = 0.0
        self._closed_since: float | None = None

    def now(self) -> float:
        """The present."""
        present = self._clock()
        self._look(present)
        standing = 0.0 if self._closed_since is None else present - self._closed_since
        return present - self._closed_s - standing

    async def follow(self) -> None:
        """Note every move of the gate; runs for as long as the participant."""
        while True:
            self._look(self._clock())
            await self._gate.wait_change()

    def _look(self, present: float) -> None:
        if self._gate.is_open and self._closed_since is not None:
            self._closed_s += present - self._closed_since
            self._closed_since = None
        elif not self._gate.is_open and self._closed_since is None:
            self._closed_since = present
