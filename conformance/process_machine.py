# SPDX-License-Identifier: Apache-2.0
"""The second, smaller machine: it owns the Gym's process, and ends, stops and restarts it in every phase."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from conformance import machine_tour
from conformance.case import Bench
from conformance.controller import Json
from conformance.gym import Gym
from conformance.machine_orders import How
from conformance.machine_outside import KINDS
from conformance.process_walk import KILLED_AT, ProcessDriver
from spec.wire import CheckpointId

LONGEST_GRACE_MS = 4_000
"""SIGTERM with an open checkpoint is tried only where `limits.shutdown_grace_ms` is not longer."""

MOST_ENDS = 2
"""How often one example ends the process; each takes up to a second."""


class ProcessMachine(RuleBasedStateMachine):
    """Walks through one Gym whose process it ends and restarts; set `bench` in a subclass."""

    bench: ClassVar[Bench]
    visits: ClassVar[Counter[str]] = Counter()
    bodies: ClassVar[dict[str, Json]] = {}
    numbers: ClassVar[Iterator[int]] = itertools.count(1)

    rollouts = Bundle("rollouts")
    snapshots = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.frozen = 0, False
        self.walk = ProcessDriver(self.bench, 6_000_000 + next(self.numbers), self.visits, self.bodies)

    @initialize(target=rollouts)
    def begin(self) -> Any:
        """Begin with an empty Gym and start one rollout of each kind."""
        self.walk.begin()
        pieces = [self.walk.place(kind) for kind in KINDS.values()]
        self.walk.start([(piece, 0) for piece in pieces])
        return multiple(*(piece.rollout_id for piece in pieces))

    def teardown(self) -> None:
        """Leave a Gym that runs."""
        target = self.walk.target
        target.cont()
        if not target.running:
            target.start()
            self.bench.wire.reconnect()
            found = Gym.discover(self.bench.wire, [endpoint.url for endpoint in target.endpoints])
            self.bench.gym.participants = found.participants
        self.walk.close()

    @rule(rollout=rollouts, steps=st.integers(1, 3))
    def let_go(self, rollout: str, steps: int) -> None:
        """Let a rollout go on."""
        piece = self.walk.pieces[rollout]
        for _ in range(steps):
            if piece.stop is not None and self.walk.agent.gate is not None:
                self.walk.advance(piece)

    @rule(rollout=rollouts)
    def start_again(self, rollout: str) -> None:
        """Start what is gone as its next attempt."""
        piece = self.walk.pieces[rollout]
        if self.walk.agent.rollout(rollout) is None:
            self.walk.start([(piece, piece.attempt + 1)])

    @rule(wait=st.sampled_from(("captured", "durable")))
    def forward(self, wait: Literal["captured", "durable"]) -> None:
        """Do what a controller would do next."""
        self._go_on(wait)

    def _go_on(self, wait: Literal["captured", "durable"]) -> None:
        phase, opened = self.walk.agent.phase, self.walk.agent.open_id()
        if opened is None:
            self.walk.drive("prepare", self._fresh())
        elif phase == "preparing":
            self.walk.drive("abort", opened)
        elif phase == "prepared":
            self.walk.drive("commit", opened, How(wait=wait))
        elif phase is not None:
            self.walk.drive("resume", opened)

    @rule(target=snapshots)
    @precondition(lambda self: self.walk.agent.phase == "idle")
    def take_snapshot(self) -> Any:
        """Take a whole snapshot."""
        before = len(self.walk.snapshots)
        machine_tour.snapshot(self.walk)
        return multiple(*(one.id for one in self.walk.snapshots[before:]))

    @rule(snapshot=snapshots)
    @precondition(lambda self: self.walk.agent.phase == "idle")
    def restore(self, snapshot: CheckpointId) -> None:
        """Restore a snapshot and stay restored."""
        found = next(one for one in self.walk.snapshots if one.id == snapshot)
        self.walk.drive("restore", self.walk.plan(found))

    @rule(fresh=st.sampled_from((False, False, True)))
    @precondition(lambda self: self.ends < MOST_ENDS)
    def kill(self, fresh: bool) -> None:
        """SIGKILL in any phase, then start on the same data or on none (C25)."""
        self.ends += 1
        self.walk.restart("kill", fresh=fresh)

    @rule(moment=st.sampled_from(sorted(KILLED_AT)))
    @precondition(lambda self: self.ends < MOST_ENDS and self.bench.target.level > 1)
    def kill_at(self, moment: str) -> None:
        """SIGKILL between two steps of an operation (level 2), then start on the same data (C40)."""
        act = self._act(KILLED_AT[moment]) if moment in self.bench.target.moments else None
        if act is not None:
            self.ends += 1
            self.walk.killed_at(moment, act)

    def _act(self, operation: str) -> Callable[[], object] | None:
        """Bring the walk to where an operation does its work, and return the call; None: something blocks."""
        walk, opened = self.walk, self.walk.agent.open_id()
        if opened is not None and operation != "retire":
            walk.drive("abort", opened)
        if operation == "start":
            piece = walk.place(KINDS["short"])
            return lambda: walk.start([(piece, 0)])
        if operation == "retire":
            piece = next(iter(walk.pieces.values()))
            return lambda: walk.retire({piece.rollout_id: piece.attempt})
        id = self._fresh()
        if operation == "restore":
            restored = walk.plan(walk.snapshots[-1]) if walk.snapshots else id
            return lambda: walk.drive("restore", restored)
        if operation == "prepare":
            return lambda: walk.drive("prepare", id)
        walk.drive("prepare", id)
        if not walk.certainly("prepared"):
            return None
        if operation == "resume":
            walk.drive("commit", id)
        return lambda: walk.drive(operation, id)

    @rule()
    @precondition(lambda self: self.ends < MOST_ENDS and self._may_term())
    def term(self) -> None:
        """SIGTERM, then start on the same data (C70)."""
        self.ends += 1
        self.walk.restart("term")

    @rule()
    @precondition(lambda self: not self.frozen)
    def freeze(self) -> None:
        """SIGSTOP, a call that waits, SIGCONT: the call is answered as ever (C10)."""
        self.frozen = True
        self.walk.case.step("stop the process, call what a controller would call next, continue it")
        self.walk.target.stop()
        asked = self.bench.wire.background(lambda: self._go_on("durable"))
        self.bench.patience.pause(0.05)
        self.walk.target.cont()
        asked.result(self.bench.patience.seconds(30.0))

    @invariant()
    def looked_at(self) -> None:
        """Status and rollouts are what the model says."""
        self.walk.look()
        self.walk.settle()

    def _may_term(self) -> bool:
        short = self.walk.gym.limit("shutdown_grace_ms") <= LONGEST_GRACE_MS
        return short or self.walk.agent.phase == "idle"

    def _fresh(self) -> CheckpointId:
        id = self.walk.ids("unseen")
        assert id is not None
        return id


__all__ = ["ProcessMachine"]
