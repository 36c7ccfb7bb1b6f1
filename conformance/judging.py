# SPDX-License-Identifier: Apache-2.0
"""The words in which a check judges what it sees, and tells its story."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from conformance.errors import Failed
from conformance.exchanges import Reply
from conformance.patience import Patience
from conformance.unchanged import show
from spec import Specification

T = TypeVar("T")

FINISH_WITHIN_S = 10.0


class Judging:
    """Judges against the specification and keeps the story.

    Args:
        spec: the specification.
        patience: scales the bounds.
    """

    def __init__(self, spec: Specification, patience: Patience) -> None:
        self.spec = spec
        self.patience = patience
        self.steps: list[str] = []
        self.left_out: dict[str, str] = {}

    def leave_out(self, reason: str, *requirements: str) -> None:
        """Note requirements of this check that this Gym, in this run, gave no occasion to judge, and why."""
        self.left_out.update(dict.fromkeys(requirements, reason))

    def step(self, text: str) -> None:
        """Note a step of the story, for the failure text."""
        self.steps.append(text)

    def equal(self, expected: object, got: object, what: str, *requirements: str) -> None:
        """Judge that a value is the expected one."""
        if expected != got:
            raise Failed(what, expected=show(expected), got=show(got), requirements=requirements)

    def true(self, condition: object, what: str, *requirements: str, got: object = "it is not so") -> None:
        """Judge that a stated condition holds."""
        if not condition:
            raise Failed(what, expected="that it holds", got=show(got), requirements=requirements)

    def accepted(self, reply: Reply, what: str, *requirements: str) -> Reply:
        """Judge that a call was accepted (200), and return the reply."""
        if reply.status != 200:
            raise Failed(what, expected="200", got=reply.brief, requirements=requirements)
        return reply

    def refused(self, reply: Reply, code: str, what: str, *requirements: str) -> Reply:
        """Judge that a call was refused with a code of the catalogue and its status, and return the reply."""
        status = self.spec.errors[code].status
        if (reply.status, reply.code) != (status, code):
            raise Failed(what, expected=f"{status} {code}", got=reply.brief, requirements=requirements)
        return reply

    def until(self, condition: Callable[[], T], what: str, *requirements: str, within_s: float = FINISH_WITHIN_S) -> T:
        """Wait for a stated condition; if it does not come true, these requirements are broken."""
        try:
            return self.patience.until(condition, what, within_s=within_s)
        except Failed as error:
            error.requirements = error.requirements or requirements
            raise

    def stays(self, condition: Callable[[], object], what: str, *requirements: str, for_s: float = 0.25) -> None:
        """Judge that a condition stays true for a while."""
        if not self.patience.stays(condition, for_s):
            raise Failed(what, expected="that it stays so", got="it changed", requirements=requirements)
