# SPDX-License-Identifier: Apache-2.0
"""The books: every rollout once, as live, as a result or as a tombstone; the fences; the feed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence

from tests.second_gym.entries import Entry, Json, Result, Rollout, Tombstone, hashed
from tests.second_gym.gate import Gate, Handler, milliseconds


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
