# SPDX-License-Identifier: Apache-2.0
"""Calls of the conformance probe that change nothing: what they get says whom the owner of sessions listens to."""

from __future__ import annotations

from conformance.errors import Failed
from conformance.machine_outside import Piece
from conformance.machine_walk import Walk
from conformance.model_rollouts import Rollout

WAYS = ("repeat", "stale", "unknown")
"""A repeat of the first effect of the last closed turn; a lower attempt; a rollout that nobody knows."""


def send(walk: Walk, piece: Piece, way: str) -> None:
    """Call the probe for a rollout that certainly stands still after a turn with effects, and judge the answer."""
    owner = walk.gym.owner("sessions")
    held = walk.agent.rollout(piece.rollout_id)
    if owner is None or held is None or not _stands(held) or walk.watches[owner.name].phase is None:
        return
    turn = held.stand.turns
    calls = piece.kind.script.turns[turn - 1]
    if isinstance(calls, str) or (way == "stale" and held.attempt == 0):
        return
    rollout_id, attempt, expected = piece.rollout_id, held.attempt, "200"
    if way == "stale":
        attempt, expected = held.attempt - 1, "409 stale_attempt"
    elif way == "unknown":
        rollout_id, expected = f"{walk.case.prefix}nobody", "409 session_lost"
    outside = len(walk.case.world.calls(rollout_id=piece.rollout_id))
    request_id = f"{rollout_id}/{turn}/1"
    reply = owner.probe(rollout_id, attempt, turn, request_id, calls[0].name, dict(calls[0].arguments))
    words = f"probe ({way}) for {rollout_id} as attempt {attempt}, {request_id} {calls[0].name}"
    walk.case.step(f"{words} → {reply.brief[:80]}")
    got = f"{reply.status} {reply.code}" if reply.code else str(reply.status)
    broken = {"repeat": "CKPT-EFFECT-001", "stale": "CKPT-EFFECT-008", "unknown": "CKPT-EFFECT-010"}[way]
    if got != expected:
        raise Failed(words, expected=expected, got=reply.brief, requirements=(broken,))
    after = len(walk.case.world.calls(rollout_id=piece.rollout_id))
    if after != outside:
        raise Failed(words, expected="no effect", got="an effect in the world", requirements=("CKPT-EFFECT-017",))
    walk.visits.update([broken, "CKPT-EFFECT-017"] if way == "repeat" else [broken])


def _stands(held: Rollout) -> bool:
    return held.state == "live" and held.loose is None and held.stand.busy == "no" and held.stand.turns > 0
