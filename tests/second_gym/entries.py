# SPDX-License-Identifier: Apache-2.0
"""What a rollout can be in the books: live, a result, or a tombstone."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from tests.second_gym.calls import Call
from tests.second_gym.sessions import Session

Json = dict[str, Any]


def digest_of(data: bytes) -> str:
    """Return the digest of bytes in the form of a receipt."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def hashed(rollout_id: str) -> str:
    """Return under which name a rollout stands in the books; a tombstone keeps no other."""
    return hashlib.sha256(rollout_id.encode("ascii")).hexdigest()


@dataclass(eq=False)
class Rollout:
    """One live attempt; changed only by who holds the lock.

    Args:
        start: the item of the start call.
        policy: where its policy is.
        session: the state of its environment.
        began: the gate's clock at the start.
    """

    start: Json
    policy: Json
    session: Session
    began: float
    turns_done: int = 0
    open_turn: int | None = None
    verifying: bool = False
    effects: int = 0
    effects_saved: int = 0  # as of the last boundary
    busy_since: float = 0.0
    activity: str = "running"
    since: float = field(default_factory=time.monotonic)
    ended: bool = False
    spent: bool = False  # its time budget
    down: float = 0.0  # seconds of the gate's clock that its policy was unavailable
    down_since: float | None = None
    versions: list[int] = field(default_factory=list)
    data_refs: list[Json] = field(default_factory=list)
    call: Call | None = None

    @property
    def rollout_id(self) -> str:
        """The rollout."""
        return str(self.start["rollout_id"])

    @property
    def attempt(self) -> int:
        """Its attempt."""
        return int(self.start["attempt"])

    @property
    def environment(self) -> str:
        """Its environment."""
        return str(self.start["environment"])

    @property
    def task_digest(self) -> str:
        """The controller's digest of its task."""
        return str(self.start["task_digest"])

    @property
    def version(self) -> int | None:
        """The highest weights version of its turns."""
        return max(self.versions, default=None)

    @property
    def blocks(self) -> bool:
        """Whether a turn is open or a verification runs."""
        return not self.session.uncertain and (self.open_turn is not None or self.verifying)

    def end(self) -> None:
        """Stop it: its thread ends at its next step, a policy call under way at once."""
        self.ended = True
        if self.call is not None:
            self.call.hang_up()

    def spend(self) -> None:
        """Note that its time budget is used up; a policy call under way ends."""
        self.spent = True
        if self.call is not None:
            self.call.hang_up()

    def now(self, activity: str) -> None:
        """Note in which state of the listing it is."""
        if activity != self.activity:
            self.activity, self.since = activity, time.monotonic()


@dataclass(frozen=True)
class Result:
    """One unreleased result.

    Args:
        text: the result string, exactly as it is served.
        sequence: its place in the feed.
        effects_saved: the effects of its rollout, for the index.
        version: the highest weights version of its turns.
        success: whether it has a body.
        final: whether no further attempt makes sense: a success, or a terminal failure.
        turns_done: the number of boundaries.
    """

    rollout_id: str
    attempt: int
    digest: str
    text: str
    sequence: int
    effects_saved: int
    version: int | None
    data_refs: list[Json]
    environment: str
    task_digest: str
    success: bool
    final: bool
    turns_done: int
    since: float

    @classmethod
    def of(cls, text: str, *, sequence: int, effects: int, version: int | None) -> Result:
        """Make a result of its string.

        Raises:
            ValueError, KeyError, TypeError: the string is not the content of a result.
        """
        content = json.loads(text)
        part = content["body"] if "body" in content else content["failure"]
        return cls(
            rollout_id=content["rollout_id"],
            attempt=content["info"]["attempt"],
            digest=digest_of(text.encode("utf-8")),
            text=text,
            sequence=sequence,
            effects_saved=effects,
            version=version,
            data_refs=content["info"]["data_refs"],
            environment=content["environment"],
            task_digest=content["task_digest"],
            success="body" in content,
            final="body" in content or bool(part["terminal"]),
            turns_done=part["turns"],
            since=time.monotonic(),
        )

    @property
    def receipt(self) -> Json:
        """What names it exactly."""
        return {"rollout_id": self.rollout_id, "attempt": self.attempt, "digest": self.digest}


@dataclass(frozen=True)
class Tombstone:
    """What is left of a rollout that was released (it has a digest) or retired.

    Args:
        final: whether a start of a higher attempt is answered `released`.
    """

    attempt: int
    digest: str | None = None
    final: bool = False


Entry = Rollout | Result | Tombstone
