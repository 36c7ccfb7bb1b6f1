# SPDX-License-Identifier: Apache-2.0
"""What can be read of the rollouts of a participant: counts, one of them, and pages of all that are held."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from reference_gym.participant.feed import Page
from reference_gym.participant.jsontext import encode
from reference_gym.participant.live import LiveRollouts


class ListedRollouts(LiveRollouts):
    """Live rollouts, unreleased results and tombstones, as they are told; see ``LiveRollouts`` for its arguments."""

    def counts(self) -> dict[str, int]:
        """Return the counts of the status, each rollout once at its highest attempt (CKPT-STATUS-014)."""
        counted = {
            "live": len(self.live),
            "restart": len(self._stopped),
            "finished_unreleased": self._shared.feed.successes,
            "failed_unreleased": self._shared.feed.failures,
            "released": self._shared.fences.released,
            "retired": self._shared.fences.retired,
        }
        return {"admitted": sum(counted.values()) - counted["restart"], **counted}

    def restarts(self) -> dict[str, str]:
        """Return the live rollouts that a cut would list in state ``restart``, with the reason."""
        found = dict.fromkeys(self._restart_only, "restart_only")
        return found | {rollout_id: self.live[rollout_id].restart or "other" for rollout_id in self._stopped}

    def page(self, after: str, max_items: int, max_bytes: int, state: str | None) -> Page:
        """Return one page of the live and finished rollouts, by id.

        Args:
            after: the last id of the page before, or anything that sorts there.
            max_items: the most items.
            max_bytes: the most bytes of the whole page, unless it holds a single item.
            state: only rollouts in this state, or None.
        """
        if self._sorted is None:
            self._sorted = sorted({*self.live, *self._shared.feed.ids()})
        items: list[bytes] = []
        size = 256  # What stands around the items.
        last = after
        for at in range(bisect_right(self._sorted, after), len(self._sorted)):
            rollout_id = self._sorted[at]
            if state is not None and self._state(rollout_id) != state:
                continue
            described = self.describe(rollout_id)
            if described is None:
                continue
            item = encode(described)
            if items and (len(items) >= max_items or size + len(item) + 1 > max_bytes):
                return Page(tuple(items), last, more=True)
            items.append(item)
            size += len(item) + 1
            last = rollout_id
        return Page(tuple(items), last, more=False)

    def _state(self, rollout_id: str) -> str | None:
        """Return the state of a live or finished rollout."""
        if (entry := self.live.get(rollout_id)) is not None:
            return "restart" if entry.restart else entry.rollout.activity
        finished = self._shared.feed.get(rollout_id)
        return None if finished is None else "finished" if finished.success else "failed"

    def describe(self, rollout_id: str) -> dict[str, Any] | None:
        """Return one rollout as in the schema ``rollout``, or None if this incarnation does not know it."""
        if (entry := self.live.get(rollout_id)) is not None:
            rollout = entry.rollout
            return {
                "rollout_id": rollout_id,
                "attempt": rollout.attempt,
                "state": "restart" if entry.restart else rollout.activity,
                "turns_done": rollout.turns_done,
                "open_turn": rollout.open_turn,
                "environment": rollout.start.environment,
                "task_digest": rollout.start.task_digest,
                "since_ms": max(0, round((self.now() - rollout.since) * 1000)),
            }
        if (finished := self._shared.feed.get(rollout_id)) is not None:
            return {
                "rollout_id": rollout_id,
                "attempt": finished.receipt.attempt,
                "state": "finished" if finished.success else "failed",
                "turns_done": finished.turns_done,
                "open_turn": None,
                "environment": finished.environment,
                "task_digest": finished.task_digest,
                "receipt": finished.receipt.as_json(),
                "since_ms": max(0, round((self.now() - finished.at) * 1000)),
            }
        if (stone := self._shared.fences.tombstone(rollout_id)) is not None:
            return {"rollout_id": rollout_id, "attempt": stone.attempt, "state": stone.kind, "open_turn": None}
        return None
