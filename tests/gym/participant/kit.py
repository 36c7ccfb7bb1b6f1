# SPDX-License-Identifier: Apache-2.0
"""What the kit's tests share: a clock that the test moves, and a Gym whose policy and effects the test holds."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import spec.durable
from reference_gym.participant import (
    AgentInfo,
    Caller,
    EffectCall,
    EnvironmentInfo,
    Limits,
    Participant,
    ParticipantConfig,
    Restored,
    Rollout,
    Sessions,
    Start,
    Success,
    TaskRefused,
)
from reference_gym.participant.artifacts import Durable
from reference_gym.participant.clock import Clock
from spec import messages
from spec.wire import ControllerPair

RUN = "run-1"
ENVIRONMENTS = (
    EnvironmentInfo("counter", "export_restore", "wait", "1"),
    EnvironmentInfo("judged", "export_restore", "repeat", "1"),
    EnvironmentInfo("once", "restart_only", "wait", "1"),
)
POLICY = {"base_url": "http://policy.test/v1", "model": "m", "api": "chat_completions"}


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Wait until a condition holds; fail when it does not within a bound."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not come to hold"
        await asyncio.sleep(0.001)


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


@dataclass(order=True)
class _Timer:
    when: float
    number: int
    callback: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class MovedClock:
    """Monotonic seconds that move only when the test says so."""

    def __init__(self) -> None:
        self._now = 1_000.0
        self._timers: list[_Timer] = []
        self._numbers = count()

    def now(self) -> float:
        """Return the present."""
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> _Timer:
        """Call back when the test has moved time to ``when``; soon if that has passed."""
        timer = _Timer(when, next(self._numbers), callback)
        if when <= self._now:
            asyncio.get_running_loop().call_soon(lambda: timer.cancelled or callback())
        else:
            heapq.heappush(self._timers, timer)
        return timer

    async def advance(self, seconds: float) -> None:
        """Move time, calling back whatever is due on the way."""
        target = self._now + seconds
        while self._timers and self._timers[0].when <= target:
            timer = heapq.heappop(self._timers)
            self._now = max(self._now, timer.when)
            if not timer.cancelled:
                timer.callback()
                await settle()
        self._now = target
        await settle()

    def stall(self, seconds: float) -> None:
        """Move time as a loop that stood still sees it: everything that is due is called back in one step."""
        self._now += seconds
        while self._timers and self._timers[0].when <= self._now:
            timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                timer.callback()


class World:
    """What the tests decide of effects: which are held, and what has really happened."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.begun: list[str] = []
        self.held: dict[str, asyncio.Event] = {}

    def hold(self, request_id: str) -> None:
        """Hold an effect before it happens."""
        self.held[request_id] = asyncio.Event()

    def release(self, request_id: str) -> None:
        """Let a held effect happen."""
        self.held[request_id].set()


class Counter:
    """A session whose state is a number; ``add`` changes it, ``die`` raises."""

    def __init__(self, world: World, value: int = 0) -> None:
        self.world = world
        self.value = value
        self.closed = False

    async def apply(self, call: EffectCall) -> Any:
        """Run one effect."""
        self.world.begun.append(call.request_id)
        if (held := self.world.held.get(call.request_id)) is not None:
            await held.wait()
        if call.tool == "die":
            raise OSError("the tool died")
        self.world.done.append(call.request_id)
        self.value += call.args["n"]
        return {"value": self.value}

    def save(self) -> Any:
        """Return the number."""
        return {"value": self.value}

    def close(self) -> None:
        """Note that nobody uses it any more."""
        self.closed = True


Reply = Sequence[tuple[str, int]]


class Loop:
    """An agent whose policy is the test: it answers each call with a list of (tool, n); an empty one ends it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sessions: Sessions | None = None
        self.replies: dict[str, asyncio.Queue[Reply]] = {}
        self.asked: list[tuple[str, int, int]] = []
        self.calls: list[tuple[str, str]] = []
        self.verifying: dict[str, asyncio.Event] = {}
        self.verifications: list[str] = []
        self.success: Callable[[Rollout, int], Success] = lambda rollout, value: Success(
            "completed", float(value), [{"role": "user", "content": "go"}], {"value": value}
        )

    def queue(self, rollout_id: str) -> asyncio.Queue[Reply]:
        """Return the queue of replies of one rollout."""
        return self.replies.setdefault(rollout_id, asyncio.Queue())

    def reply(self, rollout_id: str, *replies: Reply) -> None:
        """Answer the next policy calls of one rollout."""
        for reply in replies:
            self.queue(rollout_id).put_nowait(reply)

    def check(self, start: Start) -> None:
        """Refuse one task."""
        if start.task.get("bad"):
            raise TaskRefused("this task is bad")

    async def run(self, rollout: Rollout) -> Success:
        """Run one attempt."""
        sessions = self.sessions
        assert sessions is not None
        value = 0
        if rollout.state is None:
            start = rollout.start
            counter = Counter(self.world)
            await sessions.open(rollout.rollout_id, rollout.attempt, start.environment, start.task_digest, counter)
            await rollout.record({"value": 0})
        else:
            value = rollout.state["value"]
        ended = rollout.state is not None and rollout.state.get("ended", False)
        while not ended:
            self.asked.append((rollout.rollout_id, rollout.attempt, rollout.turns_done + 1))
            self.calls.append((rollout.rollout_id, rollout.policy.base_url))
            with rollout.policy_call():
                reply = await self.queue(rollout.rollout_id).get()
            async with rollout.turn() as turn:
                for tool, n in reply:
                    value = (await turn.effect(tool, {"n": n}, sessions.effect))["value"]
                ended = not reply
                turn.close({"value": value, "ended": True} if ended else {"value": value})
        async with rollout.verification() as verification:
            self.verifications.append(rollout.rollout_id)
            if (held := self.verifying.get(rollout.rollout_id)) is not None:
                await held.wait()
            verification.finish(self.success(rollout, value))
        return self.success(rollout, value)


class Gym:
    """One participant that owns rollouts and sessions, or sessions alone, and what the test holds of it."""

    def __init__(
        self,
        root: Path,
        *,
        clock: Clock | None = None,
        durable: Durable = spec.durable,
        limits: Limits | None = None,
        rollouts: bool = True,
        staging: Path | None = None,
        name: str = "gym",
        **more: Any,
    ) -> None:
        self.root = root
        self.world = World()
        self.loop = Loop(self.world)
        self.config = ParticipantConfig(
            name,
            "agent" if rollouts else "resources",
            10 if rollouts else 30,
            environments=ENVIRONMENTS,
            agents=[AgentInfo("loop", "export_restore")] if rollouts else [],
            storage_roots=[root],
            staging=staging,
            limits=limits or Limits(min_lease_ms=100),
            **more,
        )
        self.participant = Participant(self.config, agent=self.loop if rollouts else None, clock=clock, durable=durable)
        self.sessions = Sessions(self.participant, self._load)
        self.loop.sessions = self.sessions
        self.counters: list[Counter] = []

    def _load(self, environment: str, saved: Any, restored: Restored) -> Counter:
        counter = Counter(self.world, saved["value"])
        self.counters.append(counter)
        return counter

    def caller(self, epoch: int = 1, controller: str = "rl", incarnation: str | None = None) -> Caller:
        """Return who calls."""
        return Caller(ControllerPair.of(epoch, controller), incarnation or self.participant.incarnation)

    @property
    def status(self) -> dict[str, Any]:
        """The status, which obeys I1."""
        status = self.participant.status()
        counts = status["counts"]
        parts = ("live", "finished_unreleased", "failed_unreleased", "released", "retired")
        assert counts["admitted"] == sum(counts[part] for part in parts), "I1"
        return status

    async def start(self, *rollout_ids: str, attempt: int = 0, epoch: int = 1, **more: Any) -> list[str]:
        """Start rollouts, each answered; return the outcomes."""
        items = [start_item(rollout_id, attempt, **more) for rollout_id in rollout_ids]
        request = messages.StartRequest.of({"rollouts": items})
        reply = await self.participant.start(self.caller(epoch), request)
        return [outcome["outcome"] for outcome in reply["outcomes"]]

    async def prepare(self, checkpoint_id: str, timeout_ms: int = 5_000, lease_ms: int = 60_000, **who: Any) -> Any:
        """Prepare."""
        run_id = who.pop("run_id", RUN)
        request = messages.PrepareRequest(
            checkpoint_id=checkpoint_id, run_id=run_id, timeout_ms=timeout_ms, lease_ms=lease_ms
        )
        return await self.participant.prepare(self.caller(**_epoch(checkpoint_id, who)), request)

    async def commit(
        self,
        checkpoint_id: str,
        path: Path | str | None = None,
        wait: str = "durable",
        timeout_ms: int = 5_000,
        *,
        leave_out_blocked: bool | None = None,
        target: Any = None,
        **who: Any,
    ) -> Any:
        """Commit, by default into a new directory named by the id."""
        if path is None:
            path = self.root / checkpoint_id
            path.mkdir(exist_ok=True)
        body = {
            "checkpoint_id": checkpoint_id,
            "target": target or {"scheme": "file", "path": str(path)},
            "wait": wait,
            "timeout_ms": timeout_ms,
        }
        if leave_out_blocked is not None:
            body["leave_out_blocked"] = leave_out_blocked
        request = messages.CommitRequest.of(body)
        return await self.participant.commit(self.caller(**_epoch(checkpoint_id, who)), request)

    async def resume(self, checkpoint_id: str, **who: Any) -> Any:
        """Resume."""
        request = messages.ResumeRequest(checkpoint_id=checkpoint_id, timeout_ms=5_000)
        return await self.participant.resume(self.caller(**_epoch(checkpoint_id, who)), request)

    async def abort(self, checkpoint_id: str, timeout_ms: int = 5_000, **who: Any) -> Any:
        """Abort."""
        request = messages.AbortRequest(checkpoint_id=checkpoint_id, timeout_ms=timeout_ms)
        return await self.participant.abort(self.caller(**_epoch(checkpoint_id, who)), request)

    async def renew(self, checkpoint_id: str, lease_ms: int, **who: Any) -> Any:
        """Renew."""
        request = messages.RenewRequest(checkpoint_id=checkpoint_id, lease_ms=lease_ms)
        return await self.participant.renew(self.caller(**_epoch(checkpoint_id, who)), request)

    async def snapshot(self, checkpoint_id: str) -> Any:
        """Prepare, commit durably, resume; return the commit's reply."""
        assert (await self.prepare(checkpoint_id))["ready"]
        reply = await self.commit(checkpoint_id)
        await self.resume(checkpoint_id)
        return reply

    async def restore(
        self,
        checkpoint_id: str,
        from_id: str | None,
        digest: str | None = None,
        rollouts: Sequence[tuple[str, int, int, int]] = (),
        results: Sequence[Any] = (),
        fences: Sequence[tuple[str, int]] = (),
        timeout_ms: int = 5_000,
        **more: Any,
    ) -> Any:
        """Restore from the snapshot of an id.

        Args:
            checkpoint_id: the fresh id.
            from_id: the id of the cut, in the directory of that name; None resets.
            digest: the manifest's.
            rollouts: (rollout id, attempt, next attempt, turns done).
            results: receipts.
            fences: (rollout id, through attempt).
            timeout_ms: the time limit.
            more: fields of the request, and who calls.
        """
        path = more.pop("path", None) or self.root / (from_id or "")
        body: dict[str, Any] = {
            "checkpoint_id": checkpoint_id,
            "run_id": more.pop("run_id", RUN),
            "source": None
            if from_id is None
            else {"scheme": "file", "path": str(path), "checkpoint_id": from_id, "manifest_digest": digest},
            "rollouts": [
                {"rollout_id": r, "attempt": a, "next_attempt": n, "turns_done": t, "task_digest": "task"}
                for r, a, n, t in rollouts
            ],
            "results": list(results),
            "fences": [{"rollout_id": r, "through_attempt": t} for r, t in fences],
            "timeout_ms": timeout_ms,
            "lease_ms": more.pop("lease_ms", 60_000),
        }
        for name in ("policy", "source"):
            if name in more:
                body[name] = more.pop(name)
        request = messages.RestoreRequest.of(body)
        return await self.participant.restore(self.caller(**_epoch(checkpoint_id, more)), request)

    async def acks(self, *receipts: Any) -> list[str]:
        """Acknowledge; return the outcomes."""
        reply = await self.participant.acks(self.caller(), messages.AcksRequest.of({"receipts": list(receipts)}))
        return [outcome["outcome"] for outcome in reply["outcomes"]]

    async def retire(self, *rollouts: tuple[str, int], timeout_ms: int = 5_000) -> Any:
        """Retire (rollout id, through attempt); return the outcomes."""
        fences = [{"rollout_id": r, "through_attempt": t} for r, t in rollouts]
        request = messages.RetireRequest.of({"rollouts": fences, "timeout_ms": timeout_ms})
        return (await self.participant.retire(self.caller(), request))["outcomes"]

    async def results(self, after: str = "", limit: int | None = None, wait_ms: int = 0) -> Any:
        """Return one page of the feed, parsed."""
        return messages.ResultsPage.read(await self.participant.results(after, limit, wait_ms))

    def state(self, rollout_id: str) -> str:
        """Return the state of one rollout."""
        return str(self.participant.rollout(rollout_id)["state"])

    async def waiting(self, *rollout_ids: str) -> None:
        """Wait until these rollouts wait for the policy."""
        await until(lambda: all(self.state(rollout_id) == "waiting_policy" for rollout_id in rollout_ids))

    async def finish(self, *rollout_ids: str) -> list[Any]:
        """Let rollouts end with their next reply; return their receipts."""
        for rollout_id in rollout_ids:
            self.loop.reply(rollout_id, [])
        await until(lambda: all(self.state(rollout_id) in ("finished", "failed") for rollout_id in rollout_ids))
        return [self.participant.rollout(rollout_id)["receipt"] for rollout_id in rollout_ids]


def start_item(rollout_id: str, attempt: int = 0, **more: Any) -> dict[str, Any]:
    """Return one item of a start call."""
    item: dict[str, Any] = {
        "rollout_id": rollout_id,
        "attempt": attempt,
        "environment": "counter",
        "task": {},
        "task_digest": "task",
        "policy": POLICY,
    }
    return {key: value for key, value in (item | more).items() if value is not None}


def _epoch(checkpoint_id: str, who: dict[str, Any]) -> dict[str, Any]:
    """Return who calls: by default the controller of the id's epoch."""
    return {"epoch": int(checkpoint_id.partition("-")[0]), **who}
