# SPDX-License-Identifier: Apache-2.0
"""The four columns: what each sends, and what a restart keeps in it."""

import json
from pathlib import Path
from typing import Any

import pytest

from reference_rl.columns import SWITCHES
from reference_rl.settings import RunSettings, group_task, settings_of, sibling_seed
from spec import wire
from tests.rl.harness import Running, results_of, running, settings, until
from tests.rl.scripted import ScriptedParticipant, calls_of, one_gym, serving


async def play(run: Running, gym: ScriptedParticipant, *siblings: int) -> None:
    """Finish some siblings: by their seed in the older route, by their id otherwise."""
    for sibling in siblings:
        if run.session.settings.column < 2:
            found = await until(
                lambda s=sibling: [r for r in gym.parked.values() if r.seed == s and r.result is None],
                "it is asked for",
            )
            gym.runs[found[-1].rollout_id] = found[-1]
            gym.finish(found[-1].rollout_id)
        else:
            await until(lambda s=sibling: f"r1_g0_s{s}" in gym.runs, "it runs")
            gym.finish(f"r1_g0_s{sibling}")


@pytest.mark.parametrize("column", [0, 1, 2, 3])
async def test_a_restart_reuses_what_the_snapshot_or_the_ledger_holds(tmp_path: Path, column: int) -> None:
    """A result after the snapshot is lost in columns 0 and 1, as it always was, and a fact in columns 2 and 3."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym, column=column)) as run:
            await play(run, gym, 0)
            await run.event("trained")
            assert "published" == (await run.snapshot()).outcome
            await play(run, gym, 1)
            await run.event("trained", 2)
        gym.new_life()
        async with running(settings(tmp_path / "run", gym, column=column)) as run:
            restarted = await run.event("restarted")
            how = {r["sibling"]: r["how"] for r in restarted["rollouts"]}
            assert "reused" == how[0]
            assert ("restarted" if column < 2 else "reused") == how[1]
            assert how[2] != "reused"
            await play(run, gym, *([1, 2] if column < 2 else [2]))
            assert await run.done() == 0
        assert [0, 1, 2] == [r["sibling"] for r in results_of(tmp_path / "run")]


async def test_column_0_sends_not_one_byte_of_the_protocol(tmp_path: Path) -> None:
    """N14, CKPT-DISC-031: over a recorded run only the older route's calls are sent, no header of the protocol."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym, column=0)) as run:
        await play(run, gym, 0)
        await run.event("trained")
        await run.snapshot()
        await play(run, gym, 1, 2)
        assert await run.done() == 0
    assert {"run"} == calls_of(gym).keys()
    body = {"environment": "scripted", "task": {"seed": 7}, "limits": {"max_turns": 5, "episode_ms": 3_600_000}}
    policy = {"policy": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api": "chat_completions"}}
    for number, (_, sent) in enumerate(gym.calls):
        headers = sent.pop("headers")
        assert not [name for name in headers if name.lower().startswith("gym-")]
        assert {**body, **policy, "seed": number} == sent


async def test_column_1_discovers_at_setup_and_no_more(tmp_path: Path) -> None:
    """Column 1 reads the capabilities, refuses what it must, and then is column 0."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym, column=1)) as run:
        await play(run, gym, 0, 1, 2)
        assert await run.done() == 0
    assert {"capabilities", "run"} == calls_of(gym).keys()
    assert 1 == len(calls_of(gym)["capabilities"])


async def test_the_metric_names_of_column_0_are_those_of_a_client_without_checkpoints(tmp_path: Path) -> None:
    """CKPT-DISC-032: with the protocol off no metric of it exists, whatever the run did."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym, column=0)) as run:
        await play(run, gym, 0, 1, 2)
        assert await run.done() == 0
    names = json.loads((tmp_path / "run/metrics.json").read_text()).keys()
    assert {"rollouts_unfinished", "rollouts_finished", "rollouts_failed", "samples_trained"} == set(names)


async def test_column_2_never_pauses_a_gym(tmp_path: Path) -> None:
    """Column 2 has ids, feed and ACKs; its snapshots hold the RL state alone and close no gate."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym, column=2)) as run:
        await play(run, gym, 0)
        await run.event("trained")
        await run.snapshot()
        snapshot = run.session.store.verify(run.session.store.ids()[0])
        assert () == snapshot.manifest.gyms
        await play(run, gym, 1, 2)
        assert await run.done() == 0
    assert not {"prepare", "commit", "restore"} & calls_of(gym).keys()
    assert 3 == len(gym.released)


def test_column_0_is_the_default() -> None:
    """What nobody asked for is off."""
    content: dict[str, Any] = {
        "run_id": "r",
        "run_dir": "x",
        "gyms": [{"alias": "g", "url": "http://h"}],
        "policy": {"base_url": "http://h", "model": "m", "api": "responses"},
        "tasks": {"environment": "e"},
    }
    loaded = settings_of(content, Path("/base"))
    assert (0, SWITCHES[0]) == (loaded.column, loaded.switches)
    assert Path("/base/x") == loaded.run_dir


def test_siblings_share_their_task_and_differ_in_their_seed() -> None:
    """Groups move the task's own seed, siblings the start's; the digest is the task's alone."""
    loaded: RunSettings = settings(Path("/nowhere"), "http://h", tasks={"groups": 2, "siblings": 2})
    first, second = loaded.groups()
    assert [{"seed": 7}, {"seed": 7}, {"seed": 8}] == [r.task for r in (*first.rollouts, second.rollouts[0])]
    assert [0, 1, 1000, 1001] == [r.seed for g in (first, second) for r in g.rollouts]
    assert 2 == len({r.task_digest for g in (first, second) for r in g.rollouts})
    assert all(wire.is_rollout_id(r.rollout_id) for r in first.rollouts)
    assert (2003, {"seed": 5}, {"seed": True}) == (
        sibling_seed(2, 3),
        group_task({"seed": 3}, 2),
        group_task({"seed": True}, 2),
    )
