# SPDX-License-Identifier: Apache-2.0
"""A deterministic policy and a world, both served on loopback inside the test's own event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

BOUND_S = 45.0

Call = tuple[str, Any]
Script = Sequence[Sequence[Call] | str]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a stated condition, looking often and giving up with its name."""
    try:
        async with asyncio.timeout(BOUND_S):
            while not condition():  # noqa: ASYNC110 - the condition may be anything
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


async def until_async(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """The same for a condition that has to ask somebody."""
    try:
        async with asyncio.timeout(BOUND_S):
            while not await condition():  # noqa: ASYNC110 - the condition may be anything
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


class Served:
    """One application on a port of its own, or on a socket that listens already."""

    def __init__(self, listening: socket.socket | None = None) -> None:
        self.app = web.Application(client_max_size=2**27)
        self._listening = listening
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Any:
        self._runner = web.AppRunner(self.app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site: web.BaseSite = web.TCPSite(self._runner, "127.0.0.1", 0)
        if self._listening is not None:
            site = web.SockSite(self._runner, self._listening.dup())
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        self.let_go()
        await self._runner.cleanup()

    def let_go(self) -> None:
        """Hold nothing any more: who is held for a caller that was killed would never end."""


@dataclass
class Asked:
    """One policy call that arrived."""

    rollout_id: str | None
    attempt: str | None
    turn: str | None
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages of the call, whichever the form."""
        messages: list[dict[str, Any]] = self.body.get("messages") or self.body["input"]
        return messages


class PolicyStub(Served):
    """Answers by the number of turns that the conversation already holds.

    `script[k]` is the reply of turn k + 1: tool calls, or a text that ends the rollout; after its end a
    text. `refuse` is a queue of (status, headers) for the next calls; `hold` holds the calls of a (rollout, turn) until
    `release`.
    """

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script
        self.asked: list[Asked] = []
        self.completed: list[tuple[str | None, str | None]] = []
        self.refuse: list[tuple[int, dict[str, str]]] = []
        self.extra: dict[str, Any] = {}
        self.headers: dict[str, str] = {}
        self._held: dict[tuple[str, int], asyncio.Event] = {}
        self._failing: set[tuple[str | None, int]] = set()
        self.app.router.add_post("/v1/chat/completions", self._chat)
        self.app.router.add_post("/v1/responses", self._responses)

    @property
    def address(self) -> dict[str, str]:
        """The policy member of a start call."""
        return {"base_url": f"{self.url}/v1", "model": "stub", "api": "chat_completions"}

    def hold(self, rollout_id: str, turn: int) -> None:
        """Hold the calls of one turn."""
        self._held[rollout_id, turn] = asyncio.Event()

    def release(self, rollout_id: str, turn: int) -> None:
        """Let them go."""
        self._held.pop((rollout_id, turn)).set()

    def fail(self, rollout_id: str, turn: int) -> None:
        """Break off the held calls of one turn."""
        self._failing.add((rollout_id, turn))
        self.release(rollout_id, turn)

    def let_go(self) -> None:
        """Let every call go."""
        for held in self._held.values():
            held.set()

    def turns_of(self, rollout_id: str) -> list[str | None]:
        """The turns that were asked for one rollout, in order."""
        return [asked.turn for asked in self.asked if asked.rollout_id == rollout_id]

    async def _before(self, request: web.Request) -> tuple[dict[str, Any], web.Response | None]:
        body = await request.json()
        asked = Asked(
            request.headers.get("Gym-Rollout-Id"),
            request.headers.get("Gym-Attempt"),
            request.headers.get("Gym-Turn"),
            body,
            dict(request.headers),
        )
        self.asked.append(asked)
        if self.refuse:
            status, headers = self.refuse.pop(0)
            return body, web.Response(status=status, headers=headers, text="busy")
        held = self._held.get((asked.rollout_id or "", int(asked.turn or 0)))
        if held is not None:
            await held.wait()
        if (asked.rollout_id, int(asked.turn or 0)) in self._failing:
            return body, web.Response(status=503, text="gone")
        self.completed.append((asked.rollout_id, asked.turn))
        return body, None

    def _reply(self, done: int) -> Sequence[Call] | str:
        return self.script[done] if done < len(self.script) else "done"

    async def _chat(self, request: web.Request) -> web.Response:
        body, refusal = await self._before(request)
        if refusal is not None:
            return refusal
        done = sum(message["role"] == "assistant" for message in body["messages"])
        reply = self._reply(done)
        message: dict[str, Any] = {"role": "assistant", "content": reply if isinstance(reply, str) else None}
        if not isinstance(reply, str):
            message["tool_calls"] = [
                {
                    "id": f"c{done}_{n}",
                    "type": "function",
                    "function": {"name": name, "arguments": args if isinstance(args, str) else json.dumps(args)},
                }
                for n, (name, args) in enumerate(reply)
            ]
        return web.json_response(
            {"choices": [{"index": 0, "message": message}], "usage": {"total_tokens": 3}} | self.extra,
            headers=self.headers,
        )

    async def _responses(self, request: web.Request) -> web.Response:
        body, refusal = await self._before(request)
        if refusal is not None:
            return refusal
        done, last = 0, None
        for item in body["input"]:
            kind = "call" if item.get("type") == "function_call" else item.get("role", "output")
            if kind in ("call", "assistant") and last not in ("call", "assistant"):
                done += 1
            last = kind
        reply = self._reply(done)
        if isinstance(reply, str):
            output: list[dict[str, Any]] = [
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": reply}]}
            ]
        else:
            output = [
                {"type": "function_call", "call_id": f"c{done}_{n}", "name": name, "arguments": json.dumps(args)}
                for n, (name, args) in enumerate(reply)
            ]
        return web.json_response({"output": output, "usage": {"input_tokens": 2}} | self.extra, headers=self.headers)


class WorldStub(Served):
    """The outside: every effect is answered with `value`, can be held by tag, and is counted."""

    def __init__(self, listening: socket.socket | None = None) -> None:
        super().__init__(listening)
        self.value: Any = 11
        self.status = 200
        self.verify_status = 200
        self.effects: list[dict[str, Any]] = []
        self.verifications: list[dict[str, Any]] = []
        self._held: dict[str, asyncio.Event] = {}
        self.count: dict[str, int] = defaultdict(int)
        self.app.router.add_post("/effects", self._effect)
        self.app.router.add_post("/verify", self._verify)

    def hold(self, tag: str) -> None:
        """Hold the effects of one tag; `verify` holds verifications."""
        self._held[tag] = asyncio.Event()

    def release(self, tag: str) -> None:
        """Let them go."""
        self._held.pop(tag).set()

    def let_go(self) -> None:
        """Let everything go."""
        for held in self._held.values():
            held.set()

    async def _effect(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.effects.append(body)
        self.count[body["tag"]] += 1
        if (held := self._held.get(body["tag"])) is not None:
            await held.wait()
        return web.json_response({"value": self.value}, status=self.status)

    async def _verify(self, request: web.Request) -> web.Response:
        self.verifications.append(await request.json())
        if (held := self._held.get("verify")) is not None:
            await held.wait()
        return web.json_response({}, status=self.verify_status)
