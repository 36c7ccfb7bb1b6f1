# SPDX-License-Identifier: Apache-2.0
"""What a Gym is counted by: the labels of what it logs and serves do not grow with the rollouts that it sees."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from reference_gym.participant import Limits, serve_aiohttp
from spec import wire
from tests.gym.participant.kit import Gym, start_item
from tests.gym.participant.test_http import TOKEN, Client

MANY, AT_ONCE = 1_000, 25
METRICS = ("prometheus_client", "opentelemetry", "statsd")


class Labels(logging.Handler):
    """The labels that a metric of log lines, or of requests, would have."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: set[tuple[str, ...]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line by everything but its arguments."""
        self.seen.add(("log", record.name, record.levelname, str(record.msg)))

    async def on_request(self, request: web.Request, _reply: web.StreamResponse) -> None:
        """Note a request as a metrics middleware of aiohttp labels it."""
        resource = request.match_info.route.resource
        self.seen.add(("request", request.method, "" if resource is None else resource.canonical))


@pytest.fixture
def labels() -> Iterator[Labels]:
    """Listens to every logger while the test runs."""
    handler, root = Labels(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.setLevel(level)
    root.removeHandler(handler)


async def through_every_route(client: Client, ids: list[str]) -> None:
    """Name rollouts in every operation that takes their ids, known ones and unknown ones."""
    for place in range(0, len(ids), AT_ONCE):
        batch = ids[place : place + AT_ONCE]
        known, strange = batch[: AT_ONCE // 2], batch[AT_ONCE // 2 :]
        items = [start_item(key) for key in known] + [start_item(key, environment="none") for key in strange]
        replies = [await client.call("POST", "/rollouts", {"rollouts": items})]
        digest = wire.result_digest("{}")
        receipts = [{"rollout_id": key, "attempt": 0, "digest": digest} for key in batch]
        replies += await asyncio.gather(*(client.call("GET", f"/rollouts/{key}") for key in batch))
        replies.append(await client.call("POST", "/acks", {"receipts": receipts}))
        fences = [{"rollout_id": key, "through_attempt": 3} for key in batch]
        replies.append(await client.call("POST", "/retire", {"rollouts": fences, "timeout_ms": 2_000}))
        stale = [{**start_item(key), "attempt": 1} for key in batch]
        replies.append(await client.call("POST", "/rollouts", {"rollouts": stale}))
        assert {200, 404} == {status for status, _ in replies}


async def test_a_thousand_rollouts_add_no_label(tmp_path: Path, labels: Labels) -> None:
    """C74, CKPT-SEC-026: one batch of rollout ids shows every label, a thousand ids through every route add none."""
    gym = Gym(tmp_path, limits=Limits(max_batch=AT_ONCE))
    app = serve_aiohttp.create_app(gym.participant, control_token=TOKEN)
    app.on_response_prepare.append(labels.on_request)
    async with await serve_aiohttp.start(app) as server, aiohttp.ClientSession(server.url) as session:
        client = Client(gym, session, server)
        await through_every_route(client, [f"few-{number}" for number in range(AT_ONCE)])
        after_few = set(labels.seen)
        await through_every_route(client, [f"many-{number}" for number in range(MANY)])
    assert {"request"} <= {label[0] for label in after_few}
    assert after_few == labels.seen
    program = "import sys, reference_gym.server; print(*{name.split('.')[0] for name in sys.modules})"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    imported, _ = await asyncio.wait_for(process.communicate(), 60)
    assert b"reference_gym" in imported
    assert [] == [name for name in METRICS if name in imported.decode().split()]
