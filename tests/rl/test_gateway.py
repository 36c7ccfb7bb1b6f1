# SPDX-License-Identifier: Apache-2.0
"""Token rows through a real run: kept before the turn closes, pinned by the snapshot, there after a restart."""

import signal
import sqlite3
from pathlib import Path

from reference_rl.snapshots import ROWS_FILE, SnapshotStore
from tests.rl.harness import until
from tests.rl.policy import policy_server
from tests.rl.processes import event, gym_process, rl_process
from tests.rl.test_real_gym import TURNS, settings


async def test_a_restored_run_trains_from_the_rows_of_its_snapshot(tmp_path: Path) -> None:
    """CKPT-DUTY-026, CKPT-SNAP-016: rows of saved turns come from the snapshot, each turn of each sample has one."""
    (tmp_path / "run" / "snapshots").mkdir(parents=True)
    async with policy_server() as policy:
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
        policy.release()
        async with gym_process(tmp_path), rl_process(tmp_path, **config) as client:
            assert 0 == await client.wait(), client.output.read_text()
    con = sqlite3.connect(tmp_path / "run" / "dataplane.sqlite")
    rows = con.execute("SELECT rollout_id, turn FROM rows").fetchall()
    con.close()
    wanted = {(f"worked_g0_s{sibling}", turn) for sibling in range(3) for turn in range(1, TURNS + 1)}
    assert sorted(wanted) == sorted(rows)
