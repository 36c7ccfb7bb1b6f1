# SPDX-License-Identifier: Apache-2.0
"""The RL process dies between any two steps of saving and restarting; what is left always goes on."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from reference_rl import failpoints
from reference_rl.snapshots import SnapshotStore
from tests.crash_matrix.forks import Forked, ForkServer
from tests.rl.harness import events_of, results_of, until
from tests.rl.processes import event, rl_fork
from tests.rl.scripted import ScriptedParticipant, serving, three_servers
from tests.rl.test_public import run_yaml

A, B, C = "r1_g0_s0", "r1_g0_s1", "r1_g0_s2"

# One crash while saving and one while restarting per run: between them every point of both is visited.
PAIRS = [
    ("snapshot.begun", "restart.claimed"),
    ("snapshot.prepared", "restart.known"),
    ("snapshot.captured", "restart.feeds_read"),
    ("snapshot.resumed", "restart.reserved"),
    ("snapshot.ledger_copied", "restart.rows_restored"),
    ("snapshot.durable", "restart.participants_restored"),
    ("snapshot.manifest_written", "restart.ledger_restored"),
    ("snapshot.renamed", "restart.resumed"),
    ("snapshot.assembled", "restart.closed"),
]


async def under_way(directory: Path, client: Forked, servers: tuple[ScriptedParticipant, ...]) -> None:
    """Wait until three rollouts run, let them do 1, 2 and 4 turns, and take a first snapshot."""
    await until(lambda: len(servers[0].runs) == 3, "three rollouts started")
    await event(directory, "dispatched", client)
    for rollout_id, turns in ((A, 1), (B, 2), (C, 4)):
        servers[0].turn(rollout_id, turns)
    client.send(signal.SIGUSR1)
    await event(directory, "snapshot_published", client)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(("while_saving", "while_restarting"), PAIRS)
async def test_a_kill_between_any_two_steps_loses_nothing(
    tmp_path: Path, forks: ForkServer, while_saving: str, while_restarting: str
) -> None:
    """C40, N9, N16: killed in a save and in the restart: the newest published is whole, no saved turn is redone."""
    servers = three_servers()
    agent = servers[0]
    async with serving(*servers):
        async with rl_fork(forks, tmp_path, f"{while_saving}:2", **run_yaml(agent.url)) as client:
            await under_way(tmp_path, client, servers)
            agent.turn(A)
            client.send(signal.SIGUSR1)
            assert -signal.SIGKILL == await client.wait()
        store = SnapshotStore(tmp_path / "run/snapshots", "r1")
        newest = store.verify(store.ids()[0])
        assert ("1-2" if while_saving == "snapshot.renamed" else "1-1") == str(newest.checkpoint_id)
        for server in servers:
            server.new_life()
        async with rl_fork(forks, tmp_path, while_restarting, **run_yaml(agent.url)) as client:
            assert -signal.SIGKILL == await client.wait()
        lines = len(events_of(tmp_path / "run"))
        async with rl_fork(forks, tmp_path, "", **run_yaml(agent.url)) as client:
            restarted = await event(tmp_path, "restarted", client, after=lines)
            saved = {r.rollout_id: r.turns_done for r in newest.index("gym", "agent").values()}
            assert saved == {r["rollout_id"]: r["turns_done"] for r in restarted["rollouts"]}
            assert saved == {r: run.turns for r, run in agent.runs.items()}
            for rollout_id in list(agent.runs):
                agent.finish(rollout_id)
            assert 0 == await client.wait()
    assert [0, 1, 2] == [r["sibling"] for r in results_of(tmp_path / "run")]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("point", ["start.marked", "start.answered", "result.saved", "result.acked"])
async def test_a_kill_between_result_and_ack_trains_nothing_twice(
    tmp_path: Path, forks: ForkServer, point: str
) -> None:
    """C01, C07: killed around a start, a save and an ACK, the Gym alive: each result is trained once and released."""
    servers = three_servers()
    agent = servers[0]
    settings: dict[str, Any] = run_yaml(agent.url, trainer={"survives": True})
    async with serving(*servers):
        settings["gyms"] = [{"alias": "gym", "url": agent.url}]
        async with rl_fork(forks, tmp_path, point, **settings) as client:
            if point.startswith("result"):
                await until(lambda: len(agent.runs) == 3, "three rollouts started")
                agent.finish(A)
            assert -signal.SIGKILL == await client.wait()
        async with rl_fork(forks, tmp_path, "", **settings) as client:
            await until(lambda: len({*agent.runs, *agent.released}) == 3, "all three are known")
            for rollout_id, run in list(agent.runs.items()):
                if run.result is None:
                    agent.finish(rollout_id)
            assert 0 == await client.wait()
    assert [0, 1, 2] == [r["sibling"] for r in results_of(tmp_path / "run")]
    assert 3 == len(agent.released)


def test_every_point_of_saving_and_restarting_is_visited() -> None:
    """The pairs above leave no point out but the last of each, which nothing follows."""
    visited = {point for pair in PAIRS for point in pair}
    wanted = {p for p in failpoints.POINTS if p.startswith(("snapshot.", "restart."))}
    assert {"snapshot.retained"} == wanted - visited


def test_every_named_point_exists_in_the_code() -> None:
    """A point that is listed and never placed would be a hole in the table."""
    source = "".join(p.read_text() for p in Path(failpoints.__file__).parent.glob("*.py"))
    assert failpoints.POINTS == set(re.findall(r'failpoints\.hit\("([a-z_.]+)"\)', source))
    assert failpoints.VARIABLE not in os.environ
