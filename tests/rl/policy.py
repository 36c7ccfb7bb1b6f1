# SPDX-License-Identifier: Apache-2.0
"""A deterministic policy that lives through every crash, can hold turns back, and keeps a log of what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from spec import wire

ACTIONS = ("south", "north", "east", "west", "pickup", "dropoff")
NEVER = 1_000_000


def step(seed: int, turn: int) -> tuple[str, dict[str, Any]]:
    """Move about on Taxi or on a lake."""
    return "step", {"action": ACTIONS[(seed + turn) % 4]}


@dataclass
class Call:
    """One request for a turn.

    Attributes:
        asked: when it came, on the monotonic clock, in seconds.
        answered: when its answer went out to somebody who was still there; ``None`` if it never did.
        seed: of the sibling, which has no other name where there is no protocol.
        headers: as they came.
    """

    rollout_id: str
    attempt: int
    turn: int
    asked: float
    answered: float | None = None
    seed: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Policy:
    """Answers with one tool call that depends on seed and turn alone.

    Attributes:
        hold_from: sibling's seed → the first turn that is not answered yet.
        latency_s: how long an answer takes on average, in seconds; no two rollouts keep the same pace.
        tool: (seed, turn) → name and arguments of the tool that is called.
        version: of the weights, told with every answer; ``None`` for none.
        gone: what still waits for an answer loses its connection instead.
    """

    hold_from: dict[int, int] = field(default_factory=dict)
    latency_s: float = 0.0
    tool: Callable[[int, int], tuple[str, dict[str, Any]]] = step
    version: int | None = None
    gone: bool = False
    calls: list[Call] = field(default_factory=list)
    url: str = ""
    _moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def let(self, changes: dict[int, int]) -> None:
        """Move some of the turns from which answers are held back."""
        async with self._moved:
            self.hold_from |= changes
            self._moved.notify_all()

    async def let_all(self) -> None:
        """Answer everything from now on."""
        async with self._moved:
            self.hold_from.clear()
            self._moved.notify_all()

    def last_asked(self) -> dict[str, int]:
        """Return the turn that was asked for last, by rollout: the turns before it are finished."""
        return {call.rollout_id: call.turn for call in self.calls}

    def was_asked(self, suffix: str, turn: int) -> bool:
        """Return whether a turn of the rollout whose id ends so was asked for."""
        return any(call.turn == turn and call.rollout_id.endswith(suffix) for call in self.calls)

    @property
    def asked(self) -> Counter[tuple[int, int]]:
        """Return (seed, turn) → how often it was asked for."""
        return Counter((call.seed, call.turn) for call in self.calls)

    @property
    def completed(self) -> Counter[tuple[int, int]]:
        """Return (seed, turn) → how often an answer went out."""
        return Counter((call.seed, call.turn) for call in self.calls if call.answered is not None)

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one chat completion."""
        body = await request.json()
        turn = 1 + sum(m["role"] == "assistant" for m in body["messages"])
        seed = body["seed"]
        headers = dict(request.headers)
        who = headers.get(wire.HEADER_ROLLOUT_ID, ""), int(headers.get(wire.HEADER_ATTEMPT, 0))
        call = Call(*who, turn, time.monotonic(), seed=seed, headers=headers)
        self.calls.append(call)
        if self.latency_s:
            await asyncio.sleep(self.latency_s * (0.25 + (37 * seed + 11 * turn) % 16 / 10))
        async with self._moved:
            await self._moved.wait_for(lambda: turn < self.hold_from.get(seed, NEVER))
        if self.gone and request.transport is not None:
            request.transport.abort()
        if request.transport is not None and not request.transport.is_closing():
            call.answered = time.monotonic()
        name, arguments = self.tool(seed, turn)
        tool = {"name": name, "arguments": json.dumps(arguments)}
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"call_{turn}", "type": "function", "function": tool}],
        }
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        told = {} if self.version is None else {wire.HEADER_POLICY_VERSION: str(self.version)}
        answer = {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice]}
        return web.json_response(answer, headers=told)


@contextlib.asynccontextmanager
async def serving(policy: Policy) -> AsyncIterator[Policy]:
    """Serve a policy on loopback."""
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
        await policy.let_all()
        await runner.cleanup()
