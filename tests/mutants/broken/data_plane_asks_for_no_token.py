# SPDX-License-Identifier: Apache-2.0
"""The data plane is served without a token; the control plane asks for its own."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.http import DataCall
from tests.mutants.seam import wrap

TARGETS = "security"
SHOWS = "answer"
BREAKS = ("CKPT-SEC-001", "CKPT-SEC-008", "CKPT-CONF-033")


def apply() -> None:
    """Break it."""

    @wrap(DataCall, "__init__")
    def init(
        original: Any, self: DataCall, participant: Any, token: str | None, handler: Any, *, schema: str | None = None
    ) -> None:
        original(self, participant, None, handler, schema=schema)
