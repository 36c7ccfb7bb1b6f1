# SPDX-License-Identifier: Apache-2.0
"""A commit from its judgement to its end: the capture, the writing, and what is told about both."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from reference_gym.participant import failpoints
from reference_gym.participant.artifacts import Target, WriteStopped, find_foreign
from reference_gym.participant.committing import Commit, write_error
from reference_gym.participant.directories import confine
from reference_gym.participant.errors import (
    Internal,
    InvalidPhase,
    NotFound,
    NotReady,
    PayloadTooLarge,
    ProtocolError,
    StaleCheckpoint,
    TargetExists,
)
from reference_gym.participant.gate import MAX_BLOCKERS
from reference_gym.participant.machine import Step
from reference_gym.participant.phases import Answer, Todo, Where
from reference_gym.participant.reads import Reads
from reference_gym.participant.records import Cut
from spec.messages import (
    CommitRequest,
)
from spec.wire import CheckpointId

logger = logging.getLogger(__name__)


class Commits(Reads):
    """What the operation ``commit`` is made of."""

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
                foreign = await asyncio.to_thread(_look, target)
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
            failpoints.reach("commit.captured")
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
            InsufficientStorage: there is no room to stage it.
        """
        if request.target.scheme == "file":
            return await asyncio.to_thread(confine, request.target.path, self.config.storage_roots)
        if self.staging is None:
            raise NotFound("there is no staging directory")
        try:
            return self.staging.new_cut(request.checkpoint_id)
        except OSError as error:
            raise write_error(error) from error

    def _capture(self, *, without_blocked: bool) -> Cut:
        """Capture the cut, by reference, at this instant (CKPT-COMMIT-002)."""
        records, restarts = self._store.cut()
        found = dict(restarts)
        if self.registry is not None:
            found |= self.registry.restarts()
        if without_blocked:  # Last: whatever else it is, a rollout that blocks is listed as blocked (CKPT-COMMIT-032).
            found |= {rollout_id: "blocked" for rollout_id in self.gate.blocked_rollouts() if rollout_id in records}
        self._cuts += 1
        full = self._cuts % self.config.full_copy_every == 0  # Damage to a shared segment damages every cut of it.
        mark = None if full else self.journal.seal()
        return Cut(records, found, self.feed.all(), self.fences.tombstones(), mark)

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
            await self.settled()  # A manifest that is complete must not be one of a cut that the log does not know.
            commit.written = await self._writer.write(commit)
        except WriteStopped:
            error = StaleCheckpoint(f"checkpoint {commit.checkpoint_id} has ended")
        except ProtocolError as failure:
            error = failure
        except Exception as failure:  # Whatever it is: a commit that nobody ends would stay open for ever.
            logger.exception("writing checkpoint %s failed", commit.checkpoint_id)
            error = Internal(f"writing failed with {type(failure).__name__}")
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
            failpoints.reach("commit.durable")

    def _cut_reply(self, commit: Commit) -> dict[str, Any]:
        written = commit.written
        return {
            "captured": True,
            "durable": written is not None,
            "manifest": None if written is None else written.manifest,
            "index": None if written is None else written.index,
            "counts": {
                **commit.counts,
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


def _look(target: Target) -> str | None:
    """Return the name of a foreign entry in the target, or None.

    Raises:
        ProtocolError: the directory cannot be read.
    """
    try:
        return find_foreign(target)
    except OSError as error:
        raise write_error(error) from error
