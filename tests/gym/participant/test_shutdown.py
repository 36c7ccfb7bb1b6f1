# SPDX-License-Identifier: Apache-2.0
"""SIGTERM in each phase, with everything open that a client can leave open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import spec
from reference_gym.participant import Limits, serving
from spec import wire
from tests.gym.participant.kit import Gym, until
from tests.gym.participant.test_http import PREFIX, TOKEN, WORLDS

GRACE_S = 2.0
TOLERANCE_S = 1.0
"""What a loaded machine may add; a wait that was forgotten adds far more."""
NEVER_S = 600.0
PHASES = ("idle", "preparing", "prepared", "committing", "writing", "committed", "restoring", "restored")
AUTHORIZED = f"Host: gym\r\nAuthorization: Bearer {TOKEN}\r\n"


class Disk:
    """The durable steps, held back: each takes so many seconds more, on whatever thread it runs."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.steps = SimpleNamespace(**{name: self._slow(step) for name, step in vars(spec.durable).items()})

    def _slow(self, step: Any) -> Any:
        def slow(*args: Any, **more: Any) -> Any:
            time.sleep(self.seconds)
            return step(*args, **more)

        return slow if callable(step) and getattr(step, "__module__", "") == spec.durable.__name__ else step


async def put_into(gym: Gym, phase: str) -> None:
    """Bring a Gym with a live rollout into a phase; ``writing`` is ``committing`` that becomes durable in time."""
    await gym.start("live")
    if phase in ("preparing", "restoring"):
        gym.world.hold("live/1/1")
        gym.loop.reply("live", [("add", 1)])
        await until(lambda: gym.world.begun)
    background: list[asyncio.Task[Any]] = gym.background  # type: ignore[attr-defined]  # kept from being collected
    if phase == "preparing":
        background.append(asyncio.ensure_future(gym.prepare("1-1", timeout_ms=30_000)))
    elif phase in ("restoring", "restored"):
        background.append(asyncio.ensure_future(gym.restore("1-1", None, timeout_ms=30_000)))
    elif phase != "idle":
        await gym.prepare("1-1", lease_ms=600_000)
        if phase != "prepared":
            background.append(asyncio.ensure_future(gym.commit("1-1", timeout_ms=30_000)))
    expected = "committing" if phase == "writing" else phase
    await until(lambda: gym.status["phase"] == expected)


async def main(world: str, phase: str, directory: Path) -> None:
    """Serve a Gym that is in a phase."""
    slow = {"committing": NEVER_S, "writing": 0.05}.get(phase, 0.0)
    gym = Gym(directory, durable=Disk(slow).steps, limits=Limits(shutdown_grace_ms=int(GRACE_S * 1000)))
    gym.background = []  # type: ignore[attr-defined]  # see put_into
    signals = serving.Signals()
    server = await WORLDS[world](gym)
    await put_into(gym, phase)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    await serving.serve_until_terminated(server, signals)


@contextlib.asynccontextmanager
async def process(world: str, phase: str, directory: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Run ``main`` in a process of its own; yields it and its port."""
    top = Path(spec.__file__).parents[1]
    with (directory / "log").open("wb") as log:
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, world, phase, str(directory)),
            cwd=top,
            env={**os.environ, "PYTHONPATH": str(top)},
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    try:
        assert started.stdout is not None
        line = await asyncio.wait_for(started.stdout.readline(), 60)
        assert line, (directory / "log").read_text()
        yield started, int(line)
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


OPEN = {
    "a connection": "",
    "half a head": f"GET {PREFIX}/check",
    "half a body": f"POST {PREFIX}/acks HTTP/1.1\r\n{AUTHORIZED}Content-Length: 100\r\n\r\n{{",
    "a request before": f"GET {PREFIX}/checkpoint HTTP/1.1\r\n{AUTHORIZED}\r\n",
    "a long poll": f"GET {PREFIX}/results?wait_ms=30000 HTTP/1.1\r\n{AUTHORIZED}\r\n",
}


async def ends(world: str, phase: str, directory: Path) -> tuple[float, int]:
    """Terminate a Gym in a phase with everything open; the seconds until it ended, and its exit code."""
    async with process(world, phase, directory) as (gym, port):
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in OPEN]
        for (_, writer), sent in zip(connections, OPEN.values(), strict=True):
            writer.write(sent.encode())
            await writer.drain()
        answered = await asyncio.wait_for(connections[3][0].readuntil(b"\r\n\r\n"), 20)
        assert b" 200 " in answered
        gym.send_signal(signal.SIGTERM)
        told = asyncio.get_running_loop().time()
        code = await asyncio.wait_for(gym.wait(), 30)
        took = asyncio.get_running_loop().time() - told
        poll = await asyncio.wait_for(connections[4][0].read(), 5)
        assert b"HTTP/1.1 200 " in poll, "the long poll was answered before the end"
        for _, writer in connections:
            writer.close()
    return took, code


@pytest.mark.parametrize("world", WORLDS)
async def test_sigterm_in_each_phase_ends_the_process_within_its_grace(tmp_path: Path, world: str) -> None:
    """C70: exit code 0 within the grace, even if a thread never returns; a commit is whole or absent."""
    for phase in PHASES:
        (tmp_path / phase).mkdir()
    found = await asyncio.gather(*(ends(world, phase, tmp_path / phase) for phase in PHASES))
    for phase, (took, code) in zip(PHASES, found, strict=True):
        log = (tmp_path / phase / "log").read_text()
        assert 0 == code, (phase, log)
        assert took < GRACE_S + TOLERANCE_S, phase
        assert "Traceback" not in log, (phase, log)
    written = {phase for phase in PHASES if (tmp_path / phase / "1-1" / "manifest.json").exists()}
    assert {"writing", "committed"} == written
    for phase in written:
        manifest = json.loads((tmp_path / phase / "1-1" / "manifest.json").read_text())
        for file in manifest["files"]:
            assert file["digest"] == wire.bytes_digest((tmp_path / phase / "1-1" / file["name"]).read_bytes())


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
    serving.leave(0)
