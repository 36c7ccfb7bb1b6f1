# SPDX-License-Identifier: Apache-2.0
"""One participant, with one coroutine per operation.

Knows no web framework. Every operation takes the caller (its controller pair and the incarnation that it expects)
and a typed request, and returns the reply as a JSON object; refusals are raised. Operations that change state are
meant to run as tasks of their own, so that they end although their client has gone (``http`` does that).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from reference_gym.participant import failpoints
from reference_gym.participant.committing import write_error
from reference_gym.participant.core import Caller
from reference_gym.participant.errors import (
    DeadlineExceeded,
    InvalidPhase,
    PayloadTooLarge,
    StaleCheckpoint,
    Unsupported,
)
from reference_gym.participant.fences import Tombstone
from reference_gym.participant.gate import MAX_BLOCKERS
from reference_gym.participant.phases import Answer, EndedAs, Phase, Where
from reference_gym.participant.restores import Restores
from reference_gym.participant.result import Receipt
from reference_gym.participant.slices import Slices, Steps
from reference_gym.participant.staging import Staging, Upload
from spec.messages import (
    AbortRequest,
    AcksRequest,
    CommitRequest,
    PrepareRequest,
    RenewRequest,
    RestoreRequest,
    ResumeRequest,
    RetireRequest,
    StartRequest,
)
from spec.wire import CheckpointId


class Participant(Restores):
    """A participant of the protocol; see ``Core`` for its arguments and for what an author calls."""

    # --- operations of the checkpoint ---------------------------------------------------------------------------------

    async def prepare(self, caller: Caller, request: PrepareRequest) -> dict[str, Any]:
        """Close the gate; reply when everything is quiescent or the time limit has passed."""
        checkpoint_id = self._checkpoint(caller, request.checkpoint_id)
        deadline = self._deadline(request.timeout_ms)
        await self._admit_verb(caller, deadline)
        lease_ms = self.config.limits.lease_ms(request.lease_ms)
        step = self.machine.prepare(checkpoint_id, request.run_id, lease_ms, self.clock.now())
        self.accept(step)
        with self._serving(checkpoint_id):
            if step.answer is Answer.ACCEPTED:
                failpoints.reach("prepare.closed")
                self._gate_changed()
            while self.machine.phase is Phase.PREPARING and self._is_open(checkpoint_id):
                if not await self.wait_move(deadline):
                    break
            self._require_open(checkpoint_id, EndedAs.COMMITTED)
            return self._readiness()

    async def commit(self, caller: Caller, request: CommitRequest) -> dict[str, Any]:
        """Capture the cut and write it; reply when it is captured or durable, as asked."""
        checkpoint_id = self._checkpoint(caller, request.checkpoint_id)
        deadline = self._deadline(request.timeout_ms)
        self._require_scheme(request.target.scheme)
        await self._admit_verb(caller, deadline)
        if await self._begin_commit(checkpoint_id, request) is Where.LAST:
            return self._recorded(checkpoint_id)
        with self._serving(checkpoint_id):
            if (commit := self._commit) is None:
                raise StaleCheckpoint(f"checkpoint {checkpoint_id} is over")
            if request.wait == "durable" and commit.written is None:
                await self._outcome(commit.outcome, deadline, checkpoint_id)
            self._require_open(checkpoint_id, EndedAs.COMMITTED)
            return self._committed(commit)

    async def resume(self, caller: Caller, request: ResumeRequest) -> dict[str, Any]:
        """Open the gate after the capture or the restore."""
        checkpoint_id = self._checkpoint(caller, request.checkpoint_id)
        await self._admit_verb(caller, self._deadline(request.timeout_ms))
        self.accept(self.machine.resume(checkpoint_id, self.clock.now()))
        failpoints.reach("resume.opened")
        with self._serving(checkpoint_id):
            return self._ending(checkpoint_id)

    async def abort(self, caller: Caller, request: AbortRequest) -> dict[str, Any]:
        """Open the gate at once; reply when whatever was under way has stopped."""
        checkpoint_id = self._checkpoint(caller, request.checkpoint_id)
        deadline = self._deadline(request.timeout_ms)
        await self._admit_verb(caller, deadline)
        self.accept(self.machine.abort(checkpoint_id, self.clock.now()))
        failpoints.reach("abort.ended")
        while (opened := self.machine.open) is not None and checkpoint_id in (opened.checkpoint_id, opened.then):
            if not await self.wait_move(deadline):
                raise DeadlineExceeded("the gate is open, and the work stops", **self._continues(checkpoint_id))
        failpoints.reach("abort.stopped")
        return self._ending(checkpoint_id)

    async def renew(self, caller: Caller, request: RenewRequest) -> dict[str, Any]:
        """Extend the lease."""
        checkpoint_id = self._checkpoint(caller, request.checkpoint_id)
        await self._admit_verb(caller, self._deadline(self.config.limits.max_wait_ms))
        lease_ms = self.config.limits.lease_ms(request.lease_ms)
        self.accept(self.machine.renew(checkpoint_id, lease_ms, self.clock.now()))
        failpoints.reach("renew.extended")
        return {"lease_remaining_ms": self.machine.lease_remaining_ms(self.clock.now())}

    async def restore(self, caller: Caller, request: RestoreRequest) -> dict[str, Any]:
        """Verify everything, then install; the participant stays paused until resume."""
        checkpoint_id = self._checkpoint(caller, request.checkpoint_id)
        deadline = self._deadline(request.timeout_ms)
        key = await self._compared(request)
        if len(request.rollouts) > self.config.limits.max_live_rollouts:
            raise PayloadTooLarge(f"more rollouts than max_live_rollouts {self.config.limits.max_live_rollouts}")
        if request.source is not None:
            self._require_scheme(request.source.scheme)
        await self._admit_verb(caller, deadline)
        await self._begin_restore(checkpoint_id, request, key, deadline)
        with self._serving(checkpoint_id):
            if self._restorer is not None and self.machine.phase is Phase.RESTORING:
                await self._restore_outcome(self._restorer.outcome, deadline, checkpoint_id)
            self._require_open(checkpoint_id, EndedAs.RESTORED)
            return {"phase": self.machine.phase.value, **self._restored(checkpoint_id)}

    # --- operations on rollouts ---------------------------------------------------------------------------------------

    async def start(self, caller: Caller, request: StartRequest) -> dict[str, Any]:
        """Start a batch of rollouts; an outcome for each."""
        registry = self._rollouts()
        self._require_batch(request.rollouts)
        self._admit(caller)
        self.machine = self.machine.used()
        registry.draining = self.draining
        outcomes = await registry.start(request.rollouts, request.policy)
        return {"outcomes": outcomes}

    async def acks(self, caller: Caller, request: AcksRequest) -> dict[str, Any]:
        """Release results by their receipts; an outcome for each."""
        registry = self._rollouts()
        self._require_batch(request.receipts)
        self._admit(caller)
        self.machine = self.machine.used()
        outcomes, slices = [], Slices()
        for receipt in request.receipts:
            await slices.give_way()
            outcome = registry.acknowledge(Receipt(receipt.rollout_id, receipt.attempt, receipt.digest))
            outcomes.append({"rollout_id": receipt.rollout_id, "attempt": receipt.attempt, "outcome": outcome})
        return {"outcomes": outcomes}

    async def retire(self, caller: Caller, request: RetireRequest) -> dict[str, Any]:
        """Fence attempts, stop and free them; an outcome for each, ``pending`` for what has not stopped in time."""
        self._require_batch(request.rollouts)
        deadline = self._deadline(request.timeout_ms)
        self._admit(caller)
        self.machine = self.machine.used()
        receipts: list[Receipt | None] = []
        steps = Steps()
        while len(receipts) < len(request.rollouts):
            first = len(receipts)
            some = request.rollouts[first : first + steps.next()]
            receipts += [self._retire(fence.rollout_id, fence.through_attempt) for fence in some]
            await asyncio.sleep(0)
        failpoints.reach("retire.fenced")
        slices, stopping = Slices(), list(request.rollouts)
        while stopping:
            if not self._freeing(stopping[-1].rollout_id, stopping[-1].through_attempt):
                stopping.pop()
                await slices.give_way()
            elif not await self.wait_move(deadline):
                break
        failpoints.reach("retire.freed")
        outcomes: list[dict[str, Any]] = []
        for fence, receipt in zip(request.rollouts, receipts, strict=True):
            await slices.give_way()
            outcome: dict[str, Any] = {"rollout_id": fence.rollout_id, "outcome": "retired"}
            if receipt is not None:
                outcome |= {"outcome": "finished", "receipt": receipt.as_json()}
            elif self._freeing(fence.rollout_id, fence.through_attempt):
                outcome["outcome"] = "pending"
            outcomes.append(outcome)
        return {"outcomes": outcomes}

    # --- artifacts ----------------------------------------------------------------------------------------------------

    def artifact(self, checkpoint_id: str, name: str) -> Path:
        """Return the path of a committed or uploaded artifact.

        Raises:
            Unsupported: the feature is not offered (CKPT-ART-012).
            NotFound: there is none.
        """
        return self._staging().find(checkpoint_id, name)

    def begin_upload(self, caller: Caller, checkpoint_id: str, name: str) -> Upload:
        """Begin to receive an artifact.

        Raises:
            InvalidPhase: a checkpoint is open (CKPT-ART-005).
            InsufficientStorage: there is no room for it (CKPT-ERR-031).
        """
        staging = self._staging()
        self._admit(caller)
        self._require_idle()
        try:
            return staging.begin_upload(checkpoint_id, name)
        except OSError as error:
            raise write_error(error) from error

    def take_upload(self, upload: Upload, piece: bytes) -> None:
        """Take the next piece of an artifact.

        Raises:
            InsufficientStorage: there is no room for it (CKPT-ERR-031).
        """
        try:
            upload.write(piece)
        except OSError as error:
            raise write_error(error) from error

    async def finish_upload(self, caller: Caller, upload: Upload) -> None:
        """Make a received artifact appear.

        Raises:
            ArgumentConflict: other bytes are held under its name.
            InsufficientStorage: there is no room for it (CKPT-ERR-031).
        """
        self._admit(caller)
        self._require_idle()
        try:
            await asyncio.to_thread(upload.finish, self._durable)
        except OSError as error:
            raise write_error(error) from error
        failpoints.reach("upload.finished")
        self.machine = self.machine.used()

    def _staging(self) -> Staging:
        if self.staging is None:
            raise Unsupported("the feature artifacts_http is not offered here")
        return self.staging

    def _require_idle(self) -> None:
        opened = self.machine.open
        if opened is not None:
            phase = self.machine.phase.value
            raise InvalidPhase(f"an upload is not possible in phase {phase}", **self._about_open())

    # --- inside: replies ----------------------------------------------------------------------------------------------

    def _readiness(self) -> dict[str, Any]:
        """Return the reply of a prepare."""
        machine, now = self.machine, self.clock.now()
        blockers = self._blockers() if machine.phase is Phase.PREPARING else []
        restarts = self._store.unable.keys() | (self.registry.restarts().keys() if self.registry is not None else set())
        restarts -= self.gate.blocked_rollouts()  # A cut would list these as blocked (CKPT-PREP-012, CKPT-COMMIT-032).
        return {
            "phase": machine.phase.value,
            "ready": machine.phase is not Phase.PREPARING,
            "blockers": blockers[:MAX_BLOCKERS],
            "blocker_count": len(blockers),
            "restart_count": len(restarts),
            "progress": self.progress,
            "wait_ms": machine.wait_ms(now),
            "lease_remaining_ms": machine.lease_remaining_ms(now),
        }

    def _ending(self, checkpoint_id: CheckpointId) -> dict[str, Any]:
        """Return the reply of a resume or an abort."""
        machine = self.machine
        told: dict[str, Any] = {"phase": machine.phase.value, "ended_as": None}
        told["pause_ms"] = machine.pause_ms(self.clock.now())
        if not self._is_open(checkpoint_id):
            last = machine.last
            known = last is not None and last.checkpoint_id == checkpoint_id
            told["ended_as"] = last.ended_as.value if known and last is not None else EndedAs.ABORTED.value
            told["pause_ms"] = last.pause_ms if known and last is not None else 0
        return told

    # --- inside: retire -----------------------------------------------------------------------------------------------

    def _retire(self, rollout_id: str, through: int) -> Receipt | None:
        if self.registry is not None:
            receipt = self.registry.retire(rollout_id, through)
            self.gate.nudge(rollout_id)
            return receipt
        changed = self.fences.raise_to(rollout_id, through)
        record = self._store.get(rollout_id)
        if record is not None and record.attempt <= through:
            self._drop_parts(rollout_id)
            self._store.drop(rollout_id)
            self.fences.bury(rollout_id, Tombstone(through, "retired"))
            changed = True
        if changed:
            self.gate.abandon(rollout_id)
            self.progressed()
        return None

    def _freeing(self, rollout_id: str, through: int) -> bool:
        """Return whether something of the retired attempts still runs."""
        stopping = self.registry is not None and self.registry.stopping(rollout_id)
        return stopping or self.gate.running_of(rollout_id, through)
