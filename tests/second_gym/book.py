# SPDX-License-Identifier: Apache-2.0
"""The books: every rollout once, as live, as a result or as a tombstone; the fences; the feed."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.second_gym.calls import Call
from tests.second_gym.gate import Gate, Handler, milliseconds
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
        """Stop it: its thread ends at its next step, its policy call at once, its session is gone."""
        self.ended = True
        self.session.closed = True
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


class Book:
    """Everything that a participant knows of its rollouts. Its methods want the lock held."""

    def __init__(self, gate: Gate, limits: Mapping[str, int]) -> None:
        self.gate = gate
        self.limits = limits
        self.entries: dict[str, Entry] = {}
        self.fences: dict[str, int] = {}
        self.progress = 0
        self.feed = ""
        self._sequence = 0
        self.new_feed()

    # --- looking ---

    def live(self) -> Iterator[Rollout]:
        """Yield every live rollout."""
        return (entry for entry in self.entries.values() if isinstance(entry, Rollout))

    def results(self) -> list[Result]:
        """Return the unreleased results in the order of the feed."""
        found = [entry for entry in self.entries.values() if isinstance(entry, Result)]
        return sorted(found, key=lambda result: result.sequence)

    def held(self, rollout_id: str) -> Entry | None:
        """Return what is known of a rollout."""
        return self.entries.get(hashed(rollout_id))

    def fence(self, rollout_id: str) -> int:
        """Return the highest attempt that is refused, -1 for none."""
        return self.fences.get(hashed(rollout_id), -1)

    def counts(self) -> dict[str, int]:
        """Return the books of the status: they add up because each rollout is one entry."""
        tally = dict.fromkeys(
            ("live", "restart", "finished_unreleased", "failed_unreleased", "released", "retired", "unmanaged"), 0
        )
        for entry in self.entries.values():
            if isinstance(entry, Rollout):
                tally["live"] += 1
                tally["restart"] += entry.session.uncertain
            elif isinstance(entry, Result):
                tally["finished_unreleased" if entry.success else "failed_unreleased"] += 1
            else:
                tally["retired" if entry.digest is None else "released"] += 1
        return {"admitted": len(self.entries), **tally}

    def blockers(self, *, handlers_only: bool = False) -> list[Json]:
        """Return what keeps the participant from standing still, the oldest first.

        Args:
            handlers_only: only the handlers that run in this process, also those of attempts that are over.
        """
        found: list[Handler] = []
        for entry in self.live():
            if entry.blocks and not handlers_only:
                kind = "verification" if entry.verifying else "effect"
                found.append(Handler(entry.busy_since, kind, entry.rollout_id, entry.attempt))
        for handler in self.gate.handlers:
            held = self.held(handler.rollout_id)
            of_probe = isinstance(held, Rollout) and held.attempt == handler.attempt
            if handlers_only or (
                isinstance(held, Rollout) and of_probe and not held.session.uncertain and not held.blocks
            ):
                found.append(handler)
        now = time.monotonic()
        return [
            {
                "kind": kind,
                "rollout_id": rollout_id,
                "attempt": attempt,
                "since_ms": milliseconds(now - since),
                "detail": f"{kind} of attempt {attempt} has not ended",
            }
            for since, kind, rollout_id, attempt in sorted(found)
        ]

    def describe(self, rollout_id: str, entry: Entry) -> Json:
        """Return a rollout as the listing shows it."""
        shown: Json = {"rollout_id": rollout_id, "attempt": entry.attempt, "open_turn": None}
        if isinstance(entry, Tombstone):
            return shown | {"state": "retired" if entry.digest is None else "released"}
        shown |= {
            "since_ms": milliseconds(time.monotonic() - entry.since),
            "turns_done": entry.turns_done,
            "environment": entry.environment,
            "task_digest": entry.task_digest,
        }
        if isinstance(entry, Result):
            return shown | {"state": "finished" if entry.success else "failed", "receipt": entry.receipt}
        if entry.session.uncertain:
            return shown | {"state": "restart"}
        return shown | {"state": entry.activity, "open_turn": entry.open_turn}

    # --- changing ---

    def new_feed(self) -> None:
        """Begin a new feed: results may have come back that a client has paged past."""
        self.feed = "f-" + secrets.token_hex(8)

    def raise_fence(self, key: str, through: int) -> None:
        """Refuse every attempt up to this one; a fence only rises."""
        self.fences[key] = max(through, self.fences.get(key, -1))

    def changed(self) -> None:
        """Note that a cut would now hold something else."""
        self.progress += 1
        self.gate.lock.notify_all()

    def drop(self, key: str) -> None:
        """End whatever a rollout is and fence its attempt; nothing of it stays but a tombstone."""
        entry = self.entries[key]
        if isinstance(entry, Rollout):
            entry.end()
        self.raise_fence(key, entry.attempt)
        self.entries[key] = Tombstone(entry.attempt)
        self.changed()

    def admit(self, rollout: Rollout) -> None:
        """Begin an attempt; a lower one is over from now on."""
        key = hashed(rollout.rollout_id)
        if isinstance(self.entries.get(key), Rollout):
            self.drop(key)
        self.raise_fence(key, rollout.attempt - 1)
        self.entries[key] = rollout
        self.changed()

    def next_sequence(self) -> int:
        """Return the next place in the feed."""
        self._sequence += 1
        return self._sequence

    def finish(self, rollout: Rollout, text: str) -> None:
        """Turn a live attempt into its result."""
        rollout.end()
        self.entries[hashed(rollout.rollout_id)] = Result.of(
            text,
            sequence=self.next_sequence(),
            effects=rollout.effects_saved,
            version=rollout.version,
        )
        self.changed()

    def acknowledge(self, receipt: Json) -> str:
        """Release the result that a receipt names; return the outcome."""
        key = hashed(receipt["rollout_id"])
        entry = self.entries.get(key)
        if isinstance(entry, Rollout) or entry is None or entry.attempt != receipt["attempt"] or entry.digest is None:
            return "unknown"
        if entry.digest != receipt["digest"]:
            return "mismatch"
        if isinstance(entry, Tombstone):
            return "already_released"
        self.entries[key] = Tombstone(entry.attempt, entry.digest, entry.final)
        if not entry.final:
            self.raise_fence(key, entry.attempt)
        self.changed()
        return "released"

    def retire(self, rollout_id: str, through: int) -> Json:
        """Fence attempts of a rollout and give up what is not finished; return the entry of `outcomes`."""
        key = hashed(rollout_id)
        self.raise_fence(key, through)
        entry = self.entries.get(key)
        if isinstance(entry, Result) and entry.success and entry.attempt <= through:
            return {"rollout_id": rollout_id, "outcome": "finished", "receipt": entry.receipt}
        if isinstance(entry, Rollout | Result) and entry.attempt <= through:
            self.drop(key)
        running = any(h.rollout_id == rollout_id and h.attempt <= through for h in self.gate.handlers)
        return {"rollout_id": rollout_id, "outcome": "pending" if running else "retired"}

    def install(
        self, results: Sequence[Result], tombstones: Mapping[str, Tombstone], fences: Mapping[str, int]
    ) -> None:
        """Replace everything by what a restore lists, in one step; what was there leaves fences behind."""
        kept = {hashed(result.rollout_id): result for result in results}
        for key, entry in self.entries.items():
            if isinstance(entry, Rollout):
                entry.end()
            same = key in kept and kept[key].attempt == entry.attempt
            self.raise_fence(key, entry.attempt - 1 if same else entry.attempt)
        self.entries = {**tombstones, **kept}
        for key, entry in self.entries.items():
            closed = isinstance(entry, Tombstone) and not entry.final
            self.raise_fence(key, entry.attempt if closed else entry.attempt - 1)
        for key, through in fences.items():
            self.raise_fence(key, through)
        self.new_feed()
        self.changed()

    def discard(self) -> None:
        """Give up everything that a restore installed; its tombstones and fences stay."""
        for key in [key for key, entry in self.entries.items() if not isinstance(entry, Tombstone)]:
            self.drop(key)

    def give_up(self, rollout: Rollout) -> None:
        """End an attempt without a result and fence it."""
        self.drop(hashed(rollout.rollout_id))
