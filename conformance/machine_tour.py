# SPDX-License-Identifier: Apache-2.0
"""What random steps do not reach for certain: two full cycles, and every cell of the phase table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from conformance.controller import Participant
from conformance.errors import Failed
from conformance.machine_orders import Driver, How
from conformance.machine_outside import KINDS, Piece
from conformance.model_rollouts import Receipt
from conformance.model_values import PHASES
from spec import StateMachine
from spec import wire as names
from spec.wire import CheckpointId

BETWEEN = ("committing", "restoring")
"""Phases that last no longer than the participant likes: they are met by a call that arrives during another one."""

LARGEST_CROWD = 200
"""Where more rollouts than that may be live, it is not tried whether one more is refused."""


# --- two cycles ---


def cycles(walk: Driver) -> None:
    """Snapshot A, restore it twice into the living Gym, another policy address; snapshot B, restore it, finish all."""
    pieces = {kind: walk.place(KINDS[kind]) for kind in ("short", "long", "effects", "verified", "restart")}
    walk.start([(piece, 0) for piece in pieces.values()])
    for kind, steps in (("short", 2), ("long", 2), ("effects", 1), ("restart", 1)):
        for _ in range(steps):
            walk.advance(pieces[kind])
    snapshot(walk)
    walk.results()
    walk.advance(pieces["long"])
    _restore(walk, policy="second")
    walk.advance(pieces["effects"])
    _restore(walk, policy=None)
    for kind in ("long", "verified"):
        walk.advance(pieces[kind])
    snapshot(walk)
    walk.take_over()
    _restore(walk, policy="main", at=-1)
    left = [piece for piece in pieces.values() if _is_left(walk, piece)]
    walk.start([(piece, piece.attempt + 1) for piece in left])
    for piece in pieces.values():
        if walk.lives(piece):
            _to_the_end(walk, piece.rollout_id)
    receipts = walk.results()
    walk.ack([replace(receipt, digest=names.bytes_digest(b"wrong")) for receipt in receipts])
    walk.ack([replace(receipt, attempt=receipt.attempt + 1) for receipt in receipts])
    walk.results()
    walk.ack(receipts)
    walk.ack(receipts)
    walk.look()


def _is_left(walk: Driver, piece: Piece) -> bool:
    """Return whether a rollout has to be started again: a restore could not continue it."""
    return walk.agent.rollout(piece.rollout_id) is None


def _to_the_end(walk: Driver, rollout_id: str) -> None:
    piece = walk.pieces[rollout_id]
    while piece.stop is not None:
        walk.advance(piece)


def snapshot(walk: Driver) -> None:
    """Take a whole snapshot, resuming before it is durable; what blocks is left out."""
    id = walk.ids("unseen")
    assert id is not None
    walk.drive("prepare", id)
    leave_out = walk.agent.phase == "preparing"
    for participant in walk.everyone[1:] if leave_out else ():
        walk.send(participant, "prepare", id, How())
    walk.drive("commit", id, How(wait="captured", leave_out=leave_out))
    walk.look()
    walk.drive("resume", id)
    walk.drive("commit", id, How(wait="durable", leave_out=leave_out))
    walk.look()


def _restore(walk: Driver, *, policy: str | None, at: int = -1) -> None:
    # What an effect is kept in would have to be waited for; let it end first.
    for piece in walk.pieces.values():
        rollout = walk.agent.rollout(piece.rollout_id)
        if rollout is not None and rollout.blocks:
            walk.advance(piece)
    id = walk.plan(walk.snapshots[at], policy=policy)
    walk.drive("restore", id)
    walk.look()
    walk.drive("restore", id)
    walk.drive("resume", id)
    walk.look()
    walk.settle()


# --- the phase table ---


def cells(machine: StateMachine, *, artifacts: bool) -> list[str]:
    """Return the name of every legal cell: phase × operation × relation of the id."""
    found: dict[str, None] = {}
    for cell in machine.cells:
        if cell.operation != "put_artifact" or artifacts:
            found[" × ".join(part for part in (cell.phase, cell.operation, cell.id) if part)] = None
    return list(found)


def tour(walk: Driver, missing: Iterable[str]) -> None:
    """Visit cells one after the other."""
    todo = sorted(missing, key=lambda name: PHASES.index(name.split(" × ")[0]))
    for name in todo:
        if walk.visits[name]:
            continue
        phase, operation, *relation = name.split(" × ")
        if phase in BETWEEN:
            _between(walk, phase, operation, *relation)
        else:
            _REACH[phase](walk)
            _visit(walk, operation, *relation)
        walk.look()


def crowd(walk: Driver) -> None:
    """Start two rollouts more than may be live, and retire them all again."""
    agent = walk.gym.agent
    room, batch = agent.limit("max_live_rollouts"), agent.limit("max_batch")
    if room > LARGEST_CROWD:
        return
    _idle(walk)
    live = sum(1 for piece in walk.pieces.values() if walk.lives(piece))
    pieces = [walk.place(KINDS["short"]) for _ in range(room - live + 2)]
    groups = [pieces[start : start + batch] for start in range(0, len(pieces), batch)]
    for group in groups:
        walk.start([(piece, 0) for piece in group])
    walk.look()
    for group in groups:
        walk.retire({piece.rollout_id: 0 for piece in group})
    walk.look()


def _idle(walk: Driver) -> None:
    if walk.agent.phase != "idle" or any(watch.phase != "idle" for watch in walk.watches.values()):
        id = max((found for watch in walk.watches.values() if (found := watch.open_id())), default=None)
        walk.drive("abort", id or _fresh(walk))
        walk.look()
    for piece in walk.pieces.values():
        rollout = walk.agent.rollout(piece.rollout_id)
        if rollout is not None and rollout.blocks:
            walk.advance(piece)


def _preparing(walk: Driver) -> None:
    _idle(walk)
    piece = walk.place(KINDS["effects"])
    walk.start([(piece, 0)])
    walk.advance(piece)
    walk.drive("prepare", _fresh(walk))


def _prepared(walk: Driver) -> None:
    _idle(walk)
    walk.drive("prepare", _fresh(walk))


def _committed(walk: Driver) -> None:
    _prepared(walk)
    walk.drive("commit", _open(walk))


def _restored(walk: Driver) -> None:
    _idle(walk)
    walk.drive("restore", _fresh(walk))


_REACH: Mapping[str, Callable[[Driver], None]] = {
    "idle": _idle,
    "preparing": _preparing,
    "prepared": _prepared,
    "committed": _committed,
    "restored": _restored,
}


def _visit(walk: Driver, operation: str, relation: str | None = None) -> None:
    if relation is not None:
        id = walk.ids(relation)
        if id is not None:
            walk.drive(operation, id)
        return
    if operation == "read":
        walk.look()
    elif operation == "put_artifact":
        for participant in walk.everyone:
            put_artifact(walk, participant)
    elif operation == "start":
        walk.start([(walk.place(KINDS["short"]), 0)])
    elif operation == "ack":
        walk.ack([_receipt(walk)])
    else:
        walk.retire({f"{walk.case.prefix}nobody": 0})


def _between(walk: Driver, phase: str, operation: str, relation: str | None = None) -> None:
    """Let a call arrive during a commit or a restore."""
    if phase == "committing":
        _prepared(walk)
        first = "commit", _open(walk)
    else:
        _idle(walk)
        first = "restore", _fresh(walk)
    if relation is not None:
        second = {"open": first[1], "unseen": _fresh(walk)}.get(relation) or walk.ids(relation)
        assert second is not None
        walk.at_once(first, (operation, second))
    else:
        walk.during(first, lambda: _visit_blindly(walk, phase, operation))


def _visit_blindly(walk: Driver, phase: str, operation: str) -> None:
    """Call what no phase refuses while a commit or restore is under way; the answer may come from before or after."""
    walk.visits[f"{phase} × {operation}"] += 1
    agent = walk.gym.agent
    if operation == "read":
        agent.status()
    elif operation == "ack":
        walk.case.accepted(walk.compose_ack([_receipt(walk)], How())[1](None), "ACK is accepted in every phase")
    elif operation == "retire":
        send = walk.compose_retire(agent, {f"{walk.case.prefix}nobody": 0}, How())[1]
        walk.case.accepted(send(None), "retire is accepted in every phase", "CKPT-RETIRE-014")
    elif operation == "start":
        piece = walk.place(KINDS["short"])
        send = walk.compose_start([(piece, 0)], How(), unfit="invalid")[1]
        walk.case.accepted(send(None), "a start is answered in every phase", "CKPT-ROLL-001")
        del walk.pieces[piece.rollout_id]
    elif operation == "put_artifact" and "artifacts_http" in walk.gym.agent.capabilities["features"]:
        reply = walk.controller.put_artifact(agent, f"{walk.controller.epoch}-991", "part-0", b"anything")
        walk.case.true(
            reply.ok or reply.code == "invalid_phase", "PUT is taken in idle alone", "CKPT-ART-005", got=reply.brief
        )


def put_artifact(walk: Driver, participant: Participant) -> None:
    """PUT an artifact: taken in idle, refused in every other phase (CKPT-ART-005)."""
    if "artifacts_http" not in participant.capabilities["features"]:
        return
    watch = walk.watches[participant.name]
    phase = watch.phase
    reply = walk.controller.put_artifact(participant, f"{walk.controller.epoch}-990", "part-0", b"anything")
    expected = (204, None) if phase == "idle" else (409, "invalid_phase")
    walk.visits[f"{phase} × put_artifact"] += 1
    if phase is not None and (reply.status, reply.code) != expected:
        raise Failed(
            f"PUT of an artifact in {phase} at {participant.name}",
            expected=f"{expected[0]} {expected[1] or ''}".strip(),
            got=reply.brief,
            requirements=("CKPT-ART-005", "CKPT-PHASE-001"),
        )


def _receipt(walk: Driver) -> Receipt:
    return Receipt(f"{walk.case.prefix}nobody", 0, names.bytes_digest(b"nothing"))


def _fresh(walk: Driver) -> CheckpointId:
    id = walk.ids("unseen")
    assert id is not None
    return id


def _open(walk: Driver) -> CheckpointId:
    id = walk.agent.open_id()
    assert id is not None, f"a checkpoint is open in {walk.agent.phase}"
    return id
