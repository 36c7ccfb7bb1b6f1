# SPDX-License-Identifier: Apache-2.0

"""Errors of the conformance suite.

SuiteError
├── UsageError            the command line or target.yaml makes no sense          exit code 2
├── SuiteFault            the suite itself did something wrong                    exit code 3
│   └── MalformedRequest  a request of the suite's own does not fit openapi.yaml
├── TargetUnreachable     no Gym answers where one was promised                   exit code 5
├── Lost                  the outcome of an exchange is unknown to the caller
│   ├── LostRequest       it certainly never reached the Gym
│   └── LostReply         the Gym may or may not have acted
├── NotOffered            the Gym does not offer what a check needs: not applicable, with the reason
└── Failed                the Gym broke a requirement                             exit code 1
├── TimedOut          a stated condition did not come true within its bound
└── ResponseViolation a response does not fit openapi.yaml or its schema
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from conformance.wire import Exchange


class SuiteError(Exception):
    """Base of everything that the suite raises."""


class UsageError(SuiteError):
    """The command line or the target file makes no sense."""


class SuiteFault(SuiteError):
    """The suite itself did something wrong; this says nothing about the Gym."""


class MalformedRequest(SuiteFault):
    """A request of the suite's own does not fit openapi.yaml."""


class TargetUnreachable(SuiteError):
    """No Gym answers where one was promised."""


class Lost(SuiteError):
    """The outcome of an exchange is unknown to the caller.

    Args:
        reason: what happened, one sentence.
        exchange: the recorded exchange, when one was recorded.
    """

    def __init__(self, reason: str, exchange: Exchange | None = None) -> None:
        super().__init__(reason)
        self.exchange = exchange


class LostRequest(Lost):
    """The request certainly never reached the Gym."""


class LostReply(Lost):
    """The request left; whether the Gym acted is unknown."""


class NotOffered(SuiteError):
    """The Gym does not offer what a check needs; the message is the reason shown in the report."""


class Failed(SuiteError):
    """The Gym broke a requirement.

    Args:
        what: one sentence: what was being judged.
        expected: what the specification says, as text.
        got: what was observed, as text.
        requirements: ids of the requirements that are broken; empty: those of the running check.
    """

    def __init__(self, what: str, *, expected: str, got: str, requirements: Sequence[str] = ()) -> None:
        super().__init__(f"{what}: expected {expected}, got {got}")
        self.what = what
        self.expected = expected
        self.got = got
        self.requirements = tuple(requirements)


class TimedOut(Failed):
    """A stated condition did not come true within its bound."""


class ResponseViolation(Failed):
    """A response does not fit openapi.yaml or its schema."""
