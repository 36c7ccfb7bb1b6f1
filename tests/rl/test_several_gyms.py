# SPDX-License-Identifier: Apache-2.0
"""Two real Gyms in one run, one of them without a shared filesystem, through the death of everything."""

import signal
from pathlib import Path
from typing import Any

from reference_rl.snapshots import SnapshotStore
from tests.rl.harness import events_of, results_of, until
from tests.rl.policy import policy_server
from tests.rl.processes import event, gym_process, rl_process


async def test_two_gyms_are_restored_together(tmp_path: Path) -> None:
    """N2, CKPT-SNAP-009: one shares files, one sends its cuts over HTTP; everything dies; no turn is redone."""
    for name in ("run/snapshots", "near", "far/private"):
        (tmp_path / name).mkdir(parents=True)
    near = {"storage_roots": ["../run/snapshots"]}
    far = {"storage_roots": ["private"], "processes": "three"}
    async with policy_server() as policy:
        # Group 0 goes to the first Gym, group 1 to the second: one finishes, one has 2 turns, one has 3.
        policy.hold_from = {1: 3, 2: 4, 1001: 3, 1002: 4}
        settings: dict[str, Any] = {
            "run_id": "two",
            "run_dir": "run",
            "column": 3,
            "gyms": [
                {"alias": "near", "announce": "near/announce.json"},
                {"alias": "far", "announce": "far/announce.json", "shares_files": False},
            ],
            "policy": {"base_url": policy.url, "model": "m", "api": "chat_completions"},
            "tasks": {"environment": "taxi", "groups": 2, "siblings": 3, "max_turns": 4, "task": {"seed": 7}},
        }
        async with gym_process(tmp_path / "near", **near) as one, gym_process(tmp_path / "far", **far) as other:
            async with rl_process(tmp_path, **settings) as client:
                held = ((1, 3), (2, 4), (1001, 3), (1002, 4))
                await until(lambda: all(policy.asked[key] for key in held), "four rollouts hold turns")
                await until(lambda: len([e for e in events_of(tmp_path / "run") if e["event"] == "trained"]) == 2, "2")
                client.send(signal.SIGUSR1)
                saved = await event(tmp_path, "snapshot_published", client)
                assert ["near", "far"] == saved["gyms"]
                await client.kill()
            await one.kill()
            await other.kill()
        store = SnapshotStore(tmp_path / "run/snapshots", "two")
        snapshot = store.verify(store.ids()[0])
        assert {"two_g1_s0", "two_g1_s1", "two_g1_s2"} >= snapshot.index("far", "agent").keys()
        assert [] == [p for p in (tmp_path / "far/private").rglob("*") if p.is_file()]
        before = policy.completed.copy()
        policy.release()
        lines = len(events_of(tmp_path / "run"))
        async with (
            gym_process(tmp_path / "near", **near),
            gym_process(tmp_path / "far", **far),
            rl_process(tmp_path, **settings) as client,
        ):
            restarted = await event(tmp_path, "restarted", client, after=lines)
            assert 0 == await client.wait(), client.output.read_text()
        assert {"near": "restored", "far": "restored"} == restarted["gyms"]
        assert [] == [key for key in before if policy.completed[key] > 1]
        assert [(g, s, 4) for g in (0, 1) for s in range(3)] == [
            (r["group"], r["sibling"], r["body"]["turns"]) for r in results_of(tmp_path / "run")
        ]
