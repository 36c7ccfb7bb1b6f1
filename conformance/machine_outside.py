# SPDX-License-Identifier: Apache-2.0
"""The outside of the machine's rollouts: at which points witness and world keep them, and what lets them go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from conformance.case import Case
from conformance.controller import Json
from conformance.gym import CONFORMANCE, RESTART_ONLY, Gym
from conformance.model_rollouts import Stand, Start
from conformance.script import Script, add, grow, refuse, script, world
from conformance.witness import Hold
from conformance.world import WorldHold


@dataclass(frozen=True)
class Stop:
    """A point at which the outside keeps a rollout: a generation, an effect in the world, or its verification."""

    at: Literal["generation", "effect", "verification"]
    turn: int
    tag: str | None = None


@dataclass(frozen=True)
class Kind:
    """One kind of rollout: its script, and where the outside can keep it."""

    name: str
    script: Script
    environment: str = CONFORMANCE
    verified: bool = False

    @property
    def turns(self) -> int:
        """How many boundaries it has when it ends."""
        return len(self.script.turns)

    @property
    def stops(self) -> tuple[Stop, ...]:
        """Where it can be kept, in order."""
        found = []
        for number, turn in enumerate(self.script.turns, start=1):
            found.append(Stop("generation", number))
            calls = () if isinstance(turn, str) else turn
            found += [Stop("effect", number, str(call.arguments["tag"])) for call in calls if call.name == "world"]
        if self.verified:
            found.append(Stop("verification", self.turns))
        return tuple(found)


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("short", script(add(1), "done")),
        Kind("long", script(add(5), [add(-3), add(2), refuse()], grow(64), add(0), "done")),
        Kind("effects", script([add(1), world("one"), add(2)], [world("two")], "done")),
        Kind("verified", script(add(4), "done"), verified=True),
        Kind("restart", script(add(1), [world("only"), add(2)], "done"), environment=RESTART_ONLY),
    )
}
"""The kinds that the machine starts, by name."""


@dataclass
class Piece:
    """One rollout of the machine, whatever its attempt, and how far the outside has let it go.

    Args:
        item: what it is started with.
        restart_only: whether its agent or its environment is (CKPT-ENV-001).
        let: how many of its stops the outside has let go.
        end: how it ends once all are let go.
        attempt: the highest attempt that was ever used for it.
    """

    rollout_id: str
    kind: Kind
    item: Json
    restart_only: bool = False
    let: int = 0
    end: Literal["success", "failure", "uncertain"] = "success"
    attempt: int = 0
    holds: list[Hold | WorldHold] = field(default_factory=list, repr=False)

    @property
    def stop(self) -> Stop | None:
        """The first stop that is not let go; ``None``: the rollout may end."""
        return self.kind.stops[self.let] if self.let < len(self.kind.stops) else None

    @property
    def goal(self) -> Stand:
        """Where the rollout gets while the gate is open."""
        stop = self.stop
        if self.end == "uncertain":
            return Stand(self.kind.stops[self.let - 1].turn - 1, "no", "uncertain")
        if stop is None:
            return Stand(self.kind.turns, "no", self.end)
        if stop.at == "generation":
            return Stand(stop.turn - 1)
        if stop.at == "effect":
            return Stand(stop.turn - 1, "effect")
        return Stand(stop.turn, "verification")

    @property
    def boundary(self) -> Stand:
        """Where what was kept last ends by itself, should the gate be closed."""
        before, goal = self.kind.stops[self.let - 1], self.goal
        if self.end == "uncertain" or before.at == "verification":
            return goal
        if self.stop is not None and self.stop.turn == before.turn and self.stop.at == "effect":
            return goal
        return Stand(before.turn)

    def start(self, attempt: int, policy: str, *, digest: str | None = None) -> Start:
        """Return the model's item of a start of this rollout."""
        return Start(self.rollout_id, attempt, digest or self.item["task_digest"], policy, self.restart_only)


def placed(case: Case, kind: Kind) -> Piece:
    """Return a fresh rollout of a kind, kept at each of its stops; it is not started yet."""
    rollout_id = case.new_id()
    item = case.item(rollout_id, environment=kind.environment, verify_in_world=kind.verified)
    piece = Piece(rollout_id, kind, item, _restart_only(case.gym, kind))
    case.witness.script(rollout_id, kind.script)
    for stop in kind.stops:
        if stop.at == "generation":
            piece.holds.append(case.witness.hold(rollout_id, stop.turn))
        elif stop.at == "effect":
            piece.holds.append(case.world.hold(stop.tag, rollout_id=rollout_id))
        else:
            piece.holds.append(case.world.hold(rollout_id=rollout_id, kind="verify"))
    return piece


def _restart_only(gym: Gym, kind: Kind) -> bool:
    agents = {row["continuation"] for row in gym.agent.capabilities["agents"]}
    return gym.environments()[kind.environment] == "restart_only" or agents == {"restart_only"}


def let_go(case: Case, piece: Piece, *, failing: bool = False) -> None:
    """Let a rollout go past its next stop; ``failing``: what is kept there fails."""
    stop = piece.stop
    assert stop is not None, f"{piece.rollout_id} is kept nowhere"
    if failing and stop.at == "effect":
        case.world.fail(stop.tag, rollout_id=piece.rollout_id)
        piece.end = "uncertain"
    elif failing and stop.at == "verification":
        case.world.fail(rollout_id=piece.rollout_id, kind="verify")
        piece.end = "failure"
    piece.let += 1
    piece.holds[piece.let - 1].release()


def arrived(case: Case, piece: Piece, attempt: int) -> bool:
    """Return whether the outside sees an attempt where it is kept next (not: whether it has ended)."""
    stop = piece.stop
    assert stop is not None
    if stop.at == "generation":
        return case.witness.asked(piece.rollout_id, stop.turn, attempt=attempt) > 0
    kind: Literal["effect", "verify"] = "effect" if stop.at == "effect" else "verify"
    calls = case.world.calls(stop.tag, rollout_id=piece.rollout_id, kind=kind, state="begun")
    return any(call.attempt == attempt for call in calls)
