# SPDX-License-Identifier: Apache-2.0
"""A run inside a trainer's own loop, as the documentation shows it."""

import asyncio
import json
from pathlib import Path

import pytest

from examples.trainer_loop import train
from reference_rl import InvariantViolated, RowKey, SettingsError, open_run
from tests.rl.harness import events_of, settings, until
from tests.rl.scripted import Fault, one_gym, serving

A, B, C = "r1_g0_s0", "r1_g0_s1", "r1_g0_s2"
DOCUMENT = Path(__file__).parents[2] / "docs" / "trainer.md"


async def test_the_documented_loop_goes_on_after_a_crash(tmp_path: Path) -> None:
    """The example of the documentation: killed after a step, it goes on at the weights of its snapshot; each once."""
    gym = one_gym()
    async with serving(gym):
        config = settings(tmp_path / "run", gym)
        training = asyncio.create_task(train(config))
        await until(lambda: len(gym.runs) == 3, "three rollouts started")
        gym.turn(B, 2)
        gym.finish(A, reward=5.0)
        store = tmp_path / "run/snapshots"
        await until((store / "1-1").is_dir, "the first step is saved")
        saved = json.loads((store / "1-1/trainer/weights.json").read_text())
        assert {"version": 1.0, "value": 5.0} == saved
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        gym.new_life()
        training = asyncio.create_task(train(config))
        await until(lambda: {B, C} <= gym.runs.keys(), "the others go on")
        assert 2 == gym.runs[B].turns
        gym.faults["prepare"] = Fault("500")  # a snapshot that fails ends nothing
        gym.finish(B, reward=2.0)
        gym.finish(C, reward=1.0)
        assert {"version": 3.0, "value": 8.0} == await asyncio.wait_for(training, 45)
    trained = [r for e in events_of(tmp_path / "run") if e["event"] == "trained" for r in e["rollouts"]]
    assert [A, B, C] == sorted(trained)


async def test_a_trainer_reads_results_and_rows_and_hears_what_ends_its_run(tmp_path: Path) -> None:
    """A unit comes again until it is consumed; rows come by turn; a violated invariant is raised where it waits."""
    gym = one_gym()
    async with serving(gym), open_run(settings(tmp_path / "run", gym)) as run:
        assert (None, 0) == (run.restored_from, run.step)
        await until(lambda: len(gym.runs) == 3, "three rollouts started")
        for turn in (2, 1):
            await run.plane.put(RowKey(A, 0, turn), {"ids": [turn]})
        gym.turn(A, 2)
        gym.finish(A)
        assert [A] == await run.next_unit()
        assert [A] == await run.next_unit()
        assert [{"ids": [1]}, {"ids": [2]}] == await run.rows(A)
        assert 2 == run.result(A)["body"]["turns"]
        with pytest.raises(KeyError):
            run.result(B)
        assert 1 == await run.record_step([A], 1)
        gym.ack_outcome = "mismatch"
        gym.finish(B)
        assert [B] == await run.next_unit()
        await run.record_step([B], 2)
        with pytest.raises(InvariantViolated):
            await asyncio.wait_for(run.next_unit(), 45)


async def test_a_column_without_rollouts_cannot_be_embedded(tmp_path: Path) -> None:
    """Columns 0 and 1 have no ids, no feed and nothing to bring back."""
    with pytest.raises(SettingsError, match="column 2 or 3"):
        async with open_run(settings(tmp_path / "run", "http://h", column=1)):
            pass


def test_the_documentation_shows_this_very_loop() -> None:
    """The page includes the file that is executed here."""
    assert "```{literalinclude} ../examples/trainer_loop.py" in DOCUMENT.read_text(encoding="utf-8")
