# SPDX-License-Identifier: Apache-2.0
"""A participant's state, and its phases by the table of the specification."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from spec import load, wire
from tests.rl.scripted.values import Fault, ProblemError, Received, Run

SPEC = load()


class Machine:
    """What every part of a scripted participant works on."""

    def __init__(self, name: str, owns: tuple[str, ...], stage: int, lease_scale: float = 1.0) -> None:
        self.name, self.owns, self.stage = name, owns, stage
        self.url = ""
        self.peers: list[Any] = []
        self.workers = {"count": 1, "coordinated": True}
        self.profiles = ["results", "checkpoint", "turn-recovery"]
        self.state_version = "1"
        self.versions = ["1.0"]
        self.role = name
        self.features: list[str] = []
        self.limits: dict[str, int] = {}
        self.cursor: str | None = None
        self.cannot: dict[str, str] = {}
        self.watch: Callable[[str], None] = lambda operation: None
        self.hold: dict[str, asyncio.Event] = {}
        self.received: list[Received] = []
        self.gone_404 = False
        self.faults: dict[str, Fault] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.hits: Counter[str] = Counter()
        self.blocked: asyncio.Event | None = None
        self.waits_s = 0.5  # At most, where a call asks it to wait.
        self.hold_write: asyncio.Event | None = None
        self.storage_full = False
        self.page_gate: asyncio.Event | None = None
        self.lease_scale = lease_scale
        self.ack_outcome: str | None = None
        self.new_life()

    def new_life(self) -> None:
        """Lose everything: a new incarnation."""
        self.incarnation = f"i-{uuid4().hex[:8]}"
        self.feed = f"f-{uuid4().hex[:8]}"
        self.phase, self.gate, self.open_id = "idle", "open", None
        self.controller: wire.ControllerPair | None = None
        self.last: dict[str, Any] | None = None
        self.fresh, self.progress, self.captured = True, 0, None
        self.runs: dict[str, Run] = {}
        self.fences: dict[str, int] = {}
        self.released: dict[str, tuple[int, str]] = {}
        self.retired: dict[str, int] = {}
        self.parked: dict[str, Run] = {}
        self.index: list[dict[str, Any]] = []
        self.target: dict[str, Any] = {}
        self.manifest: dict[str, Any] | None = None
        self.moved = asyncio.Event()
        self.lease: asyncio.TimerHandle | None = None
        self.journal: list[str] = []

    def touch(self) -> None:
        """Count progress and wake whoever waits."""
        self.progress += 1
        self.moved.set()
        self.moved = asyncio.Event()

    def _cell(self, operation: str, checkpoint_id: str, **facts: Any) -> Any:
        cid = wire.parse_checkpoint_id(checkpoint_id)
        last = wire.parse_checkpoint_id(self.last["checkpoint_id"]) if self.last else None
        if self.open_id is not None and cid == self.open_id:
            relation = "open"
        elif cid == last:
            relation = "last"
        elif (last is None or cid > last) and (self.open_id is None or cid > self.open_id):
            relation = "unseen"
        else:
            relation = "lower"
        facts |= {"gate": self.gate, "last": self.last["ended_as"] if self.last else "aborted"}
        cell = SPEC.machine.cell(operation, self.phase, relation, **facts)
        if cell.answer == "refused":
            raise ProblemError(cell.error, phase=self.phase, checkpoint_id=self.open_id and str(self.open_id))
        self.fresh = False
        return cell

    def _event(self, event: str) -> None:
        row = SPEC.machine.on(event, self.phase, gate=self.gate)
        if row is not None:
            self.journal.append(event)
            self._apply(row)

    def _apply(self, row: Any, checkpoint_id: str | None = None) -> None:
        if row.state in ("as_before", "installed_discarded") and self.phase == "restored":
            self.runs, self.fences = {}, {**self.fences, **{r.rollout_id: r.attempt for r in self.runs.values()}}
        if row.gate is not None:
            self.gate = row.gate
        if row.ends is not None:
            self.last = {
                "checkpoint_id": checkpoint_id or str(self.open_id),
                "ended_as": row.ends,
                "manifest": self.manifest,
                "error_code": None,
                "pause_ms": 0,
            }
            self.open_id, self.captured = None, None
        self.phase = row.next
        self._arm()
        self.touch_waiters()

    def touch_waiters(self) -> None:
        self.moved.set()
        self.moved = asyncio.Event()

    def _arm(self, lease_ms: int | None = None) -> None:
        if self.lease is not None:
            self.lease.cancel()
            self.lease = None
        if lease_ms is not None:
            self.lease_ms = lease_ms
        if self.open_id is not None and self.gate == "closed":
            delay = self.lease_ms / 1000 * self.lease_scale
            self.lease = asyncio.get_running_loop().call_later(delay, self._event, "lease_end")
