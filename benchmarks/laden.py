# SPDX-License-Identifier: Apache-2.0
"""A Gym in a process of its own that holds large state and tells how long its event loop served nobody.

Its rollouts need no policy: each crosses one boundary and waits, and boundaries go on at a low rate among all that
wait. Everything else is the kit over HTTP, as any Gym embeds it. ``POST /bench`` is the benchmark's own way in.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from reference_gym.participant import (
    AgentInfo,
    EffectCall,
    EnvironmentInfo,
    Limits,
    Participant,
    ParticipantConfig,
    Restored,
    Rollout,
    Sessions,
    Start,
    Success,
    serve_aiohttp,
)
from reference_gym.participant.collecting import FullCollections
from reference_gym.participant.journal import LogJournal
from reference_gym.participant.log import LogFile
from reference_gym.participant.recovery import open_log

TICK_S = 0.001
POOL = " ".join(f"{number:x}" * 3 for number in range(1, 200_000))


@dataclass(slots=True)
class Worst:
    """The longest stall since the last mark, in seconds: on the clock, and what of it is this process's own."""

    wall: float = 0.0
    own: float = 0.0
    over: int = 0


class Watch:
    """Measures, on the event loop, by how much each tick of one millisecond comes late.

    A tick is late by what the loop's own callbacks took and by its waits for the interpreter's lock, which is what a
    client feels. A watching thread would wait for the same lock and add that to what it sees.

    What the machine gave to others is not this process's own: the time for which this thread was ready to run and was
    not run, as the kernel counts it, is taken off; and nothing is own for which no thread of this process was busy.
    """

    def __init__(self) -> None:
        self.worst = Worst()
        try:
            self._scheduled = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self._scheduled = -1

    def _queued(self) -> float:
        """Return for how long this thread was ready to run and was not run, in seconds."""
        if self._scheduled < 0:
            return 0.0
        return int(os.pread(self._scheduled, 100, 0).split()[1]) / 1e9

    async def run(self) -> None:
        """Tick until cancelled."""
        last, busy, queued = time.perf_counter(), time.process_time(), self._queued()
        while True:
            await asyncio.sleep(TICK_S)
            now, used, waited = time.perf_counter(), time.process_time(), self._queued()
            late = now - last - TICK_S
            own = min(late - (waited - queued), used - busy)
            worst = self.worst
            worst.wall, worst.own = max(worst.wall, late), max(worst.own, own)
            worst.over += own > 0.020
            last, busy, queued = now, used, waited

    def take(self) -> dict[str, float]:
        """Return the worst in milliseconds, and begin anew."""
        worst, self.worst = self.worst, Worst()
        return {"wall_ms": worst.wall * 1000, "own_ms": worst.own * 1000, "over": worst.over}


def text(size: int, chosen: random.Random) -> str:
    """Return text of ``size`` bytes that is nobody else's."""
    begin = chosen.randrange(len(POOL) - size)
    return POOL[begin : begin + size]


class Box:
    """A session of ``size`` bytes of small values; one huge string where ``whole``."""

    def __init__(self, state: Any) -> None:
        self.state = state

    @classmethod
    def new(cls, size: int, chosen: random.Random) -> Box:
        """Return a session of about ``size`` bytes."""
        if size > 16_000_000:
            return cls({"blob": text(1_000_000, chosen) * (size // 1_000_000), "count": 0})
        return cls({"cells": [{"at": [n, n + 1], "what": text(40, chosen)} for n in range(size // 70)], "count": 0})

    async def apply(self, call: EffectCall) -> Any:
        """Count."""
        self.state = {**self.state, "count": self.state["count"] + 1}
        return {"count": self.state["count"]}

    def save(self) -> Any:
        """Return all of it."""
        return self.state

    def close(self) -> None:
        """There is nothing to free."""


class Waiter:
    """An agent whose rollouts cross one boundary and wait to be told to cross another, or to finish."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sessions: Sessions | None = None
        self.waiting: dict[str, asyncio.Future[bool]] = {}
        self.boundaries = 0

    def check(self, start: Start) -> None:
        """Every task will do."""

    async def run(self, rollout: Rollout) -> Success:
        """Run one attempt."""
        sessions = self.sessions
        assert sessions is not None
        start = rollout.start
        if rollout.state is None:
            chosen = random.Random(start.seed)
            box = Box.new(self.size // 4 if self.size < 16_000_000 else self.size, chosen)
            await sessions.open(rollout.rollout_id, rollout.attempt, start.environment, start.task_digest, box)
            told = self.size * 3 // 4 if self.size < 16_000_000 else 1_000
            messages = [{"role": "tool", "content": text(600, chosen), "number": n} for n in range(max(1, told // 640))]
            await self.turn(rollout, sessions, {"messages": messages})
        state = rollout.state
        while await self.told(rollout):
            await self.turn(rollout, sessions, state)
        return Success("completed", 1.0, state["messages"][:8], None)

    async def told(self, rollout: Rollout) -> bool:
        """Wait like for a policy; whether to go on."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiting[rollout.rollout_id] = future
        try:
            with rollout.policy_call():
                return await future
        finally:
            if self.waiting.get(rollout.rollout_id) is future:
                del self.waiting[rollout.rollout_id]

    async def turn(self, rollout: Rollout, sessions: Sessions, state: Any) -> None:
        """Do one turn with one effect."""
        async with rollout.turn() as turn:
            await turn.effect("count", {}, sessions.effect)
            turn.close(state)
        self.boundaries += 1

    async def pace(self, per_s: float) -> None:
        """Let boundaries happen at a rate."""
        chosen = random.Random(5)
        while True:
            await asyncio.sleep(1 / per_s)
            names = list(self.waiting) if len(self.waiting) < 1000 else None
            if not self.waiting:
                continue
            name = chosen.choice(names) if names else f"r{chosen.randrange(len(self.waiting))}"
            future = self.waiting.get(name)
            if future is not None and not future.done():
                future.set_result(True)


async def serve(options: argparse.Namespace) -> None:
    """Serve until the standard input ends."""
    directory = Path(options.directory)
    config = ParticipantConfig(
        "laden",
        "agent",
        10,
        environments=[EnvironmentInfo("box", "export_restore", "wait", "1")],
        agents=[AgentInfo("waiter", "export_restore")],
        storage_roots=[directory / "snapshots"],
        full_copy_every=2,
        limits=Limits(max_body_bytes=64 * 2**20, max_wait_ms=120_000),
    )
    agent = Waiter(int(options.kilobytes * 1000))
    journal = LogJournal() if options.log else None
    participant = Participant(config, agent=agent, journal=journal)

    def load(_environment: str, saved: Any, _restored: Restored) -> Box:
        return Box(saved)

    agent.sessions = Sessions(participant, load, contained=lambda _environment, _tool: True)
    if journal is not None:
        log = LogFile.claim(directory / "log")
        assert log is not None
        await open_log(participant, journal, log)
    watch = Watch()

    async def bench(request: web.Request) -> web.Response:
        asked = await request.json()
        if asked.get("go_on"):
            participant.go_on()
        for number, name in enumerate(list(agent.waiting)[: asked.get("finish", 0)]):
            if (future := agent.waiting.get(name)) is not None and not future.done():
                future.set_result(False)
            await asyncio.sleep(0 if number % 4 else 0.0005)
        told: dict[str, float] = {"boundaries": agent.boundaries, "waiting": len(agent.waiting)}
        if asked.get("take"):
            told |= watch.take()
        return web.json_response(told)

    app = serve_aiohttp.create_app(participant, control_token=None)
    app.router.add_post("/bench", bench)
    server = await serve_aiohttp.start(app)
    collections = FullCollections(lambda: participant.held, lambda: participant.busy)
    tasks = [asyncio.create_task(work) for work in (watch.run(), agent.pace(options.rate), collections.follow())]
    assert gc.isenabled()
    sys.stdout.write(json.dumps({"url": server.url}) + "\n")
    sys.stdout.flush()
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, input)
    for task in tasks:
        task.cancel()


def main() -> None:
    """Serve a laden Gym; the first line on the standard output is its address."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--kilobytes", type=float, default=16.0)
    parser.add_argument("--rate", type=float, default=50.0, help="boundaries per second")
    parser.add_argument("--log", action="store_true")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
