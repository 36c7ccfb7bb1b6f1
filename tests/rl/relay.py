# SPDX-License-Identifier: Apache-2.0
"""A relay before one participant of a real Gym: passes every call on; keeps, spoils, edits and doubles some."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
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

LOST = "lost"
"""Passed on, while whoever sent it loses the connection at once; the reply goes to :attr:`Relay.lost`."""


@dataclass(frozen=True)
class Asked:
    """One call as it came in, ``at`` which moment on the monotonic clock, in seconds."""

    method: str
    path: str
    headers: dict[str, str]
    data: bytes
    at: float = field(default_factory=time.monotonic)

    @property
    def operation(self) -> str:
        """Return the last word of the path, without what follows it: `commit`, `rollouts`, `acks`."""
        return self.path.partition("?")[0].removeprefix(PREFIX).removeprefix("checkpoint/")

    @property
    def body(self) -> Any:
        """Return its JSON."""
        return json.loads(self.data or b"{}")


Rule = Callable[[Asked], str]
Reply = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""


@dataclass
class Relay:
    """Passes calls on to wherever ``upstream`` says that the participant is now.

    Attributes:
        rule: says what becomes of a call: `pass`, `keep`, `lost`, or a fault of ``tests.rl.scripted.FAULTS`` or `404`.
        before: awaited before a call is passed on.
        edit: returns the call that is passed on in its place.
        instead: returns a reply that is given without asking the participant, or nothing.
        copies: how many of a call arrive at the same time; the first reply is the one that is given.
        kept: calls that were kept back.
        lost: replies that nobody waited for.
        doubled: every reply to a call that arrived more than once.
        seen: every call.
        passed: every call that the participant was asked in the usual way; ``replies`` has its answer by ``id()``.
    """

    upstream: Callable[[], str]
    rule: Rule = field(default=lambda asked: PASS)
    before: Callable[[Asked], Awaitable[None]] | None = None
    edit: Callable[[Asked], Asked] = field(default=lambda asked: asked)
    instead: Callable[[Asked], Reply | None] = field(default=lambda asked: None)
    copies: Callable[[Asked], int] = field(default=lambda asked: 1)
    kept: list[Asked] = field(default_factory=list)
    lost: list[asyncio.Task[Reply]] = field(default_factory=list)
    doubled: list[Reply] = field(default_factory=list)
    seen: list[Asked] = field(default_factory=list)
    passed: list[Asked] = field(default_factory=list)
    replies: dict[int, Reply] = field(default_factory=dict)
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
        if fault == LOST:
            self.lost.append(asyncio.create_task(self.send(self.edit(asked))))
            return _reset(request)
        self.passed.append(asked)
        try:
            reply = self.instead(asked) or await self._send_copies(self.edit(asked), self.copies(asked))
            self.replies[id(asked)] = reply
            status, back, data = reply
        except (aiohttp.ClientError, OSError):
            return _reset(request)
        if fault == "reset_after":
            return _reset(request)
        return web.Response(status=status, headers=back, body=data[:-1] if fault == "cut_json" else data)

    async def _send_copies(self, asked: Asked, copies: int) -> Reply:
        replies = await asyncio.gather(*(self.send(asked) for _ in range(copies)))
        if copies > 1:
            self.doubled += replies
        return replies[0]

    async def send(self, asked: Asked) -> Reply:
        """Pass one call on as it came; return status, headers and body of the reply."""
        if self.before is not None:
            await self.before(asked)
        assert self._http is not None
        url = self.upstream() + asked.path
        async with self._http.request(asked.method, url, headers=asked.headers, data=asked.data) as reply:
            back = {name: value for name, value in reply.headers.items() if name.lower() not in HOP}
            return reply.status, back, await reply.read()

    def unanswered(self, operation: str) -> list[Asked]:
        """Return the calls of an operation that were passed on, and not answered yet."""
        return [asked for asked in self.passed if asked.operation == operation and id(asked) not in self.replies]

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
            for task in relay.lost:
                task.cancel()
            await runner.cleanup()
