# SPDX-License-Identifier: Apache-2.0
"""A Gym that dies and comes back, and what everybody outside of it knows for certain: what was acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.gym.controller import Refused
from tests.gym.running import RunningGym, environment
from tests.gym.stubs import BOUND_S, PolicyStub

ROOT = Path(__file__).resolve().parents[3]
GONE = (aiohttp.ClientError, OSError, TimeoutError)


class Zygote:
    """The process that forks the lives of Gyms."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Zygote:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.gym.crash.zygote"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment(),
            cwd=ROOT,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(BOUND_S):
            await self._process.wait()

    async def order(self, order: dict[str, Any]) -> int:
        """Begin a life; its pid."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return int((await self._line())["pid"])

    async def end(self) -> int:
        """Wait for the end of the present life; its status."""
        return int((await self._line())["status"])

    async def _line(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return line


@dataclass
class MortalGym(RunningGym):
    """A Gym whose lives come from a zygote."""

    zygote: Zygote = field(default_factory=Zygote)
    failpoint: str | None = None
    broken: str | None = None
    pid: int = 0
    ended: asyncio.Task[int] | None = None

    @property
    def hits(self) -> Path:
        """Where a fail point writes that it was reached."""
        return self.directory / "hits"

    async def start(self, *more: str) -> None:
        """Begin a life, and wait until it listens."""
        del more
        self.announce_file.unlink(missing_ok=True)
        order = {
            "config": str(self.write_config()),
            "announce": str(self.announce_file),
            "log": str(self.log_file),
            "failpoint": self.failpoint,
            "hits": str(self.hits),
            "broken": self.broken,
        }
        self.pid = await self.zygote.order(order)
        self.ended = asyncio.create_task(self.zygote.end())
        async with asyncio.timeout(BOUND_S):
            while not self.announce_file.exists():
                assert not self.ended.done(), self.log_file.read_text()[-3000:]
                await asyncio.sleep(0.005)
        self.announced = json.loads(self.announce_file.read_text())
        self.http = self.http or aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=BOUND_S))

    def arm(self) -> None:
        """Let the fail point act from now on."""
        os.kill(self.pid, signal.SIGUSR2)

    async def kill(self) -> None:
        """SIGKILL, if it lives; return when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        assert self.ended is not None
        await asyncio.shield(self.ended)

    @property
    def dead(self) -> bool:
        """Whether this life has ended."""
        return self.ended is None or self.ended.done()

    async def close(self) -> None:
        """End whatever is left."""
        if not self.dead:
            await self.kill()
        if self.http is not None:
            await self.http.close()


@dataclass
class Known:
    """What was acknowledged: nothing of it may be missing afterwards.

    ``proved`` is what the policy's log proved when the last life ended.
    """

    policy: PolicyStub
    incarnation: str = ""
    started: set[str] = field(default_factory=set)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    released: dict[str, dict[str, Any]] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    fenced: dict[str, int] = field(default_factory=dict)
    ended: list[tuple[str, str]] = field(default_factory=list)
    progress: int = 0
    proved: dict[str, int] = field(default_factory=dict)

    def turns(self) -> dict[str, int]:
        """The finished turns of each rollout on which a later policy call depended, by attempt 0."""
        proved: dict[str, int] = {}
        for asked in self.policy.asked:
            if asked.rollout_id is not None and asked.turn is not None:
                proved[asked.rollout_id] = max(proved.get(asked.rollout_id, 0), int(asked.turn) - 1)
        return proved

    def held_turn(self) -> bool:
        """Whether an unfinished rollout holds a finished turn."""
        gone = self.results.keys() | self.released.keys() | self.doubtful | self.fenced.keys()
        return any(done >= 1 and rollout not in gone for rollout, done in self.turns().items())


async def see_results(gym: RunningGym, known: Known) -> None:
    """Read the feed: what was seen once is known."""
    for rollout, found in (await gym.results()).items():
        known.results[rollout] = found["receipt"]


async def release(gym: RunningGym, known: Known, rollout: str) -> None:
    """Acknowledge one result."""
    receipt = known.results[rollout]
    known.doubtful.add(rollout)
    reply = await gym.post("agent", "/acks", {"receipts": [receipt]})
    assert "released" == reply["outcomes"][0]["outcome"], reply
    known.released[rollout] = receipt


async def retire(gym: RunningGym, known: Known, rollout: str, through: int) -> None:
    """Retire one rollout."""
    known.doubtful.add(rollout)
    body = {"rollouts": [{"rollout_id": rollout, "through_attempt": through}], "timeout_ms": 5_000}
    await gym.post("agent", "/retire", body)
    known.fenced[rollout] = through


async def judge(gym: RunningGym, known: Known, *, replaced: bool = False) -> bool:
    """Compare a new life with what was acknowledged; whether the incarnation is kept.

    Args:
        gym: the new life.
        known: everything that was acknowledged to anybody.
        replaced: a restore was under way, so that the live work may be that of either side.
    """
    status = await gym.raw("agent", "GET", "/checkpoint")
    assert ("idle", "open", None) == (status["phase"], status["gate"], status["checkpoint_id"])
    if gym.incarnations["agent"] != known.incarnation:
        assert (0, None, None) == (status["counts"]["live"], status["last"], status["controller"])
        return False
    counts = status["counts"]
    assert counts["admitted"] == sum(
        counts[key] for key in ("live", "finished_unreleased", "failed_unreleased", "released", "retired")
    )
    assert gym.epoch == status["controller"]["epoch"]
    assert known.progress <= status["progress"]
    if known.ended:
        checkpoint_id, ended_as = known.ended[-1]
        last = status["last"]
        assert _number(checkpoint_id) <= _number(last["checkpoint_id"]), (known.ended, last)
        if checkpoint_id == last["checkpoint_id"]:
            assert ended_as == last["ended_as"]
    for rollout, through in known.fenced.items():
        assert "stale_attempt" == await outcome(gym, known, rollout, through)
    live = await gym.rollouts()  # Unreleased results are among them.
    results = await gym.results()
    for rollout, receipt in known.released.items():
        reply = await gym.post("agent", "/acks", {"receipts": [receipt]})
        assert "already_released" == reply["outcomes"][0]["outcome"] or replaced, (rollout, reply)
    if replaced:
        return True
    for rollout, receipt in known.results.items():
        if rollout not in known.doubtful:
            assert receipt == results[rollout]["receipt"], rollout
    for rollout in known.started - known.doubtful - known.results.keys():
        assert rollout in live, f"{rollout} was started and is gone"
        assert known.proved.get(rollout, 0) <= live[rollout]["turns_done"], (rollout, known.proved, live[rollout])
    return True


async def outcome(gym: RunningGym, known: Known, rollout: str, attempt: int) -> str:
    """What a start of this attempt is answered."""
    item = {
        "rollout_id": rollout,
        "attempt": attempt,
        "environment": "conformance",
        "task": {"seed": 7, "world_url": None, "verify_in_world": False},
        "task_digest": "sha256:" + "0" * 64,
        "policy": known.policy.address,
    }
    reply = await gym.post("agent", "/rollouts", {"rollouts": [item]})
    return str(reply["outcomes"][0]["outcome"])


def _number(checkpoint_id: str) -> tuple[int, int]:
    epoch, sequence = checkpoint_id.split("-")
    return int(epoch), int(sequence)


__all__ = ["GONE", "Known", "MortalGym", "Refused", "Zygote", "judge", "release", "retire", "see_results"]
