# SPDX-License-Identifier: Apache-2.0
"""A participant that is killed when its manifest is complete and has no name yet: that cut does not exist."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gym.controller import Cut, Refused
from tests.gym.crash.lives import GONE, MortalGym
from tests.gym.running import FORMS, task_of
from tests.gym.stubs import PolicyStub, until

SCRIPT = [[("add", {"n": 5})], [("grow", {"bytes": 1000})], [("add", {"n": 0})], "done"]
POINT = "commit.unnamed"


@pytest.mark.parametrize("log", [{}, None], ids=["log", "no log"])
@pytest.mark.parametrize("processes", FORMS)
async def test_a_manifest_without_its_name_is_none(processes: str, log: dict[str, Any] | None, tmp_path: Path) -> None:
    """C40, C25: SIGKILL before the rename: nobody takes that cut for one, and the one before is as good as ever."""
    victim = "all" if processes == "one" else "agent"
    gym = MortalGym(tmp_path, processes, log=log, failpoint=POINT, victim=victim, judged=False)
    async with PolicyStub(SCRIPT) as policy:
        try:
            await gym.start()
            await gym.adopt()
            await gym.begin_rollout("whole", task_of(), policy.address)
            whole = await gym.result_of("whole")
            policy.hold("cut", 3)
            await gym.begin_rollout("cut", task_of(), policy.address)
            await until(lambda: "3" in policy.turns_of("cut"), "turn 3 is asked")
            cuts = await gym.snapshot()
            half = await _killed_while_it_commits(gym, cuts["agent"])
            before = dict(gym.incarnations)
            policy.release("cut", 3)
            await gym.start()
            last = (await gym.raw("agent", "GET", "/checkpoint"))["last"]
            for role in gym.roles:
                await gym.raw(role, "GET", "/capabilities")
            if log is None:
                assert (None, set()) == (last, set(before.values()) & set(gym.incarnations.values()))
                await gym.adopt()
                await _is_refused(gym, half)
                await gym.restore(cuts, attempt=1)
            else:
                assert before == gym.incarnations
                assert (half.checkpoint_id, "failed", None) == (
                    last["checkpoint_id"],
                    last["ended_as"],
                    last["manifest"],
                )
            found = await gym.result_of("cut")
        finally:
            await gym.close()
    assert gym.hits.read_text().startswith(f"{POINT} ")
    assert whole["body"] == found["body"]
    assert ["1", "2", "3", "3", "4"] == policy.turns_of("cut")


async def _killed_while_it_commits(gym: MortalGym, good: Cut) -> Cut:
    """Let the agent's process die in a commit, and all others with it; what it has left."""
    checkpoint_id = gym.next_id()
    await gym.prepare(checkpoint_id)
    gym.arm()
    with pytest.raises(GONE):
        await gym.commit(checkpoint_id)
    await gym.kill()
    path = gym.directory / "snapshots" / checkpoint_id / "agent"
    names = {entry.name for entry in path.iterdir()}
    assert (True, False) == (".manifest.json.tmp" in names, "manifest.json" in names)
    return replace(good, checkpoint_id=checkpoint_id, path=path)


async def _is_refused(gym: MortalGym, half: Cut) -> None:
    """See that no restore takes a cut whose manifest has no name."""
    source = {"scheme": "file", "path": str(half.path), "checkpoint_id": half.checkpoint_id}
    body = {
        "checkpoint_id": gym.next_id(),
        "run_id": "run",
        "source": source | {"manifest_digest": half.digest},
        **{"rollouts": [], "results": [], "fences": [], "timeout_ms": 10_000, "lease_ms": 60_000},
    }
    with pytest.raises(Refused) as refused:
        await gym.post("agent", "/checkpoint/restore", body)
    assert "checkpoint_corrupt" == refused.value.problem["code"]
    assert "manifest.json" in refused.value.problem["detail"]
