# SPDX-License-Identifier: Apache-2.0
"""A trainer's loop around a run: after a crash the same call goes on at the step of the last snapshot."""

import asyncio
import json
import logging
import sys
from pathlib import Path

from reference_rl import Row, RunSettings, SnapshotFailed, load_settings, open_run

WEIGHTS = "trainer/weights.json"


async def train(settings: RunSettings, save_every: int = 1) -> dict[str, float]:
    """Train until every rollout of the run is consumed, each once; return the weights."""
    async with open_run(settings) as run:
        weights = {"version": 0.0, "value": 0.0}
        if run.restored_from is not None and (run.restored_from.path / WEIGHTS).exists():
            weights = json.loads((run.restored_from.path / WEIGHTS).read_text())
        while (unit := await run.next_unit()) is not None:
            rewards = [run.result(rollout_id)["body"]["reward"] for rollout_id in unit]
            rows = [row for rollout_id in unit for row in await run.rows(rollout_id)]
            weights = learn(weights, rewards, rows)
            step = await run.record_step(unit, int(weights["version"]))
            if step % save_every == 0:
                try:
                    async with run.snapshot() as cut:  # captured: the Gyms work again
                        await cut.write(WEIGHTS, json.dumps(weights).encode())
                except SnapshotFailed as error:
                    logging.warning("the snapshot before stays in use: %s", error)
        return weights


def learn(weights: dict[str, float], rewards: list[float], rows: list[Row]) -> dict[str, float]:
    """Stand in for a gradient step: the rows hold what the policy was asked and what it answered, turn by turn."""
    value = weights["value"] + sum(rewards) + 0.01 * len(rows)
    return {"version": weights["version"] + 1, "value": value}


if __name__ == "__main__":
    logging.warning("trained: %s", asyncio.run(train(load_settings(Path(sys.argv[1])))))
