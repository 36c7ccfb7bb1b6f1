# SPDX-License-Identifier: Apache-2.0
"""The rows of the index are sorted without regard to case."""

from __future__ import annotations

from typing import Any

from reference_gym.participant import artifacts
from tests.mutants.seam import wrap

TARGETS = "durability"
SHOWS = "state"
FROM_THE_TEXT = True
BREAKS = ("CKPT-DIR-008",)


def apply() -> None:
    """Break it."""

    @wrap(artifacts, "index_rows")
    def index_rows(original: Any, cut: Any) -> Any:
        return iter(sorted(original(cut), key=lambda row: str(row["rollout_id"]).casefold()))
