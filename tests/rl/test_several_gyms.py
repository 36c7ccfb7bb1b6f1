# SPDX-License-Identifier: Apache-2.0
"""Two real Gyms in one run, one of them without a shared filesystem, through the death of everything."""

import signal
from pathlib import Path
from typing import Any

import pytest

from reference_rl.snapshots import SnapshotStore
from tests.rl.harness import events_of, results_of, until
from tests.rl.policy import Policy, serving
from tests.rl.processes import Process, event, gym_process, rl_process


def named(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of a name so far."""
    return [e for e in events_of(run_dir) if e["event"] == name]


async def snapshot(run_dir: Path, client: Process, number: int) -> dict[str, Any]:
    """Ask for a snapshot until the ``number``-th is published, and return its event."""
    while len(named(run_dir, "snapshot_published")) < number:
        failed = len(named(run_dir, "snapshot_failed"))
        client.send(signal.SIGUSR1)
        await until(
            lambda failed=failed: (
                len(named(run_dir, "snapshot_published")) >= number or len(named(run_dir, "snapshot_failed")) > failed
            ),
            "it ended",
        )
    return named(run_dir, "snapshot_published")[number - 1]


@pytest.mark.timeout(300)
async def test_two_gyms_are_restored_together(tmp_path: Path) -> None:
    """N2, CKPT-SNAP-009, CKPT-RESTART-062: one shares files, one is optional and sends its cuts over HTTP.

    The optional one dies alone: a snapshot leaves it out, and it comes back from the one before. Then everything
    dies. No turn of either is redone.
    """
    for name in ("run/snapshots", "near", "far/private"):
        (tmp_path / name).mkdir(parents=True)
    near = {"storage_roots": ["../run/snapshots"]}
    far = {"storage_roots": ["private"], "processes": "three"}
    async with serving(Policy()) as policy:
        # Group 0 goes to the first Gym, group 1 to the second: one finishes, one has 2 turns, one has 3.
        policy.hold_from = {1: 3, 2: 4, 1001: 3, 1002: 4}
        settings: dict[str, Any] = {
            "run_id": "two",
            "run_dir": "run",
            "column": 3,
            "gyms": [
                {"alias": "near", "announce": "near/announce.json"},
                {"alias": "far", "announce": "far/announce.json", "shares_files": False, "optional": True},
            ],
            "recovery": {"health_s": 0.5, "reach_s": 60.0},
            "policy": {"base_url": policy.url, "model": "m", "api": "chat_completions"},
            "tasks": {"environment": "taxi", "groups": 2, "siblings": 3, "max_turns": 4, "task": {"seed": 7}},
        }
        run_dir = tmp_path / "run"
        async with gym_process(tmp_path / "near", **near) as one, rl_process(tmp_path, **settings) as client:
            async with gym_process(tmp_path / "far", **far):
                held = ((1, 3), (2, 4), (1001, 3), (1002, 4))
                await until(lambda: all(policy.asked[key] for key in held), "four rollouts hold turns")
                await until(lambda: len(named(run_dir, "trained")) == 2, "two are trained")
                assert ["near", "far"] == (await snapshot(run_dir, client, 1))["gyms"]
            without = await snapshot(run_dir, client, 2)
            assert (["near"], ["far"]) == (without["gyms"], without["left_out"])
            async with gym_process(tmp_path / "far", **far):
                recovered = await event(tmp_path, "gym_recovered", client)
                assert ("far", "restored", "1-1") == tuple(recovered[n] for n in ("gym", "how", "snapshot"))
                await until(lambda: policy.asked[1001, 3] > 1 and policy.asked[1002, 4] > 1, "both went on")
                assert ["near", "far"] == (await snapshot(run_dir, client, 3))["gyms"]
                await client.kill()
            await one.kill()
        store = SnapshotStore(run_dir / "snapshots", "two")
        assert named(run_dir, "snapshot_published")[2]["checkpoint_id"] == str(store.ids()[0])
        saved = store.verify(store.ids()[0])
        assert {"two_g1_s0", "two_g1_s1", "two_g1_s2"} >= saved.index("far", "agent").keys()
        assert {"left_out"} == {r.reason for r in store.verify(store.ids()[1]).restarts().values()}
        assert [] == [p for p in (tmp_path / "far/private").rglob("*") if p.is_file()]
        before = policy.completed.copy()
        await policy.let_all()
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
