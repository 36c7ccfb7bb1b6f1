# SPDX-License-Identifier: Apache-2.0
"""The Gyms' half of a snapshot: prepare, commit, resume, wait until durable, abort."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from reference_rl import failpoints, queries
from reference_rl.control import Leases, abort_everywhere
from reference_rl.deployment import Deployment, Outcome, Participant, everywhere
from reference_rl.errors import (
    GymError,
    InvariantViolated,
    SnapshotFailed,
    Superseded,
)
from reference_rl.events import Events
from reference_rl.ledger import Ledger
from reference_rl.settings import SnapshotSettings
from reference_rl.snapshots import Draft
from reference_rl.stopwatch import Stopwatch
from spec import messages, wire

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """How long each step may take; milliseconds."""

    stage_ms: int
    durable_ms: int
    lease_ms: int
    leave_out_blocked: bool

    @classmethod
    def of(cls, settings: SnapshotSettings) -> CaptureLimits:
        """Return the limits of the settings."""
        return cls(settings.timeout_ms, settings.durable_timeout_ms, settings.lease_ms, settings.leave_out_blocked)


class Member(NamedTuple):
    """One participant and the Gym that it belongs to."""

    gym: Deployment
    participant: Participant

    @property
    def key(self) -> tuple[str, str]:
        """Return (alias, participant name)."""
        return self.gym.alias, self.participant.name


class DurableCut(NamedTuple):
    """What one participant reported about its durable cut."""

    member: Member
    reply: messages.CommitResponse


class Capture:
    """Captures the cuts of some Gyms under one checkpoint id.

    Attributes:
        gyms: the Gyms that are in.
        left_out: aliases of optional Gyms that failed and were left out whole.
        left_out_rollouts: whether blocked rollouts were left out.
        gone: aliases of Gyms of which a participant is another incarnation than the known one.
        progress: (alias, participant) → (incarnation, progress) of what was captured.

    Requirements: CKPT-COMMIT-044…047, CKPT-STAGE-003…005, CKPT-STAGE-007, CKPT-STAGE-010, CKPT-STAGE-011,
    CKPT-DUTY-012…019, CKPT-DUTY-028, CKPT-RESTART-042, CKPT-RESTART-043, CKPT-SNAP-008, CKPT-SNAP-025, CKPT-SNAP-027,
    CKPT-SNAP-036.
    """

    def __init__(
        self,
        checkpoint_id: wire.CheckpointId,
        gyms: Iterable[Deployment],
        ledger: Ledger,
        draft: Draft,
        limits: CaptureLimits,
        events: Events,
        *,
        run_id: str,
        visible_as: Mapping[str, str],
    ) -> None:
        self.gyms: list[Deployment] = list(gyms)
        self.left_out: list[str] = []
        self.left_out_rollouts = False
        self.gone: set[str] = set()
        self.progress: dict[tuple[str, str], tuple[str, int]] = {}
        self._id = str(checkpoint_id)
        self._run_id = run_id
        self._ledger = ledger
        self._draft = draft
        self._limits = limits
        self._events = events
        self._visible_as = visible_as
        self._leases = Leases(self._id, limits.lease_ms)
        self._targets: dict[tuple[str, str], dict[str, str]] = {}
        self._watch = Stopwatch()
        self._counts: dict[str, int] = {"turn": 0, "finished": 0, "restart": 0, "bytes": 0}
        self._marks: dict[str, float] = {"begun": time.monotonic()}

    async def capture(self) -> None:
        """Prepare stage by stage, then commit everywhere at once; every gate is closed when this returns.

        Raises:
            SnapshotFailed: naming step and participant.
        """
        for gym in self.gyms:
            self._check_known(gym)
        await self._for_each_gym("prepare", self._prepare_gym)
        self._mark("prepared")
        failpoints.hit("snapshot.prepared")
        for member in self._members():
            self._targets[member.key] = await asyncio.to_thread(self._target, member)
        outcomes = await self._all("commit", self._commit_captured)
        for member, reply in outcomes:
            if not reply.captured:
                name = member.participant.client.name
                raise SnapshotFailed("commit", f"{name} answered without a capture", name)
        self._mark("captured")
        failpoints.hit("snapshot.captured")

    async def resume(self) -> int:
        """Open the gates, callees before callers; return how many could not be opened and are left to their lease."""
        failures = 0

        async def one(gym: Deployment) -> int:
            failed = 0
            for stage in gym.stages(descending=True):
                for outcome in await everywhere(stage, self._resume_one):
                    _raise_fatal(outcome.error)
                    failed += outcome.error is not None
                    if outcome.error is not None:
                        name = f"{gym.alias}/{outcome.participant.name}"
                        self._events.emit(
                            "resume_failed", checkpoint_id=self._id, participant=name, reason=str(outcome.error)
                        )
            return failed

        for failed in await asyncio.gather(*(one(gym) for gym in self.gyms)):
            failures += failed
        await self._leases.release_all()
        self._mark("resumed")
        failpoints.hit("snapshot.resumed")
        return failures

    async def wait_durable(self) -> list[DurableCut]:
        """Return when every cut is written and synced under the known incarnations.

        Raises:
            SnapshotFailed: one is not, within the limit.
        """
        outcomes = await self._all("durable", self._commit_durable)
        cuts = [DurableCut(member, reply) for member, reply in outcomes]
        for cut in cuts:
            counts = cut.reply.counts
            if cut.member.participant.owns("rollouts"):
                self._counts["turn"] += counts.turn
                self._counts["finished"] += counts.finished
                self._counts["restart"] += counts.restart
            self._counts["bytes"] += counts.bytes
            self._watch.written(cut.member.participant.client.name, counts.bytes)
        self._mark("durable")
        return cuts

    async def abort(self) -> None:
        """Abort everywhere with the same id; what cannot be reached is left to its lease."""
        await self._leases.release_all()
        participants = [m.participant for m in self._members()]
        outcomes = await abort_everywhere(participants, self._id, self._limits.stage_ms)
        for outcome in outcomes:
            if outcome.error is not None:
                self._events.emit(
                    "abort_failed",
                    checkpoint_id=self._id,
                    participant=outcome.participant.client.name,
                    reason=str(outcome.error),
                )
                if isinstance(outcome.error, Superseded):
                    raise outcome.error

    def metrics(self) -> dict[str, Any]:
        """Return what the cut holds and how long each step took; times in milliseconds."""
        marks = list(self._marks.items())
        steps = {f"{name}_ms": round((at - before) * 1000) for (_, before), (name, at) in pairwise(marks)}
        return {
            "pause_ms": max(self._watch.pauses().values(), default=0),
            "pauses_ms": self._watch.pauses(),
            "participants": self._watch.metrics(),
            **self._counts,
            **steps,
            "gyms": [gym.alias for gym in self.gyms],
            "left_out": self.left_out,
            "blocked_left_out": self.left_out_rollouts,
            "renew_failures": self._leases.failures,
        }

    # --- one participant --------------------------------------------------------------------------------------

    async def _prepare_gym(self, gym: Deployment) -> None:
        for stage in gym.stages():
            outcomes = await everywhere(stage, self._prepare_one)
            blocked = []
            for outcome in outcomes:
                member = Member(gym, outcome.participant)
                reply = self._value("prepare", member, outcome)
                if reply.ready:
                    incarnation = outcome.participant.incarnation
                    self.progress[member.key] = (incarnation, reply.progress)
                else:
                    blocked.append((outcome.participant, reply))
            if blocked and not self._limits.leave_out_blocked:
                participant, reply = blocked[0]
                says = f"{participant.name} is not ready: {_blocked_by(reply)}"
                raise SnapshotFailed("prepare", says, participant.client.name)
            if blocked:
                self.left_out_rollouts = True

    async def _prepare_one(self, participant: Participant) -> messages.PrepareResponse:
        self._leases.hold(participant)
        self._watch.note(participant.client.name, "prepare")
        end = time.monotonic() + self._limits.stage_ms / 1000
        pace = participant.client.pace()
        while True:
            left_ms = max(1, round((end - time.monotonic()) * 1000))
            reply = await participant.client.prepare(
                self._id,
                self._run_id,
                timeout_ms=min(left_ms, participant.capabilities.limits.max_wait_ms),
                lease_ms=self._limits.lease_ms,
                budget_s=left_ms / 1000,
            )
            if reply.ready or time.monotonic() >= end:
                self._watch.parked(participant.client.name, reply.wait_ms)
                return reply
            await pace.step()

    async def _commit_captured(self, member: Member) -> messages.CommitResponse:
        name = member.participant.client.name
        self._watch.note(name, "commit")
        reply = await self._commit(member, "captured", self._limits.stage_ms)
        self._watch.note(name, "captured")
        return reply

    async def _commit_durable(self, member: Member) -> messages.CommitResponse:
        end = time.monotonic() + self._limits.durable_ms / 1000
        pace = member.participant.client.pace()
        while True:
            left_ms = round((end - time.monotonic()) * 1000)
            reply = await self._commit(member, "durable", max(left_ms, 1))
            if reply.durable:
                return reply
            if left_ms <= 0:
                name = member.participant.client.name
                raise SnapshotFailed("durable", f"{name} is still writing", name)
            await pace.step()

    async def _commit(self, member: Member, wait: str, budget_ms: int) -> messages.CommitResponse:
        participant = member.participant
        return await participant.client.commit(
            self._id,
            self._targets[member.key],
            wait=wait,
            timeout_ms=min(budget_ms, participant.capabilities.limits.max_wait_ms),
            budget_s=budget_ms / 1000,
            leave_out_blocked=self.left_out_rollouts,
        )

    async def _resume_one(self, participant: Participant) -> None:
        name = participant.client.name
        self._watch.note(name, "resume")
        try:
            reply = await participant.client.resume(self._id, timeout_ms=self._limits.stage_ms)
        except GymError as error:
            if not error.retryable:
                raise
            # At once and once more; after that its lease opens the gate.
            reply = await participant.client.resume(self._id, timeout_ms=self._limits.stage_ms)
        finally:
            await self._leases.release(participant)
        self._watch.opened(name, reply.pause_ms)

    def _target(self, member: Member) -> dict[str, str]:
        alias, name = member.key
        path = self._draft.directory("gym", alias, name)
        if not member.participant.by_file:
            return {"scheme": "http"}
        root = self._visible_as.get(alias)
        if root is None:
            return {"scheme": "file", "path": str(path)}
        return {"scheme": "file", "path": f"{root.rstrip('/')}/{self._draft.path.name}/gym/{alias}/{name}"}

    # --- everywhere -------------------------------------------------------------------------------------------

    def _members(self) -> list[Member]:
        return [Member(gym, participant) for gym in self.gyms for participant in gym.participants]

    def _check_known(self, gym: Deployment) -> None:
        known = self._ledger.read(queries.incarnations, gym.alias)
        if self._ledger.read(queries.restore_is_open, gym.alias) or known != gym.incarnations():
            self.gone.add(gym.alias)
            if not gym.optional:
                raise SnapshotFailed("prepare", f"{gym.alias} must be restored before it is saved again")

    async def _for_each_gym(self, step: str, work: Callable[[Deployment], Awaitable[None]]) -> None:
        gyms = [gym for gym in self.gyms if gym.alias not in self.gone]
        failed: list[tuple[Deployment, Exception]] = [
            (gym, SnapshotFailed(step, f"{gym.alias} is not the known incarnation"))
            for gym in self.gyms
            if gym.alias in self.gone
        ]
        results = await asyncio.gather(*(work(gym) for gym in gyms), return_exceptions=True)
        for gym, result in zip(gyms, results, strict=True):
            if isinstance(result, Exception):
                _raise_fatal(result)
                failed.append((gym, result))
            elif isinstance(result, BaseException):
                raise result
        for gym, error in failed:
            await self._leave_out(gym, error)

    async def _all(
        self, step: str, call: Callable[[Member], Awaitable[messages.CommitResponse]]
    ) -> list[tuple[Member, messages.CommitResponse]]:
        members = self._members()
        by_participant = {id(m.participant): m for m in members}
        outcomes = await everywhere(
            [m.participant for m in members], lambda participant: call(by_participant[id(participant)])
        )
        good: list[tuple[Member, messages.CommitResponse]] = []
        failed: dict[str, tuple[Deployment, Exception]] = {}
        for member, outcome in zip(members, outcomes, strict=True):
            try:
                good.append((member, self._value(step, member, outcome)))
            except SnapshotFailed as error:
                failed.setdefault(member.gym.alias, (member.gym, error))
        for gym, reason in failed.values():
            # A Gym can be left out only as long as nobody has been resumed on the strength of its capture.
            if step == "durable":
                raise reason
            await self._leave_out(gym, reason)
        return [(member, reply) for member, reply in good if member.gym.alias not in failed]

    async def _leave_out(self, gym: Deployment, error: Exception) -> None:
        if not gym.optional or len(self.gyms) == 1:
            raise error
        for participant in gym.participants:
            await self._leases.release(participant)
            self._watch.forget(participant.client.name)
        self.gyms.remove(gym)
        self.left_out.append(gym.alias)
        await abort_everywhere(gym.participants, self._id, self._limits.stage_ms)
        self._events.emit("gym_left_out", checkpoint_id=self._id, gym=gym.alias, reason=str(error))

    def _value(self, step: str, member: Member, outcome: Outcome) -> Any:
        error = outcome.error
        if error is None:
            return outcome.value
        _raise_fatal(error)
        if isinstance(error, GymError) and error.code == "stale_incarnation":
            self.gone.add(member.gym.alias)
        if isinstance(error, SnapshotFailed):
            raise error
        raise SnapshotFailed(step, str(error), f"{member.gym.alias}/{member.participant.name}") from error

    def _mark(self, name: str) -> None:
        self._marks[name] = time.monotonic()
        if self._leases.superseded is not None:
            raise self._leases.superseded


def _raise_fatal(error: BaseException | None) -> None:
    if isinstance(error, (Superseded, InvariantViolated)):
        raise error


def _blocked_by(reply: messages.PrepareResponse) -> str:
    shown: Sequence[messages.Blocker] = reply.blockers[:3]
    parts = [f"{b.kind} of {b.rollout_id or 'the server'} for {b.since_ms} ms" for b in shown]
    more = reply.blocker_count - len(shown)
    return "; ".join(parts + ([f"{more} more"] if more > 0 else [])) or f"phase {reply.phase}"
