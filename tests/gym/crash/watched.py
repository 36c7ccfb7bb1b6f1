# SPDX-License-Identifier: Apache-2.0
"""What the suite's model holds possible for one participant, through calls and through deaths of its process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from conformance import model, model_looks
from conformance.model import Call, State
from conformance.model_rollouts import Plan, Receipt, Resumed, Retire, Rollouts, Stand, Start
from spec.wire import ControllerPair, parse_checkpoint_id

CONTROLLER = "test"
_OPERATIONS = {"acks": "ack", "rollouts": "start"}


class Watched:
    """The states that one participant may be in.

    Args:
        owns_rollouts: whether its rollouts are followed as well; those of the others are their callers' business.
        judges: whether what is impossible is a fault; otherwise nothing is.
    """

    def __init__(self, *, owns_rollouts: bool, judges: bool = True) -> None:
        self.owns_rollouts = owns_rollouts
        self._judges = judges
        self.states: frozenset[State] = frozenset({State()})

    # --- what is asked ------------------------------------------------------------------------------------------------

    def call(self, epoch: int, path: str, body: Mapping[str, Any]) -> Call:
        """Return a call as the model knows it."""
        name = path.rpartition("/")[2]
        operation = _OPERATIONS.get(name, name)
        call = Call(operation, ControllerPair.of(epoch, CONTROLLER), run_id=body.get("run_id", ""))
        if "checkpoint_id" in body:
            call = replace(call, checkpoint_id=parse_checkpoint_id(body["checkpoint_id"]))
        match operation:
            case "commit":
                return replace(call, arguments=json.dumps(body["target"]), wait=body["wait"])
            case "restore":
                source = body["source"]
                call = replace(call, arguments=json.dumps(body, sort_keys=True))
                if not self.owns_rollouts or source is None:
                    return call
                return replace(call, source=parse_checkpoint_id(source["checkpoint_id"]), plan=_plan(body))
            case "start":
                return replace(call, items=tuple(_start(item) for item in body["rollouts"]))
            case "ack":
                return replace(call, items=tuple(_receipt(receipt) for receipt in body["receipts"]))
            case "retire":
                return replace(call, items=tuple(_fence(fence) for fence in body["rollouts"]))
        return call

    def answered(self, call: Call, status: int, body: Mapping[str, Any]) -> None:
        """Judge an answer.

        Raises:
            AssertionError: the specification does not allow it.
        """
        if call.operation == "restore" and not self.owns_rollouts:
            body = {**body, "restored_count": 0}
        self._become(model.filter_by(self.states, call, status, body), f"{call.operation} answered {status} {body}")

    def lost(self, call: Call) -> None:
        """Note that a call was not answered: it was executed, or not."""
        self.states = model.unknown(self.states, call)

    # --- what happens -------------------------------------------------------------------------------------------------

    def allow(self, rollout_id: str, turns: int, *, ends: bool) -> None:
        """Note how far the outside lets a rollout get."""
        goal = Stand(turns, end="success" if ends else None)
        self.states = frozenset(model.let_go(state, rollout_id, goal, Stand()) for state in self.states)

    def lease_ended(self) -> None:
        """Note that the lease may have ended."""
        self.states |= frozenset(after for state in model.unfold(self.states) for after in model.lease_ends(state))

    def restarted(self, *, kept: bool) -> None:
        """Note that the process was killed and is there again."""
        possible = model.unfold(self.states)
        if not kept:
            self.states = frozenset(model.loses_everything(state) for state in possible)
            return
        ways = (model.restarts(state, manifest_complete=done) for state in possible for done in (False, True))
        self.states = frozenset(state for way in ways for state in way)

    # --- what is seen -------------------------------------------------------------------------------------------------

    def committed(self, checkpoint_id: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Judge the index of a cut."""
        id, index = parse_checkpoint_id(checkpoint_id), {row["rollout_id"]: row for row in rows}
        found = set()
        for state in self.states:
            exact = model_looks.indexed(state.cuts.get(id, Rollouts()), index)
            if exact is not None:
                found.add(replace(state, cuts=MappingProxyType({**state.cuts, id: exact})))
        self._become(frozenset(found), f"the index of {checkpoint_id}: {index}")

    def status(self, status: Mapping[str, Any], *, counted: bool = True) -> None:
        """Judge a status."""
        owns = self.owns_rollouts and counted
        seen = (state for state in model.unfold(self.states) if model_looks.sees(state, status, owns_rollouts=owns))
        self._become(frozenset(seen), f"status {status}")

    def rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Judge the rows of the rollouts."""
        for row in rows:
            found = (model_looks.row_of(state, row) for state in model.unfold(self.states))
            self._become(frozenset(state for state in found if state is not None), f"row {row}")

    def result(self, result: Mapping[str, Any]) -> None:
        """Judge a result of the feed."""
        success = "body" in result
        terminal = success or result["failure"]["terminal"]
        receipt = _receipt(result["receipt"])
        found = (
            model_looks.finished(state, receipt, success=success, terminal=terminal)
            for state in model.unfold(self.states)
        )
        self._become(frozenset(state for state in found if state is not None), f"result {receipt}")

    def _become(self, states: frozenset[State], seen: str) -> None:
        if not self._judges:
            return
        assert states, f"the model does not allow {seen[:600]}; possible was {_brief(self.states)[:600]}"
        self.states = states


def _brief(states: Iterable[State]) -> str:
    return "; ".join(
        sorted({f"{one.phase}/{one.gate} open {one.open and one.open.id} last {one.last}" for one in states})
    )


def _start(item: Mapping[str, Any]) -> Start:
    restart_only = item["environment"] == "conformance-restart"
    return Start(item["rollout_id"], item["attempt"], item["task_digest"], restart_only=restart_only)


def _receipt(receipt: Mapping[str, Any]) -> Receipt:
    return Receipt(receipt["rollout_id"], receipt["attempt"], receipt["digest"])


def _fence(fence: Mapping[str, Any]) -> Retire:
    return Retire(fence["rollout_id"], fence["through_attempt"])


def _plan(body: Mapping[str, Any]) -> Plan:
    names = ("rollout_id", "attempt", "next_attempt", "turns_done", "task_digest")
    return Plan(
        rollouts=tuple(Resumed(*(rollout[name] for name in names)) for rollout in body["rollouts"]),
        results=tuple(_receipt(receipt) for receipt in body["results"]),
        fences=tuple(_fence(fence) for fence in body["fences"]),
    )
