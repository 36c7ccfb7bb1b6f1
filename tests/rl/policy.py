# SPDX-License-Identifier: Apache-2.0
"""A deterministic policy model for the real Gym: turns of a sibling can be held, every call is counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator

from aiohttp import web

ACTIONS = ("south", "north", "east", "west", "pickup", "dropoff")


class Policy:
    """Answers with one tool call that depends on the conversation alone.

    Attributes:
        hold_from: sibling seed → the first turn whose answer is held back.
        completed: (seed, turn) → how often an answer went out.
        asked: (seed, turn) → how often it was asked for.
    """

    def __init__(self) -> None:
        self.url = ""
        self.hold_from: dict[int, int] = {}
        self.asked: Counter[tuple[int, int]] = Counter()
        self.completed: Counter[tuple[int, int]] = Counter()
        self.headers: list[dict[str, str]] = []
        self._released = asyncio.Event()

    def release(self) -> None:
        """Answer everything from now on."""
        self.hold_from.clear()
        self._released.set()

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one chat completion."""
        body = await request.json()
        self.headers.append(dict(request.headers))
        turn = 1 + sum(m["role"] == "assistant" for m in body["messages"])
        seed = body["seed"]
        self.asked[seed, turn] += 1
        if turn >= self.hold_from.get(seed, 1_000_000):
            await self._released.wait()
        self.completed[seed, turn] += 1
        call = {"name": "step", "arguments": json.dumps({"action": ACTIONS[(seed + turn) % 4]})}
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"call_{turn}", "type": "function", "function": call}],
        }
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return web.json_response({"id": "c", "object": "chat.completion", "model": "m", "choices": [choice]})


@contextlib.asynccontextmanager
async def policy_server() -> AsyncIterator[Policy]:
    """Serve a policy on loopback."""
    policy = Policy()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", policy.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    policy.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"  # type: ignore[union-attr] # it is listening
    try:
        yield policy
    finally:
        policy.release()
        await runner.cleanup()
