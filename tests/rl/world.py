# SPDX-License-Identifier: Apache-2.0
"""The outside that the conformance environment calls: answers effects, and holds those of some rollouts back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web


class World:
    """Counts effects by request id.

    Attributes:
        held: ends of rollout ids whose effects are not answered.
        failing: ends of rollout ids whose next effect fails, once.
        pause_s: how long every other answer takes, in seconds.
        asked: request ids, in the order in which they came.
    """

    def __init__(self) -> None:
        self.url = ""
        self.held: tuple[str, ...] = ()
        self.failing: set[str] = set()
        self.pause_s = 0.0
        self.asked: list[str] = []
        self._moved = asyncio.Condition()

    async def let_go(self) -> None:
        """Answer everything from now on."""
        async with self._moved:
            self.held = ()
            self._moved.notify_all()

    async def effect(self, request: web.Request) -> web.Response:
        """Answer one effect."""
        asked = await request.json()
        self.asked.append(asked["request_id"])
        for end in self.failing:
            if asked["rollout_id"].endswith(end):
                self.failing.remove(end)
                return web.Response(status=500)
        async with self._moved:
            await self._moved.wait_for(lambda: not asked["rollout_id"].endswith(self.held or ("\n",)))
        await asyncio.sleep(self.pause_s)
        return web.json_response({"value": 11})


@contextlib.asynccontextmanager
async def world_server() -> AsyncIterator[World]:
    """Serve a world on loopback."""
    world = World()
    app = web.Application()
    app.router.add_post("/effects", world.effect)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    world.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield world
    finally:
        await world.let_go()
        await runner.cleanup()
