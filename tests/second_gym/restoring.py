# SPDX-License-Identifier: Apache-2.0
"""Restore: verify, close the gate, wait for handlers, install in one step; stays paused."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from tests.second_gym import cuts
from tests.second_gym.entries import Result, Tombstone, hashed
from tests.second_gym.phases import Checkpoint, Phases, Work, as_id
from tests.second_gym.refusals import Refusal, past_deadline

Json = dict[str, Any]
LOG = logging.getLogger("second_gym")


def comparable(body: Json) -> object:
    """Return what a repeat of a restore is compared by: its lists as sets."""
    lists = {
        name: sorted({json.dumps(entry, sort_keys=True) for entry in body[name]})
        for name in ("rollouts", "results", "fences")
    }
    return {"source": body["source"], "policy": body.get("policy"), **lists}


class Restoring:
    """The operation restore. Wants the lock held.

    Args:
        phases: the phase machine.
        name: the participant's name.
        roots: directories inside which sources lie.
    """

    def __init__(self, phases: Phases, name: str, roots: list[Path]) -> None:
        self.phases = phases
        self.gate = phases.gate
        self.book = phases.book
        self.name = name
        self.roots = roots

    def restore(self, body: Json, arrived: float) -> Json:
        """Replace everything by what the call lists from a cut."""
        phases = self.phases
        relation = phases.judge("restore", body["checkpoint_id"])
        if relation == "last" and phases.last is not None and phases.last.checkpoint is not None:
            return self._reply(phases.last.checkpoint)
        checkpoint = phases.open if relation == "open" else self._accept(body, arrived)
        assert checkpoint is not None
        if not checkpoint.restoring:
            self._judge(body)
            raise phases.invalid_phase()
        if checkpoint.arguments != comparable(body):
            raise phases.refusal("argument_conflict", "This restore was begun with other arguments.")
        work = checkpoint.work
        assert work is not None
        with phases.serving(checkpoint, body["lease_ms"]):
            over = self.gate.wait(
                lambda: work.done or checkpoint.ending is not None, phases.deadline(arrived, body["timeout_ms"])
            )
            if not over and work.waits_for_handlers and time.monotonic() >= work.deadline:
                over = self._fail(checkpoint, work, self._not_ready())
            if not over:
                raise past_deadline()
            if checkpoint.restored is None or checkpoint.ending is not None:
                raise work.error or phases.refusal("stale_checkpoint", "This restore ended while the call waited.")
            return self._reply(checkpoint)

    def _reply(self, checkpoint: Checkpoint) -> Json:
        assert checkpoint.restored is not None
        return {"phase": self.phases.phase, **checkpoint.restored}

    # --- before it is accepted ---

    def _judge(self, body: Json) -> Path | None:
        """Judge what request and participant alone can tell; return the directory of the source."""
        source = None if body["source"] is None else cuts.directory(body["source"]["path"], self.roots)
        late = []
        for listed in body["rollouts"]:
            held = self.book.held(listed["rollout_id"])
            fence = max(self.book.fence(listed["rollout_id"]), listed["attempt"], -1 if held is None else held.attempt)
            if listed["next_attempt"] <= fence:
                late.append({"rollout_id": listed["rollout_id"], "through_attempt": fence})
        if late:
            raise self.phases.refusal("stale_attempt", "A next_attempt is not above its fence.", rollouts=late)
        return source

    def _accept(self, body: Json, arrived: float) -> Checkpoint:
        source = self._judge(body)
        if self.phases.draining:
            raise Refusal("unavailable", "This participant is being stopped.")
        checkpoint = Checkpoint(
            id=as_id(body["checkpoint_id"]),
            run_id=body["run_id"],
            restoring=True,
            arguments=comparable(body),
            lease=self.phases.lease(body["lease_ms"]),
        )
        checkpoint.work = Work(self.phases.deadline(arrived, body["timeout_ms"]))
        self.phases.begin(checkpoint, "restoring")
        threading.Thread(target=self._build, args=(checkpoint, checkpoint.work, body, source), daemon=True).start()
        return checkpoint

    # --- in a thread of its own ---

    def _build(self, checkpoint: Checkpoint, work: Work, body: Json, source: Path | None) -> None:
        cut = cuts.Cut((), (), ())
        results: list[Result] = []
        error: Refusal | None = None
        try:
            if source is not None:
                wanted = body["source"]
                cut = cuts.read(source, wanted, cuts.Heading(body["run_id"], wanted["checkpoint_id"], self.name))
            results = self._listed(body, cut)
        except Refusal as refusal:
            error = refusal
        except Exception as fault:
            LOG.exception("restore %s", body["checkpoint_id"])
            error = Refusal("internal", f"The restore failed ({type(fault).__name__}).")
        with self.gate.lock:
            if error is not None:
                self._fail(checkpoint, work, error)
            elif checkpoint.ending is None:
                self.phases.close_gate(checkpoint, finishing=False)
                work.waits_for_handlers = True
                self.gate.wait(lambda: not self.gate.handlers or self._over(checkpoint, work), work.deadline)
                if not self._over(checkpoint, work) and self.gate.handlers:
                    self._fail(checkpoint, work, self._not_ready())
            if self._over(checkpoint, work):
                if not work.done:
                    self.phases.work_ended(checkpoint, work, None)
                return
            self._install(checkpoint, body, results, dict(cut.tombstones))
            self.phases.work_ended(checkpoint, work, None)

    @staticmethod
    def _over(checkpoint: Checkpoint, work: Work) -> bool:
        return work.done or checkpoint.ending is not None

    def _not_ready(self) -> Refusal:
        blockers = self.book.blockers(handlers_only=True)[:100]
        return self.phases.refusal("not_ready", f"{len(blockers)} handlers are running.", blockers=blockers)

    def _fail(self, checkpoint: Checkpoint, work: Work, error: Refusal) -> bool:
        """End a restore that failed, with everything as it was before."""
        if not self.phases.work_ended(checkpoint, work, error):
            self.phases.end(checkpoint, "failed", error)
        return True

    def _listed(self, body: Json, cut: cuts.Cut) -> list[Result]:
        """Return the results that a restore lists; nothing that it lists to continue can be, here."""
        rows = {(row["rollout_id"], row["attempt"]): row for row in cut.rows}
        receipts = {json.dumps(result.receipt, sort_keys=True): result for result in cut.results}
        wrong = []
        for listed in body["rollouts"]:
            row = rows.get((listed["rollout_id"], listed["attempt"]))
            if row is None or row["state"] != "turn":
                wrong.append({"rollout_id": listed["rollout_id"], "detail": "is not held in state turn"})
        wanted = [json.dumps(receipt, sort_keys=True) for receipt in body["results"]]
        for receipt, key in zip(body["results"], wanted, strict=True):
            if key not in receipts:
                wrong.append({"rollout_id": receipt["rollout_id"], "detail": "the receipt is not held"})
        if wrong:
            raise Refusal("state_mismatch", "The lists and the source disagree.", {"rollouts": wrong})
        if body["rollouts"]:
            raise Refusal("state_incompatible", "No rollout can be continued here.")
        now = time.monotonic()
        found = sorted((receipts[key] for key in set(wanted)), key=lambda result: result.rollout_id)
        return [dataclasses.replace(result, since=now) for result in found]

    def _install(
        self, checkpoint: Checkpoint, body: Json, results: list[Result], tombstones: dict[str, Tombstone]
    ) -> None:
        fences: dict[str, int] = {}
        for fence in body["fences"]:
            key = hashed(fence["rollout_id"])
            fences[key] = max(fence["through_attempt"], fences.get(key, 0))
        numbered = [dataclasses.replace(result, sequence=self.book.next_sequence()) for result in results]
        self.book.install(numbered, tombstones, fences)
        checkpoint.restored = {"restored_count": 0, "restarts": [], "results_count": len(results)}
        self.phases.phase = "restored"
