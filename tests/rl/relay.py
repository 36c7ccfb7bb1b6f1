# SPDX-License-Identifier: Apache-2.0
"""A relay before one participant of a real Gym: passes every call on, keeps some back, spoils some."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

PREFIX = "/gym-checkpoint/v1/"
HOP = {"connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding"}
SILENT_S = 3600.0

PASS = "pass"
KEEP = "keep"
"""Not passed on yet: whoever sent it gets no answer, and :meth:`Relay.send_kept` may send it later."""


@dataclass(frozen=True)
class Asked:
    """One call as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    data: bytes

    @property
    def operation(self) -> str:
        """Return the last word of the path, without what follows it: `commit`, `rollouts`, `acks`."""
        return self.path.partition("?")[0].removeprefix(PREFIX).removeprefix("checkpoint/")

    @property
    def body(self) -> Any:
        """Return its JSON."""
        return json.loads(self.data or b"{}")


Rule = Callable[[Asked], str]


@dataclass
class Relay:
    """Passes calls on to wherever ``upstream`` says that the participant is now.

    Attributes:
        rule: says what becomes of a call: `pass`, `keep`, or a fault of ``tests.rl.scripted.FAULTS`` or `404`.
        before: awaited before a call is passed on.
        kept: calls that were kept back.
        seen: every call.
    """

    upstream: Callable[[], str]
    rule: Rule = field(default=lambda asked: PASS)
    before: Callable[[Asked], Awaitable[None]] | None = None
    kept: list[Asked] = field(default_factory=list)
    seen: list[Asked] = field(default_factory=list)
    url: str = ""
    _site: web.TCPSite | None = None
    _runner: web.AppRunner | None = None
    _usual: Rule = field(default=lambda asked: PASS)
    _http: aiohttp.ClientSession | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one call."""
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        asked = Asked(request.method, request.raw_path, headers, await request.read())
        self.seen.append(asked)
        fault = self.rule(asked)
        if fault == KEEP:
            self.kept.append(asked)
        if fault in (KEEP, "silence"):
            await asyncio.sleep(SILENT_S)
        if fault == "reset_before":
            return _reset(request)
        if fault in ("500", "502", "503", "504", "404"):
            return web.Response(text="<html>not here</html>", content_type="text/html", status=int(fault))
        if fault == "html":
            return web.Response(text="<html>welcome</html>", content_type="text/html")
        try:
            status, back, data = await self.send(asked)
        except (aiohttp.ClientError, OSError):
            return _reset(request)
        if fault == "reset_after":
            return _reset(request)
        return web.Response(status=status, headers=back, body=data[:-1] if fault == "cut_json" else data)

    async def send(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        """Pass one call on as it came; return status, headers and body of the reply."""
        if self.before is not None:
            await self.before(asked)
        assert self._http is not None
        url = self.upstream() + asked.path
        async with self._http.request(asked.method, url, headers=asked.headers, data=asked.data) as reply:
            back = {name: value for name, value in reply.headers.items() if name.lower() not in HOP}
            return reply.status, back, await reply.read()

    async def away(self) -> None:
        """Refuse connections, and reset those that there are, until :meth:`back`."""
        self._usual, self.rule = self.rule, lambda asked: "reset_before"
        assert self._site is not None
        await self._site.stop()

    async def back(self) -> None:
        """Serve again at the same address."""
        assert self._site is not None
        assert self._runner is not None
        self._site = web.TCPSite(self._runner, "127.0.0.1", int(self.url.rpartition(":")[2]))
        await self._site.start()
        self.rule = self._usual

    async def send_kept(self) -> list[Any]:
        """Let everything that was kept back arrive now, in its order; return the replies."""
        kept, self.kept = self.kept, []
        return [json.loads((await self.send(asked))[2]) for asked in kept]


def _reset(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


@contextlib.asynccontextmanager
async def relaying(upstream: Callable[[], str]) -> AsyncIterator[Relay]:
    """Serve a relay on loopback."""
    relay = Relay(upstream)
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", relay.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        relay._http = http
        relay._runner, relay._site = runner, web.TCPSite(runner, "127.0.0.1", 0)
        await relay._site.start()
        relay.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield relay
        finally:
            await runner.cleanup()
