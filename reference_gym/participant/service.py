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

from reference_gym.participant.artifacts import Target, WriteStopped, confine, find_foreign
from reference_gym.participant.clock import within
from reference_gym.participant.committing import Commit, write_error
from reference_gym.participant.core import Caller, Core
from reference_gym.participant.errors import (
    DeadlineExceeded,
    InvalidPhase,
    NotFound,
    NotReady,
    PayloadTooLarge,
    ProtocolError,
    StaleCheckpoint,
    TargetExists,
    Unavailable,
    Unsupported,
)
from reference_gym.participant.feed import page_text
from reference_gym.participant.fences import Tombstone
from reference_gym.participant.gate import MAX_BLOCKERS
from reference_gym.participant.machine import Answer, EndedAs, Phase, Step, Todo, Where
from reference_gym.participant.records import Cut
from reference_gym.participant.restorer import Restorer
from reference_gym.participant.restoring import compared, require_above_fences, require_single
from reference_gym.participant.result import Receipt
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
from spec.wire import PROTOCOL_VERSION, CheckpointId

__all__ = ["Caller", "Participant"]

_COUNTS = (
    "admitted",
    "live",
    "restart",
    "finished_unreleased",
    "failed_unreleased",
    "released",
    "retired",
    "unmanaged",
)


class Participant(Core):
    """A participant of the protocol; see ``Core`` for its arguments and for what an author calls."""

    # --- reading ------------------------------------------------------------------------------------------------------

    def capabilities(self) -> dict[str, Any]:
        """Return the capabilities.

        Raises:
            NotFound: it owns nothing and is no participant (CKPT-DISC-005).
        """
        config = self.config
        if not self.owns:
            raise NotFound("this server owns nothing and is not a participant")
        schema = config.state_schema
        told: dict[str, Any] = {
            "name": config.name,
            "role": config.role,
            "owns": list(self.owns),
            "incarnation": self.incarnation,
            "implementation": {"name": config.implementation, "version": config.version},
            "protocol_versions": [PROTOCOL_VERSION],
            "profiles": list(config.profiles),
            "features": self.features,
            "state_schema": {"id": schema.id, "version": schema.version, "reads": list(schema.reads)},
            "agents": [{"name": agent.name, "continuation": agent.continuation} for agent in config.agents],
            "environments": [
                {
                    "name": environment.name,
                    "continuation": environment.continuation,
                    "verify": environment.verify,
                    "state_version": environment.state_version,
                }
                for environment in config.environments
            ],
            "storage": self.storage,
            "stage": config.stage,
            "workers": {"count": config.workers, "coordinated": config.coordinated},
            "limits": config.limits.as_json(),
        }
        if config.participants:
            told["participants"] = [{"name": peer.name, "url": peer.url} for peer in config.participants]
        return told

    def status(self) -> dict[str, Any]:
        """Return the status, all of one instant (CKPT-STATUS-027)."""
        machine, now = self.machine, self.clock.now()
        controller, registry = machine.controller, self.registry
        counts = dict.fromkeys(_COUNTS, 0)
        if registry is not None:
            counts |= registry.counts()
            counts["unmanaged"] = self.unmanaged_count
        told: dict[str, Any] = {
            "phase": machine.phase.value,
            "gate": "open" if machine.gate_open else "closed",
            "checkpoint_id": None if machine.open is None else str(machine.open.checkpoint_id),
            "controller": None if controller is None else {"id": controller.name, "epoch": controller.epoch},
            "lease_remaining_ms": machine.lease_remaining_ms(now),
            "progress": self.progress,
            "fresh": machine.fresh,
            "draining": self.draining,
            "captured": None if machine.open is None else machine.open.captured,
            "counts": counts,
            "last": self._last(),
        }
        if registry is not None:
            told["feed"] = self.feed.id
        return told

    def rollouts_page(self, after: str, limit: int | None, state: str | None) -> bytes:
        """Return one page of the rollouts, encoded."""
        page = self._rollouts().page(after, self._page_items(limit), self.config.limits.max_page_bytes, state)
        return page_text(page.items, {"next": page.next if page.more else None}, "rollouts")

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """Return one rollout.

        Raises:
            NotFound: this incarnation does not know it (CKPT-ROLL-042).
        """
        described = self._rollouts().describe(rollout_id)
        if described is None:
            raise NotFound(f"there is no rollout {rollout_id}")
        return described

    async def results(self, after: str, limit: int | None, wait_ms: int) -> bytes:
        """Return one page of the feed, encoded, waiting for something to serve (CKPT-FEED-009)."""
        self._rollouts()
        deadline = self._deadline(wait_ms)
        while True:
            page = self.feed.page(after, self._page_items(limit), self.config.limits.max_page_bytes)
            if page.items or self.draining or self.clock.now() >= deadline:
                return page_text(page.items, {"feed": self.feed.id, "next": page.next, "more": page.more}, "results")
            waiting = asyncio.ensure_future(self.feed.wait())
            try:
                await within(self.clock, deadline, waiting)
            finally:
                waiting.cancel()

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
                self._opened()
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
        with self._serving(checkpoint_id):
            return self._ending(checkpoint_id)

    async def abort(self, caller: Caller, request: AbortRequest) -> dict[str, Any]:
        """Open the gate at once; reply when whatever was under way has stopped."""
        checkpoint_id = self._checkpoint(caller, request.checkpoint_id)
        deadline = self._deadline(request.timeout_ms)
        await self._admit_verb(caller, deadline)
        self.accept(self.machine.abort(checkpoint_id, self.clock.now()))
        while (opened := self.machine.open) is not None and checkpoint_id in (opened.checkpoint_id, opened.then):
            if not await self.wait_move(deadline):
                raise DeadlineExceeded("the gate is open, and the work stops", **self._continues(checkpoint_id))
        return self._ending(checkpoint_id)

    async def renew(self, caller: Caller, request: RenewRequest) -> dict[str, Any]:
        """Extend the lease."""
        checkpoint_id = self._checkpoint(caller, request.checkpoint_id)
        await self._admit_verb(caller, self._deadline(self.config.limits.max_wait_ms))
        lease_ms = self.config.limits.lease_ms(request.lease_ms)
        self.accept(self.machine.renew(checkpoint_id, lease_ms, self.clock.now()))
        return {"lease_remaining_ms": self.machine.lease_remaining_ms(self.clock.now())}

    async def restore(self, caller: Caller, request: RestoreRequest) -> dict[str, Any]:
        """Verify everything, then install; the participant stays paused until resume."""
        checkpoint_id = self._checkpoint(caller, request.checkpoint_id)
        deadline = self._deadline(request.timeout_ms)
        require_single(request)
        if len(request.rollouts) > self.config.limits.max_live_rollouts:
            raise PayloadTooLarge(f"more rollouts than max_live_rollouts {self.config.limits.max_live_rollouts}")
        if request.source is not None:
            self._require_scheme(request.source.scheme)
        await self._admit_verb(caller, deadline)
        await self._begin_restore(checkpoint_id, request, deadline)
        with self._serving(checkpoint_id):
            if self._restorer is not None and self.machine.phase is Phase.RESTORING:
                await self._outcome(self._restorer.outcome, deadline, checkpoint_id)
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
        return {"outcomes": registry.start(request.rollouts, request.policy)}

    async def acks(self, caller: Caller, request: AcksRequest) -> dict[str, Any]:
        """Release results by their receipts; an outcome for each."""
        registry = self._rollouts()
        self._require_batch(request.receipts)
        self._admit(caller)
        self.machine = self.machine.used()
        outcomes = []
        for receipt in request.receipts:
            outcome = registry.acknowledge(Receipt(receipt.rollout_id, receipt.attempt, receipt.digest))
            outcomes.append({"rollout_id": receipt.rollout_id, "attempt": receipt.attempt, "outcome": outcome})
        return {"outcomes": outcomes}

    async def retire(self, caller: Caller, request: RetireRequest) -> dict[str, Any]:
        """Fence attempts, stop and free them; an outcome for each, ``pending`` for what has not stopped in time."""
        self._require_batch(request.rollouts)
        deadline = self._deadline(request.timeout_ms)
        self._admit(caller)
        self.machine = self.machine.used()
        receipts = [self._retire(fence.rollout_id, fence.through_attempt) for fence in request.rollouts]
        while any(self._freeing(fence.rollout_id, fence.through_attempt) for fence in request.rollouts):
            if not await self.wait_move(deadline):
                break
        outcomes: list[dict[str, Any]] = []
        for fence, receipt in zip(request.rollouts, receipts, strict=True):
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
        """
        staging = self._staging()
        self._admit(caller)
        self._require_idle()
        return staging.begin_upload(checkpoint_id, name)

    async def finish_upload(self, caller: Caller, upload: Upload) -> None:
        """Make a received artifact appear.

        Raises:
            ArgumentConflict: other bytes are held under its name.
        """
        self._admit(caller)
        self._require_idle()
        await asyncio.to_thread(upload.finish, self._durable)
        self.machine = self.machine.used()

    def storage_error(self, error: OSError) -> ProtocolError:
        """Return what a failed write means to the controller."""
        return write_error(error)

    def _staging(self) -> Staging:
        if self.staging is None:
            raise Unsupported("the feature artifacts_http is not offered here")
        return self.staging

    def _require_idle(self) -> None:
        opened = self.machine.open
        if opened is not None:
            phase = self.machine.phase.value
            raise InvalidPhase(f"an upload is not possible in phase {phase}", **self._about_open())

    # --- inside: commit -----------------------------------------------------------------------------------------------

    async def _begin_commit(self, checkpoint_id: CheckpointId, request: CommitRequest) -> Where:
        """Judge a commit; capture and begin to write if it is the one that does. Return where its id stands."""
        left_out = bool(request.leave_out_blocked)
        key = (request.target, left_out)

        def judge() -> Step:
            return self.machine.commit(checkpoint_id, key, self.clock.now(), leave_out_blocked=left_out)

        try:
            step = judge()
            if step.answer is Answer.ACCEPTED:
                directory = await self._directory(request)
                target = self._commit.target if self._commit is not None else Target(directory)
                foreign = await asyncio.to_thread(find_foreign, target)
                step = judge()  # Again: while the directory was looked at, another call may have come first.
                if step.todo is not None and not left_out:
                    self._require_recordable()
                if foreign is not None and step.answer is Answer.ACCEPTED:
                    raise TargetExists(f"the target directory is not empty: it holds {foreign!r}")
        except (InvalidPhase, NotReady) as refusal:
            await self._directory(request)  # Arguments are judged before the phase (CKPT-ORDER-001).
            if isinstance(refusal, NotReady):
                raise NotReady(refusal.detail, **refusal.extra, blockers=self._blockers()[:MAX_BLOCKERS]) from None
            raise
        if step.answer is Answer.ACCEPTED:
            opened = self.machine.open
            if step.todo is not None and opened is not None:
                cut = self._capture(without_blocked=step.todo is Todo.CAPTURE_WITHOUT_BLOCKED)
                self._commit = Commit(str(checkpoint_id), opened.run_id, cut, target)
            self.accept(step)
            self._begin_writing()
        elif self.machine.where(checkpoint_id) is Where.OPEN:
            self.accept(step)
        return self.machine.where(checkpoint_id)

    def _require_recordable(self) -> None:
        """Refuse a cut that would hold a record beyond the limit (CKPT-COMMIT-051 to CKPT-COMMIT-053).

        Raises:
            PayloadTooLarge: naming the limit and every such rollout.
        """
        others = self.registry.restarts() if self.registry is not None else {}
        large = (key for key, reason in self._store.unable.items() if reason == "record_too_large")
        named = sorted(key for key in large if key not in others)
        if named:
            limit = f"max_record_bytes {self.config.limits.max_record_bytes}"
            text = f"the record of {named[0]} is longer than {limit} ({len(named)} in all)"
            raise PayloadTooLarge(text, **self._about_open(), rollouts=[{"rollout_id": key} for key in named])

    async def _directory(self, request: CommitRequest) -> Path:
        """Return the directory of a commit's target.

        Raises:
            ForbiddenTarget: it is not inside a root.
        """
        if request.target.scheme == "file":
            return await asyncio.to_thread(confine, request.target.path, self.config.storage_roots)
        if self.staging is None:
            raise NotFound("there is no staging directory")
        return self.staging.new_cut(request.checkpoint_id)

    def _capture(self, *, without_blocked: bool) -> Cut:
        """Capture the cut, by reference, at this instant (CKPT-COMMIT-002)."""
        records, restarts = self._store.cut()
        found = dict(restarts)
        if without_blocked:
            found |= {rollout_id: "blocked" for rollout_id in self.gate.blocked_rollouts() if rollout_id in records}
        if self.registry is not None:
            found |= self.registry.restarts()
        return Cut(records, found, self.feed.all(), self.fences.tombstones())

    def _begin_writing(self) -> None:
        commit = self._commit
        if commit is None:
            raise RuntimeError("there is no capture to write")
        commit.renew()
        task = asyncio.get_running_loop().create_task(self._write(commit), name=f"commit {commit.checkpoint_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, commit: Commit) -> None:
        """Write the cut, and let the machine know how it ended."""
        error: ProtocolError | None = None
        try:
            commit.written = await self._writer.write(commit)
        except WriteStopped:
            error = StaleCheckpoint(f"checkpoint {commit.checkpoint_id} has ended")
        except ProtocolError as failure:
            error = failure
        now, opened = self.clock.now(), self.machine.open
        if opened is not None and opened.ending is not None:
            commit.written = None
            self.move(Step(self.machine.stopped(now)))
        elif error is not None:
            self.move(Step(self.machine.write_failed(error.code, now)))
            commit.outcome.set_exception(error)
        elif commit.written is not None:
            outcome = self._cut_reply(commit)
            self.move(Step(self.machine.durable(commit.written.manifest, outcome, now)))
            commit.outcome.set_result(commit.written)

    def _cut_reply(self, commit: Commit) -> dict[str, Any]:
        written = commit.written
        return {
            "captured": True,
            "durable": written is not None,
            "manifest": None if written is None else written.manifest,
            "index": None if written is None else written.index,
            "counts": {
                **commit.cut.counts,
                "files": 0 if written is None else written.files,
                "bytes": 0 if written is None else written.bytes,
            },
        }

    def _committed(self, commit: Commit) -> dict[str, Any]:
        machine = self.machine
        pause_ms = machine.pause_ms(self.clock.now())
        if machine.open is None and machine.last is not None:
            pause_ms = machine.last.pause_ms
        return {"phase": machine.phase.value, **self._cut_reply(commit), "pause_ms": pause_ms}

    def _recorded(self, checkpoint_id: CheckpointId) -> dict[str, Any]:
        """Return the recorded reply of a commit that ended well."""
        last = self.machine.last
        if last is None or last.checkpoint_id != checkpoint_id or last.outcome is None:
            raise StaleCheckpoint(f"checkpoint {checkpoint_id} is over")
        return {"phase": self.machine.phase.value, **last.outcome, "pause_ms": last.pause_ms}

    # --- inside: restore ----------------------------------------------------------------------------------------------

    async def _begin_restore(self, checkpoint_id: CheckpointId, request: RestoreRequest, deadline: float) -> None:
        """Judge a restore, and begin it if it is the one that does."""
        key = compared(request)
        lease_ms = self.config.limits.lease_ms(request.lease_ms)

        def judge() -> Step:
            return self.machine.restore(checkpoint_id, request.run_id, key, lease_ms, self.clock.now())

        directory: Path | None = None
        try:
            step = judge()
            if step.answer is Answer.ACCEPTED:
                directory = await self._source(request)
                step = judge()  # Again: while the source was looked for, another call may have come first.
        except InvalidPhase:
            await self._source(request)  # Arguments are judged before the phase (CKPT-ORDER-001).
            raise
        if step.answer is Answer.ACCEPTED:
            require_above_fences(request, self.highest)
            if self.draining:
                raise Unavailable("the participant is draining")
            self.accept(step)
            self._opened()
            self._restorer = Restorer(self, request, directory, deadline)
        elif self._is_open(checkpoint_id):
            self.accept(step)

    async def _source(self, request: RestoreRequest) -> Path | None:
        source = request.source
        if source is None:
            return None
        if source.scheme == "file":
            return await asyncio.to_thread(confine, source.path, self.config.storage_roots)
        return None if self.staging is None else self.staging.uploaded(source.checkpoint_id)

    def _restored(self, checkpoint_id: CheckpointId) -> dict[str, Any]:
        """Return the recorded outcome of a restore."""
        for known in (self.machine.open, self.machine.last):
            if known is not None and known.checkpoint_id == checkpoint_id and known.outcome is not None:
                return dict(known.outcome)
        raise StaleCheckpoint(f"checkpoint {checkpoint_id} is over")

    # --- inside: replies ----------------------------------------------------------------------------------------------

    def _blockers(self) -> list[dict[str, object]]:
        return [blocker.as_json() for blocker in self.gate.blockers()]

    def _readiness(self) -> dict[str, Any]:
        """Return the reply of a prepare."""
        machine, now = self.machine, self.clock.now()
        blockers = self._blockers() if machine.phase is Phase.PREPARING else []
        restarts = self._store.unable.keys() | (self.registry.restarts().keys() if self.registry is not None else set())
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

    def _last(self) -> dict[str, Any] | None:
        last = self.machine.last
        if last is None:
            return None
        return {
            "checkpoint_id": str(last.checkpoint_id),
            "ended_as": last.ended_as.value,
            "manifest": last.manifest,
            "error_code": last.error_code,
            "pause_ms": last.pause_ms,
        }

    def _opened(self) -> None:
        """Another id has opened: committed artifacts need not be kept any longer (CKPT-ART-002)."""
        if self.staging is not None:
            self.staging.forget_cuts()

    # --- inside: retire -----------------------------------------------------------------------------------------------

    def _retire(self, rollout_id: str, through: int) -> Receipt | None:
        if self.registry is not None:
            receipt = self.registry.retire(rollout_id, through)
            self.gate.nudge()
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
