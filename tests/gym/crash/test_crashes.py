# SPDX-License-Identifier: Apache-2.0
"""The seeded part of the crash test: some fail points, some random kills, and proof that both can fail."""

from __future__ import annotations

import random
from pathlib import Path

from tests.gym.crash.points import visit_all
from tests.gym.crash.soak import soak

SEED = 20
ALWAYS = ("boundary.crossed", "log.half", "log.sealed", "restore.installed", "commit.manifest")


async def test_nothing_acknowledged_is_missing_after_a_kill_at_a_fail_point(tmp_path: Path) -> None:
    """C40: SIGKILL at named points of a busy Gym; every one is reached while an unfinished rollout holds a turn."""
    others = random.Random(SEED).sample(
        ("acks.released", "commit.captured", "effect.done", "log.append", "log.based", "part.changed", "turn.opened"), 3
    )
    verdicts = await visit_all(tmp_path, [(point, 1) for point in (*ALWAYS, *others)])
    assert [] == [verdict for verdict in verdicts if not verdict.sound]


async def test_ten_kills_at_random_instants_lose_no_finished_turn(tmp_path: Path) -> None:
    """C25: a busy Gym is killed ten times: the same incarnation, every finished turn, result, ACK and `last`."""
    lives = await soak(tmp_path / "soak", 10, SEED)
    assert (10, 0, None) == (lives.kills, lives.lost, lives.fault)
    assert lives.turns > 10


async def test_a_gym_that_waits_for_no_write_is_found_out(tmp_path: Path) -> None:
    """The crash test can fail: replies and policy calls that leave too early cost a turn or a result."""
    lives = await soak(tmp_path / "soak", 10, SEED, broken="nobody_waits")
    assert lives.fault is not None
