# SPDX-License-Identifier: Apache-2.0
"""Rules of the machine for what goes wrong: stale and malformed calls, lost ones, targets and disks that fail."""

from __future__ import annotations

from typing import Any, Literal

from hypothesis import strategies as st
from hypothesis.stateful import multiple, precondition, rule

from conformance import machine_malformed as malformed
from conformance import machine_probe as probe
from conformance.machine_base import Machine, operations, relations, rollouts, stale_ways
from conformance.machine_items import How, Stale
from conformance.machine_outside import KINDS
from conformance.model_rollouts import Receipt
from conformance.target import ProcessTarget
from conformance.wire import Fault
from spec import wire as names


class FaultRules(Machine):
    """Rules in which something goes wrong."""

    @rule(target=rollouts, target_kind=st.sampled_from(("forbidden", "taken")))
    @precondition(lambda self: self.walk.agent.phase in ("preparing", "prepared", "committed"))
    def commit_elsewhere(self, target_kind: Literal["forbidden", "taken"]) -> Any:
        """Commit outside of the roots, or into a directory that holds another cut: refused, nothing is written."""
        opened = self.walk.agent.open_id()
        if opened is not None and (target_kind == "forbidden" or self.walk.snapshots):
            self.named(opened, "commit", How(target=target_kind))
        return multiple()

    @rule(operation=operations, relation=relations, way=stale_ways)
    def stale(self, operation: str, relation: str, way: Stale) -> None:
        """Call with a lower controller, another incarnation, or an id of another epoch: refused, nothing changes."""
        id = self.choose(relation, operation)
        if id is not None:
            self.walk.drive(operation, id, How(stale=way))

    @rule(rollout=rollouts, way=st.sampled_from(("controller", "epoch", "incarnation")), what=st.sampled_from("sar"))
    def stale_items(self, rollout: str, way: Stale, what: str) -> None:
        """Start, ACK or retire as a lower controller or for another incarnation: refused as a whole."""
        piece = self.walk.pieces[rollout]
        if what == "s":
            self.walk.start([(piece, piece.attempt)], how=How(stale=way))
        elif what == "a":
            self.walk.ack([Receipt(rollout, piece.attempt, names.bytes_digest(b"any"))], How(stale=way))
        else:
            self.walk.retire({rollout: piece.attempt}, How(stale=way))

    @rule(operation=st.sampled_from(malformed.OPERATIONS), way=st.sampled_from(malformed.WAYS))
    def malformed(self, operation: str, way: str) -> None:
        """Send what is not a request of this protocol: `invalid_request`, nothing changes, nobody is adopted."""
        malformed.send(self.walk, operation, way)

    @rule(operation=operations, relation=relations, reply=st.booleans(), look=st.booleans())
    def lost(self, operation: str, relation: str, reply: bool, look: bool) -> None:
        """Lose a request on its way, or the reply: what is true then is not known until somebody looks."""
        id = self.choose(relation, operation)
        if id is not None:
            fault = Fault.lost_reply() if reply else Fault.lost_request()
            self.recent = id
            self.walk.drive(operation, id, How(), fault)
            self.blind = not look

    @rule(target=rollouts, kind=st.sampled_from(sorted(KINDS)), look=st.booleans())
    def lost_start(self, kind: str, look: bool) -> Any:
        """Lose the reply to a start."""
        piece = self.walk.place(KINDS[kind])
        self.walk.start([(piece, 0)], fault=Fault.lost_reply())
        self.blind = not look
        return piece.rollout_id

    @rule(operation=operations, relation=relations, after_ms=st.sampled_from((0, 10)))
    @precondition(lambda self: not self.cut_off)
    def cut_off_call(self, operation: str, relation: str, after_ms: int) -> None:
        """Send a call whole and reset the connection: it may be executed at any time from then on, or never (C33)."""
        id = self.choose(relation, operation)
        if id is not None and operation != "restore":
            self.cut_off = True
            self.recent = id
            self.walk.drive(operation, id, How(), Fault.disconnect(after_ms))

    @rule(some=rollouts, what=st.sampled_from(("ack", "retire")), look=st.booleans())
    def lost_items(self, some: str, what: str, look: bool) -> None:
        """Lose the reply to an ACK or a retire."""
        piece = self.walk.pieces[some]
        if what == "retire":
            self.walk.retire({some: piece.attempt}, fault=Fault.lost_reply())
        else:
            held = self.walk.agent.rollout(some)
            digest = held.digest if held is not None else None
            wanted = Receipt(some, piece.attempt, digest or names.bytes_digest(b"any"))
            self.walk.ack([wanted], fault=Fault.lost_reply())
        self.blind = not look

    @rule(wait=st.sampled_from(("captured", "durable")), resume_first=st.booleans())
    @precondition(lambda self: "commit.write" in self.bench.target.moments and self.walk.certainly("prepared"))
    def fail_to_write(self, wait: Literal["captured", "durable"], resume_first: bool) -> None:
        """Let the writing of a cut fail for lack of space (level 2): prepared with its capture, or failed (C44)."""
        id = self.walk.agent.open_id()
        if id is None or not isinstance(self.bench.target, ProcessTarget):
            return
        self.recent = id
        with self.walk.case.failpoint("commit.write", "fail"):
            self.walk.drive("commit", id, How(wait=wait, failing=True))
            if resume_first:
                self.named(id, "resume", How())
            self.walk.until_written()
        status = self.walk.agent.participant.status()
        if (status["phase"], status["checkpoint_id"]) == ("prepared", str(id)):
            self.walk.visits["CKPT-COMMIT-026"] += 1
        elif status["last"] and (status["last"]["checkpoint_id"], status["last"]["ended_as"]) == (str(id), "failed"):
            self.walk.visits["CKPT-COMMIT-028"] += 1

    @rule(rollout=rollouts, way=st.sampled_from(probe.WAYS))
    def probe(self, rollout: str, way: str) -> None:
        """Call the conformance probe of the owner of sessions in a way that changes nothing."""
        probe.send(self.walk, self.walk.pieces[rollout], way)
