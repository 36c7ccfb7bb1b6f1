# SPDX-License-Identifier: Apache-2.0
"""The demo's policy server: a stand-in for an inference server that outlives every crash of the others.

It speaks the OpenAI chat-completions form. A reply depends on the seed and the conversation alone, so two rollouts
that see the same conversation get the same reply, whatever crashed in between. It trusts no protocol header: the
sibling is told by the request's `seed`, the turn by counting the assistant messages. Named calls are held on order.

Routes, all below `/<run>` (one run per column):

    PUT  /<run>                        open a run: {"siblings": {seed: n}, "holds": {sibling: turn}, "log": path}
    POST /<run>/release                let every held call go on, and hold no more
    POST /<run>/v1/chat/completions    what the Gym calls

Every line of the log is one event of one call: `asked`, `held`, `released`, `completed`, `dropped` (the caller went
away, or the hold was never released). A `completed` line is written when the generation is done, before its reply
leaves: it is paid for.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import json
import os
import signal
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import web

# S105: this is the name of a variable, not a token.
TOKEN_ENV = "GYM_POLICY_TOKEN"  # noqa: S105
HOLD_S = 600.0
MOVES = ("south", "north", "east", "west")
Json = dict[str, Any]


def turn_of(messages: list[Json]) -> int:
    """The turn that a conversation asks for: one more than the replies that it holds."""
    return 1 + len([message for message in messages if message.get("role") == "assistant"])


def fingerprint(seed: int, messages: list[Json]) -> bytes:
    """32 bytes that depend on the seed and on every part of the conversation that a model would read."""
    text = json.dumps([seed, messages], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).digest()


def reply(seed: int, messages: list[Json]) -> Json:
    """The assistant message that follows a conversation: a sentence and one to three tool calls.

    It never drops the passenger off, so that the episode always lasts for all of its turns.
    """
    dice = fingerprint(seed, messages)
    turn = turn_of(messages)
    actions = ["pickup" if dice[2 * n] < 20 else MOVES[dice[2 * n + 1] % 4] for n in range(1, 2 + dice[0] % 3)]
    return {
        "role": "assistant",
        "content": f"Turn {turn}: {', then '.join(actions)}.",
        "tool_calls": [
            {
                "id": f"call_{dice.hex()[:8]}_{n}",
                "type": "function",
                "function": {"name": "step", "arguments": json.dumps({"action": action})},
            }
            for n, action in enumerate(actions)
        ],
    }


def completion(model: str, seed: int, messages: list[Json]) -> Json:
    """A whole chat-completions response body; equal requests give equal bodies."""
    message = reply(seed, messages)
    prompt, written = len(json.dumps(messages)) // 4, len(json.dumps(message)) // 4
    return {
        "id": f"chatcmpl-{fingerprint(seed, messages).hex()[:24]}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written},
    }


@dataclass
class Run:
    """What the policy knows of one column: who is who, whom to hold, where to write."""

    siblings: dict[int, int]
    holds: dict[int, int]
    log: Path
    released: asyncio.Event = field(default_factory=asyncio.Event)
    calls: count[int] = field(default_factory=lambda: count(1))

    def write(self, event: str, call: Json) -> None:
        """Append one event; it is with the operating system when this returns."""
        with self.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"t": round(time.time(), 4), "event": event, **call}) + "\n")


class PolicyServer:
    """The policy as an aiohttp application.

    Args:
        latency_s: seconds that one generation takes; each call gets 75 % to 125 % of it, by its conversation.
        token: bearer token that every request must carry, or None for no check.
    """

    def __init__(self, latency_s: float, token: str | None) -> None:
        self._latency_s = latency_s
        self._token = token
        self._runs: dict[str, Run] = {}

    def app(self) -> web.Application:
        """The routes, with the token check in front."""
        app = web.Application(middlewares=[self._authorise], client_max_size=64 * 2**20)
        app.router.add_put("/{run}", self._open)
        app.router.add_post("/{run}/release", self._release)
        app.router.add_post("/{run}/v1/chat/completions", self._chat)
        return app

    @web.middleware
    async def _authorise(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if self._token is not None and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return _error(401, "the bearer token is missing or wrong")
        response: web.StreamResponse = await handler(request)
        return response

    async def _open(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = request.match_info["run"]
        if name in self._runs:
            return _error(409, f"run {name!r} is open already")
        self._runs[name] = Run(
            siblings={int(seed): sibling for seed, sibling in body["siblings"].items()},
            holds={int(sibling): turn for sibling, turn in body["holds"].items()},
            log=Path(body["log"]),
        )
        return web.json_response({"run": name})

    async def _release(self, request: web.Request) -> web.Response:
        run = self._runs.get(request.match_info["run"])
        if run is None:
            return _error(404, "no such run")
        run.released.set()
        return web.json_response({})

    async def _chat(self, request: web.Request) -> web.Response:
        run = self._runs.get(request.match_info["run"])
        if run is None:
            return _error(404, "no such run")
        body = await request.json()
        seed, messages = body.get("seed"), body.get("messages")
        if body.get("stream"):
            return _error(400, "this policy does not stream")
        if seed not in run.siblings or not isinstance(messages, list):
            return _error(400, f"seed {seed!r} belongs to no sibling of this run")
        call = _call(next(run.calls), run.siblings[seed], messages, request)
        run.write("asked", call)
        try:
            await self._generate(run, call, seed, messages)
        except asyncio.CancelledError:
            run.write("dropped", call)
            raise
        except TimeoutError:
            run.write("dropped", call)
            return _error(503, f"held for {HOLD_S:g} s and never released")
        answer = completion(str(body.get("model", "")), seed, messages)
        run.write("completed", call | {"tokens": answer["usage"]["completion_tokens"]})
        return web.json_response(answer)

    async def _generate(self, run: Run, call: Json, seed: int, messages: list[Json]) -> None:
        if run.holds.get(call["sibling"]) == call["turn"] and not run.released.is_set():
            run.write("held", call)
            async with asyncio.timeout(HOLD_S):
                await run.released.wait()
            run.write("released", call)
        await asyncio.sleep(self._latency_s * (0.75 + fingerprint(seed, messages)[31] / 510))


def _call(number: int, sibling: int, messages: list[Json], request: web.Request) -> Json:
    """What identifies one call; the protocol's headers are only noted, and only where they are sent."""
    call: Json = {"call": number, "sibling": sibling, "turn": turn_of(messages)}
    for name in ("rollout_id", "attempt", "turn"):
        value = request.headers.get("Gym-" + name.replace("_", "-").title())
        if value is not None:
            call["header_turn" if name == "turn" else name] = value if name == "rollout_id" else int(value)
    return call


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)


async def serve(latency_s: float, announce: Path) -> None:
    """Serve on a free loopback port until SIGTERM, after writing `{"pid", "url"}` to the announce file."""
    server = PolicyServer(latency_s, os.environ.get(TOKEN_ENV))
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    port = runner.addresses[0][1]
    partial = announce.with_suffix(".tmp")
    partial.write_text(json.dumps({"pid": os.getpid(), "url": f"http://127.0.0.1:{port}"}), encoding="utf-8")
    partial.rename(announce)
    await stopped.wait()
    await runner.cleanup()


def main() -> None:
    """Entry point of `python -m reference_rl.demo.policy`."""
    parser = argparse.ArgumentParser(description="The demo's deterministic policy server.")
    parser.add_argument("--announce", type=Path, required=True, help="file that gets the URL once it listens")
    parser.add_argument("--latency", type=float, default=0.25, help="seconds per generation")
    options = parser.parse_args()
    asyncio.run(serve(options.latency, options.announce))


if __name__ == "__main__":
    main()
