# SPDX-License-Identifier: Apache-2.0
"""Epochs: one life of a controller each, claimed durably and exclusively in the run directory.

A claim is a file `epochs/<number>` that was created with ``O_EXCL``: two controllers of one run directory can never
hold the same number, and whoever sees a higher one than its own knows that it was superseded.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

from reference_rl.errors import Superseded
from spec import durable

_DIRECTORY = "epochs"
_MAX_EPOCH = 10**15 - 1


@dataclass(frozen=True, slots=True)
class Claim:
    """A claimed epoch of one run directory."""

    run_dir: Path
    epoch: int
    controller_id: str

    def check(self) -> None:
        """Return when this claim is still the highest.

        Raises:
            Superseded: another controller of this run directory has claimed a higher epoch.

        Requirements: CKPT-SNAP-026.
        """
        found = highest(self.run_dir)
        if found > self.epoch:
            raise Superseded(f"epoch {found} was claimed in the run directory, this controller holds {self.epoch}")


def highest(run_dir: Path) -> int:
    """Return the highest epoch ever claimed in a run directory, 0 when none."""
    directory = run_dir / _DIRECTORY
    if not directory.is_dir():
        return 0
    return max((int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal()), default=0)


def claim(run_dir: Path, controller_id: str, seen: int = 0) -> Claim:
    """Claim the next epoch, durably, before it is used towards anybody.

    Args:
        run_dir: the run directory; it exists.
        controller_id: the id under which this controller will call.
        seen: the highest epoch that any participant or the ledger showed.

    Returns:
        A claim of ``max(own claims, seen) + 1``, or of a higher number when others claim at the same time.

    Requirements: CKPT-CTRL-009…011.
    """
    directory = run_dir / _DIRECTORY
    if not directory.is_dir():
        # Another controller may have made it in between.
        with contextlib.suppress(FileExistsError):
            durable.make_dir(directory)
    while True:
        epoch = max(highest(run_dir), seen) + 1
        if epoch > _MAX_EPOCH:
            raise Superseded(f"no epoch is left above {epoch - 1}")
        record = {"controller_id": controller_id, "claimed_at": time.time()}
        try:
            durable.write_file(directory / str(epoch), json.dumps(record).encode() + b"\n")
        except FileExistsError:
            continue
        durable.sync_dir(directory)
        return Claim(run_dir, epoch, controller_id)
