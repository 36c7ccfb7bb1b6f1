# SPDX-License-Identifier: Apache-2.0
"""Taking a cut: prepare, commit, resume; and the calls that work for every checkpoint: abort and renew."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.second_gym import cuts
from tests.second_gym.gate import milliseconds
from tests.second_gym.phases import Checkpoint, Last, Phases, Work, as_id, as_text
from tests.second_gym.refusals import Refusal, past_deadline

Json = dict[str, Any]
LOG = logging.getLogger("second_gym")


class Saving:
    """The operations of a checkpoint that prepare opened. Each wants the lock held.

    Args:
        phases: the phase machine.
        name: the participant's name.
        roots: directories inside which targets lie.
    """

    def __init__(self, phases: Phases, name: str, roots: list[Path]) -> None:
        self.phases = phases
        self.gate = phases.gate
        self.book = phases.book
        self.name = name
        self.roots = roots

    def prepare(self, body: Json, arrived: float) -> Json:
        """Close the gate and wait until everything stands still, or say what blocks."""
        phases = self.phases
        if phases.judge("prepare", body["checkpoint_id"]) == "open":
            checkpoint = phases.open
            assert checkpoint is not None
            if not checkpoint.restoring and checkpoint.run_id != body["run_id"]:
                raise phases.refusal("argument_conflict", "This checkpoint was prepared for another run.")
            if checkpoint.restoring or self.gate.open:
                raise phases.invalid_phase()
        else:
            checkpoint = Checkpoint(
                id=as_id(body["checkpoint_id"]),
                run_id=body["run_id"],
                restoring=False,
                arguments=None,
                lease=phases.lease(body["lease_ms"]),
            )
            phases.begin(checkpoint, "preparing")
            phases.close_gate(checkpoint, finishing=True)
        with phases.serving(checkpoint, body["lease_ms"]):

            def decided() -> bool:
                phases.settle()
                return checkpoint.over or checkpoint.prepared_after is not None

            self.gate.wait(decided, phases.deadline(arrived, body["timeout_ms"]))
            if checkpoint.over or checkpoint.ending is not None:
                raise phases.refusal("stale_checkpoint", "This checkpoint ended while the call waited.")
            ready = checkpoint.prepared_after is not None
            blockers = [] if ready else self.book.blockers()
            still = time.monotonic() - (checkpoint.closed_at or 0.0)
            reasons = [cuts.reason(rollout) for rollout in self.book.live()]
            return {
                "phase": phases.phase,
                "ready": ready,
                "blockers": blockers[:100],
                "blocker_count": len(blockers),
                "restart_count": sum(reason != "blocked" for reason in reasons),
                "progress": self.book.progress,
                "wait_ms": milliseconds(still if checkpoint.prepared_after is None else checkpoint.prepared_after),
                "lease_remaining_ms": checkpoint.remaining_ms(),
            }

    def commit(self, body: Json, arrived: float) -> Json:
        """Capture the cut and have it written; wait for what the call asks for."""
        phases = self.phases
        arguments = (body["target"], body.get("leave_out_blocked", False))
        if phases.judge("commit", body["checkpoint_id"]) == "last":
            assert phases.last is not None and phases.last.checkpoint is not None
            return self._committed(phases.last.checkpoint)
        checkpoint = phases.open
        assert checkpoint is not None
        if checkpoint.committed_with not in (None, arguments):
            raise phases.refusal("argument_conflict", "This checkpoint was committed with other arguments.")
        if phases.phase in ("preparing", "prepared", "restoring", "restored"):
            target = cuts.directory(body["target"]["path"], self.roots)
            if phases.phase in ("preparing", "prepared"):
                cuts.must_be_empty(target)
            if checkpoint.restoring:
                raise phases.invalid_phase()
            if phases.phase == "preparing" and not arguments[1]:
                blockers = self.book.blockers()[:100]
                raise phases.refusal("not_ready", f"{len(blockers)} pieces of work are under way.", blockers=blockers)
            self._begin_writing(checkpoint, target, arguments)
        work = checkpoint.work
        with phases.serving(checkpoint):
            if body["wait"] == "durable" and work is not None:
                deadline = phases.deadline(arrived, body["timeout_ms"])
                if not self.gate.wait(lambda: work.done or checkpoint.ending is not None, deadline):
                    raise past_deadline()
                if checkpoint.written is None or checkpoint.ending is not None:
                    raise work.error or phases.refusal("stale_checkpoint", "This checkpoint ended meanwhile.")
            return self._committed(checkpoint)

    def _committed(self, checkpoint: Checkpoint) -> Json:
        cut, written = checkpoint.cut, checkpoint.written
        assert cut is not None
        return {
            "phase": self.phases.phase,
            "captured": True,
            "durable": written is not None,
            "manifest": None if written is None else written.manifest,
            "index": None if written is None else written.index,
            "counts": {
                **{state: cut.count(state) for state in ("turn", "finished", "restart")},
                "files": 0 if written is None else written.files,
                "bytes": 0 if written is None else written.size,
            },
            "pause_ms": checkpoint.pause_ms,
        }

    def _begin_writing(self, checkpoint: Checkpoint, target: Path, arguments: object) -> None:
        """Capture, unless a failed writing has left a capture, and start the writer."""
        if checkpoint.cut is None:
            checkpoint.cut = cuts.capture(self.book)
        if checkpoint.prepared_after is None and checkpoint.closed_at is not None:
            checkpoint.prepared_after = time.monotonic() - checkpoint.closed_at  # without what it leaves out
        checkpoint.committed_with = arguments
        checkpoint.work = Work(time.monotonic() + self.phases.limits["max_write_ms"] / 1000)
        self.phases.phase, self.gate.finishing = "committing", False
        heading = cuts.Heading(checkpoint.run_id, as_text(checkpoint.id), self.name)
        threading.Thread(
            target=self._write, args=(checkpoint, checkpoint.work, checkpoint.cut, target, heading), daemon=True
        ).start()

    def _write(self, checkpoint: Checkpoint, work: Work, cut: cuts.Cut, target: Path, heading: cuts.Heading) -> None:
        """Write a cut; what the writer's thread does."""
        error: Refusal | None = None
        written = None

        def publish(appear: Callable[[], None]) -> None:
            with self.gate.lock:
                if checkpoint.ending is not None:
                    raise cuts.Stopped
                if time.monotonic() > work.deadline:
                    raise Refusal("deadline_exceeded", "The writing took longer than max_write_ms.")
                appear()

        try:
            written = cuts.write(target, heading, cut, publish)
        except Refusal as refusal:
            error = refusal
        except cuts.Stopped:
            pass
        except Exception as fault:
            LOG.exception("writing %s", heading.checkpoint_id)
            error = Refusal("internal", f"The writer failed ({type(fault).__name__}).")
        with self.gate.lock:
            if self.phases.work_ended(checkpoint, work, error):
                return
            if written is not None:
                checkpoint.written = written
                self.phases.became_durable = True
                if self.gate.open:
                    self.phases.end(checkpoint, "committed")
                else:
                    self.phases.phase = "committed"
            elif self.gate.open:
                self.phases.end(checkpoint, "failed", error)
            else:
                self.phases.phase = "prepared"
            self.gate.lock.notify_all()

    def resume(self, body: Json, _: float) -> Json:
        """Open the gate after a capture or a restore."""
        phases = self.phases
        if phases.judge("resume", body["checkpoint_id"]) == "last":
            return self._ended()
        checkpoint = phases.open
        assert checkpoint is not None
        if phases.phase in ("preparing", "prepared", "restoring"):
            raise phases.invalid_phase()
        with phases.serving(checkpoint):
            if phases.phase != "committing":
                phases.end(checkpoint, "committed" if phases.phase == "committed" else "restored")
                return self._ended()
            phases.open_gate(checkpoint)
        return {"phase": phases.phase, "ended_as": None, "pause_ms": checkpoint.pause_ms}

    def abort(self, body: Json, arrived: float) -> Json:
        """Open the gate and end the open checkpoint; this id can never be published."""
        phases = self.phases
        relation = phases.judge("abort", body["checkpoint_id"])
        identity = as_id(body["checkpoint_id"])
        phases.fresh = False
        if phases.open is not None:
            checkpoint = phases.cancel("aborted", identity)
            if not self.gate.wait(lambda: checkpoint.over, phases.deadline(arrived, body["timeout_ms"])):
                raise past_deadline()
            ended_as = "aborted" if checkpoint.recorded_id != checkpoint.id else checkpoint.ending
            return {"phase": phases.phase, "ended_as": ended_as, "pause_ms": checkpoint.pause_ms}
        if relation == "unseen":
            phases.last = Last(identity, "aborted")
        return self._ended()

    def _ended(self) -> Json:
        last = self.phases.last
        assert last is not None
        return {"phase": self.phases.phase, "ended_as": last.ended_as, "pause_ms": last.pause_ms}

    def renew(self, body: Json, _: float) -> Json:
        """Extend the lease."""
        self.phases.judge("renew", body["checkpoint_id"])
        checkpoint = self.phases.open
        assert checkpoint is not None
        with self.phases.serving(checkpoint, body["lease_ms"]):
            pass
        return {"lease_remaining_ms": checkpoint.remaining_ms()}
