# SPDX-License-Identifier: Apache-2.0
"""With checkpointing off nobody can tell this client from one that never heard of it, byte by byte."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rl.harness import running, settings
from tests.rl.scripted import one_gym

TOKEN = "data-token-of-a-test"
ENVIRONMENT = "scripted"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Recorder:
    """Serves `POST /run` on a plain socket, and keeps every byte that it receives.

    Attributes:
        requests: what was received, one entry for each request, as it was on the wire.
    """

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.port = 0
        self.connections: set[asyncio.Task[None] | None] = set()

    @property
    def url(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self.port}"

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer every request of one connection with a finished rollout."""
        self.connections.add(asyncio.current_task())
        try:
            await self._answer_all(reader, writer)
        finally:
            writer.close()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
                )
                self.requests.append(head + await reader.readexactly(length))
                if head.startswith(b"GET "):
                    content = json.dumps(await one_gym().on_capabilities(None, {})).encode()  # type: ignore[arg-type] # it does not look
                    writer.write(ANSWER % len(content) + content)
                    continue
                body = {"outcome": "completed", "reward": 1.0, "turns": 1, "messages": []}
                content = json.dumps({"rollout_id": "x", "body": body, "info": {"attempt": 0}}).encode()
                writer.write(ANSWER % len(content) + content)
                await writer.drain()


@contextlib.asynccontextmanager
async def recording() -> AsyncIterator[Recorder]:
    """Run a recorder on loopback."""
    recorder = Recorder()
    server = await asyncio.start_server(recorder.converse, "127.0.0.1", 0)
    recorder.port = server.sockets[0].getsockname()[1]
    try:
        yield recorder
    finally:
        server.close()
        tasks = [task for task in recorder.connections if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


async def minimal_client(url: str, groups: int, siblings: int) -> set[str]:
    """Be a client without the feature: one POST for each sibling, and four numbers at the end.

    Returns:
        The names of its metrics.
    """
    metrics = dict.fromkeys(("rollouts_unfinished", "rollouts_finished", "rollouts_failed", "samples_trained"), 0)
    async with httpx.AsyncClient(timeout=None) as http:  # noqa: S113  # the call is held for as long as its rollout runs
        for group in range(groups):
            for sibling in range(siblings):
                start = {
                    "environment": ENVIRONMENT,
                    "task": {"seed": 7 + group},
                    "seed": 1000 * group + sibling,
                    "limits": {"max_turns": 5, "episode_ms": 3_600_000},
                    "policy": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api": "chat_completions"},
                }
                reply = await http.post(f"{url}/run", json=start, headers={"Authorization": f"Bearer {TOKEN}"})
                metrics["rollouts_finished"] += "body" in reply.json()
    return set(metrics)


@pytest.mark.parametrize("column", [0, 1])
async def test_with_checkpointing_off_no_byte_and_no_metric_differs(
    tmp_path: Path, monkeypatch: Any, column: int
) -> None:
    """CKPT-DISC-031, CKPT-DISC-032, N14: a whole run with a snapshot in it: the same wire, the same metrics.

    With column 1 one GET of the capabilities comes first, and it is all that differs.
    """
    monkeypatch.setenv("GYM_CHECKPOINT_DATA_TOKEN", TOKEN)
    async with recording() as wire:
        tasks = {"environment": ENVIRONMENT, "groups": 2, "siblings": 3}
        async with running(settings(tmp_path / "run", wire.url, column=column, tasks=tasks)) as run:
            await run.event("trained")
            await run.snapshot()
            assert await run.done() == 0
        ours, wire.requests = wire.requests, []
        asked, ours = ours[:column], ours[column:]
        assert [True] * column == [r.startswith(b"GET /gym-checkpoint/v1/capabilities ") for r in asked]
        names = await minimal_client(wire.url, 2, 3)
        theirs = wire.requests
    assert 6 == len(theirs)
    assert sorted(theirs) == sorted(ours)
    assert names == json.loads((tmp_path / "run/metrics.json").read_text()).keys()
