# SPDX-License-Identifier: Apache-2.0
"""A Gym that lives: what it says about its rollouts and results, and how it is adopted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from reference_rl import queries, settling, transitions
from reference_rl.adoption import plan_adoption
from reference_rl.batching import batches
from reference_rl.control import Tenure
from reference_rl.deployment import Deployment
from reference_rl.errors import GymError, InvariantViolated
from reference_rl.ledger import Ledger
from reference_rl.records import Receipt, Reservation, RolloutRow, ServedResult
from spec import messages, wire


@dataclass(frozen=True)
class Fated:
    """What happened to one rollout in a recovery, for the report."""

    rollout_id: str
    group: int
    sibling: int
    how: str
    attempt: int
    turns_done: int
    reason: str


@dataclass
class GymReport:
    """What a recovery did with one Gym."""

    alias: str
    how: str
    snapshot_id: str | None = None
    rollouts: list[Fated] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class Living:
    """Reads living Gyms and tells them what is no longer wanted.

    Args:
        tenure: this controller.
        ledger: the run's ledger.
        max_failures: after so many non-terminal failures a rollout counts as failed.
        timeout_ms: how long a participant may take to stop what is retired, in milliseconds.
    """

    def __init__(self, tenure: Tenure, ledger: Ledger, max_failures: int = 5, timeout_ms: int = 60_000) -> None:
        self._tenure = tenure
        self._ledger = ledger
        self._max_failures = max_failures
        self._timeout_ms = timeout_ms

    async def read_feed(self, gym: Deployment) -> int:
        """Read the live feed of the owner of rollouts once: its results are facts. Return how many were saved.

        Requirements: CKPT-RESTART-011, CKPT-RESTART-050.
        """
        saved = 0
        after: str | None = None
        while True:
            try:
                page = await gym.owner.client.results(after, 0)
            except GymError:
                return saved  # a dead owner has no facts to tell
            served = [read_result(entry) for entry in page.results]
            settled = await self._ledger.do(settling.settle, gym.alias, served, self._max_failures)
            for result, outcome in zip(served, settled, strict=True):
                if outcome.decision == "session_lost":
                    # Whoever reads a feed here is about to restore this Gym: the rollout goes into that restore.
                    await self._ledger.do(
                        settling.settle_session_lost, gym.alias, result, self._max_failures, fact=False
                    )
                saved += outcome.decision == "saved"
            after = page.next
            if not page.more:
                return saved

    async def list_rollouts(self, gym: Deployment, state: str | None = None) -> dict[str, messages.Rollout]:
        """Return what the owner of rollouts holds, tombstones included, by rollout; those in one state when given."""
        found: dict[str, messages.Rollout] = {}
        after: str | None = None
        while True:
            page = await gym.owner.client.rollouts(after, state)
            found.update({rollout.rollout_id: rollout for rollout in page.rollouts})
            after = page.next
            if after is None:
                return found

    async def restart_stopped(self, gym: Deployment) -> list[str]:
        """Retire what the Gym lists in state `restart`, and reserve its next attempt; return these rollouts.

        Such a rollout waits for its controller: an effect may have happened whose record is missing.

        Requirements: CKPT-DUTY-031, CKPT-DUTY-032.
        """
        stopped = await self.list_rollouts(gym, "restart")
        if not stopped:
            return []
        await self.retire_everywhere(gym, [(rollout_id, held.attempt) for rollout_id, held in stopped.items()])
        kept = {receipt.rollout_id for receipt in self._ledger.read(queries.kept, gym.alias)}
        wanted = {row.rollout_id for row in self._ledger.read(queries.unfinished, gym.alias)} - kept
        wishes = [
            Reservation(rollout_id, "restart: stopped by its Gym", held.attempt)
            for rollout_id, held in stopped.items()
            if rollout_id in wanted
        ]
        return list(await self._ledger.do(transitions.reserve, wishes, self._tenure.epoch))

    async def highest_attempts(self, gym: Deployment) -> dict[str, int]:
        """Return the attempt that the owner of rollouts shows for each rollout; nothing when it cannot be asked."""
        try:
            listed = await self.list_rollouts(gym)
        except GymError:
            return {}
        return {rollout_id: rollout.attempt for rollout_id, rollout in listed.items()}

    async def adopt(self, gym: Deployment) -> GymReport:
        """Go on with a Gym that lived through everything: reconcile its rollouts with the ledger's.

        What runs under another attempt than the ledger's is retired; what is missing gets a new attempt; what lives
        is told the present policy address by a repeated start (which the dispatcher sends).

        Requirements: CKPT-RESTART-007…010.
        """
        report = GymReport(gym.alias, "adopted")
        listed = await self.list_rollouts(gym)
        plan = plan_adoption(self._ledger.read(queries.unfinished, gym.alias), listed)
        await self.retire_everywhere(gym, plan.retire)
        await self._ledger.do(transitions.reserve, plan.reserve, self._tenure.epoch)
        await self._ledger.do(transitions.mark_unsent_again, plan.repeat)
        report.rollouts += [_fated(row, how, turns, reason) for row, how, turns, reason in plan.fates]
        return report

    async def retire_everywhere(self, gym: Deployment, rollouts: Sequence[tuple[str, int]]) -> None:
        """Fence and free attempts on every participant of a Gym; a result that one still holds goes on the keep list.

        Raises:
            GymError: a participant could not be told.
        """
        for participant in gym.participants:
            for batch in batches(rollouts, participant.capabilities.limits, list, most=1000):
                reply = await participant.client.retire(batch, timeout_ms=self._timeout_ms)
                for outcome in reply.outcomes:
                    if outcome.outcome == "finished" and outcome.receipt is not None:
                        receipt = Receipt(outcome.receipt.rollout_id, outcome.receipt.attempt, outcome.receipt.digest)
                        await self._ledger.do(settling.keep_receipt, gym.alias, receipt)


def read_result(entry: messages.FeedResult) -> ServedResult:
    """Return one entry of a results page with its digest checked against its text.

    Raises:
        InvariantViolated: the text is not the one that the receipt names, or not JSON.

    Requirements: CKPT-RESULT-017, CKPT-RESULT-019.
    """
    receipt = Receipt(entry.receipt.rollout_id, entry.receipt.attempt, entry.receipt.digest)
    found = wire.result_digest(entry.result)
    evidence = {"receipt": receipt._asdict(), "digest": found}
    name = f"the result of {receipt.rollout_id}, attempt {receipt.attempt},"
    if found != receipt.digest:
        raise InvariantViolated(f"{name} is not the one that its receipt names", evidence)
    try:
        return ServedResult(receipt, entry.result, json.loads(entry.result))
    except ValueError as error:
        raise InvariantViolated(f"{name} is not JSON: {error}", evidence) from error


def _fated(row: RolloutRow, how: str, turns: int, reason: str) -> Fated:
    return Fated(row.rollout_id, row.group, row.sibling, how, row.attempt, turns, reason)
