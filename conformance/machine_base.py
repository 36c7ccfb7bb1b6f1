# SPDX-License-Identifier: Apache-2.0
"""What every rule of the machine stands on: one walk for each example, its bundles, and how an id is chosen."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine

from conformance.case import Bench
from conformance.controller import Json
from conformance.machine_items import How, Stale
from conformance.machine_orders import Driver
from conformance.model_values import CHECKPOINT_OPERATIONS
from spec.wire import CheckpointId

operations = st.sampled_from(CHECKPOINT_OPERATIONS)
relations = st.sampled_from(("open", "last", "unseen", "lower", "recent"))
stale_ways: st.SearchStrategy[Stale] = st.sampled_from(("controller", "epoch", "incarnation", "id-epoch"))
addresses = st.sampled_from(("main", "second"))

rollouts, receipts = Bundle[str]("rollouts"), Bundle("receipts")
checkpoints, snapshots = Bundle("checkpoints"), Bundle("snapshots")


class Machine(RuleBasedStateMachine):
    """One walk through one Gym; the rules are in the classes that extend this one.

    Set `bench` in a subclass. `visits` counts the cells of the phase table over all examples.
    """

    bench: ClassVar[Bench]
    visits: ClassVar[Counter[str]] = Counter()
    bodies: ClassVar[dict[str, Json]] = {}
    numbers: ClassVar[Iterator[int]] = itertools.count(1)
    stories: ClassVar[list[list[str]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.blind = False
        self.waited = False
        self.retired_unknown = False
        self.cut_off = False
        self.recent: CheckpointId | None = None
        self.walk = Driver(self.bench, 5_000_000 + next(self.numbers), self.visits, self.bodies)
        self.stories.append(self.walk.case.steps)

    def choose(self, relation: str, operation: str) -> CheckpointId | None:
        """Return an id that stands in a relation at the owner of rollouts, or the one named most recently, if any."""
        if relation == "recent":
            fits = self.recent is not None and self.recent.epoch == self.walk.controller.epoch
            return self.recent if fits else self.walk.ids("unseen")
        if operation == "restore" and relation == "unseen" and self.walk.snapshots:
            return self.walk.plan(self.walk.snapshots[-1])
        return self.walk.ids(relation)

    def named(self, id: CheckpointId | None, operation: str, how: How) -> CheckpointId:
        """Drive an operation and remember its id as the one named most recently."""
        assert id is not None
        self.recent = id
        self.walk.drive(operation, id, how)
        return id
