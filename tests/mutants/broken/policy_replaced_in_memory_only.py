# SPDX-License-Identifier: Apache-2.0
"""A repeated start replaces the policy of the running rollout, but a cut before its next boundary has the old one."""

from __future__ import annotations

from typing import Any

from reference_gym.participant.registry import Registry
from tests.mutants.seam import wrap

TARGETS = "restore"
SHOWS = "state"
BREAKS = ("CKPT-RESTORE-036", "CKPT-STATUS-006")


def apply() -> None:
    """Break it."""

    @wrap(Registry, "_replace_policy")
    def replace_policy(original: Any, self: Registry, entry: Any, policy: Any) -> None:
        entry.rollout.policy = policy
