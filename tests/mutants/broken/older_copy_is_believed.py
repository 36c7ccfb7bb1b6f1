# SPDX-License-Identifier: Apache-2.0
"""A log that was copied back is believed: the incarnation is kept although everything since the copy is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reference_gym.participant import log
from tests.mutants.seam import wrap

TARGETS = "durability"
SHOWS = "crash"
LOG = True
BREAKS = ("CKPT-ID-021", "CKPT-ID-020")


def apply() -> None:
    """Break it."""

    @wrap(log, "disbelief")
    def disbelief(original: Any, recovered: log.Recovered, life: Any, directory: Path) -> Any:
        reason = original(recovered, life, directory)
        return None if "copy" in (reason or "") else reason
