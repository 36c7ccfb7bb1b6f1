# SPDX-License-Identifier: Apache-2.0
"""The four columns of the worked example, as switches.

    switch                                              0      1      2      3
    discovery runs at setup                             –      yes    yes    yes
    fixed rollout ids and attempts, results feed        –      –      yes    yes
    a snapshot holds the Gym's state, a restart uses it –      –      –      yes

Columns 0 and 1 speak the Gym's own older route; with column 0 not one byte of the protocol is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Column = Literal[0, 1, 2, 3]


@dataclass(frozen=True, slots=True)
class Switches:
    """What a column turns on.

    Attributes:
        discovers: capabilities are read, and judged, at setup.
        tracks_rollouts: rollouts have one id for life, attempts, receipts and ACKs.
        captures_gyms: snapshots hold the Gyms' state, and a restart continues from it.
    """

    discovers: bool
    tracks_rollouts: bool
    captures_gyms: bool

    @property
    def profiles(self) -> frozenset[str]:
        """Return the profiles that every participant must list."""
        if self.captures_gyms:
            return frozenset({"results", "checkpoint"})
        return frozenset({"results"}) if self.tracks_rollouts else frozenset()


SWITCHES: Final[dict[Column, Switches]] = {
    0: Switches(discovers=False, tracks_rollouts=False, captures_gyms=False),
    1: Switches(discovers=True, tracks_rollouts=False, captures_gyms=False),
    2: Switches(discovers=True, tracks_rollouts=True, captures_gyms=False),
    3: Switches(discovers=True, tracks_rollouts=True, captures_gyms=True),
}
"""Column → its switches; column 0 is the default everywhere."""
