# SPDX-License-Identifier: Apache-2.0
"""Token rows through a real run: kept before the turn closes, pinned by the snapshot, there after a restart."""

import json
import signal
import sqlite3
from pathlib import Path

from reference_rl.snapshots import ROWS_FILE, SnapshotStore
from tests.rl.harness import events_of, until
from tests.rl.policy import ACTIONS, Policy, serving
from tests.rl.processes import event, gym_process, rl_process
from tests.rl.test_real_gym import TURNS, settings


async def test_a_restored_run_trains_from_the_rows_of_its_snapshot(tmp_path: Path) -> None:
    """CKPT-DUTY-026, CKPT-SNAP-016: the data plane is lost too: samples are trained from the rows of the snapshot.

    The trainer reads one row for each turn of each sample; those of saved turns are what the policy answered in the
    first life, and no turn of them was asked for again.
    """
    (tmp_path / "run" / "snapshots").mkdir(parents=True)
    async with serving(Policy()) as policy:
        policy.hold_from = {1: 3, 2: 5}
        config = settings(3, policy) | {"gateway": True}
        async with gym_process(tmp_path) as gym, rl_process(tmp_path, **config) as client:
            await event(tmp_path, "trained", client)
            await until(lambda: policy.asked[1, 3] and policy.asked[2, 5], "B's third and C's fifth turn are asked for")
            client.send(signal.SIGUSR1)
            await event(tmp_path, "snapshot_published", client)
            await client.kill()
            await gym.kill()
        store = SnapshotStore(tmp_path / "run/snapshots", "worked")
        saved = (store.verify(store.ids()[0]).path / ROWS_FILE).read_text().splitlines()
        assert 5 + 2 + 4 == len(saved)
        for path in (tmp_path / "run").glob("dataplane.sqlite*"):
            path.unlink()  # the data plane of the dead run is lost as well
        answered = policy.completed.copy()
        lines = len(events_of(tmp_path / "run"))
        await policy.let_all()
        async with gym_process(tmp_path), rl_process(tmp_path, **config) as client:
            assert 0 == await client.wait(), client.output.read_text()
        assert [] == [key for key in answered if policy.completed[key] > 1]
        later = events_of(tmp_path / "run")[lines:]
        assert [5, 5, 5] == [e["rows"] for e in events_of(tmp_path / "run") if e["event"] == "trained"]
        assert [] == [e for e in later if e["event"] == "rows_missing"]
        metrics = next(e for e in later if e["event"] == "done")["metrics"]
        assert (10, 0) == (metrics["ckpt_token_rows_trained"], metrics["ckpt_token_rows_missing"])
    con = sqlite3.connect(tmp_path / "run" / "dataplane.sqlite")
    found = con.execute("SELECT rollout_id, attempt, turn, row FROM rows").fetchall()
    con.close()
    kept = {json.loads(line)["key"]: json.loads(line)["row"] for line in saved}
    assert kept == {f"{r}/{a}/{t}": json.loads(row) for r, a, t, row in found if f"{r}/{a}/{t}" in kept}
    for rollout_id, _, turn, row in found:
        call = json.loads(row)["answer"]["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
        assert ACTIONS[(int(rollout_id[-1]) + turn) % 4] == json.loads(call)["action"], "what the policy answered"
    rows = [(rollout_id, turn) for rollout_id, _, turn, _ in found]
    wanted = {(f"worked_g0_s{sibling}", turn) for sibling in range(3) for turn in range(1, TURNS + 1)}
    assert sorted(wanted) == sorted(rows)
