# SPDX-License-Identifier: Apache-2.0
"""The phase machine, held cell by cell against the specification's table, and its clock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

import spec
from reference_gym.participant.errors import ProtocolError, StaleController
from reference_gym.participant.machine import Machine, Step
from reference_gym.participant.phases import Answer, EndedAs, Last, Phase, Todo
from spec.wire import CheckpointId, ControllerPair

TABLE = spec.load("1.0").machine
LAST, OPEN, UNSEEN = CheckpointId(3, 5), CheckpointId(3, 7), CheckpointId(3, 9)
IDS = {"open": [OPEN], "last": [LAST], "unseen": [UNSEEN], "lower": [CheckpointId(3, 2), CheckpointId(2, 9)]}
NOW = 1_000.0
MANIFEST = {"name": "manifest.json", "digest": "sha256:" + 64 * "0", "bytes": 1}


def machine(phase: str, *, gate: str = "closed", last: str = "aborted") -> Machine:
    """Return a machine in a phase, reached by operations; the checkpoint before it ended as ``last``."""
    start = Machine(last=Last(LAST, EndedAs(last), outcome={}), controller=ControllerPair.of(3, "rl"))
    if phase == "idle":
        return start
    if phase in ("restoring", "restored"):
        restoring = start.restore(OPEN, "run", "key", 5_000, NOW).machine
        if phase == "restored" or gate == "closed":
            restoring = restoring.verified(NOW)
        return restoring.installed({}) if phase == "restored" else restoring
    at = start.prepare(OPEN, "run", 5_000, NOW).machine
    if phase == "preparing":
        return at
    at = at.quiescent(NOW)
    if phase == "prepared":
        return at
    at = at.commit(OPEN, "key", NOW).machine
    if gate == "open":
        at = at.resume(OPEN, NOW).machine
    return at if phase == "committing" else at.durable(MANIFEST, {}, NOW)


def run(at: Machine, operation: str, checkpoint_id: CheckpointId, *, leave_out: bool = False) -> Step:
    """Carry out one operation."""
    match operation:
        case "prepare":
            return at.prepare(checkpoint_id, "run", 5_000, NOW)
        case "commit":
            return at.commit(checkpoint_id, "key", NOW, leave_out_blocked=leave_out)
        case "resume":
            return at.resume(checkpoint_id, NOW)
        case "abort":
            return at.abort(checkpoint_id, NOW)
        case "renew":
            return at.renew(checkpoint_id, 5_000, NOW)
        case _:
            return at.restore(checkpoint_id, "run", "key", 5_000, NOW)


def situations(row: Any) -> Iterator[dict[str, Any]]:
    """Yield every combination of facts under which a row of the table applies."""
    facts = dict(row.when.facts)
    if row.phase in ("committing", "restoring"):
        facts.setdefault("gate", ("open", "closed"))
    names = list(facts)
    for values in product(*facts.values()):
        yield dict(zip(names, values, strict=True))


def settled(step: Step) -> Machine:
    """Return the machine after whatever an ending step leaves to stop has stopped."""
    at = step.machine
    return at.stopped(NOW) if at.open is not None and at.open.ending is not None else at


CELLS = [
    pytest.param(cell, facts, checkpoint_id, id=f"{cell.operation}-{cell.phase}-{cell.id}-{checkpoint_id}-{facts}")
    for cell in TABLE.cells
    if cell.id is not None
    for facts in situations(cell)
    for checkpoint_id in IDS[cell.id]
]


@pytest.mark.parametrize(("cell", "facts", "checkpoint_id"), CELLS)
def test_every_cell_of_the_table(cell: Any, facts: dict[str, Any], checkpoint_id: CheckpointId) -> None:
    """Each phase, operation and id is answered as the table says, and leads where it says."""
    at = machine(cell.phase, gate=facts.get("gate", "closed"), last=facts.get("last", "aborted"))
    leave_out = bool(facts.get("leave_out_blocked", False))
    if cell.answer == "refused":
        with pytest.raises(ProtocolError) as refusal:
            run(at, cell.operation, checkpoint_id, leave_out=leave_out)
        assert cell.error == refusal.value.code
        if cell.error in ("invalid_phase", "not_ready", "checkpoint_conflict"):
            assert str(OPEN) == refusal.value.extra["checkpoint_id"]
            assert cell.phase == refusal.value.extra["phase"]
        return
    step = run(at, cell.operation, checkpoint_id, leave_out=leave_out)
    after = settled(step)
    if cell.answer != "accepted":
        assert Answer(cell.answer) is step.answer or cell.operation == "renew"
        assert (at.phase, at.gate_open, at.last) == (after.phase, after.gate_open, after.last)
        return
    assert Answer.ACCEPTED is step.answer
    assert cell.next == after.phase
    expected_gate = at.gate_open if cell.gate is None else cell.gate == "open"
    assert expected_gate == step.machine.gate_open == after.gate_open
    assert (cell.state is not None and Todo(cell.state)) == (step.todo or False)
    if cell.ends is None:
        assert at.last == after.last
    else:
        assert after.last is not None
        assert (checkpoint_id, EndedAs(cell.ends)) == (after.last.checkpoint_id, after.last.ended_as)


@pytest.mark.parametrize("cell", [cell for cell in TABLE.cells if cell.operation in ("start", "put_artifact")], ids=str)
def test_starts_and_uploads_follow_the_gate_and_the_open_id(cell: Any) -> None:
    """A start is admitted exactly while the gate is open, an upload exactly while no id is open."""
    for facts in situations(cell):
        at = machine(cell.phase, gate=facts.get("gate", "closed"))
        if cell.operation == "start":
            assert (cell.item == "started") == at.gate_open
        else:
            assert (cell.answer == "refused") == (at.open is not None)


EVENTS = [
    pytest.param(event, facts, id=f"{event.event}-{event.phase}-{facts}")
    for event in TABLE.events
    for facts in situations(event)
]


@pytest.mark.parametrize(("event", "facts"), EVENTS)
def test_every_event_of_the_table(event: Any, facts: dict[str, Any]) -> None:
    """Each thing that happens without a call of the controller leads where the table says."""
    at = machine(event.phase, gate=facts.get("gate", "closed"))
    at = at.begin_serving().end_serving(OPEN, NOW) if at.open is not None else at
    step = happen(at, event.event, facts)
    if event.impossible is not None:
        assert step is None
        return
    assert step is not None
    after = settled(step)
    assert event.next == after.phase
    gate_open = at.gate_open if event.gate is None else event.gate == "open"
    assert gate_open == step.machine.gate_open
    if event.ends is None:
        assert at.last == after.last
    else:
        assert after.last is not None
        assert (OPEN, EndedAs(event.ends)) == (after.last.checkpoint_id, after.last.ended_as)
    if event.state in ("writer_stopped", "installed_discarded"):
        assert Todo(event.state) is step.todo


def happen(at: Machine, event: str, facts: dict[str, Any]) -> Step | None:
    """Let one event happen."""
    match event:
        case "quiescent":
            return Step(at.quiescent(NOW))
        case "durable":
            return Step(at.durable(MANIFEST, {}, NOW))
        case "write_failed":
            return Step(at.write_failed("internal", NOW))
        case "verified":
            return Step(at.verified(NOW))
        case "installed":
            return Step(at.installed({}))
        case "restore_failed":
            return Step(at.restore_failed("not_ready", NOW))
        case "lease_end":
            return at.lease_end(NOW + 6.0)
        case "higher_controller":
            return at.adopt(ControllerPair.of(4, "other"), NOW)
        case _:
            return at.restarted(manifest=MANIFEST if facts.get("manifest") == "complete" else None)


def test_a_lower_controller_is_told_the_adopted_pair() -> None:
    """Controllers are ordered by epoch, then bytewise by id; the refusal names the adopted pair."""
    at = machine("prepared")
    for pair in (ControllerPair.of(2, "zz"), ControllerPair.of(3, "rk"), ControllerPair.of(3, "RL")):
        with pytest.raises(StaleController) as refusal:
            at.adopt(pair, NOW)
        assert {"id": "rl", "epoch": 3} == refusal.value.extra["controller"]
    assert ControllerPair.of(3, "rm") == at.adopt(ControllerPair.of(3, "rm"), NOW).machine.controller
    assert at == at.adopt(ControllerPair.of(3, "rl"), NOW).machine


def test_an_abort_with_a_higher_id_is_recorded_in_place_of_what_it_ends() -> None:
    """The late prepare of the higher id is refused, whether the open one had to be stopped first or not."""
    for phase in ("preparing", "prepared", "committing", "committed", "restoring", "restored"):
        after = settled(machine(phase).abort(UNSEEN, NOW))
        assert after.last == Last(UNSEEN, EndedAs.ABORTED)
        with pytest.raises(ProtocolError, match="stale_checkpoint"):
            after.prepare(UNSEEN, "run", 5_000, NOW)


@pytest.mark.parametrize("phase", ["committing", "restoring"])
def test_while_an_aborted_checkpoint_ends_only_its_abort_is_answered(phase: str) -> None:
    """CKPT-PHASE-006: abort joins, every other verb of that id is stale; a higher id conflicts until it has ended."""
    ending = machine(phase).abort(OPEN, NOW).machine
    assert ending.gate_open and ending.phase == phase
    assert Answer.JOINS is ending.abort(OPEN, NOW).answer
    for verb in ("prepare", "commit", "resume", "renew", "restore"):
        with pytest.raises(ProtocolError, match="stale_checkpoint"):
            run(ending, verb, OPEN)
        with pytest.raises(ProtocolError, match="checkpoint_conflict"):
            run(ending, verb, UNSEEN)
    joined = ending.abort(UNSEEN, NOW)
    assert Answer.JOINS is joined.answer
    assert Last(UNSEEN, EndedAs.ABORTED) == joined.machine.stopped(NOW).last


def test_the_lease_stands_still_while_a_call_is_served_and_never_shrinks() -> None:
    """N6: only accepted POSTs of the open id renew; C27: nothing but the given time moves the lease."""
    at = machine("prepared").begin_serving()
    assert 5_000 == at.lease_remaining_ms(NOW + 100)
    assert at.lease_end(NOW + 100) is None
    at = at.end_serving(OPEN, NOW + 100)
    assert 5_000 == at.lease_remaining_ms(NOW + 100)
    assert 2_000 == at.lease_remaining_ms(NOW + 103)
    shorter = at.renew(OPEN, 1_000, NOW + 101).machine
    assert 4_000 == shorter.lease_remaining_ms(NOW + 101)
    longer = at.renew(OPEN, 60_000, NOW + 101).machine
    assert 60_000 == longer.lease_remaining_ms(NOW + 101)
    assert at.lease_end(NOW + 104.9) is None
    ended = at.lease_end(NOW + 105)
    assert ended is not None and Phase.IDLE is ended.machine.phase


def test_a_repeat_with_other_arguments_conflicts() -> None:
    """C31: run_id of prepare, the key of commit and of restore are compared, time limits are not."""
    with pytest.raises(ProtocolError, match="argument_conflict"):
        machine("preparing").prepare(OPEN, "other", 5_000, NOW)
    with pytest.raises(ProtocolError, match="argument_conflict"):
        machine("committing").commit(OPEN, "other", NOW)
    with pytest.raises(ProtocolError, match="argument_conflict"):
        machine("restoring").restore(OPEN, "run", "other", 5_000, NOW)
    kept = machine("committing").write_failed("insufficient_storage", NOW)
    with pytest.raises(ProtocolError, match="argument_conflict"):
        kept.commit(OPEN, "other", NOW)
    again = kept.commit(OPEN, "key", NOW)
    assert (Answer.ACCEPTED, None) == (again.answer, again.todo), "N20: the kept capture is written, none is taken"


def test_pause_and_wait_are_measured_on_the_given_clock() -> None:
    """The pause counts while the gate is closed, the wait until it was prepared."""
    at = Machine().prepare(OPEN, "run", 5_000, NOW).machine.quiescent(NOW + 2)
    assert (2_000, 3_000) == (at.wait_ms(NOW + 3), at.pause_ms(NOW + 3))
    at = at.commit(OPEN, "key", NOW + 3).machine.resume(OPEN, NOW + 4).machine
    assert 4_000 == at.pause_ms(NOW + 9)
    ended = at.durable(MANIFEST, {}, NOW + 9)
    assert ended.last is not None
    assert (4_000, MANIFEST) == (ended.last.pause_ms, ended.last.manifest)
