# SPDX-License-Identifier: Apache-2.0
"""The example of a FastAPI Gym: small, built on the kit alone, green at level 1, its own game survives a crash."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from examples.fastapi_gym.app import Settings, create_gym
from reference_gym.participant import serve_uvicorn, serving
from tests.gym.controller import CONTROL_TOKEN, DATA_TOKEN, Controller
from tests.gym.stubs import PolicyStub, until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "fastapi_gym"
OWN = ("environment.py", "agent.py")
MOST_LINES = 150
PROJECT = ("spec", "reference_gym", "reference_rl", "conformance", "tests")
OFFERED = ("results", "checkpoint", "turn-recovery")


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the quick budget says about the example; on a loaded machine its bounds are stretched."""
    report = tmp_path_factory.mktemp("fastapi-gym") / "report.json"
    suite = Path(sys.executable).with_name("gym-conformance")
    target = EXAMPLE / "target.yaml"
    run = [suite, "run", "--target", target, "--budget", "quick", "--seed", "7", "--time-scale", "2", "--json", report]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    told: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["verdict"]
    return told | {"output": done.stdout}


@pytest.mark.timeout(300)
def test_the_quick_budget_is_green_at_level_1(verdict: dict[str, Any]) -> None:
    """Nothing fails, and every profile is judged, with the conformance module that comes from the kit."""
    assert 0 == verdict["exit_code"], verdict["output"][-8000:]
    assert (0, 0) == (verdict["requirements"]["failed"], verdict["requirements"]["flaky"])
    assert {"conformant", "partial"} >= {verdict["profiles"][profile] for profile in OFFERED}
    assert 400 <= verdict["requirements"]["passed"]


def test_of_this_project_it_imports_the_kit_alone() -> None:
    """What a foreign Gym would install is all that it needs."""
    named = set()
    for path in EXAMPLE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                named.add(node.module or "")
    ours = {name for name in named if name.split(".")[0] in PROJECT}
    assert ours
    assert {"reference_gym.participant"} == {".".join(name.split(".")[:2]) for name in ours}


def test_its_environment_and_agent_loop_are_short() -> None:
    """At most 150 lines that are not blank, docstrings included."""
    lines = [line for name in OWN for line in (EXAMPLE / name).read_text(encoding="utf-8").splitlines() if line.strip()]
    assert MOST_LINES >= len(lines)


@dataclass
class PigGym(Controller):
    """One life of the example, in this process, and its controller."""

    directory: Path
    server: serving.Server
    http: aiohttp.ClientSession | None
    epoch: int = 0
    sequence: int = 0
    incarnations: dict[str, str] = field(default_factory=dict)
    roles = ["agent"]  # type: ignore[assignment]  # noqa: RUF012 - a constant in place of a property

    def url(self, role: str) -> str:
        """Where it listens."""
        return self.server.url


@asynccontextmanager
async def pig_gym(directory: Path, epoch: int = 0) -> AsyncIterator[PigGym]:
    """Serve the example, not started for conformance."""
    storage = directory / "snapshots"
    storage.mkdir(exist_ok=True)
    settings = Settings(
        storage=storage,
        uploads=directory / "uploads",
        limits={"shutdown_grace_ms": 500},
        control_token=CONTROL_TOKEN,
        data_token=DATA_TOKEN,
    )
    gym = create_gym(settings)
    async with await serve_uvicorn.start(gym, gym.participant) as server, aiohttp.ClientSession() as http:
        controller = PigGym(directory, server, http, epoch)
        await controller.adopt()
        yield controller


GAME = {"seed": 3, "goal": 20}
MOVES: list[Any] = [[("roll", {}), ("roll", {})], [("bank", {})], *[[("roll", {})], [("bank", {})]] * 10]


async def test_a_game_goes_on_in_another_life_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """The acid test of its own environment: interrupted = uninterrupted, die, pot, conversation and reward."""
    async with PolicyStub(MOVES) as policy:
        async with pig_gym(tmp_path) as gym:
            await gym.begin_rollout("straight", GAME, policy.address, environment="pig")
            straight = (await gym.result_of("straight"))["body"]
            policy.hold("cut", 2)
            await gym.begin_rollout("cut", GAME, policy.address, environment="pig")
            await until(lambda: "2" in policy.turns_of("cut"), "the second turn was asked")
            cuts = await gym.snapshot()
        policy.release("cut", 2)
        async with pig_gym(tmp_path, epoch=1) as gym:
            await gym.restore(cuts, attempt=1)
            again = (await gym.result_of("cut"))["body"]
    assert straight == again
    assert straight["turns"] > 2
    assert straight["final"]["banked"] >= GAME["goal"]
    assert ["1", "2", "2"] == policy.turns_of("cut")[:3]


async def test_the_older_route_is_what_it_was(tmp_path: Path) -> None:
    """It plays, it is counted as unmanaged and no more, and its errors are FastAPI's own."""
    async with PolicyStub(MOVES) as policy, pig_gym(tmp_path) as gym:
        asked = {**GAME, "policy": policy.address}
        told = await gym.data("agent", "/play", asked)
        assert told["final"]["banked"] >= GAME["goal"]
        assert [] == [one for one in policy.asked for name in one.headers if name.lower().startswith("gym-")]
        assert 0 == (await gym.raw("agent", "GET", "/checkpoint"))["counts"]["admitted"]
        assert gym.http is not None
        async with gym.http.post(f"{gym.server.url}/play", json=asked) as reply:
            assert (401, {"detail": "Unauthorized"}) == (reply.status, await reply.json())
