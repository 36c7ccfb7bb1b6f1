# SPDX-License-Identifier: Apache-2.0
"""How long each participant was paused for a snapshot, phase by phase, and what its cut cost. Pure but for the clock.

The phases are seen from the controller: `prepare` from the first prepare to the commit, `commit` from there to the
resume, `resume` until that is answered. `gate` is the participant's own account of how long its gate was closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Times:
    marks: dict[str, float] = field(default_factory=dict)
    park_wait_ms: int = 0
    gate_ms: int | None = None
    bytes: int = 0


class Stopwatch:
    """Notes the steps of one snapshot, participant by participant.

    Args:
        clock: seconds on a monotonic clock.
    """

    STEPS = ("prepare", "commit", "captured", "resume", "resumed", "durable")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[str, _Times] = {}

    def note(self, participant: str, step: str) -> None:
        """Note the first time of one of the ``STEPS`` at a participant."""
        self._of(participant).marks.setdefault(step, self._clock())

    def parked(self, participant: str, wait_ms: int) -> None:
        """Note how long the participant has waited for readiness, in milliseconds."""
        self._of(participant).park_wait_ms = wait_ms

    def opened(self, participant: str, pause_ms: int) -> None:
        """Note how long the participant says that its gate was closed, in milliseconds."""
        self.note(participant, "resumed")
        self._of(participant).gate_ms = pause_ms

    def written(self, participant: str, size: int) -> None:
        """Note that a cut is durable, and its size in bytes."""
        self.note(participant, "durable")
        self._of(participant).bytes = size

    def forget(self, participant: str) -> None:
        """Drop what was noted: it was left out."""
        self._times.pop(participant, None)

    def metrics(self) -> dict[str, Any]:
        """Return, by participant, the pause by phase, the wait for readiness, capture, writing and bytes."""
        return {name: _account(times) for name, times in self._times.items()}

    def pauses(self) -> dict[str, int]:
        """Return what each participant that was resumed says of its pause, in milliseconds."""
        return {name: times.gate_ms for name, times in self._times.items() if times.gate_ms is not None}

    def _of(self, participant: str) -> _Times:
        return self._times.setdefault(participant, _Times())


def _account(times: _Times) -> Mapping[str, Any]:
    def between(first: str, last: str) -> int:
        if first not in times.marks or last not in times.marks:
            return 0
        return round((times.marks[last] - times.marks[first]) * 1000)

    pause = {
        "prepare": between("prepare", "commit"),
        "commit": between("commit", "resume"),
        "resume": between("resume", "resumed"),
    }
    return {
        "pause_ms": pause if times.gate_ms is None else pause | {"gate": times.gate_ms},
        "park_wait_ms": times.park_wait_ms,
        "capture_ms": between("commit", "captured"),
        "write_ms": between("captured", "durable"),
        "bytes": times.bytes,
    }
