# SPDX-License-Identifier: Apache-2.0
"""The soak in small: a few kills of random processes at random instants."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash_matrix.forks import fork_server
from tests.crash_matrix.soak import Wish, soak


@pytest.mark.timeout(240)
@pytest.mark.parametrize("log", [False, True], ids=["without a log", "with a log"])
async def test_kills_at_random_instants_lose_nothing(tmp_path: Path, log: bool) -> None:
    """C40, C46, N15, C25: four kills in 120 rollouts: all trained once, bodies as without, no listed turn redone."""
    said: list[str] = []
    wish = Wish(120, 4, 3, turns=6, latency_s=0.06, live=16, interval_s=0.4, longest_s=1.0, log=log)
    async with fork_server() as forks:
        outcome = await soak(forks, tmp_path, wish, said.append)
    assert (120, []) == (outcome.trained, outcome.violations), said
    assert 4 == len(outcome.kills), said
    assert outcome.in_a_turn >= 3, said
