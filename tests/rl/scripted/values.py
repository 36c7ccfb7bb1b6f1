# SPDX-License-Identifier: Apache-2.0
"""What a scripted participant holds, and what a test orders from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spec import wire

ENVIRONMENT = "scripted"


@dataclass
class Fault:
    """What happens to a call: see ``FAULTS``; after ``after`` good ones ``times`` are hit, before it acted or after."""

    kind: str
    times: int = 10_000
    acts: bool = False
    after: int = 0


FAULTS = ("500", "502", "503", "504", "reset_before", "reset_after", "cut_json", "html", "silence")


@dataclass
class Run:
    """One rollout as a participant holds it."""

    rollout_id: str
    attempt: int
    task_digest: str
    environment: str = ENVIRONMENT
    seed: int = 0
    turns: int = 0
    state: str = "waiting_policy"
    result: str | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    starts: int = 0
    without_effect: int = 0
    served_as: str | None = None

    def receipt(self) -> dict[str, Any]:
        assert self.result is not None
        return {
            "rollout_id": self.rollout_id,
            "attempt": self.attempt,
            "digest": wire.result_digest(self.result),
        }

    def served(self) -> dict[str, Any]:
        return {"receipt": self.receipt(), "result": self.result if self.served_as is None else self.served_as}


@dataclass(frozen=True)
class Received:
    """One request as it came in."""

    operation: str
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class ProblemError(Exception):
    """A refusal in the protocol's form."""

    def __init__(self, code: str, **fields: Any) -> None:
        self.code, self.fields = code, fields
        super().__init__(code)
