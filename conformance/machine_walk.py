# SPDX-License-Identifier: Apache-2.0
"""One walk through a Gym: rollouts that the outside keeps and lets go, and what may be true of every participant.

A `Walk` is what the rules of the machine act on. It holds no randomness: the same actions make the same calls.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import MappingProxyType

from conformance import case, model, model_looks
from conformance import machine_outside as outside
from conformance.case import Bench, Case
from conformance.controller import Controller, Json, Participant
from conformance.errors import Failed, TimedOut
from conformance.machine_outside import Kind, Piece
from conformance.machine_watch import Watch
from conformance.model_rollouts import Busy, Receipt, Rollout
from conformance.model_values import Last, State
from spec import wire as names
from spec.wire import CheckpointId, ControllerPair

ARRIVES_WITHIN_S = 10.0
LEASE_SLACK_S = 4.0


class Walk:
    """The rollouts of one walk and what may be true of every participant.

    Args:
        bench: what the run shares.
        number: makes the namespace.
        visits: counts the cells of the phase table that were tried.
        bodies: the body of an uninterrupted rollout, by kind.
    """

    def __init__(self, bench: Bench, number: int, visits: Counter[str], bodies: dict[str, Json]) -> None:
        self.case = Case(bench, "machine", number)
        self.gym = bench.gym
        self.bodies = bodies
        self.controller = Controller("nobody", 1)
        self.pieces: dict[str, Piece] = {}
        self.floors: dict[tuple[str, int], int] = {}
        self.first_generation = 0
        self.visits = visits
        self.watches: dict[str, Watch] = {}

    def begin(self) -> None:
        """Become the controller of the Gym, and begin with nothing in it."""
        self.controller = self.case.new_controller("walk")
        self.reset()

    @property
    def everyone(self) -> list[Participant]:
        """All participants, in ascending order of their stage."""
        return self.gym.participants

    @property
    def agent(self) -> Watch:
        """The watch of the participant that owns rollouts."""
        return self.watches[self.gym.agent.name]

    @property
    def pair(self) -> ControllerPair:
        """The present controller."""
        return ControllerPair.of(self.controller.epoch, self.controller.controller_id)

    def reset(self) -> None:
        """Leave no rollout of anybody, so that the counts of a status start from nothing, and know what is true."""
        id = self.controller.next_id()
        self.case.step(f"reset every participant: restore {id} of source null, resume")
        for participant in self.gym.descending:
            reply = self.controller.restore(participant, id, None)
            self.case.accepted(reply, f"{participant.name} resets", "CKPT-RESTORE-031")
        for participant in self.gym.descending:
            self.case.accepted(self.controller.resume(participant, id), f"{participant.name} resumes")
        last = Last(names.parse_checkpoint_id(id), "restored")
        self.watches = {p.name: self._watch(p, last) for p in self.everyone}
        self.look()

    def _watch(self, participant: Participant, last: Last) -> Watch:
        room = participant.limit("max_live_rollouts") if participant.owns("rollouts") else 2**31
        state = State(last=last, controller=self.pair, runs_effects=participant.owns("sessions"), room=room)
        return Watch(participant, frozenset({state}), self.visits, self.case.step)

    def ids(self, relation: str) -> CheckpointId | None:
        """Return an id of the present epoch that stands in this relation at the owner of rollouts, if there is one."""
        opened, last = self.agent.open_id(), self.agent.last_id()
        if relation == "open":
            return opened
        if relation == "last":
            return last
        if relation == "unseen":
            return names.parse_checkpoint_id(self.controller.next_id())
        known = [id for id in (opened, last) if id is not None]
        lower = CheckpointId(self.controller.epoch, 0)
        return lower if known and lower not in known and lower < max(known) else None

    # --- rollouts ---

    def place(self, kind: Kind) -> Piece:
        """Return a fresh rollout, not started yet."""
        piece = outside.placed(self.case, kind)
        self.pieces[piece.rollout_id] = piece
        self.case.attempts[piece.rollout_id] = 0
        return piece

    def lives(self, piece: Piece) -> bool:
        """Return whether a rollout is certainly live."""
        return bool(self.agent.all(lambda state: _state_of(state, piece) == "live"))

    def advance(self, piece: Piece, *, failing: bool = False) -> None:
        """Let a rollout go past the point where the outside keeps it, and wait until it has moved."""
        stop = piece.stop
        assert stop is not None
        self.case.step(
            f"let {piece.rollout_id} go past {stop.at} of turn {stop.turn}" + (", which fails" if failing else "")
        )
        held = self.agent.rollout(piece.rollout_id)
        outside.let_go(self.case, piece, failing=failing)
        self._tell_outside(piece)
        if self.gates_open:
            self.settle()
        elif held is not None and held.blocks:
            self._to_boundary(piece, held)

    def _tell_outside(self, piece: Piece) -> None:
        goal, boundary = piece.goal, piece.boundary if piece.let else piece.goal
        for watch in self.watches.values():
            watch.change(lambda state: model.let_go(state, piece.rollout_id, goal, boundary))

    def unstick(self, piece: Piece) -> None:
        """Let go what an attempt that is over has left in the world, so that its handler can end."""
        stop = piece.stop
        if stop is not None and stop.at != "generation":
            outside.let_go(self.case, piece)
            self._tell_outside(piece)

    @property
    def gates_open(self) -> bool:
        """Whether the gate of every participant is certainly open."""
        return all(watch.gate == "open" for watch in self.watches.values())

    def settle(self) -> None:
        """While every gate is open: wait until each rollout has got where the outside keeps it."""
        late = any(watch.any(lambda state: state.late is not None) for watch in self.watches.values())
        if late:
            self.look()
        if not self.gates_open:
            return
        try:
            self._settle()
        except TimedOut:
            # A call that was cut off may have come, and closed the gate.
            if late:
                self.look()
            if not late or self.gates_open:
                raise

    def _settle(self) -> None:
        for piece in self.pieces.values():
            rollout = self.agent.rollout(piece.rollout_id)
            if rollout is None or rollout.state != "live":
                continue
            if rollout.loose is not None or not self._asked(piece, rollout):
                self._arrive(piece, rollout)

    def _asked(self, piece: Piece, rollout: Rollout) -> bool:
        return rollout.uncertain or (piece.stop is not None and outside.arrived(self.case, piece, rollout.attempt))

    def _arrive(self, piece: Piece, rollout: Rollout) -> None:
        goal = piece.goal
        if goal.end is None:
            what = f"{piece.rollout_id} reaches {piece.stop} as attempt {rollout.attempt}"
            self._until(lambda: outside.arrived(self.case, piece, rollout.attempt), what, "CKPT-GATE-008")
            self._check_address(piece, rollout)
            self.agent.change(lambda state: _stand(state, piece.rollout_id, replace(rollout, stand=goal, loose=None)))
            self.guest(piece, goal.busy)
        else:
            self._until_ended(piece, rollout)

    def _until_ended(self, piece: Piece, rollout: Rollout) -> None:
        words = {"success": "finished", "failure": "failed", "uncertain": "restart"}
        wanted = words[piece.goal.end or "success"]
        self._until(
            lambda: self.case.row(piece.rollout_id)["state"] == wanted,
            f"{piece.rollout_id} is {wanted}",
            "CKPT-ENV-013" if wanted == "restart" else "CKPT-ROLL-046",
        )
        row = self.case.row(piece.rollout_id)
        self.agent.rows({**self._rows(), piece.rollout_id: row}, self._ours)
        self._recovered(piece)

    def _recovered(self, piece: Piece) -> None:
        """What failed once does not fail again."""
        piece.end = "success"
        self._tell_outside(piece)

    def _to_boundary(self, piece: Piece, held: Rollout) -> None:
        """A turn or verification that was kept ends by itself although the gate is closed."""
        boundary = piece.boundary
        if boundary.end == "uncertain" or (boundary.end is not None and not held.left_out):
            self._until_ended(piece, held)
        elif held.left_out:
            return
        elif boundary.busy != "no":
            self._until(lambda: outside.arrived(self.case, piece, held.attempt), "the turn goes on", "CKPT-GATE-004")
            self.agent.change(lambda state: _stand(state, piece.rollout_id, replace(held, stand=boundary, loose=None)))
            self.guest(piece, boundary.busy)
        else:
            there = boundary.turns
            self._until(
                lambda: self.case.row(piece.rollout_id)["turns_done"] == there,
                f"{piece.rollout_id} runs to its boundary {there}",
                "CKPT-GATE-004",
            )
            self.look()

    def hosted(self, piece: Piece) -> None:
        """A rollout that is started may have a session wherever sessions are owned."""
        for watch in self.watches.values():
            if watch is not self.agent and watch.participant.owns("sessions"):
                watch.change(lambda state: replace(state, sessions=state.sessions | {piece.rollout_id}))

    def guest(self, piece: Piece, busy: Busy) -> None:
        """Note what of a rollout the outside keeps in the participants that own sessions and no rollouts."""
        for watch in self.watches.values():
            if watch is not self.agent and watch.participant.owns("sessions"):

                def hosts(state: State) -> State:
                    rest = {name: kind for name, kind in state.guests.items() if name != piece.rollout_id}
                    guests = rest if busy == "no" else {**rest, piece.rollout_id: busy}
                    return replace(state, guests=MappingProxyType(guests))

                watch.change(hosts)

    def _check_address(self, piece: Piece, rollout: Rollout) -> None:
        """A policy call goes to the address that the rollout has by now (CKPT-ROLL-033, CKPT-RESTORE-035, 036)."""
        stop = piece.stop
        if stop is None or stop.at != "generation":
            return
        asked = self.case.witness.generations(piece.rollout_id, stop.turn, attempt=rollout.attempt)[-1]
        if asked.address != rollout.policy:
            raise Failed(
                f"turn {stop.turn} of {piece.rollout_id} (attempt {rollout.attempt}) calls its policy",
                expected=f"the address {rollout.policy!r}",
                got=f"the address {asked.address!r}",
                requirements=("CKPT-ROLL-033", "CKPT-RESTORE-035"),
            )

    def _until(
        self, condition: Callable[[], object], what: str, *requirements: str, within_s: float = ARRIVES_WITHIN_S
    ) -> None:
        try:
            self.case.patience.until(condition, what, within_s=within_s)
        except TimedOut as error:
            error.requirements = requirements
            raise

    def take_over(self) -> CheckpointId:
        """Become a higher controller that nobody has heard of yet; return the id of its first abort."""
        self.controller = Controller(self.controller.controller_id, self.controller.epoch + 1)
        self.case.step(f"a higher controller appears: epoch {self.controller.epoch}")
        return CheckpointId(self.controller.epoch, 0)

    def wait_for_lease(self, id: CheckpointId, lease_ms: int, ends: Callable[[State], frozenset[State]]) -> None:
        """Stay away until the lease of a checkpoint has ended everywhere."""
        self.case.step(f"stay away for the {lease_ms} ms of the lease of {id}")
        for watch in self.watches.values():
            if watch.any(lambda state: state.open is not None and state.open.id != id):
                continue  # A call that came late may have opened another one.
            status = watch.participant.status
            within = lease_ms / 1000 + LEASE_SLACK_S
            what = f"the lease of {id} ends at {watch.name}"
            self._until(lambda: status()["phase"] == "idle", what, "CKPT-LEASE-009", within_s=within)  # noqa: B023  # called at once
            watch.states = frozenset(after for state in model.unfold(watch.states) for after in ends(state))
        self.look()
        self.settle()

    # --- looks ---

    def _ours(self, rollout_id: str) -> bool:
        return rollout_id in self.pieces

    def _rows(self) -> dict[str, Json]:
        return self.agent.participant.rollouts() if self.pieces else {}

    def look(self) -> None:
        """Read status and rollouts of everybody; what cannot be is a failure."""
        for watch in self.watches.values():
            watch.look()
        if self.pieces:
            rows = self._rows()
            self.agent.rows(rows, self._ours)
            for name, row in rows.items():
                piece = self.pieces.get(name)
                if piece is not None and piece.end != "success" and row["state"] in ("restart", "failed"):
                    self._recovered(piece)
        self.witnessed()

    def witnessed(self) -> None:
        """No finished turn is generated again, and none twice in one attempt (I2)."""
        for piece in self.pieces.values():
            seen: Counter[tuple[int, int]] = Counter()
            for one in self.case.witness.generations(piece.rollout_id):
                if one.attempt is None:
                    raise Failed("a policy call", expected="Gym-Attempt", got="none", requirements=("CKPT-ID-009",))
                if one.number < self.first_generation:
                    continue
                floor = self.floors.get((piece.rollout_id, one.attempt), 0)
                if one.conversation_turn <= floor:
                    raise Failed(
                        f"attempt {one.attempt} of {piece.rollout_id} continues after turn {floor}",
                        expected=f"policy calls for turn {floor + 1} and later",
                        got=f"a policy call for turn {one.conversation_turn}",
                        requirements=("CKPT-INV-002", "CKPT-RESTORE-033"),
                    )
                if one.state == "completed":
                    seen[one.attempt, one.conversation_turn] += 1
            again = [key for key, count in seen.items() if count > 1]
            if again:
                raise Failed(
                    f"{piece.rollout_id} is generated turn by turn",
                    expected="each turn once in an attempt",
                    got=f"(attempt, turn) {again} twice",
                    requirements=("CKPT-INV-002",),
                )

    # --- results ---

    def results(self) -> list[Receipt]:
        """Read the whole feed; what it serves must be able to be, and be what the rollout gives uninterrupted (I8)."""
        self.case.step("read the feed")
        found: list[Receipt] = []
        self.agent.go_on()
        served = {key: entry for key, entry in self.gym.agent.results().items() if self._ours(key)}
        for key, entry in served.items():
            content = json.loads(entry["result"])
            failure = content.get("failure")
            self.agent.served(entry, success=failure is None, terminal=failure is None or failure["terminal"])
            self._judge_content(self.pieces[key], entry, content)
            row = entry["receipt"]
            found.append(Receipt(row["rollout_id"], row["attempt"], row["digest"]))
        missing = self.agent.all(lambda state: _missing(state, served))
        if missing:
            raise Failed(
                "a read of the feed from its beginning",
                expected=f"the results of {', '.join(sorted(missing))} too",
                got=f"the results of {', '.join(sorted(served)) or 'nobody'}",
                requirements=("CKPT-FEED-001",),
            )
        return found

    def _judge_content(self, piece: Piece, entry: Json, content: Json) -> None:
        digest = names.result_digest(entry["result"])
        self.case.equal(digest, entry["receipt"]["digest"], "the digest of a receipt", "CKPT-RESULT-002")
        if "body" in content:
            expected = self.bodies.get(piece.kind.name)
            if expected is not None:
                what = f"the body of {piece.rollout_id} is that of the uninterrupted rollout"
                self.case.equal(expected, content["body"], what, "CKPT-ENV-006", "CKPT-ENV-028")

    def baseline(self, kinds: Iterable[Kind]) -> None:
        """Run a rollout of each kind uninterrupted, and remember its body."""
        for kind in kinds:
            piece = self.place(kind)
            while piece.stop is not None:
                outside.let_go(self.case, piece)
            self.case.outcome(piece.item)
            self.bodies[kind.name] = self.case.body(case.Rollout(piece.rollout_id, 0, piece.item, kind.script))
            del self.pieces[piece.rollout_id]

    def close(self) -> None:
        """Leave the Gym as it was found."""
        self.case.close()


def _state_of(state: State, piece: Piece) -> str | None:
    held = state.rollouts.get(piece.rollout_id)
    return held.state if held is not None else None


def _stand(state: State, rollout_id: str, rollout: Rollout) -> State:
    return replace(state, rollouts=state.rollouts.put(rollout_id, rollout))


def _missing(state: State, served: Iterable[str]) -> frozenset[str]:
    return model_looks.unserved(state.rollouts, served)
