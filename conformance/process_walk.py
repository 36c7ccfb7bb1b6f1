# SPDX-License-Identifier: Apache-2.0
"""A walk that ends the Gym's process and starts it again, and works out what may be true then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from conformance import machine_outside as outside
from conformance import model
from conformance.controller import Json, Participant
from conformance.errors import Failed, NotOffered
from conformance.gym import Gym
from conformance.machine_orders import Driver
from conformance.machine_outside import Piece
from conformance.machine_watch import Watch
from conformance.model_rollouts import Rollout, Stand
from conformance.model_values import State
from conformance.target import ProcessTarget

KILLED_AT: Final[Mapping[str, str]] = {
    "start.judge": "start",
    "retire.fence": "retire",
    "prepare.close": "prepare",
    "commit.capture": "commit",
    "commit.write": "commit",
    "commit.manifest": "commit",
    "commit.note": "commit",
    "resume.open": "resume",
    "abort.end": "abort",
    "restore.verify": "restore",
    "restore.build": "restore",
    "restore.install": "restore",
}
"""The fail points at which a walk can be killed, and the operation on whose way each lies."""


class ProcessDriver(Driver):
    """A walk that may end the Gym's process and start it again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.down = False

    @property
    def target(self) -> ProcessTarget:
        """The Gym's process."""
        target = self.case.bench.target
        if not isinstance(target, ProcessTarget):
            raise NotOffered("process control (level 1) is not offered")
        return target

    def look(self) -> None:
        """Read everything, unless a process of the Gym may be gone."""
        if not self.down:
            super().look()

    def settle(self) -> None:
        """Wait for what the outside lets go, unless a process of the Gym may be gone."""
        if not self.down:
            super().settle()

    def killed_at(self, moment: str, act: Callable[[], object]) -> None:
        """Do something during which the Gym gets SIGKILL at a fail point, and start it again on the same data."""
        at_risk = self._at_risk()
        with self.case.failpoint(moment, "kill") as point:
            self.down = True
            try:
                act()
            finally:
                self.down = False
            reached = point.reached
        if reached:
            self.restart(f"kill at {moment}", at_risk=at_risk)
        else:
            self.look()
            self.settle()

    def restart(self, how: str, *, fresh: bool = False, at_risk: Mapping[str, Rollout] | None = None) -> None:
        """End the process, start it on the same data or on none, and work out what may be true then.

        Args:
            how: `term`, or in which way it is killed.
            fresh: on no data.
            at_risk: what was under way when it was killed; None: what is now.
        """
        phases = {watch.name: watch.phase for watch in self.watches.values()}
        self.case.step(f"{how} the process in {phases}, start it {'on no data' if fresh else 'on the same data'}")
        self.visits[f"{self.agent.phase} × {how}{' fresh' if fresh else ''}"] += 1
        before = {name: watch.participant.capabilities["incarnation"] for name, watch in self.watches.items()}
        at_risk = self._at_risk() if at_risk is None else at_risk
        if how == "term":
            self.target.term()
        else:
            self.target.kill()
        self._from_now_on()
        self.target.start(fresh=fresh)
        self.case.wire.reconnect()
        found = Gym.discover(self.case.wire, [endpoint.url for endpoint in self.target.endpoints])
        self.gym.participants = found.participants
        for participant in self.everyone:
            watch = self.watches[participant.name]
            self._reborn(watch, participant, before[participant.name], fresh=fresh)
            watch.states = cut_off(watch.states, at_risk)
            if participant.owns("rollouts") and participant.capabilities["incarnation"] == before[participant.name]:
                self.visits["CKPT-PHASE-018"] += sum(map(cannot_continue, at_risk.values()))
        if lost_sessions([participant.capabilities for participant in self.everyone], before):
            self._give_up_sessions()
        else:
            self.look_after_restart(at_risk)

    def _give_up_sessions(self) -> None:
        """Retire what goes on until its next effect and fails then, as `session_lost`: nobody can say when."""
        self.agent.change(may_fail)
        self.look()
        self.retire({name: piece.attempt for name, piece in self.pieces.items()})
        self.look()

    def _at_risk(self) -> dict[str, Rollout]:
        """Return the rollouts with something that may be under way, or of which no process keeps the state."""
        found = {}
        for name in self.pieces:
            rollout = self.agent.rollout(name)
            if rollout is not None and (rollout.may_block or (rollout.restart_only and rollout.state == "live")):
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
        watch.participant = participant
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

    def look_after_restart(self, at_risk: Mapping[str, Rollout]) -> None:
        """Read everything, and wait until what was under way goes on or has stopped (CKPT-PHASE-015)."""
        for watch in self.watches.values():
            watch.look()
        rows = self._rows()
        for name, rollout in at_risk.items():
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
        state = self.case.row(piece.rollout_id)["state"]
        if state == "restart":
            self.agent.change(lambda state: _uncertain(state, piece.rollout_id))
        # The handler that was there is gone; the one that is there now is one that has come since.
        self.guest(piece, "no" if state in ("restart", "failed") else piece.goal.busy)


def cannot_continue(rollout: Rollout) -> bool:
    """Return whether a rollout that lived when its process was ended has certainly stopped (CKPT-PHASE-018)."""
    return rollout.restart_only and rollout.loose is None


def cut_off(states: frozenset[State], at_risk: Mapping[str, Rollout]) -> frozenset[State]:
    """Return what may be true after a restart: what cannot continue has stopped, what was cut off may have.

    Args:
        states: what may be true but for that.
        at_risk: the rollouts with something under way (CKPT-ENV-013), or that cannot continue (CKPT-PHASE-018).
    """
    for name, rollout in at_risk.items():
        stopped = frozenset(_uncertain(state, name) for state in states)
        states = stopped if cannot_continue(rollout) else states | stopped
    return states


def lost_sessions(participants: Sequence[Json], before: Mapping[str, str]) -> bool:
    """Return whether rollouts live on whose sessions were apart and are gone.

    Args:
        participants: the capabilities of all, after a restart.
        before: the incarnations that they had, by name.
    """
    kept = {row["name"] for row in participants if row["incarnation"] == before[row["name"]]}
    owners = {row["name"] for row in participants if "rollouts" in row["owns"]}
    apart = {row["name"] for row in participants if "sessions" in row["owns"]} - owners
    return owners <= kept and not apart <= kept


def may_fail(state: State) -> State:
    """Return ``state`` in which every rollout that goes on may have failed by now."""

    def loosened(_: str, one: Rollout) -> Rollout:
        if one.state != "live" or one.uncertain:
            return one
        return replace(one, loose=Stand((one.loose or one.stand).turns, "no", "failure"))

    return replace(state, rollouts=state.rollouts.each(loosened))


def _uncertain(state: State, rollout_id: str) -> State:
    held = state.rollouts.get(rollout_id)
    if held is None or held.state != "live":
        return state
    stopped = replace(held, stand=Stand(held.stand.turns, "no", "uncertain"), loose=None)
    return replace(state, rollouts=state.rollouts.put(rollout_id, stopped))
