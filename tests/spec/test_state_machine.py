# SPDX-License-Identifier: Apache-2.0
"""The phase table is whole: each cell and each event is answered once, in words that the other data files know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

import spec

MACHINE = spec.load("1.0").machine
ROWS: tuple[spec.Cell | spec.Event, ...] = (*MACHINE.cells, *MACHINE.events)
ERRORS = spec.load("1.0").errors
SCHEMAS = spec.load("1.0").schemas
COMMON = SCHEMAS["common"]["$defs"]
OUTCOMES = SCHEMAS["start-response"]["properties"]["outcomes"]["items"]["properties"]["outcome"]["enum"]
ENDS = COMMON["endedAs"]["enum"]

PHASES = ["idle", "preparing", "prepared", "committing", "committed", "restoring", "restored"]
OPERATIONS_WITH_ID = ["prepare", "commit", "resume", "abort", "renew", "restore"]
OPERATIONS_WITHOUT_ID = ["retire", "start", "ack", "read", "put_artifact"]
WITH_OPEN_ID = [phase for phase in PHASES if phase != "idle"]

# Which events can happen in which phases; what is not here cannot happen there.
EVENTS = {
    "quiescent": ["preparing"],
    "durable": ["committing"],
    "write_failed": ["committing"],
    "verified": ["restoring"],
    "installed": ["restoring"],
    "restore_failed": ["restoring"],
    "lease_end": WITH_OPEN_ID,
    "higher_controller": PHASES,
    "process_restart": PHASES,
}

Facts = dict[str, str | bool]


def situations(machine: spec.StateMachine, phase: str) -> Iterator[Facts]:
    """Yield every combination of the facts that conditions may ask for, as far as the phase allows them."""
    gates = machine.phases[phase]["gate"]
    for gate, last, leave_out, manifest in product(gates, ENDS, (True, False), ("absent", "complete")):
        yield {"gate": gate, "last": last, "leave_out_blocked": leave_out, "manifest": manifest}


def relations(operation: str, phase: str) -> list[str | None]:
    """Return how the id of a call can stand to what the participant keeps; ``open`` needs an open checkpoint."""
    if operation in OPERATIONS_WITHOUT_ID:
        return [None]
    return ["last", "unseen", "lower"] if phase == "idle" else ["open", "last", "unseen", "lower"]


def answers(machine: spec.StateMachine, operation: str, phase: str, relation: str | None) -> list[int]:
    """Return for every situation how many rows answer the cell."""
    rows = [c for c in machine.cells if (c.operation, c.phase, c.id) == (operation, phase, relation)]
    return [sum(row.when.holds(facts) for row in rows) for facts in situations(machine, phase)]


def holes(machine: spec.StateMachine) -> list[tuple[str, str, str | None]]:
    """Return the cells that some situation finds without an answer or with several."""
    return [
        (operation, phase, relation)
        for operation, phase in product(OPERATIONS_WITH_ID + OPERATIONS_WITHOUT_ID, PHASES)
        for relation in relations(operation, phase)
        if {1} != set(answers(machine, operation, phase, relation))
    ]


def test_the_table_knows_the_phases_and_operations_of_the_protocol() -> None:
    """Nothing is missing from the table's own lists, and nothing is there besides."""
    assert PHASES == list(MACHINE.phases)
    assert PHASES == COMMON["phase"]["enum"]
    assert set(OPERATIONS_WITH_ID + OPERATIONS_WITHOUT_ID) == set(MACHINE.operations)
    assert set(OPERATIONS_WITH_ID) == {name for name, about in MACHINE.operations.items() if about["id"]}
    assert {"open", "last", "unseen", "lower"} == set(MACHINE.ids)


def test_every_cell_is_answered_exactly_once_in_every_situation() -> None:
    """Phase x operation x relation of the id: conditions leave no gap and do not overlap."""
    assert [] == holes(MACHINE)


def test_no_cell_stands_outside_the_table() -> None:
    """A row for an operation, phase or relation that cannot be is a slip of the pen."""
    possible = {
        (operation, phase, relation)
        for operation, phase in product(OPERATIONS_WITH_ID + OPERATIONS_WITHOUT_ID, PHASES)
        for relation in relations(operation, phase)
    }
    assert set() == {(c.operation, c.phase, c.id) for c in MACHINE.cells} - possible


@pytest.mark.parametrize("index", range(0, len(MACHINE.cells), 7))
def test_a_missing_row_is_found(index: int) -> None:
    """The test above can fail: without one row, its cell is a hole; with the row twice, too."""
    cell = MACHINE.cells[index]
    where = (cell.operation, cell.phase, cell.id)
    assert [where] == holes(replace(MACHINE, cells=MACHINE.cells[:index] + MACHINE.cells[index + 1 :]))
    assert [where] == holes(replace(MACHINE, cells=(*MACHINE.cells, cell)))


def test_refusals_name_a_code_of_the_catalogue_and_change_nothing() -> None:
    """`refused` and `error` go together, the code exists, and phase and gate stay."""
    for cell in MACHINE.cells:
        assert (cell.answer == "refused") == (cell.error is not None), cell
        if cell.error is not None:
            assert cell.error in ERRORS, cell
            assert (cell.phase, None, None, None) == (cell.next, cell.gate, cell.ends, cell.state), cell


def test_only_an_accepted_call_changes_anything() -> None:
    """Joining and replying leave phase, gate, `last` and state as they are."""
    for cell in MACHINE.cells:
        assert cell.answer in ("accepted", "joins", "replies", "refused"), cell
        if cell.answer in ("joins", "replies"):
            assert (cell.phase, None, None, None) == (cell.next, cell.gate, cell.ends, cell.state), cell


def test_every_next_phase_and_gate_exists() -> None:
    """A row leads to a phase of the table, with a gate that this phase can have."""
    for row in ROWS:
        assert row.next in PHASES, row
        if row.gate is not None:
            assert row.gate in MACHINE.phases[row.next]["gate"], row


def test_a_gate_that_must_change_is_said_to_change() -> None:
    """Between phases whose gates have nothing in common the row says which gate follows."""
    for row in ROWS:
        before = row.when.facts.get("gate", tuple(MACHINE.phases[row.phase]["gate"]))
        after = MACHINE.phases[row.next]["gate"]
        if row.gate is None and getattr(row, "event", None) != "installed":  # its gate was closed by `verified`
            assert set(before) <= set(after), row


def test_a_checkpoint_ends_exactly_where_its_id_closes() -> None:
    """A row from an open checkpoint to idle says how it ended; `ends` leads to idle and is a known word."""
    for row in ROWS:
        if row.ends is not None:
            assert row.ends in ENDS, row
            assert "idle" == row.next, row
        elif row.phase != "idle":
            assert row.next != "idle", row


def test_a_start_answers_with_an_outcome_of_its_schema() -> None:
    """Only `start` has an item outcome: `started` while the gate is open, `admission_closed` otherwise."""
    for cell in MACHINE.cells:
        assert (cell.operation == "start") == (cell.item is not None), cell
        if cell.item is not None:
            gates = cell.when.facts.get("gate", tuple(MACHINE.phases[cell.phase]["gate"]))
            assert cell.item in OUTCOMES, cell
            assert {"started" if cell.item == "started" else "admission_closed"} == {
                "started" if gate == "open" else "admission_closed" for gate in gates
            }, cell


def test_the_events_of_the_protocol_are_all_there() -> None:
    """Progress, write failure, lease end, higher controller, process restart, restore done and failed."""
    assert set(EVENTS) == {row.event for row in MACHINE.events}


@pytest.mark.parametrize(("event", "phase"), [(e, p) for e, p in product(EVENTS, PHASES)])
def test_an_event_is_answered_once_where_it_can_happen_and_nowhere_else(event: str, phase: str) -> None:
    """Each event in each of its phases has exactly one row in every situation."""
    rows = [row for row in MACHINE.events if (row.event, row.phase) == (event, phase)]
    found = {sum(row.when.holds(facts) for row in rows) for facts in situations(MACHINE, phase)}
    assert ({1} if phase in EVENTS[event] else {0}) == found


def test_a_participant_reopens_by_itself_from_every_phase() -> None:
    """I10: without its controller, lease end or the end of the work leads from each phase to idle and open."""
    for phase, gate in [(p, g) for p in WITH_OPEN_ID for g in MACHINE.phases[p]["gate"]]:
        row = MACHINE.on("lease_end", phase, gate=gate)
        if row is None:
            ended = [MACHINE.on(event, phase, gate=gate) for event in ("durable", "write_failed")]
            assert ["idle", "idle"] == [end.next for end in ended if end is not None], phase
        else:
            assert ("idle", "open") == (row.next, row.gate), phase


def test_every_phase_can_be_reached_and_left() -> None:
    """From idle each phase can be entered, and idle again from each."""
    steps = {(row.phase, row.next) for row in ROWS}

    def reachable(start: str) -> set[str]:
        seen, todo = {start}, [start]
        while todo:
            here = todo.pop()
            todo += [after for before, after in steps if before == here and after not in seen]
            seen |= set(todo)
        return seen

    assert set(PHASES) == reachable("idle")
    assert all("idle" in reachable(phase) for phase in PHASES)


@pytest.mark.parametrize(
    ("operation", "phase", "relation", "facts", "expected"),
    [
        ("prepare", "idle", "unseen", {}, ("accepted", "preparing", None)),
        ("prepare", "idle", "last", {}, ("refused", "idle", "stale_checkpoint")),
        ("prepare", "committing", "open", {"gate": "open"}, ("refused", "committing", "invalid_phase")),
        ("commit", "preparing", "open", {"leave_out_blocked": False}, ("refused", "preparing", "not_ready")),
        ("commit", "preparing", "open", {"leave_out_blocked": True}, ("accepted", "committing", None)),
        ("commit", "idle", "last", {"last": "committed"}, ("replies", "idle", None)),
        ("resume", "prepared", "open", {}, ("refused", "prepared", "invalid_phase")),
        ("resume", "committed", "open", {}, ("accepted", "idle", None)),
        ("abort", "committed", "unseen", {}, ("accepted", "idle", None)),
        ("abort", "idle", "last", {}, ("replies", "idle", None)),
        ("restore", "prepared", "open", {}, ("refused", "prepared", "invalid_phase")),
        ("commit", "prepared", "unseen", {}, ("refused", "prepared", "checkpoint_conflict")),
        ("renew", "idle", "last", {}, ("refused", "idle", "stale_checkpoint")),
        ("put_artifact", "restored", None, {}, ("refused", "restored", "invalid_phase")),
    ],
)
def test_cells_that_matter_say_what_the_chapters_say(
    operation: str, phase: str, relation: str | None, facts: Facts, expected: tuple[str, str, str | None]
) -> None:
    """A sample of the table, written down a second time by hand."""
    cell = MACHINE.cell(operation, phase, relation, **facts)
    assert expected == (cell.answer, cell.next, cell.error)
