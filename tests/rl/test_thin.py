# SPDX-License-Identifier: Apache-2.0
"""The whole path, thin: run, snapshot, kill, run again."""

from pathlib import Path

from tests.rl.harness import results_of, running, settings, until
from tests.rl.scripted import one_gym, serving


async def test_a_run_survives_the_death_of_everything(tmp_path: Path) -> None:
    """CKPT-RESTART-058: the worked example: A is reused, B and C continue after 2 and 4 turns, each alone."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await until(lambda: len(gym.runs) == 3, "three rollouts started")
            gym.turn("r1_g0_s0", 5)
            gym.finish("r1_g0_s0")
            gym.turn("r1_g0_s1", 2)
            gym.turn("r1_g0_s2", 4)
            await run.event("finished")
            report = await run.snapshot()
            assert report.outcome == "published", report
        gym.new_life()
        async with running(settings(tmp_path / "run", gym)) as run:
            restarted = await run.event("restarted")
            assert ["reused", "continued", "continued"] == [r["how"] for r in restarted["rollouts"]]
            assert [0, 2, 4] == [r["turns_done"] for r in restarted["rollouts"]]
            assert {"r1_g0_s1": 2, "r1_g0_s2": 4} == {r: run.turns for r, run in gym.runs.items()}
            gym.finish("r1_g0_s1")
            gym.finish("r1_g0_s2")
            assert await run.done() == 0
        assert [(0, 0), (1, 1), (2, 1)] == [(r["sibling"], r["attempt"]) for r in results_of(tmp_path / "run")]
