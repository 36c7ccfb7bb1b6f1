# SPDX-License-Identifier: Apache-2.0
"""A Gym whose node is lost comes back at another address while RL lives and has nothing to send."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash_matrix import judge
from tests.crash_matrix.bench import Bench
from tests.crash_matrix.forks import fork_server
from tests.crash_matrix.story import FIRST_HOLD, MORE, TASKS, first_snapshot, to_the_end
from tests.rl.policy import Policy, serving


@pytest.mark.timeout(150)
async def test_a_gym_that_comes_back_elsewhere_is_found(tmp_path: Path) -> None:
    """N2, I7: an idle dispatcher is no sign of life: the Gym is discovered anew and restored within a bounded time."""
    more = MORE | {"recovery": {"reach_s": 45.0, "health_s": 1.0}}
    async with fork_server() as forks, serving(Policy(hold_from=dict(FIRST_HOLD))) as policy:
        bench = Bench(forks, tmp_path, policy, TASKS, more)
        bench.prepare()
        try:
            await bench.start_gym()
            await bench.start_rl()
            await first_snapshot(bench)
            await bench.kill({"gym"}, "quiet", lose_disk=True)
            await bench.bring_back()
            recovered = await bench.event("gym_recovered")
            assert "restored" == recovered["how"]
            await policy.let_all()
            await to_the_end(bench)
            assert [] == judge.regenerated(bench) + judge.at_the_end(bench, await bench.statuses(), None)
        finally:
            await bench.close()
