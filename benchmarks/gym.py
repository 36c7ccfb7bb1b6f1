# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: a real Gym in a process of its own, a policy that parks rollouts, and a plain caller."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

from spec import wire

CONFIG = """
name: gym
storage_roots: [snapshots]
environments: [taxi]
"""


class Policy:
    """A policy that plays ``turns`` turns of every rollout at once and then holds the next call for good."""

    def __init__(self, turns: int, padding: int = 0) -> None:
        self.turns, self.padding = turns, padding
        self.held = 0
        self.url = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, daemon=True).start()
        if not self._ready.wait(10):
            raise RuntimeError("the policy did not start within 10 s")

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._answer)

        async def start() -> None:
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            self._ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        if int(request.headers[wire.HEADER_TURN]) > self.turns:
            self.held += 1
            await asyncio.Event().wait()
        call = {"name": "step", "arguments": json.dumps({"action": "north"})}
        message = {
            "role": "assistant",
            "content": "x" * self.padding,
            "tool_calls": [{"id": f"c{len(body['messages'])}", "type": "function", "function": call}],
        }
        return web.json_response({"choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}]})


class Caller:
    """A controller that says exactly what a benchmark wants, and nothing else."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url + wire.PREFIX, timeout=120)
        incarnation = self.http.get("/capabilities").json()["incarnation"]
        self.headers = {
            wire.HEADER_CONTROLLER_ID: "bench",
            wire.HEADER_CONTROLLER_EPOCH: "1",
            wire.HEADER_EXPECT_INCARNATION: incarnation,
        }

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one call.

        Raises:
            RuntimeError: it is not 200.
        """
        reply = self.http.post(path, json=body, headers=self.headers)
        if reply.status_code != 200:
            raise RuntimeError(f"{path}: {reply.status_code} {reply.text[:500]}")
        answer: dict[str, Any] = reply.json()
        return answer

    def start_in_batches(
        self,
        count: int,
        at_once: int,
        policy: str,
        item: Callable[[int], dict[str, Any]],
        after: Callable[[int], None] = lambda _first: None,
    ) -> None:
        """Start rollouts ``r0`` and so on; none may be refused.

        Args:
            count: how many.
            at_once: how many in one call.
            policy: base URL.
            item: what is particular to the rollout of a number.
            after: called after each batch with the number of its first rollout.
        """
        spec = {"base_url": policy, "model": "bench", "api": "chat_completions"}
        for first in range(0, count, at_once):
            items = [
                {"rollout_id": f"r{number}", "attempt": 0, "task_digest": f"t{number}", **item(number)}
                for number in range(first, min(count, first + at_once))
            ]
            outcomes = self.post("/rollouts", {"policy": spec, "rollouts": items})["outcomes"]
            if any(outcome["outcome"] != "started" for outcome in outcomes):
                raise RuntimeError(f"not started: {outcomes[0]}")
            after(first)

    def start(self, count: int, turns: int, policy: Policy, seconds: float = 300) -> None:
        """Start ``count`` rollouts and wait until each has done ``turns`` turns and asks for the next."""
        limits = {"max_turns": turns + 10, "episode_ms": 3_600_000}
        goal = policy.held + count
        self.start_in_batches(
            count, 500, policy.url, lambda number: {"environment": "taxi", "task": {"seed": number}, "limits": limits}
        )
        until = time.monotonic() + seconds
        while policy.held < goal:
            if time.monotonic() > until:
                raise RuntimeError(f"only {policy.held} of {goal} rollouts are parked after {seconds:g} s")
            time.sleep(0.02)


@contextmanager
def running_gym(directory: Path) -> Iterator[str]:
    """Start a Gym in a process of its own, without authentication, and end it; yields its URL."""
    (directory / "snapshots").mkdir(parents=True)
    (directory / "gym.yaml").write_text(CONFIG, encoding="utf-8")
    announce = directory / "announce.json"
    command = [str(Path(sys.executable).with_name("reference-gym")), "serve", "--config", str(directory / "gym.yaml")]
    with (directory / "gym.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--announce", str(announce), "--insecure-no-auth"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + 30
        while not announce.is_file():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the Gym did not start: {(directory / 'gym.log').read_text(encoding='utf-8')}")
            time.sleep(0.02)
        yield json.loads(announce.read_text(encoding="utf-8"))["participants"][0]["url"]
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)
