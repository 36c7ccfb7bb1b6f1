# SPDX-License-Identifier: Apache-2.0
"""The second, smaller machine: it owns the Gym's process, and ends, stops and restarts it in every phase."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from conformance import machine_outside as outside
from conformance import machine_tour, model
from conformance.case import Bench
from conformance.controller import Json, Participant
from conformance.errors import Failed, NotOffered
from conformance.gym import Gym
from conformance.machine_orders import Driver, How
from conformance.machine_outside import KINDS, Piece
from conformance.machine_watch import Reader, Watch
from conformance.model_rollouts import Rollout, Stand
from conformance.model_values import State
from conformance.target import ProcessTarget
from spec.wire import CheckpointId

LONGEST_GRACE_MS = 4_000
"""SIGTERM with an open checkpoint is tried only where `limits.shutdown_grace_ms` is not longer."""

MOST_ENDS = 2
"""How often one example ends the process; each takes up to a second."""

End = Literal["kill", "term"]


class ProcessDriver(Driver):
    """A walk that may end the Gym's process and start it again."""

    @property
    def target(self) -> ProcessTarget:
        """The Gym's process."""
        target = self.case.bench.target
        if not isinstance(target, ProcessTarget):
            raise NotOffered("process control (level 1) is not offered")
        return target

    def restart(self, how: End, *, fresh: bool = False) -> None:
        """End the process, start it on the same data or on none, and work out what may be true then."""
        phases = {watch.name: watch.phase for watch in self.watches.values()}
        self.case.step(f"{how} the process in {phases}, start it {'on no data' if fresh else 'on the same data'}")
        self.visits[f"{self.agent.phase} × {how}{' fresh' if fresh else ''}"] += 1
        before = {name: watch.participant.capabilities["incarnation"] for name, watch in self.watches.items()}
        busy = self._busy()
        if how == "kill":
            self.target.kill()
        else:
            self.target.term()
        self._from_now_on()
        self.target.start(fresh=fresh)
        self.case.wire.reconnect()
        found = Gym.discover(self.case.wire, [endpoint.url for endpoint in self.target.endpoints])
        self.gym.participants = found.participants
        for participant in self.everyone:
            self._reborn(self.watches[participant.name], participant, before[participant.name], fresh=fresh)
        self.look_after_restart(busy)

    def _busy(self) -> dict[str, Rollout]:
        """Return the rollouts with an effect that may be under way."""
        found = {}
        for name in self.pieces:
            rollout = self.agent.rollout(name)
            if rollout is not None and rollout.may_block:
                found[name] = rollout
        return found

    def _from_now_on(self) -> None:
        """A turn that had no boundary may be generated again by the same attempt, one that had must not."""
        made = self.case.witness.generations()
        self.first_generation = made[-1].number + 1 if made else 0
        for name in self.pieces:
            rollout = self.agent.rollout(name)
            if rollout is not None and rollout.state == "live":
                self.floors[name, rollout.attempt] = rollout.stand.turns

    def _reborn(self, watch: Watch, participant: Participant, incarnation: str, *, fresh: bool) -> None:
        watch.participant, watch.reader = participant, Reader(participant)
        kept = participant.capabilities["incarnation"] == incarnation
        self.case.step(f"{participant.name} has {'kept its' if kept else 'a new'} incarnation")
        if kept and fresh:
            raise Failed(
                f"{participant.name} starts on no data",
                expected="a new incarnation",
                got=f"the incarnation {incarnation} again",
                requirements=("CKPT-ID-020",),
            )
        possible = model.unfold(watch.states)
        if kept:
            ways = (model.restarts(one, manifest_complete=done) for one in possible for done in (False, True))
            watch.states = frozenset(state for way in ways for state in way)
        else:
            watch.states = frozenset(model.loses_everything(state) for state in possible)
            watch.forget_progress()
            watch.feed_rule, watch.feed = "any", None

    def look_after_restart(self, busy: dict[str, Rollout]) -> None:
        """Read everything; an effect that was under way may have made its rollout uncertain (CKPT-ENV-013)."""
        for watch in self.watches.values():
            watch.look()
        rows = self._rows()
        for name, rollout in busy.items():
            piece = self.pieces[name]
            if name in rows and self.lives(piece):
                self._wait_for_fate(piece, rollout)
        self.look()
        self.settle()

    def _wait_for_fate(self, piece: Piece, rollout: Rollout) -> None:
        """Wait until a rollout whose effect or verification was cut off has stopped, or is kept there again."""

        def decided() -> bool:
            return self.case.row(piece.rollout_id)["state"] in ("restart", "failed") or (
                piece.stop is not None and outside.arrived(self.case, piece, rollout.attempt)
            )

        self._until(decided, f"{piece.rollout_id} goes on, or stops as uncertain", "CKPT-PHASE-015")
        if self.case.row(piece.rollout_id)["state"] == "restart":
            self.agent.change(lambda state: _uncertain(state, piece.rollout_id))


def _uncertain(state: State, rollout_id: str) -> State:
    held = state.rollouts.get(rollout_id)
    if held is None or held.state != "live":
        return state
    stopped = replace(held, stand=Stand(held.stand.turns, "no", "uncertain"), loose=None)
    return replace(state, rollouts=state.rollouts.put(rollout_id, stopped))


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
        self.walk.case.step("stop the process, ask for its status, continue it")
        self.walk.target.stop()
        asked = self.bench.wire.background(self.walk.gym.agent.status)
        self.bench.patience.pause(0.05)
        self.walk.target.cont()
        asked.result(self.bench.patience.seconds(10.0))

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


__all__ = ["ProcessDriver", "ProcessMachine"]
