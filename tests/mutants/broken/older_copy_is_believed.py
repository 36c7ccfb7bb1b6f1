# SPDX-License-Identifier: Apache-2.0
"""A log that was copied back is believed: the incarnation is kept although everything since the copy is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from reference_gym.participant import log
from reference_gym.participant.log_format import segment_name
from tests.mutants.seam import wrap

TARGETS = "durability"
SHOWS = "crash"
LOG = True
BREAKS = ("CKPT-ID-021", "CKPT-ID-020")


def apply() -> None:
    """Break it."""

    @wrap(log, "disbelief")
    def disbelief(original: Any, recovered: log.Recovered, life: Any, directory: Path) -> Any:
        inode = (directory / segment_name(recovered.newest)).stat().st_ino
        recovered.state.life = replace(recovered.state.life, inode=inode)
        return original(recovered, life, directory)
