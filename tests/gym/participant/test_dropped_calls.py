# SPDX-License-Identifier: Apache-2.0
"""Calls whose client goes away at once: the operation reaches its end, or was never begun; nothing stays half."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from reference_gym.participant import serve_aiohttp
from reference_gym.participant.phases import Phase
from spec import wire
from tests.gym.participant.kit import RUN, Gym, until

SETTLED = {Phase.IDLE, Phase.PREPARED, Phase.COMMITTED, Phase.RESTORED}


async def send_and_drop(gym: Gym, port: int, verb: str, body: dict[str, Any]) -> None:
    """Send one whole call and reset the connection after 10 ms, whatever the server has done by then."""
    data = json.dumps(body).encode()
    headers = {
        "Host": "gym",
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        wire.HEADER_CONTROLLER_ID: "rl",
        wire.HEADER_CONTROLLER_EPOCH: "1",
        wire.HEADER_EXPECT_INCARNATION: gym.participant.incarnation,
    }
    head = [f"POST {wire.PREFIX}/checkpoint/{verb} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + data)
    await asyncio.sleep(0.01)
    writer.transport.abort()


async def test_every_verb_reaches_its_end_although_its_client_is_gone(tmp_path: Path) -> None:
    """C33, C32: dropped 10 ms after sending; a repeat finds the one outcome, and each verb has happened once."""
    gym = Gym(tmp_path)
    server = await serve_aiohttp.start(serve_aiohttp.create_app(gym.participant, control_token=None))
    names = [f"r{number}" for number in range(60)]
    for name in names:
        gym.loop.reply(name, [("add", 1)])
    await gym.start(*names)
    await until(lambda: len(gym.world.done) == 60, 20)
    target = tmp_path / "1-1"
    target.mkdir()
    prepare = {"checkpoint_id": "1-1", "run_id": RUN, "timeout_ms": 5_000, "lease_ms": 60_000}
    await send_and_drop(gym, server.port, "prepare", prepare)
    assert (await gym.prepare("1-1"))["ready"]
    commit = {"checkpoint_id": "1-1", "target": {"scheme": "file", "path": str(target)}, "timeout_ms": 5_000}
    await send_and_drop(gym, server.port, "commit", {**commit, "wait": "durable"})
    reply = await gym.commit("1-1")
    await send_and_drop(gym, server.port, "resume", {"checkpoint_id": "1-1", "timeout_ms": 5_000})
    assert "committed" == (await gym.resume("1-1"))["ended_as"]
    rows = [(name, 0, 1, 1) for name in names]
    source = {"scheme": "file", "path": str(target), "checkpoint_id": "1-1"}
    restore = {
        "checkpoint_id": "1-2",
        "run_id": RUN,
        "source": source | {"manifest_digest": reply["manifest"]["digest"]},
        "rollouts": [
            {"rollout_id": r, "attempt": a, "next_attempt": n, "turns_done": t, "task_digest": "task"}
            for r, a, n, t in rows
        ],
        "results": [],
        "fences": [],
        "timeout_ms": 5_000,
        "lease_ms": 60_000,
    }
    await send_and_drop(gym, server.port, "restore", restore)
    again = await gym.restore("1-2", "1-1", reply["manifest"]["digest"], rows)
    assert (60, 60) == (again["restored_count"], len(gym.counters)), "each session was built once"
    await send_and_drop(gym, server.port, "abort", {"checkpoint_id": "1-2", "timeout_ms": 5_000})
    assert "aborted" == (await gym.abort("1-2"))["ended_as"]
    assert 60 == gym.status["counts"]["retired"]
    assert gym.participant.machine.phase in SETTLED
    await until(lambda: gym.participant.machine.serving == 0)
    await server.stop()
