# SPDX-License-Identifier: Apache-2.0
"""A real Gym that serves a client without the protocol and one with it at the same time."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.crash_matrix.bench import BOUND_S
from tests.crash_matrix.forks import ForkServer
from tests.rl.harness import events_of, until
from tests.rl.policy import Call, Policy
from tests.rl.real import TAXI, bench_of
from tests.rl.relay import PREFIX, Asked, Relay, relaying

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]


def sent_to_the_gym(relay: Relay) -> list[Any]:
    """Return what came outside of the protocol, byte by byte, in an order that does not depend on the time."""
    older = [asked for asked in relay.seen if not asked.path.startswith(PREFIX)]
    return sorted((asked.method, asked.path, sorted(asked.headers.items()), asked.data) for asked in older)


def answered_by_the_gym(relay: Relay) -> list[Any]:
    """Return status, headers, names of fields and body of each answer outside of the protocol."""
    replies = [relay.replies[id(asked)] for asked in relay.seen if not asked.path.startswith(PREFIX)]
    found = []
    for status, headers, data in replies:
        content = json.loads(data)
        fields = sorted((name, sorted(value) if isinstance(value, dict) else "") for name, value in content.items())
        found.append((json.dumps(content["body"], sort_keys=True), status, sorted(headers.items()), fields))
    return sorted(found)


def asked_of_the_policy(calls: list[Call]) -> list[Any]:
    """Return the calls that carry no rollout's name."""
    return sorted((call.seed, call.turn, sorted(call.headers.items())) for call in calls if not call.rollout_id)


async def test_nothing_differs_for_a_client_that_never_heard_of_checkpoints(tmp_path: Path, forks: ForkServer) -> None:
    """N14: three rollouts of the older route, alone and while another client holds every gate closed: the same wire.

    What the client sends, what the Gym answers and what the policy sees are equal to the byte, names and times of a
    rollout apart; neither the policy nor the client sees a header of the protocol. The other client's snapshot is
    published.
    """
    policy = Policy(hold_from={3: 3})
    async with (
        bench_of(forks, tmp_path / "b", policy, gym={"storage_roots": ["other/snapshots"]}, column=0) as bench,
        relaying(lambda: bench.urls()["gym"]) as relay,
    ):
        bench.through = {"gym": relay.url}
        await bench.start_gym()
        await bench.start_rl()
        assert bench.client is not None
        assert 0 == await bench.client.wait(BOUND_S)
        alone = (sent_to_the_gym(relay), answered_by_the_gym(relay), asked_of_the_policy(policy.calls))
        assert [3, 3, 15] == [len(found) for found in alone]
        assert [] == [name for _, _, headers, _ in alone[1] for name, _ in headers if name.lower().startswith("gym-")]

        # Seed 3 is the other client's alone.
        other = await bench.start_rival("other", column=3, tasks=TAXI | {"siblings": 4})
        await until(lambda: policy.was_asked("_s3", 3), "it holds turns", BOUND_S)
        relay.seen.clear()
        relay.replies.clear()
        calls = len(policy.calls)
        over = asyncio.Event()

        async def wait_with_commit(asked: Asked) -> None:
            if asked.operation == "commit":
                await over.wait()

        relay.before = wait_with_commit
        other.send(signal.SIGUSR1)
        await until(lambda: any(a.operation == "commit" for a in relay.seen), "every gate is closed", BOUND_S)
        again = await bench.start_rival("again", column=0)
        assert 0 == await again.wait(BOUND_S)
        assert "closed" == (await bench.ask("gym", "checkpoint"))["gate"]
        over.set()
        beside = (sent_to_the_gym(relay), answered_by_the_gym(relay), asked_of_the_policy(policy.calls[calls:]))
        for one, two in zip(alone, beside, strict=True):
            assert one == two
        assert [] == [name for *_, headers in beside[2] for name, _ in headers if name.lower().startswith("gym-")]
        directory = tmp_path / "b" / "other"
        ended = ("snapshot_published", "snapshot_failed")
        found = await until(lambda: [e for e in events_of(directory) if e["event"] in ended], "it ends", BOUND_S)
        assert ["snapshot_published"] == [event["event"] for event in found]
        await policy.let_all()
        assert 0 == await other.wait(BOUND_S)
        results = [(tmp_path / "b" / name / "results.jsonl").read_text() for name in ("run", "again", "other")]
        assert [3, 3, 4] == [text.count("\n") for text in results]
