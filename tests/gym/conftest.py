# SPDX-License-Identifier: Apache-2.0
"""One living Gym per process form, shared by the tests that neither kill it nor need it fresh."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gym.running import FORMS, RunningGym, environment
from tests.gym.stubs import WorldStub


@dataclass(frozen=True)
class Home:
    """A Gym that lives for the whole session, and the socket on which its world listens, test by test."""

    directory: Path
    processes: str
    world: socket.socket

    @property
    def world_url(self) -> str:
        """The only world that its tasks may name."""
        return f"http://127.0.0.1:{self.world.getsockname()[1]}"


def settle(directory: Path, processes: str) -> Iterator[Home]:
    """Start a Gym, and end it."""
    with socket.socket() as world:
        world.bind(("127.0.0.1", 0))
        world.listen(128)
        home = Home(directory, processes, world)
        command = RunningGym(directory, processes, world_url=home.world_url).command()
        with (directory / "gym.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment())
        assert process.stdout is not None
        assert process.stdout.readline(), (directory / "gym.log").read_text()
        yield home
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="session")
def home_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A Gym in one process."""
    yield from settle(tmp_path_factory.mktemp("one"), "one")


@pytest.fixture(scope="session")
def home_of_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A Gym in three processes."""
    yield from settle(tmp_path_factory.mktemp("three"), "three")


@pytest.fixture(params=FORMS)
def home(request: pytest.FixtureRequest) -> Home:
    """A Gym in each form."""
    found: Home = request.getfixturevalue(f"home_of_{request.param}")
    return found


@pytest.fixture
async def gym(home: Home) -> AsyncIterator[RunningGym]:
    """The living Gym with a new controller; what the test leaves running is retired."""
    async for attached in visit(home):
        yield attached


@pytest.fixture
async def gym_of_one(home_of_one: Home) -> AsyncIterator[RunningGym]:
    """The living Gym in one process, where the form makes no difference."""
    async for attached in visit(home_of_one):
        yield attached


async def visit(home: Home) -> AsyncIterator[RunningGym]:
    """Attach to a living Gym, and leave it empty."""
    attached = RunningGym(home.directory, home.processes, world_url=home.world_url)
    await attached.attach()
    yield attached
    await attached.reset()
    assert attached.http is not None
    await attached.http.close()


@pytest.fixture
async def world(home: Home) -> AsyncIterator[WorldStub]:
    """The outside of the living Gym."""
    async with WorldStub(home.world) as stub:
        yield stub


@pytest.fixture
def rollout() -> str:
    """A rollout id that no other test has used: a living Gym keeps its fences."""
    return f"r{uuid.uuid4().hex[:12]}"
