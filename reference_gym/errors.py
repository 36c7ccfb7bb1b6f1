# SPDX-License-Identifier: Apache-2.0
"""Errors of the reference Gym's own parts, beside the kit's (`participant.errors`, `participant.policy_call`).

    PeerUnavailable        another participant cannot be reached, or says that it cannot serve now
    PeerRefused            another participant refuses for a reason that no repetition changes
    SettingsError          gym.yaml or a token cannot be used; the text is for the operator

None of their texts is ever shown to the policy.
"""

from __future__ import annotations


class PeerUnavailable(Exception):
    """Another participant cannot be reached or cannot serve now.

    Args:
        reached: whether any try may have reached it, so that nobody knows what it did.
    """

    def __init__(self, message: str, *, reached: bool) -> None:
        super().__init__(message)
        self.reached = reached


class PeerRefused(Exception):
    """Another participant refused, for good."""


class SettingsError(Exception):
    """The settings cannot be used as they are."""
