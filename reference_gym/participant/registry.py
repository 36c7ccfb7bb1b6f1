# SPDX-License-Identifier: Apache-2.0
"""The rollouts of a participant that owns them: starting, ending and restoring them, at their highest attempt.

A rollout is *live* (an ``Entry``), or has an unreleased result (in the feed), or is a tombstone (in the fences), or is
unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from reference_gym.participant import failpoints
from reference_gym.participant.encoding import Saved, head, start_of, start_text
from reference_gym.participant.feed import Feed
from reference_gym.participant.fences import Tombstone
from reference_gym.participant.listing import ListedRollouts
from reference_gym.participant.live import BuiltRollouts, Entry
from reference_gym.participant.result import Receipt
from reference_gym.participant.rollout import Rollout
from reference_gym.participant.slices import Slices, Steps
from reference_gym.participant.state import (
    Policy,
    Start,
    TaskRefused,
)
from spec.messages import Policy as PolicyMessage
from spec.messages import StartRollout

logger = logging.getLogger(__name__)

Verdict = tuple[str, Receipt | None, str | None]
"""The outcome of one item of a start call, with its receipt and detail."""

_TWICE: Verdict = ("invalid", None, "the rollout is in the batch more than once")  # CKPT-ROLL-003


class Registry(ListedRollouts):
    """All rollouts of a participant that owns them; see ``LiveRollouts`` for its arguments."""

    # --- starting -----------------------------------------------------------------------------------------------------

    async def start(self, items: Sequence[StartRollout], policy: PolicyMessage | None) -> list[dict[str, Any]]:
        """Judge the items of one start call, each by itself; return their outcomes in order."""
        outcomes = []
        times = Counter(item.rollout_id for item in items)
        for item in items:
            outcome: dict[str, Any] = {"rollout_id": item.rollout_id, "attempt": item.attempt}
            verdict, receipt, detail = _TWICE
            if times[item.rollout_id] == 1:
                verdict, receipt, detail = self._start(item, item.policy or policy)
            outcome["outcome"] = verdict
            if receipt is not None:
                outcome["receipt"] = receipt.as_json()
            if detail is not None:
                outcome["detail"] = detail
            outcomes.append(outcome)
            await asyncio.sleep(0)  # What was started runs at once, up to where it first waits.
        return outcomes

    def _start(self, item: StartRollout, policy: PolicyMessage | None) -> Verdict:
        """Return the first outcome that fits, in the order of CKPT-ROLL-004."""
        start = None if policy is None else start_of(item, Policy(policy.base_url, policy.model, policy.api))
        if start is None:
            return "invalid", None, "neither the item nor the batch names a policy"
        if self._config.agent(item.agent) is None:
            return "invalid", None, f"there is no agent {item.agent}"
        if self._config.environment(item.environment) is not None:
            try:
                self._agent.check(start)
            except TaskRefused as refusal:
                return "invalid", None, str(refusal)[:2000]
            except Exception:
                logger.exception("judging the task of rollout %s failed", start.rollout_id)
                return "invalid", None, "the task could not be judged"
        else:
            return "unknown_environment", None, f"there is no environment {item.environment}"
        held = self._held(start)
        if held is not None:
            return held
        return self._admit(start)

    def _held(self, start: Start) -> Verdict | None:
        """Return the outcome for a rollout that is known, or None if it may be admitted."""
        fences, rollout_id, attempt = self._shared.fences, start.rollout_id, start.attempt
        if attempt <= (through := self.fence(rollout_id)):
            return "stale_attempt", None, f"fenced through attempt {through}"
        stone = fences.tombstone(rollout_id)
        if stone is not None and stone.final:
            return "released", None, None
        entry, finished = self.live.get(rollout_id), self._shared.feed.get(rollout_id)
        if entry is not None and attempt == entry.rollout.attempt:
            if start.task_digest != entry.rollout.start.task_digest:
                return "conflict", None, "it was started with another task"
            self._replace_policy(entry, start.policy)
            return "already_started", None, None
        if finished is not None and (finished.success or attempt == finished.receipt.attempt):
            if start.task_digest != finished.task_digest:
                return "conflict", None, "it was started with another task"
            return "already_finished", finished.receipt, None
        return None

    def _admit(self, start: Start) -> Verdict:
        if self.draining or not self._shared.gate.is_open:
            return "admission_closed", None, "the participant is draining" if self.draining else "the gate is closed"
        lower = self.live.get(start.rollout_id)
        if len(self.live) - (lower is not None) >= self._config.limits.max_live_rollouts:
            return "over_capacity", None, f"max_live_rollouts is {self._config.limits.max_live_rollouts}"
        if lower is not None:
            self._remove(lower)
        self._shared.drop(start.rollout_id)
        self._shared.feed.remove(start.rollout_id)
        self._shared.fences.unbury(start.rollout_id)
        self._shared.fences.raise_to(start.rollout_id, start.attempt - 1)
        entry = Entry(Rollout(start, self), start_text(start))
        self._insert(entry)
        self._shared.store.put(self._record(entry))
        self._shared.progressed()
        self._run(entry)
        failpoints.reach("start.judged")
        return "started", None, None

    def fence(self, rollout_id: str) -> int:
        """Return the highest attempt that a start must be above: fenced, or below one that is held."""
        held = -1
        if (entry := self.live.get(rollout_id)) is not None:
            held = entry.rollout.attempt - 1
        elif (finished := self._shared.feed.get(rollout_id)) is not None:
            held = finished.receipt.attempt - 1
        elif (stone := self._shared.fences.tombstone(rollout_id)) is not None:
            held = stone.attempt - 1
        return max(held, self._shared.fences.through(rollout_id))

    def _replace_policy(self, entry: Entry, policy: Policy) -> None:
        """Give a live rollout another policy from its next policy call on (CKPT-ROLL-033)."""
        if policy == entry.rollout.policy:
            return
        entry.rollout.policy = policy
        if (record := self._shared.store.get(entry.rollout.rollout_id)) is not None:
            first = head(record.rollout_id, record.attempt, policy)
            self._shared.store.put(replace(record, payload=(first, *record.payload[1:])))
        self._shared.progressed()

    # --- ending -------------------------------------------------------------------------------------------------------

    def retire(self, rollout_id: str, through: int) -> Receipt | None:
        """Fence and stop one rollout; return the receipt of a success that stays (CKPT-RETIRE-001 to -013)."""
        fences, feed = self._shared.fences, self._shared.feed
        entry, finished = self.live.get(rollout_id), feed.get(rollout_id)
        changed = fences.raise_to(rollout_id, through)
        if finished is not None and finished.receipt.attempt <= through and finished.success:
            if changed:
                self._shared.progressed()
            return finished.receipt
        if entry is not None and entry.rollout.attempt <= through:
            self._remove(entry)
            self._shared.drop(rollout_id)
        elif finished is not None and finished.receipt.attempt <= through:
            feed.remove(rollout_id)
            self._shared.drop(rollout_id)
        elif entry is not None or finished is not None or fences.tombstone(rollout_id) is None:
            return None  # Nothing up to ``through`` is held; the fence is all that is new (CKPT-RETIRE-019).
        stone = fences.tombstone(rollout_id)
        if stone is None or (stone.kind == "retired" and stone.attempt < through):
            fences.bury(rollout_id, Tombstone(through, "retired"))
            changed = True
        if changed:
            self._shared.progressed()
        return None

    def acknowledge(self, receipt: Receipt) -> str:
        """Release a result by its exact receipt; return the outcome (CKPT-ACK-003 to CKPT-ACK-012)."""
        rollout_id = receipt.rollout_id
        finished = self._shared.feed.get(rollout_id)
        if finished is not None and finished.receipt.attempt == receipt.attempt:
            if finished.receipt != receipt:
                return "mismatch"
            self._shared.feed.remove(rollout_id)
            self._shared.drop(rollout_id)
            stone = Tombstone(receipt.attempt, "released", receipt.digest, final=finished.terminal)
            self._shared.fences.bury(rollout_id, stone)
            if not finished.terminal:
                self._shared.fences.raise_to(rollout_id, receipt.attempt)
            self._shared.progressed()
            failpoints.reach("acks.released")
            return "released"
        known = self._shared.fences.tombstone(rollout_id)
        if known is None or known.kind != "released" or known.attempt != receipt.attempt:
            return "unknown"
        return "already_released" if known.digest == receipt.digest else "mismatch"

    def end_stale(self, rollout: Rollout) -> None:
        """End a rollout one of whose calls another participant has refused as stale (CKPT-FENCE-012, -014)."""
        if not rollout.ended:
            self.retire(rollout.rollout_id, rollout.attempt)

    # --- restoring ----------------------------------------------------------------------------------------------------

    async def build(self, plan: Iterable[tuple[Saved, int]], policy: Policy | None) -> BuiltRollouts:
        """Return the restored rollouts, built aside and parked.

        Args:
            plan: what was saved, and the attempt as which it continues.
            policy: replaces the saved ones, or None.
        """
        built, slices = BuiltRollouts(), Slices()
        for saved, attempt in plan:
            if saved.start is None:
                continue
            rollout_id = saved.start.rollout_id
            built.live[rollout_id] = self._rebuilt(saved, saved.start, attempt, policy)
            if self._config.restart_only(saved.start.environment, saved.start.agent):
                built.restart_only.add(rollout_id)
            await slices.give_way()  # A large restore must not keep status and lease from being served.
        return built

    def _rebuilt(self, saved: Saved, start: Start, attempt: int, policy: Policy | None) -> Entry:
        """Return one rollout as it was at its last boundary."""
        rollout = Rollout(start, self, attempt=attempt, policy=policy or saved.policy)
        rollout.state = saved.state
        rollout.turns_done = saved.turns_done
        rollout.effects = saved.effects
        rollout.policy_versions = list(saved.policy_versions)
        rollout.data_refs = list(saved.data_refs)
        rollout.usage = dict(saved.usage or {})
        rollout.activity = "parked"
        return Entry(rollout, start_text(start))

    def recover(self, live: Mapping[str, Saved]) -> None:
        """Hold the rollouts of an earlier life of this incarnation, parked, as the same attempts (CKPT-PHASE-015)."""
        for saved in live.values():
            if saved.start is not None:
                self._insert(self._rebuilt(saved, saved.start, saved.attempt, None))

    def cannot_continue(self, rollout_id: str, reason: str) -> None:
        """Stop a recovered rollout: it is in state ``restart`` (CKPT-PHASE-018)."""
        entry = self.live.get(rollout_id)
        if entry is not None and entry.restart is None:
            self._stop(entry, reason)

    def attempts(self) -> Iterator[tuple[str, int]]:
        """Return the attempts that a restore fences: of everything live, and of every unreleased result, as of now."""
        live, results = list(self.live.items()), self._shared.feed.all()
        return chain(
            ((rollout_id, entry.rollout.attempt) for rollout_id, entry in live),
            ((done.receipt.rollout_id, done.receipt.attempt) for done in results),
        )

    def install(self, built: BuiltRollouts, feed: Feed) -> None:
        """Make restored rollouts and results current in place of all others (CKPT-RESTORE-014, -015)."""
        self._replace(built)
        self._shared.feed.renew(feed)

    def continue_restored(self) -> None:
        """Run every restored rollout (CKPT-RESTORE-033): some now, the others in slices while the gate is open."""
        steps = Steps()
        waiting = [entry for entry in self.live.values() if entry.task is None and entry.restart is None]
        first = steps.next()
        for entry in waiting[:first]:
            self._continue(entry)
        if len(waiting) > first:
            self._spawn(self._continue_all(deque(waiting[first:]), steps), "continuing of restored rollouts")

    async def _continue_all(self, waiting: deque[Entry], steps: Steps) -> None:
        while waiting:
            await asyncio.sleep(0)
            for _ in range(min(steps.next(), len(waiting))):
                await self._shared.gate.wait_open("")  # What has not begun when the next prepare comes begins after it.
                self._continue(waiting.popleft())

    def _continue(self, entry: Entry) -> None:
        if entry.task is None and not entry.rollout.ended:
            entry.rollout.activity = "running"
            self._run(entry)

    def discard_installed(self) -> None:
        """Drop what a restore installed and nobody resumed; its fences and tombstones are the caller's."""
        self._replace(BuiltRollouts())
        self._shared.feed.clear()
