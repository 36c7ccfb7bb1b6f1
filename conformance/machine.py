# SPDX-License-Identifier: Apache-2.0
"""The state machine: Hypothesis walks through a Gym and the model judges every answer.

`CheckpointMachine` is public: subclass it, set `bench`, and add rules of your own. A rule reads the model alone to
decide what it does; what an answer may be is the model's business, too (`conformance.model`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, multiple, precondition, rule

from conformance.errors import Failed
from conformance.machine_base import addresses, checkpoints, operations, receipts, relations, rollouts, snapshots
from conformance.machine_faults import FaultRules
from conformance.machine_items import How
from conformance.machine_outside import KINDS
from conformance.machine_races import RaceRules
from conformance.machine_run import MachineReport, run
from conformance.model import lease_ends
from conformance.model_rollouts import Receipt
from spec import wire as names
from spec.wire import CheckpointId

SHORTEST_LEASE_MS = 1_500
"""A lease is waited for only where `limits.min_lease_ms` lets it be as short as this."""


class CheckpointMachine(FaultRules, RaceRules):
    """Walks through one Gym; every example has a namespace of its own and begins with an empty, idle Gym.

    Set `bench` in a subclass. `visits` counts the cells of the phase table over all examples.
    """

    @initialize()
    def begin(self) -> None:
        """Begin with an empty Gym, and know what an uninterrupted rollout of each kind gives."""
        self.walk.begin()
        if not self.bodies and self.bench.has_world:
            self.walk.baseline(kind for kind in KINDS.values())
            self.walk.reset()

    def teardown(self) -> None:
        """Leave the Gym as it was found."""
        self.walk.close()

    # --- rollouts ---

    @rule(target=rollouts, kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=2), address=addresses)
    def start(self, kinds: list[str], address: str) -> Any:
        """Start a batch of fresh rollouts."""
        pieces = [self.walk.place(KINDS[kind]) for kind in kinds]
        self.walk.start([(piece, 0) for piece in pieces], address=address)
        return multiple(*[piece.rollout_id for piece in pieces])

    @rule(rollout=rollouts, higher=st.integers(-1, 1), other_task=st.booleans(), address=addresses)
    def start_again(self, rollout: str, higher: int, other_task: bool, address: str) -> None:
        """Start a rollout that was started before: the same, a lower or a higher attempt, the same or another task."""
        piece = self.walk.pieces[rollout]
        attempt = max(0, piece.attempt + higher)
        self.walk.start([(piece, attempt)], address=address, other_task=other_task and attempt <= piece.attempt)

    @rule(kind=st.sampled_from(sorted(KINDS)), unfit=st.sampled_from(("invalid", "unknown_environment", "twice")))
    def start_unfit(self, kind: str, unfit: Literal["invalid", "unknown_environment", "twice"]) -> None:
        """Start what cannot be started."""
        piece = self.walk.place(KINDS[kind])
        if unfit == "twice":
            self.walk.start([(piece, 0), (piece, 0)])
        else:
            self.walk.start([(piece, 0)], unfit=unfit)
        del self.walk.pieces[piece.rollout_id]

    @rule(rollout=rollouts, steps=st.integers(1, 8))
    def let_go(self, rollout: str, steps: int) -> None:
        """Let a rollout go on: past its next generation, effect or verification, or several of them."""
        piece = self.walk.pieces[rollout]
        for _ in range(steps):
            if piece.stop is not None and self.walk.agent.gate is not None:
                self.walk.advance(piece)

    @rule(rollout=rollouts)
    def let_fail(self, rollout: str) -> None:
        """Let the effect or verification fail that the outside keeps of a rollout."""
        piece = self.walk.pieces[rollout]
        held = self.walk.agent.rollout(rollout)
        if piece.stop is not None and piece.stop.at != "generation" and held is not None and held.blocks:
            self.walk.advance(piece, failing=True)

    @rule(target=receipts)
    def read_results(self) -> Any:
        """Read the whole feed."""
        return multiple(*self.walk.results())

    @rule(target=receipts, kind=st.sampled_from(("short", "long", "verified")))
    @precondition(lambda self: self.walk.gates_open)
    def finish(self, kind: str) -> Any:
        """Start a rollout, let it go to its end, and read its result."""
        piece = self.walk.place(KINDS[kind])
        self.walk.start([(piece, 0)])
        while piece.stop is not None and self.walk.lives(piece):
            self.walk.advance(piece)
        return multiple(*self.walk.results())

    @rule(some=st.lists(receipts, min_size=1, max_size=3), wrong=st.sampled_from(("no", "no", "digest", "attempt")))
    def ack(self, some: list[Receipt], wrong: str) -> None:
        """ACK receipts; the last of them perhaps with another digest or attempt."""
        if wrong == "digest":
            some[-1] = replace(some[-1], digest=names.bytes_digest(b"wrong"))
        elif wrong == "attempt":
            some[-1] = replace(some[-1], attempt=some[-1].attempt + 1)
        self.walk.ack(some)

    @rule(rollout=rollouts, higher=st.integers(-1, 0))
    def retire(self, rollout: str, higher: int) -> None:
        """Retire a rollout through its present or its previous attempt."""
        piece = self.walk.pieces[rollout]
        self.walk.retire({rollout: max(0, piece.attempt + higher)})

    @rule()
    @precondition(lambda self: not self.retired_unknown)
    def retire_unknown(self) -> None:
        """Retire a rollout that nobody knows: the fence is recorded."""
        self.retired_unknown = True
        piece = self.walk.place(KINDS["short"])
        self.walk.retire({piece.rollout_id: 0})
        self.walk.start([(piece, 0)])
        del self.walk.pieces[piece.rollout_id]

    # --- checkpoints ---

    @rule(target=checkpoints, wait=st.sampled_from(("captured", "durable")), leave_out=st.booleans())
    def forward(self, wait: Literal["captured", "durable"], leave_out: bool) -> Any:
        """Do what a controller would do next."""
        phase, walk = self.walk.agent.phase, self.walk
        opened = walk.agent.open_id()
        if phase == "idle" or opened is None:
            return self.named(walk.ids("unseen"), "prepare", How())
        if phase == "preparing":
            self.named(opened, "prepare", How())
            if leave_out and walk.agent.phase == "preparing":
                self.named(opened, "commit", How(wait=wait, leave_out=True))
        elif phase == "prepared":
            self.named(opened, "commit", How(wait=wait))
        elif phase == "restoring":
            self.named(opened, "restore", How())
        else:
            self.named(opened, "resume", How())
        return multiple()

    @rule(target=snapshots, resume_first=st.booleans(), http=st.sampled_from((False, False, True)))
    @precondition(lambda self: self.walk.agent.phase == "idle")
    def take_snapshot(self, resume_first: bool, http: bool) -> Any:
        """Take a whole snapshot, resuming before or after it is durable, its files shared or fetched."""
        id, before = self.walk.ids("unseen"), len(self.walk.snapshots)
        assert id is not None
        self.named(id, "prepare", How())
        how = How(leave_out=self.walk.agent.phase == "preparing", http=http and self.walk.may_upload())
        if how.leave_out:
            for participant in self.walk.everyone[1:]:
                self.walk.send(participant, "prepare", id, How())
        self.named(id, "commit", replace(how, wait="captured"))
        if resume_first:
            self.named(id, "resume", How())
        self.named(id, "commit", replace(how, wait="durable"))
        if not resume_first:
            self.named(id, "resume", How())
        return multiple(*(snapshot.id for snapshot in self.walk.snapshots[before:]))

    @rule(snapshot=snapshots, policy=st.sampled_from((None, "main", "second")), keep=st.booleans(), part=st.booleans())
    @precondition(lambda self: self.walk.agent.phase == "idle")
    def restore_snapshot(self, snapshot: CheckpointId, policy: str | None, keep: bool, part: bool) -> None:
        """Restore into the living server, whole or in part, perhaps with another policy address."""
        found = next(one for one in self.walk.snapshots if one.id == snapshot)
        only = sorted(self.walk.pieces)[::2] if part else None
        id = self.walk.plan(found, only=only, keep=None if keep else (), policy=policy)
        self.named(id, "restore", How())

    @rule(
        snapshot=snapshots,
        wrong=st.sampled_from(("turns", "attempt", "task", "unknown", "digest", "checkpoint", "used")),
    )
    @precondition(lambda self: self.walk.agent.phase == "idle")
    def restore_wrong(self, snapshot: CheckpointId, wrong: Any) -> None:
        """Restore with lists that disagree with the files, or with attempts that were used: nothing is installed."""
        found = next(one for one in self.walk.snapshots if one.id == snapshot)
        used = wrong == "used"
        id = self.walk.plan(found, wrong=None if used else wrong, used=used)
        # Only the owner of rollouts knows every attempt; the others would install what it refuses.
        self.recent = id
        self.walk.send(self.walk.gym.agent, "restore", id, How())
        if self.walk.agent.phase == "restored":  # There was nothing in the lists that could be wrong.
            self.walk.drive("restore", id)
        self.walk.settle()

    @rule(
        operation=operations, relation=relations, impatient=st.booleans(), other=st.sampled_from((False, False, True))
    )
    def call(self, operation: str, relation: str, impatient: bool, other: bool) -> None:
        """Call anything with the open id, the last, an unseen, a lower one, or the one named most recently."""
        id = self.choose(relation, operation)
        if id is not None and not (operation == "renew" and other):
            self.named(id, operation, How(impatient=impatient, other=other))

    @rule(operation=st.sampled_from(("abort", "prepare", "restore", "resume")))
    def take_over(self, operation: str) -> None:
        """Let a higher controller appear: what was open ends, whatever its first call is."""
        id = self.walk.take_over()
        self.recent = replace(id, sequence=1)
        self.named(id if operation == "abort" else self.recent, operation, How())

    @rule()
    @precondition(lambda self: self.walk.certainly("idle") and not self.waited)
    def let_lease_end(self) -> None:
        """Prepare and stay away: the gate opens by itself (I10)."""
        lease = self.walk.gym.limit("min_lease_ms")
        id = self.walk.ids("unseen")
        if lease <= SHORTEST_LEASE_MS and id is not None:
            self.waited = True
            self.named(id, "prepare", How(lease_ms=lease))
            self.walk.wait_for_lease(id, lease, lease_ends)

    # --- always ---

    @invariant()
    def looked_at(self) -> None:
        """Status and rollouts are what the model says; I1, I2, I4, I9."""
        if not self.blind:
            self.walk.look()
            self.walk.settle()
        self.blind = False


__all__ = ["CheckpointMachine", "Failed", "MachineReport", "run"]
