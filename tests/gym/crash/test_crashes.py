# SPDX-License-Identifier: Apache-2.0
"""The seeded part of the crash test: some fail points, some random kills, and proof that both can fail."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.gym.crash.endure import endure
from tests.gym.crash.lives import ROLES
from tests.gym.crash.points import POINTS, Visit, all_visits, visit
from tests.gym.crash.soak import soak

SEED = 20
SOAK_S = 30.0
"""After so many seconds no further life is begun: on a busy machine there are fewer kills."""
ALWAYS = [
    Visit("one", "all", "boundary.crossed"),
    Visit("one", "all", "log.half"),
    Visit("one", "all", "commit.manifest"),
    Visit("one", "all", "restore.installed"),
    Visit("three", "agent", "boundary.written"),
    Visit("three", "resources", "effect.done"),
    Visit("three", "model", "part.changed"),
]
MORE = 5
APART = {name for name, point in POINTS.items() if point.apart}


def chosen() -> list[Visit]:
    """Return what is visited here: some always, some drawn."""
    others = [visit for visit in all_visits(SEED) if visit not in ALWAYS]
    return [*ALWAYS, *random.Random(SEED).sample(others, MORE)]


@pytest.mark.parametrize("at", chosen(), ids=lambda at: f"{at.form}-{at.victim}-{at.point}-{at.nth}")
async def test_nothing_acknowledged_is_missing_after_a_kill_at_a_fail_point(at: Visit, tmp_path: Path) -> None:
    """C40: SIGKILL at a named point of a busy Gym, which is reached while an unfinished rollout holds a turn."""
    verdict = await visit(tmp_path / "gym", at)
    assert verdict.sound, verdict


def test_the_whole_crash_test_visits_every_point_of_every_process() -> None:
    """One process visits every point that it has, and so do three; none is left to chance."""
    visits = all_visits(SEED)
    assert POINTS.keys() == {visit.point for visit in visits}
    assert {(form, role) for form, roles in ROLES.items() for role in roles} == {(at.form, at.victim) for at in visits}


@pytest.mark.parametrize(("form", "kills"), [("one", 6), ("three", 2)])
async def test_kills_at_random_instants_lose_no_finished_turn(form: str, kills: int, tmp_path: Path) -> None:
    """C25: a busy Gym is killed again and again: the same incarnation, every finished turn, result, ACK and `last`."""
    lives = await soak(tmp_path / "soak", form, kills, SEED, limit_s=SOAK_S)
    assert (0, 0, None) == (lives.lost, lives.renewed, lives.fault)
    assert 0 < lives.kills <= kills
    assert lives.turns > 0


async def test_a_gym_that_waits_for_no_write_is_found_out(tmp_path: Path) -> None:
    """The crash test can fail: replies and policy calls that leave too early cost a turn or a result."""
    lives = await soak(tmp_path / "soak", "one", 10, SEED, broken="nobody_waits")
    assert lives.fault is not None


@pytest.mark.parametrize("action", ["raise", "delay"])
@pytest.mark.parametrize("point", random.Random(SEED).sample(sorted(POINTS.keys() - APART), 3))
async def test_a_step_that_fails_or_takes_long_stops_no_gym(point: str, action: str, tmp_path: Path) -> None:
    """C44, N20: an error like that of a disk, or half a second, at a named point: everything works afterwards."""
    verdict = await endure(tmp_path / "gym", Visit("one", "all", point), action)
    assert verdict.sound, verdict
