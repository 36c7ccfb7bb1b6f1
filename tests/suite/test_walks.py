# SPDX-License-Identifier: Apache-2.0
"""What a walk works out by itself: what a restart has cut off, whose sessions are gone, how much can be uploaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from conformance.controller import Json
from conformance.machine_plans import has_room
from conformance.model_rollouts import Rollout, Rollouts, Stand
from conformance.model_values import State
from conformance.process_walk import cannot_continue, cut_off, lost_sessions
from spec.wire import ControllerPair

GOING = Rollout(0, "task")
BUSY = replace(GOING, stand=Stand(1, "effect"))
ONCE = replace(GOING, restart_only=True)


def _end(state: State, rollout_id: str) -> str | None:
    held = state.rollouts.get(rollout_id)
    assert held is not None
    return held.stand.end


def _ends(states: frozenset[State]) -> set[str | None]:
    return {_end(state, "r") for state in states}


@pytest.mark.parametrize(
    ("rollout", "at_risk", "ends"),
    [
        (GOING, False, {None}),
        (BUSY, True, {None, "uncertain"}),
        (ONCE, True, {"uncertain"}),
        (replace(ONCE, loose=Stand(1, "no", "failure")), True, {None, "uncertain"}),
    ],
    ids=["nothing was under way", "an effect was", "it only starts again", "it may have failed before"],
)
def test_a_restart_stops_what_it_cut_off(rollout: Rollout, at_risk: bool, ends: set[str | None]) -> None:
    """CKPT-ENV-013, CKPT-PHASE-018: a handler that was cut off may leave its rollout uncertain, `restart_only` does."""
    state = State(controller=ControllerPair.of(7, "trainer"), rollouts=Rollouts().put("r", rollout))
    assert ends == _ends(cut_off(frozenset({state}), {"r": rollout} if at_risk else {}))
    assert cannot_continue(rollout) is (ends == {"uncertain"})


def test_what_two_rollouts_lost_is_independent() -> None:
    """Of two whose handlers were cut off each may have stopped without the other."""
    rollouts = Rollouts().put("r", BUSY).put("s", BUSY)
    state = State(controller=ControllerPair.of(7, "trainer"), rollouts=rollouts)
    found = cut_off(frozenset({state}), {"r": BUSY, "s": BUSY})
    both = {(_end(one, "r"), _end(one, "s")) for one in found}
    assert {(None, None), ("uncertain", None), (None, "uncertain"), ("uncertain", "uncertain")} == both


def _row(name: str, incarnation: str, *owns: str) -> Json:
    return {"name": name, "incarnation": incarnation, "owns": owns}


BEFORE = {"agent": "a", "resources": "r"}


@pytest.mark.parametrize(
    ("incarnations", "lost"),
    [
        ({"agent": "a", "resources": "r"}, False),
        ({"agent": "a", "resources": "new"}, True),
        ({"agent": "new", "resources": "r"}, False),
        ({"agent": "new", "resources": "new"}, False),
    ],
)
def test_sessions_that_were_apart_may_be_gone_while_their_rollouts_live(
    incarnations: Mapping[str, str], lost: bool
) -> None:
    """N8: only where the owner of rollouts has kept its life and an owner of sessions has not."""
    rows = [
        _row("agent", incarnations["agent"], "rollouts"),
        _row("resources", incarnations["resources"], "sessions"),
    ]
    assert lost is lost_sessions(rows, BEFORE)


def test_sessions_beside_their_rollouts_are_not_lost_alone() -> None:
    """One participant that owns both keeps both or none; a ledger elsewhere has no part in it."""
    rows = [_row("gym", "a", "rollouts", "sessions"), _row("model", "new", "ledger")]
    assert not lost_sessions(rows, {"gym": "a", "model": "m"})


@pytest.mark.parametrize(
    ("sizes", "limits", "room"),
    [
        ([], {"max_artifacts": 1, "max_artifacts_bytes": 1}, True),
        ([(5, 1000), (4, 3000)], {}, True),
        ([(5, 1000), (5, 1000)], {"max_artifacts": 20}, True),
        ([(5, 1000), (5, 1000)], {"max_artifacts": 19}, False),
        ([(5, 1000), (5, 3000)], {"max_artifacts": 99, "max_artifacts_bytes": 10_000}, True),
        ([(5, 1000), (5, 3000)], {"max_artifacts": 99, "max_artifacts_bytes": 9_999}, False),
    ],
)
def test_a_walk_uploads_no_more_than_a_gym_takes(
    sizes: list[tuple[int, int]], limits: dict[str, int], room: bool
) -> None:
    """A further cut may be twice as large as the largest so far, in files and in bytes; no limit is no bound."""
    assert room is has_room(sizes, limits)
