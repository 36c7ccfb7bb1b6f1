# SPDX-License-Identifier: Apache-2.0
"""ACKs, late starts and readers of the feed between a real RL client and a real Gym; a ledger that is locked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reference_rl.errors import InvariantViolated
from reference_rl.rollouts import FEED_WAIT_MS
from tests.crash_matrix.bench import BOUND_S, Bench
from tests.crash_matrix.forks import ForkServer
from tests.rl.harness import until
from tests.rl.policy import Policy
from tests.rl.real import SURVIVES, TAXI, A, B, bench_of, ended_well
from tests.rl.relay import PASS, Asked, Relay, Reply, relaying

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

WRONG = "m_g0_s41"


def outcomes_of(reply: Reply) -> Counter[str]:
    """Return how often each outcome stands in a reply."""
    return Counter(row["outcome"] for row in json.loads(reply[2])["outcomes"])


def with_a_wrong_digit(asked: Asked) -> Asked:
    """Change the last hex digit of one digest, where the call holds that receipt."""
    if asked.operation != "acks":
        return asked
    receipts = asked.body["receipts"]
    for receipt in receipts:
        if receipt["rollout_id"] == WRONG:
            receipt["digest"] = receipt["digest"][:-1] + ("0" if receipt["digest"][-1] != "0" else "1")
    return replace(asked, data=json.dumps({"receipts": receipts}).encode())


async def finished(bench: Bench, count: int) -> bool:
    """Return whether the Gym holds so many results."""
    return bool((await bench.ask("gym", "checkpoint"))["counts"]["finished_unreleased"] == count)


async def all_finished(bench: Bench, count: int) -> None:
    """Wait until the Gym holds so many results."""
    end = time.monotonic() + BOUND_S
    while not await finished(bench, count):
        assert time.monotonic() < end, f"not within {BOUND_S} s: {count} results"
        await asyncio.sleep(0.02)


async def test_one_wrong_digit_in_a_hundred_acks(tmp_path: Path, forks: ForkServer) -> None:
    """C03, C04: a digit changes on the way: 99 are released, RL stops with the evidence; the result is still served.

    The next RL owes all of them still. Its ACK arrives 50 times at once: each time without an error, and the one that
    was left is released once.
    """
    tasks = TAXI | {"siblings": 100, "max_turns": 1}
    async with (
        bench_of(forks, tmp_path / "b", Policy(), tasks, **SURVIVES) as bench,
        relaying(lambda: bench.urls()["gym"]) as relay,
    ):
        bench.through = {"gym": relay.url}
        relay.rule = lambda asked: "503" if asked.operation == "results" else PASS
        relay.edit = with_a_wrong_digit
        await bench.start_gym()
        await bench.start_rl()
        await all_finished(bench, 100)
        relay.rule = lambda asked: PASS
        assert bench.client is not None
        assert InvariantViolated.exit_code == await bench.client.wait(BOUND_S)
        (acked,) = [asked for asked in relay.seen if asked.operation == "acks"]
        assert {"released": 99, "mismatch": 1} == outcomes_of(relay.replies[id(acked)])
        (evidence,) = bench.run_dir.glob("evidence-*.json")
        assert WRONG in evidence.read_text()
        served = (await bench.ask("gym", "results"))["results"]
        assert [WRONG] == [entry["receipt"]["rollout_id"] for entry in served]

        relay.edit = lambda asked: asked
        relay.copies = lambda asked: 50 if asked.operation == "acks" else 1
        await bench.start_rl()
        samples = await ended_well(bench)
        assert 100 == len({row["rollout_id"] for row in samples})
        found = sum((outcomes_of(reply) for reply in relay.doubled), Counter[str]())
        assert {"released": 1, "already_released": 50 * 100 - 1} == found
        assert {200} == {status for status, _, _ in relay.doubled}
        assert [] == (await bench.ask("gym", "results"))["results"]


async def test_a_late_start_with_another_task_and_readers_that_go_away(tmp_path: Path, forks: ForkServer) -> None:
    """C05, C06: A is released, then a start of it with another task comes: `released`, and no old result.

    19 others wait for the feed together with RL and hang up; when B finishes RL's call gets the result at once.
    """
    policy = Policy(hold_from={1: 3})
    tasks = TAXI | {"siblings": 2}
    async with (
        bench_of(forks, tmp_path / "b", policy, tasks) as bench,
        relaying(lambda: bench.urls()["gym"]) as relay,
    ):
        bench.through = {"gym": relay.url}
        await bench.start_gym()
        await bench.start_rl()
        await bench.event("acked")
        await until(lambda: policy.was_asked(B, 3), "B holds two turns", BOUND_S)
        start = next(asked for asked in relay.seen if (asked.method, asked.operation) == ("POST", "rollouts"))
        late = [row | {"task": {"seed": 8}, "task_digest": "another"} for row in start.body["rollouts"]]
        body = json.dumps(start.body | {"rollouts": late}).encode()
        reply = json.loads((await relay.send(replace(start, data=body)))[2])
        assert [(A, "released"), (B, "conflict")] == [(row["rollout_id"], row["outcome"]) for row in reply["outcomes"]]
        assert not [row for row in reply["outcomes"] if "receipt" in row]
        assert [] == (await bench.ask("gym", "results"))["results"]

        async with waiting(bench, 19):
            await bench.ask("gym", "checkpoint")  # answered after everybody's question was read
        await until(lambda: relay.unanswered("results"), "RL waits as well")
        await policy.let_all()
        await until(lambda: B in bench.saved(), "RL has the result", BOUND_S)
        (poll,) = [asked for asked in relay.passed if asked.operation == "results" and holds(relay, asked, B)]
        assert time.monotonic() - poll.at < FEED_WAIT_MS / 1000 - 0.5, "told when it finished, not when the wait ended"
        assert [(A, 0), (B, 0)] == [(row["rollout_id"], row["attempt"]) for row in await ended_well(bench)]


def holds(relay: Relay, asked: Asked, rollout_id: str) -> bool:
    """Return whether the answer to a request for results holds that of a rollout."""
    _, _, data = relay.replies.get(id(asked), (0, {}, b'{"results": []}'))
    return rollout_id in [entry["receipt"]["rollout_id"] for entry in json.loads(data)["results"]]


@contextlib.asynccontextmanager
async def waiting(bench: Bench, count: int) -> AsyncIterator[None]:
    """Let readers wait for a result until the block ends, and then hang up."""
    async with bench.http() as http:
        url = f"{bench.urls()['gym']}/gym-checkpoint/v1/results?wait_ms=30000"
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(_read(http, url)) for _ in range(count)]
        done, _ = await asyncio.wait(tasks, timeout=0.2)
        assert not done, "all of them wait"
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(http: Any, url: str) -> None:
    async with http.get(url) as reply:
        await reply.read()


async def test_results_wait_for_a_locked_ledger(tmp_path: Path, forks: ForkServer) -> None:
    """C72: 25 results come while another process holds the ledger's write lock for 2 s: none is lost, none fails.

    Nothing is acknowledged meanwhile.
    """
    policy = Policy(hold_from=dict.fromkeys(range(0, 25_000, 1000), 2))
    tasks = TAXI | {"groups": 25, "siblings": 1, "max_turns": 2}
    async with bench_of(forks, tmp_path / "b", policy, tasks) as bench:
        await bench.start_gym()
        await bench.start_rl()
        await until(lambda: sorted(policy.last_asked().values()) == [2] * 25, "25 hold a turn", BOUND_S)
        with contextlib.closing(sqlite3.connect(bench.run_dir / "ledger.sqlite", isolation_level=None)) as con:
            con.execute("BEGIN IMMEDIATE")
            until_s = time.monotonic() + 2
            await policy.let_all()
            await all_finished(bench, 25)
            await asyncio.sleep(until_s - time.monotonic())
            assert [] == bench.events("finished", "acked", "trained")
            con.execute("COMMIT")
        samples = await ended_well(bench)
        assert 25 == len({row["rollout_id"] for row in samples})
        assert 25 == len(bench.events("finished"))
        assert [] == bench.events("surplus", "retried", "gym_trouble", "gym_lost")
