# SPDX-License-Identifier: Apache-2.0
"""Rules of the machine for calls that are under way at the same time."""

from __future__ import annotations

from typing import Literal

from hypothesis import strategies as st
from hypothesis.stateful import rule

from conformance.machine_base import Machine, operations, relations, rollouts
from conformance.machine_items import How
from conformance.machine_outside import KINDS
from conformance.model_rollouts import Receipt
from spec import wire as names


class RaceRules(Machine):
    """Rules in which two calls are under way at once."""

    @rule(first=operations, second=operations, one=relations, other=relations)
    def pair(self, first: str, second: str, one: str, other: str) -> None:
        """Make two calls at the same time: the answers fit one order of them, or one under way during the other."""
        ids = self.choose(one, first), self.choose(other, second)
        if ids[0] is not None and ids[1] is not None:
            self.recent = ids[0]
            self.walk.at_once((first, ids[0]), (second, ids[1]))

    @rule(operation=operations, relation=relations)
    def twice(self, operation: str, relation: str) -> None:
        """Make the same call twice at the same time."""
        id = self.choose(relation, operation)
        if id is not None:
            self.recent = id
            self.walk.at_once((operation, id), (operation, id))

    @rule(
        operation=st.sampled_from(("prepare", "commit", "resume", "abort")),
        relation=relations,
        what=st.sampled_from(("start", "ack", "retire")),
        rollout=rollouts,
    )
    def with_items(self, operation: str, relation: str, what: Literal["start", "ack", "retire"], rollout: str) -> None:
        """Start, acknowledge or retire a rollout while a call that names a checkpoint is under way."""
        id = self.choose(relation, operation)
        if id is None:
            return
        self.recent = id
        piece = self.walk.pieces[rollout]
        if what == "start":
            self.walk.start_during((operation, id), self.walk.place(KINDS["short"]))
        elif what == "retire":
            self.walk.retire_during((operation, id), {rollout: piece.attempt})
        else:
            held = self.walk.agent.rollout(rollout)
            digest = held.digest if held is not None else None
            receipt = Receipt(rollout, piece.attempt, digest or names.bytes_digest(b"any"))
            call, send = self.walk.compose_ack([receipt], How())
            self.walk.items_at_once((operation, id), call, send, f"ACK {rollout}")
            self.walk.settle()
