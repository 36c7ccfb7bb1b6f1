# SPDX-License-Identifier: Apache-2.0
"""What both ends of the wire agree on beside the messages: paths, header names, keys and digests.

No I/O, and nothing that only one side needs.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "/gym-checkpoint/v1"
PROBE_PATH: Final = "/gym-conformance/v1/effect"
PROTOCOL_VERSION: Final = "1.0"
PROBLEM_MEDIA_TYPE: Final = "application/problem+json"

HEADER_CONTROLLER_ID: Final = "Gym-Controller-Id"
HEADER_CONTROLLER_EPOCH: Final = "Gym-Controller-Epoch"
HEADER_EXPECT_INCARNATION: Final = "Gym-Expect-Incarnation"
HEADER_INCARNATION: Final = "Gym-Incarnation"
HEADER_ROLLOUT_ID: Final = "Gym-Rollout-Id"
HEADER_ATTEMPT: Final = "Gym-Attempt"
HEADER_TURN: Final = "Gym-Turn"
HEADER_POLICY_VERSION: Final = "Gym-Policy-Version"
"""On a policy's response: the weights version that made it, a decimal integer."""

MAX_ATTEMPT: Final = 2**31 - 1
"""The highest attempt number, inclusive."""

# Both classes are spelled out and matched as a whole: `\d` takes other scripts' digits, and `$` a trailing newline.
_ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED_SUFFIX = re.compile(r".*-a[0-9]+")
_CHECKPOINT_ID = re.compile(r"([1-9][0-9]{0,14})-(0|[1-9][0-9]{0,14})")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, order=True, slots=True)
class CheckpointId:
    """A checkpoint id, ordered as a pair of numbers: first the controller's epoch, then its sequence."""

    epoch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.sequence}"


@dataclass(frozen=True, order=True, slots=True)
class ControllerPair:
    """A controller, ordered by epoch and then bytewise by id."""

    epoch: int
    controller_id: bytes

    @classmethod
    def of(cls, epoch: int, controller_id: str) -> ControllerPair:
        """Return the pair for a controller id given as text."""
        return cls(epoch, controller_id.encode())

    @property
    def name(self) -> str:
        """Return the controller id as text."""
        return self.controller_id.decode()


def is_rollout_id(value: str) -> bool:
    """Return whether ``value`` is a legal rollout id: its form, and no reserved ``-a<digits>`` ending."""
    return _ROLLOUT_ID.fullmatch(value) is not None and _RESERVED_SUFFIX.fullmatch(value) is None


def rollout_key(rollout_id: str, attempt: int) -> str:
    """Return the key of one attempt, e.g. ``p7_g2`` for attempt 0 and ``p7_g2-a1`` for attempt 1.

    Raises:
        ValueError: the id or the attempt is not legal.
    """
    if not is_rollout_id(rollout_id):
        raise ValueError(f"{rollout_id!r} is not a rollout id")
    if not 0 <= attempt <= MAX_ATTEMPT:
        raise ValueError(f"attempt {attempt} is outside 0 … {MAX_ATTEMPT}")
    return rollout_id if attempt == 0 else f"{rollout_id}-a{attempt}"


def request_id(rollout_id: str, turn: int, ordinal: int) -> str:
    """Return the request id of one effect: the ``ordinal``-th of turn ``turn``, without the attempt."""
    return f"{rollout_id}/{turn}/{ordinal}"


def parse_checkpoint_id(text: str) -> CheckpointId:
    """Return a checkpoint id as numbers.

    Raises:
        ValueError: ``text`` is not ``<epoch>-<sequence>``.
    """
    match = _CHECKPOINT_ID.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a checkpoint id")
    return CheckpointId(int(match[1]), int(match[2]))


def bytes_digest(data: bytes) -> str:
    """Return ``sha256:`` and 64 lower-case hexadecimal digits over ``data``."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def result_digest(text: str) -> str:
    """Return the digest of a result: over exactly the bytes of its text in UTF-8, nothing canonicalised.

    Raises:
        UnicodeEncodeError: the text holds a lone surrogate and has no UTF-8 form.
    """
    return bytes_digest(text.encode("utf-8"))


def is_digest(value: str) -> bool:
    """Return whether ``value`` has the form of a digest."""
    return _DIGEST.fullmatch(value) is not None
