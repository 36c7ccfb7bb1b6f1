# SPDX-License-Identifier: Apache-2.0
"""What one run shares between its checks: the Gym, the three clocks, and where things lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from conformance.gym import Gym
from conformance.patience import Patience
from conformance.target import Target
from conformance.wire import Wire
from conformance.witness import Witness
from conformance.world import World
from spec import Specification


@dataclass
class Bench:
    """What one run shares between its checks."""

    spec: Specification
    target: Target
    gym: Gym
    wire: Wire
    witness: Witness
    world: World
    patience: Patience
    nonce: str
    has_world: bool
    work_dir: Path
