# SPDX-License-Identifier: Apache-2.0
"""Rollouts under way: dispatch in batches, the results feed, when ACKs are sent, and noticing that a Gym is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from reference_rl import failpoints, queries, settling, transitions
from reference_rl.acks import AckDebts
from reference_rl.batching import batches
from reference_rl.control import Tenure
from reference_rl.deployment import Deployment
from reference_rl.errors import GymError, InvariantViolated, Refused, Superseded, Unreachable
from reference_rl.events import Events
from reference_rl.ledger import Ledger
from reference_rl.living import Living, read_result
from reference_rl.records import Receipt, Reservation, RolloutRow, ServedResult, Settled
from spec import messages

T = TypeVar("T")

FEED_WAIT_MS = 10_000
"""How long one request for results may wait, in milliseconds."""

DEBT_REST_S = 5.0
"""After so many seconds without a new debt the old ones are tried again."""

IDLE_S = 0.25
"""How long the dispatcher rests when nothing can be started, in seconds; a result wakes it earlier."""


class RolloutManager:
    """Runs the rollouts of one Gym.

    Call :meth:`run` once the Gym is recovered; it returns when the Gym must be recovered again, and not before.

    Args:
        gym: discovered and obeying this controller.
        ledger: the run's ledger.
        tenure: this controller.
        living: how a Gym that lives is read and told.
        events: where what happened is written.
        policy: the policy address for every start.
        max_batch: starts per call at most.
        max_live: rollouts in flight at most.
        max_failures: after so many non-terminal failures a rollout counts as failed.
        health_s: how often every participant is asked for its incarnation, in seconds.
        on_result: called after results were saved.

    Attributes:
        gym: as given.
        acks: the ACKs that are owed there.

    Requirements: CKPT-FEED-013, CKPT-FEED-014, CKPT-ACK-019, CKPT-ACK-022, CKPT-TIME-012, CKPT-RESTART-009,
    CKPT-RESTART-033.
    """

    def __init__(
        self,
        gym: Deployment,
        ledger: Ledger,
        tenure: Tenure,
        living: Living,
        events: Events,
        policy: Mapping[str, str],
        *,
        max_batch: int = 500,
        max_live: int = 1000,
        max_failures: int = 5,
        health_s: float = 2.0,
        on_result: Callable[[], None] = lambda: None,
    ) -> None:
        self.gym = gym
        self.acks = AckDebts(gym, ledger, events)
        self._ledger = ledger
        self._tenure = tenure
        self._living = living
        self._events = events
        self._policy = dict(policy)
        self._max_batch = max_batch
        self._max_live = max_live
        self._max_failures = max_failures
        self._health_s = health_s
        self._on_result = on_result
        self._lost: asyncio.Event = asyncio.Event()
        self._work: asyncio.Event = asyncio.Event()
        self._owing: asyncio.Event = asyncio.Event()
        self._unreachable_since: dict[str, float] = {}
        self._rewind = False
        self._taking: list[asyncio.Task[list[Settled]]] = []

    def lose(self) -> None:
        """Say that the Gym is not the known one any more: :meth:`run` returns and nothing more is sent."""
        self._lost.set()

    async def run(self) -> None:
        """Dispatch, read results and settle debts until the Gym is lost.

        Raises:
            Superseded: a higher controller has taken over.
            InvariantViolated: the run must stop, with its evidence.
        """
        self._lost.clear()
        self._unreachable_since.clear()
        await self.acks.give_up()  # what was sent to the Gym as it was before may have come to nothing
        loops: list[Coroutine[Any, Any, None]] = [self._dispatch(), self._feed(), self._ack(), self._watch()]
        tasks = [asyncio.create_task(loop) for loop in loops]
        lost = asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait([*tasks, lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tasks, lost):
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            lost.cancel()
            # A page that is being settled is settled to its end: what it owes is seen by whoever comes next.
            taken = await asyncio.gather(*self._taking, return_exceptions=True)
            self._taking = []
        for result in (*results, *taken):
            if isinstance(result, Exception):
                raise result

    # --- dispatch ---------------------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        while True:
            self._work.clear()
            progress = await self._guarded("dispatch", self._dispatch_batch())
            if not progress:
                await _within(self._work, IDLE_S)

    async def _dispatch_batch(self) -> bool:
        limits = self.gym.owner.capabilities.limits
        size = min(self._max_batch, limits.max_batch)
        alias = self.gym.alias
        rows = self._ledger.read(queries.unconfirmed, alias, size)
        if not rows:
            live = self._ledger.read(queries.live_count, alias)
            free = min(size, self._max_live - live, limits.max_live_rollouts - live)
            again = self._ledger.read(queries.to_dispatch, alias, max(free, 0))
            rows = again or self._ledger.read(queries.to_repeat, alias, size)
        if not rows:
            return False
        rows = next(batches(rows, limits, _start, most=size))
        await self._ledger.do(transitions.mark_sent, [row.rollout_id for row in rows])
        failpoints.hit("start.marked")
        reply = await self.gym.owner.client.start([_start(row) for row in rows], self._policy)
        failpoints.hit("start.answered")
        return await self._take_outcomes(rows, reply.outcomes)

    async def _take_outcomes(self, rows: Sequence[RolloutRow], outcomes: Sequence[messages.StartOutcome]) -> bool:
        confirmed, put_back = [], []
        for row, outcome in zip(rows, outcomes, strict=True):
            if self._settled_meanwhile(row):
                # Its result came through the feed, and may be released already, while the start was on its way.
                continue
            match outcome.outcome:
                case "started" | "already_started":
                    confirmed.append((row.rollout_id, row.attempt))
                case "admission_closed" | "over_capacity":
                    put_back.append((row.rollout_id, row.attempt))
                case "already_finished":
                    await self._await_result(row, outcome)
                case "stale_attempt":
                    await self._reserve_above(row)
                case "released" | "conflict":
                    raise InvariantViolated(
                        f"{self.gym.alias} calls {row.rollout_id} {outcome.outcome}, the ledger calls it unfinished",
                        {
                            "call": _start(row),
                            "answer": outcome.to_object(),
                            "ledger": asdict(row),
                            "gym": self.gym.alias,
                        },
                    )
                case _:
                    detail = f"{outcome.outcome}: {outcome.detail or ''}"
                    await self._ledger.do(transitions.fail_rollout, row.rollout_id, detail)
                    self._events.emit("refused", rollout_id=row.rollout_id, attempt=row.attempt, reason=detail)
                    self._on_result()
        await self._ledger.do(transitions.mark_answered, confirmed)
        await self._ledger.do(transitions.mark_unsent, put_back)
        if confirmed:
            self._events.emit(
                "dispatched", gym=self.gym.alias, rollouts=[{"rollout_id": r, "attempt": a} for r, a in confirmed]
            )
        return not put_back

    def _settled_meanwhile(self, row: RolloutRow) -> bool:
        now = self._ledger.read(queries.rollout, row.rollout_id)
        return now is None or now.state != "unfinished" or now.attempt != row.attempt

    async def _await_result(self, row: RolloutRow, outcome: messages.StartOutcome) -> None:
        assert outcome.receipt is not None
        receipt = Receipt(outcome.receipt.rollout_id, outcome.receipt.attempt, outcome.receipt.digest)
        if await self._ledger.do(settling.keep_receipt, self.gym.alias, receipt):
            self._rewind = True
        else:
            # It was settled as surplus and its ACK is on the way: then a higher attempt can start.
            wish = Reservation(row.rollout_id, "its result was surplus", receipt.attempt)
            await self._ledger.do(transitions.reserve, [wish], self._tenure.epoch)

    async def _reserve_above(self, row: RolloutRow) -> None:
        try:
            highest = (await self.gym.owner.client.rollout(row.rollout_id)).attempt
        except GymError as error:
            if error.code != "not_found":
                raise
            highest = row.attempt  # a bare fence: it cannot be read, only stepped over
        wish = Reservation(row.rollout_id, "a fence above", highest)
        await self._ledger.do(transitions.reserve, [wish], self._tenure.epoch)

    # --- results ----------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        feed: str | None = None
        after: str | None = None
        pace = self.gym.owner.client.pace()
        while True:
            if feed is None:
                status = await self._guarded("status", self.gym.owner.client.status())
                if status is not None:
                    self.gym.check_controller(self.gym.owner, status)
                feed, after = (status.feed if status else None), None
                if feed is None:
                    await asyncio.sleep(IDLE_S)
                    continue
            if self._rewind:
                self._rewind, after = False, None
            wait_ms = min(FEED_WAIT_MS, self.gym.owner.capabilities.limits.max_wait_ms)
            page = await self._guarded("results", self.gym.owner.client.results(after, wait_ms))
            if page is None:
                continue
            if page.feed != feed:
                # Served before a restore, or after one that this loop has not heard of: never mixed with the present
                # feed.
                self._events.emit("page_discarded", gym=self.gym.alias, feed=page.feed, expected=feed)
                feed = None
                await pace.step()
                continue
            after = page.next
            if page.results:
                taking = asyncio.create_task(self.take_page([read_result(entry) for entry in page.results]))
                self._taking = [taking]
                await asyncio.shield(taking)
            else:
                await pace.step()

    async def take_page(self, page: Sequence[ServedResult]) -> list[Settled]:
        """Settle one page of results: saved or surplus, and an ACK owed for each."""
        settled = await self._ledger.do(settling.settle, self.gym.alias, page, self._max_failures)
        failpoints.hit("result.saved")
        for served, outcome in zip(page, settled, strict=True):
            lost = outcome.decision == "session_lost"
            self._report(served, await self._judge_session_lost(served) if lost else outcome)
        self._owing.set()
        self._work.set()
        self._on_result()
        return settled

    async def _judge_session_lost(self, served: ServedResult) -> Settled:
        known = self._ledger.read(queries.incarnations, self.gym.alias)
        try:
            present = await self.gym.read_incarnations()
        except GymError:
            # Not to be judged now: it is served again, and whoever recovers the Gym reads it.
            self._rewind = True
            self.lose()
            return Settled(served.receipt, "session_lost", "a participant could not be asked for its incarnation")
        fact = present == known and not self._ledger.read(queries.restore_is_open, self.gym.alias)
        outcome = await self._ledger.do(
            settling.settle_session_lost, self.gym.alias, served, self._max_failures, fact=fact
        )
        if not fact:
            self.lose()
        return outcome

    def _report(self, served: ServedResult, outcome: Settled) -> None:
        names = {"saved": "finished", "saved_failure": "failed", "retry": "retried", "surplus": "surplus"}
        event = names.get(outcome.decision)
        if event is None:
            return
        body = served.content.get("body") or {}
        self._events.emit(
            event,
            group=outcome.group,
            sibling=outcome.sibling,
            rollout_id=outcome.receipt.rollout_id,
            attempt=outcome.receipt.attempt,
            turns=body.get("turns"),
            reward=body.get("reward"),
            reason=outcome.reason,
        )

    async def _ack(self) -> None:
        while True:
            self._owing.clear()
            await self._guarded("acks", self.acks.settle())
            await _within(self._owing, DEBT_REST_S)

    # --- health -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        known = self.gym.incarnations()
        while True:
            await asyncio.sleep(self._health_s)
            present = await self._guarded("incarnations", self.gym.read_incarnations())
            if present is not None and present != known:
                changed = sorted(name for name in known if present.get(name) != known[name])
                self._events.emit("incarnation_changed", gym=self.gym.alias, participants=changed)
                self.lose()
                return
            stopped = await self._guarded("stopped", self._living.restart_stopped(self.gym))
            if stopped:
                self._events.emit("restarted_in_place", gym=self.gym.alias, rollouts=stopped)
                self._work.set()

    async def _guarded(self, what: str, work: Awaitable[T]) -> T | None:
        """Await one call; a failure is noted and waited out, a lost Gym ends the loops, only what is fatal leaves.

        Each kind of call has its own clock: a dispatcher with nothing to send, or the one participant that still
        answers, proves nothing about the others.
        """
        try:
            value = await work
        except (Superseded, InvariantViolated):
            raise
        except GymError as error:
            if error.code == "stale_incarnation":
                self.lose()
            elif isinstance(error, Refused) and not error.retryable:
                # The same call again cannot help (a token, a limit, a path): the run ends with this reason.
                raise
            now = time.monotonic()
            since = self._unreachable_since.setdefault(what, now)
            if since == now:
                self._events.trouble(
                    "gym_trouble", f"{self.gym.alias} {what}", gym=self.gym.alias, call=what, reason=str(error)
                )
            elif isinstance(error, Unreachable) and now - since > self._health_s:
                # Gone, perhaps to another address: recovery discovers anew and waits for it.
                self.lose()
            await asyncio.sleep(IDLE_S)
            return None
        self._unreachable_since.pop(what, None)
        self._events.over(f"{self.gym.alias} {what}")
        return value


async def _within(event: asyncio.Event, limit_s: float) -> None:
    # Not wait_for(): before Python 3.12 it can swallow a cancellation that comes together with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()


def _start(row: RolloutRow) -> dict[str, Any]:
    start: dict[str, Any] = {
        "rollout_id": row.rollout_id,
        "attempt": row.attempt,
        "environment": row.environment,
        "task": dict(row.task),
        "task_digest": row.task_digest,
        "limits": dict(row.limits),
    }
    if row.agent is not None:
        start["agent"] = row.agent
    if row.seed is not None:
        start["seed"] = row.seed
    return start
