# SPDX-License-Identifier: Apache-2.0
"""Errors of the reference Gym's own parts, beside the refusals of the protocol (`participant.errors`).

    PolicyUnavailable      the policy was unavailable for longer than `policy_retry_ms`
    PolicyRefused          the policy refuses this request, or answers with something else than the form asked for
    EpisodeOver            the rollout's time budget is used up
    PeerUnavailable        another participant cannot be reached, or says that it cannot serve now
    PeerRefused            another participant refuses for a reason that no repetition changes
    SettingsError          gym.yaml or a token cannot be used; the text is for the operator

None of their texts is ever shown to the policy.
"""

from __future__ import annotations


class PolicyUnavailable(Exception):
    """The policy was unavailable for longer than is waited for."""


class PolicyRefused(Exception):
    """The policy refused the request.

    Args:
        terminal: whether the same request would be refused again.
    """

    def __init__(self, message: str, *, terminal: bool) -> None:
        super().__init__(message)
        self.terminal = terminal


class EpisodeOver(Exception):
    """The time budget of the episode is used up."""


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
