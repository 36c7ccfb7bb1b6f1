# SPDX-License-Identifier: Apache-2.0
"""The control plane over real sockets: tokens, forms, the order of checks, problem documents, artifacts, draining."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import pytest
from aiohttp import web

import spec
from reference_gym.participant import Limits, serve_aiohttp, serve_asgi, serve_uvicorn, serving
from reference_gym.participant.exchange import Request
from reference_gym.participant.http import DataCall
from reference_gym.participant.result import validator
from spec import wire
from tests.gym.participant.kit import RUN, Counter, Gym, MovedClock, start_item, until

TOKEN = "control-secret"
DATA_TOKEN = "data-secret"
PREFIX = wire.PREFIX


class Client:
    """A client that speaks raw bodies, and checks of every reply what holds for all of them."""

    def __init__(self, gym: Gym, session: aiohttp.ClientSession, server: serving.Server) -> None:
        self.gym = gym
        self.session = session
        self.server = server
        self.port = server.port

    def headers(self, **changed: str | None) -> dict[str, str]:
        """Return the headers of a mutating call; None leaves one out."""
        named = {
            "Authorization": f"Bearer {TOKEN}",
            wire.HEADER_CONTROLLER_ID: "rl",
            wire.HEADER_CONTROLLER_EPOCH: "1",
            wire.HEADER_EXPECT_INCARNATION: self.gym.participant.incarnation,
            "Content-Type": "application/json",
        }
        named |= {name.replace("_", "-"): value for name, value in changed.items()}  # type: ignore[dict-item]  # filtered
        return {name: value for name, value in named.items() if value is not None}

    async def call(self, method: str, path: str, body: Any = None, **changed: Any) -> tuple[int, Any]:
        """Call, and return status and JSON."""
        data = body if isinstance(body, bytes) or body is None or hasattr(body, "__aiter__") else json.dumps(body)
        headers = self.headers(**changed)
        async with self.session.request(method, PREFIX + path, data=data, headers=headers) as reply:
            text = await reply.read()
            assert self.gym.participant.incarnation == reply.headers[wire.HEADER_INCARNATION]
            if reply.status >= 400:
                assert wire.PROBLEM_MEDIA_TYPE == reply.headers["Content-Type"]
                problem = json.loads(text)
                validator("problem").validate(problem)
                row = spec.load().errors[problem["code"]]
                assert (row.status, row.retryable) == (reply.status, problem["retryable"])
                assert TOKEN not in text.decode()
            return reply.status, (json.loads(text) if text else None)

    async def code(self, method: str, path: str, body: Any = None, **changed: Any) -> str:
        """Return the error code of a call that is refused."""
        status, problem = await self.call(method, path, body, **changed)
        assert status >= 400, problem
        return str(problem["code"])


Served = Callable[..., contextlib.AbstractAsyncContextManager[Client]]


@pytest.fixture(params=["aiohttp", "asgi"])
def served(request: pytest.FixtureRequest) -> Served:
    """Return what serves a Gym on a free port, in each world."""

    @contextlib.asynccontextmanager
    async def serve(root: Path, **more: Any) -> AsyncIterator[Client]:
        more.setdefault("limits", Limits(max_body_bytes=20_000, max_batch=10, shutdown_grace_ms=500))
        gym = Gym(root, **more)
        async with await WORLDS[request.param](gym) as server, aiohttp.ClientSession(server.url) as session:
            yield Client(gym, session, server)

    return serve


async def echo(_request: Request, body: Any) -> Any:
    """Answer with the body: a call of the data plane."""
    return {"echo": body}


async def on_aiohttp(gym: Gym) -> serving.Server:
    """Serve a Gym and a call of the data plane with aiohttp."""
    app = serve_aiohttp.create_app(gym.participant, control_token=TOKEN)
    app.router.add_post("/data", serve_aiohttp.data_plane(gym.participant, DATA_TOKEN, echo))
    return await serve_aiohttp.start(app)


async def on_asgi(gym: Gym) -> serving.Server:
    """Serve a Gym and a call of the data plane as an ASGI application on uvicorn."""
    app = serve_asgi.create_app(gym.participant, control_token=TOKEN)
    app.add("POST", "/data", DataCall(gym.participant, DATA_TOKEN, echo))
    return await serve_uvicorn.start(app, gym.participant)


WORLDS: dict[str, Callable[[Gym], Awaitable[serving.Server]]] = {"aiohttp": on_aiohttp, "asgi": on_asgi}

PREPARE = {"checkpoint_id": "1-1", "run_id": RUN, "timeout_ms": 1_000, "lease_ms": 60_000}


async def test_every_reply_matches_its_schema(served: Served, tmp_path: Path) -> None:
    """Each operation once, over the wire; every reply is what its schema says."""
    async with served(tmp_path) as client:

        async def check(schema: str, method: str, path: str, body: Any = None) -> Any:
            status, reply = await client.call(method, path, body)
            assert status == 200, reply
            with contextlib.suppress(jsonschema_rs.ValidationError):
                validator(schema).validate(reply)
                return reply
            raise AssertionError([error.message for error in validator(schema).iter_errors(reply)])

        await check("capabilities", "GET", "/capabilities")
        await check("status", "GET", "/checkpoint")
        await check("start-response", "POST", "/rollouts", {"rollouts": [start_item("a"), start_item("b")]})
        await check("rollouts-page", "GET", "/rollouts?limit=1&state=running")
        await check("rollout", "GET", "/rollouts/a")
        receipts = await client.gym.finish("a")
        page = await check("results-page", "GET", "/results?wait_ms=1000&limit=5")
        assert receipts == [result["receipt"] for result in page["results"]]
        await check("prepare-response", "POST", "/checkpoint/prepare", PREPARE)
        target = tmp_path / "1-1"
        target.mkdir()
        commit = {
            "checkpoint_id": "1-1",
            "target": {"scheme": "file", "path": str(target)},
            "wait": "durable",
            "timeout_ms": 5_000,
        }
        committed = await check("commit-response", "POST", "/checkpoint/commit", commit)
        await check("renew-response", "POST", "/checkpoint/renew", {"checkpoint_id": "1-1", "lease_ms": 1_000})
        await check("status", "GET", "/checkpoint")
        await check("resume-response", "POST", "/checkpoint/resume", {"checkpoint_id": "1-1", "timeout_ms": 1_000})
        await check("acks-response", "POST", "/acks", {"receipts": receipts})
        restore = {
            "checkpoint_id": "1-2",
            "run_id": RUN,
            "source": {
                "scheme": "file",
                "path": str(target),
                "checkpoint_id": "1-1",
                "manifest_digest": committed["manifest"]["digest"],
            },
            "rollouts": [{"rollout_id": "b", "attempt": 0, "next_attempt": 1, "turns_done": 0, "task_digest": "task"}],
            "results": receipts,
            "fences": [{"rollout_id": "zz", "through_attempt": 3}],
            "timeout_ms": 5_000,
            "lease_ms": 60_000,
        }
        await check("restore-response", "POST", "/checkpoint/restore", restore)
        await check("abort-response", "POST", "/checkpoint/abort", {"checkpoint_id": "1-2", "timeout_ms": 1_000})
        fences = {"rollouts": [{"rollout_id": "b", "through_attempt": 1}], "timeout_ms": 1_000}
        await check("retire-response", "POST", "/retire", fences)
        await check("rollout", "GET", "/rollouts/b")
        validator("participant-manifest").validate(json.loads((target / "manifest.json").read_text()))
        for line in (target / "rollouts.jsonl").read_text().splitlines():
            validator("index-record").validate(json.loads(line))


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b'{"checkpoint_id": "1-1", "checkpoint_id": "1-1"}',
    b'{"timeout_ms": NaN}',
    b'{"timeout_ms": Infinity}',
    b'{"timeout_ms": 1e999}',
    b"\xef\xbb\xbf{}",
    b'{"run_id": "\xff"}',
    b'{"run_id": "\\ud800"}',
    b'{"a": ' * 2_000,
    b"[" * 900 + b"]" * 900,
    json.dumps(PREPARE | {"extra": 1}).encode(),
    json.dumps(PREPARE | {"timeout_ms": 1.0}).encode(),
    json.dumps(PREPARE | {"timeout_ms": True}).encode(),
    json.dumps(PREPARE | {"timeout_ms": "1"}).encode(),
    json.dumps(PREPARE | {"timeout_ms": None}).encode(),
    json.dumps(PREPARE | {"timeout_ms": -1}).encode(),
    json.dumps(PREPARE | {"timeout_ms": 10**30}).encode(),
    json.dumps(PREPARE | {"checkpoint_id": "1-1\n"}).encode(),
    json.dumps(PREPARE | {"checkpoint_id": "01-1"}).encode(),
    json.dumps(PREPARE | {"checkpoint_id": "2-1"}).encode(),
    json.dumps(PREPARE).encode("utf-16"),
]


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: repr(body[:40]))
async def test_malformed_bodies_are_refused_and_change_nothing(served: Served, tmp_path: Path, body: bytes) -> None:
    """CKPT-ERR-006: duplicate keys, NaN, surrogates, deep nesting, other types, unknown fields, beyond bounds."""
    async with served(tmp_path) as client:
        before = client.gym.status
        assert "invalid_request" == await client.code("POST", "/checkpoint/prepare", body)
        assert before == client.gym.status


@pytest.mark.parametrize(
    "changed",
    [
        {wire.HEADER_CONTROLLER_ID: None},
        {wire.HEADER_CONTROLLER_EPOCH: None},
        {wire.HEADER_EXPECT_INCARNATION: None},
        {wire.HEADER_CONTROLLER_ID: "-x"},
        {wire.HEADER_CONTROLLER_ID: 129 * "x"},
        {wire.HEADER_CONTROLLER_EPOCH: "0"},
        {wire.HEADER_CONTROLLER_EPOCH: "01"},
        {wire.HEADER_CONTROLLER_EPOCH: "1.0"},
        {wire.HEADER_CONTROLLER_EPOCH: 16 * "1"},
        {wire.HEADER_EXPECT_INCARNATION: "a b"},
    ],
    ids=str,
)
async def test_missing_and_malformed_headers(served: Served, tmp_path: Path, changed: dict[str, str | None]) -> None:
    """CKPT-ID-032 to CKPT-ID-034."""
    async with served(tmp_path) as client:
        assert "invalid_request" == await client.code("POST", "/checkpoint/prepare", PREPARE, **changed)
        assert client.gym.status["controller"] is None


async def test_the_first_check_that_fails_answers(served: Served, tmp_path: Path) -> None:
    """CKPT-ORDER-001: each call breaks everything from one check on; nothing before the controller adopts it."""
    async with served(tmp_path, limits=Limits(max_body_bytes=2_000)) as client:
        await client.call("POST", "/checkpoint/abort", {"checkpoint_id": "1-5", "timeout_ms": 0})
        commit: dict[str, Any] = {
            "checkpoint_id": "9-1",
            "target": {"scheme": "http"},
            "wait": "durable",
            "timeout_ms": 0,
        }
        outside = {"scheme": "file", "path": "/"}
        chain: list[tuple[str, Any, dict[str, Any]]] = [
            ("unauthorized", b"x" * 3_000, {"Authorization": "Bearer wrong", "Content-Type": "text/plain"}),
            ("payload_too_large", b"x" * 3_000, {"Content-Type": "text/plain"}),
            ("unsupported_media_type", b"{", {"Content-Type": "text/plain"}),
            ("invalid_request", b"{", {wire.HEADER_EXPECT_INCARNATION: "another"}),
            ("invalid_request", commit, {wire.HEADER_CONTROLLER_EPOCH: "0", wire.HEADER_EXPECT_INCARNATION: "x"}),
            ("unsupported", commit, {wire.HEADER_CONTROLLER_EPOCH: "9", wire.HEADER_EXPECT_INCARNATION: "x"}),
            (
                "stale_incarnation",
                commit | {"target": outside},
                {wire.HEADER_CONTROLLER_EPOCH: "9", wire.HEADER_EXPECT_INCARNATION: "x"},
            ),
            (
                "stale_controller",
                commit | {"target": outside, "checkpoint_id": "1-1"},
                {wire.HEADER_CONTROLLER_ID: "a"},
            ),
            ("stale_checkpoint", commit | {"target": outside, "checkpoint_id": "1-1"}, {}),
        ]
        for code, body, changed in chain:
            assert code == await client.code("POST", "/checkpoint/commit", body, **changed)
            assert {"id": "rl", "epoch": 1} == client.gym.status["controller"]


async def test_errors_of_the_framework_are_problem_documents(served: Served, tmp_path: Path) -> None:
    """CKPT-ERR-008: 404, 405 with Allow, 415, an unknown version, paths outside of the prefix, the data plane."""
    async with served(tmp_path) as client:
        assert "not_found" == await client.code("GET", "/nothing")
        assert "method_not_allowed" == await client.code("DELETE", "/rollouts")
        assert "unsupported_media_type" == await client.code("POST", "/retire", b"{}", Content_Type="text/plain")
        assert "invalid_request" == await client.code("GET", "/rollouts/..%2fx")
        assert "not_found" == await client.code("GET", "/rollouts/unknown")
        for query in ("limit=0", "limit=x", "wait_ms=-1", "limit=1&limit=2", "after=" + 2_000 * "x"):
            assert "invalid_request" == await client.code("GET", f"/results?{query}")
        assert "invalid_request" == await client.code("GET", "/rollouts?state=sleeping")
        authorized = {"Authorization": f"Bearer {DATA_TOKEN}"}
        for method, path, status, code in (
            ("GET", "/gym-checkpoint/v2/capabilities", 501, "unsupported_version"),
            ("GET", "/gym-checkpoint/x/capabilities", 404, "not_found"),
            ("GET", "/elsewhere", 404, "not_found"),
            ("GET", "/data", 405, "method_not_allowed"),
        ):
            headers = authorized if path == "/data" else {"Authorization": f"Bearer {TOKEN}"}
            async with client.session.request(method, path, headers=headers) as reply:
                assert (status, wire.PROBLEM_MEDIA_TYPE) == (reply.status, reply.headers["Content-Type"])
                assert code == (await reply.json(content_type=None))["code"]
                if status == 405:
                    assert "POST" in reply.headers["Allow"]


@pytest.mark.parametrize(
    "sent",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n",
        b"GET /" + 100_000 * b"x" + b" HTTP/1.1\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
    ],
    ids=["no HTTP", "a bad header", "a long line", "a bad length"],
)
async def test_what_is_not_even_http_is_refused_with_a_problem_document(
    served: Served, tmp_path: Path, sent: bytes
) -> None:
    """CKPT-ERR-007: also below the routes; the server goes on."""
    async with served(tmp_path) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(sent)
        reply = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        head, _, body = reply.partition(b"\r\n\r\n")
        assert b"HTTP/1.1 400 " in head or b"HTTP/1.0 400 " in head
        assert wire.PROBLEM_MEDIA_TYPE.encode() in head
        validator("problem").validate(json.loads(body))
        assert (await client.call("GET", "/checkpoint"))[0] == 200


async def test_each_plane_has_its_own_token(served: Served, tmp_path: Path) -> None:
    """CKPT-SEC-001: missing, of another plane, or another scheme: unauthorized, with WWW-Authenticate."""
    async with served(tmp_path) as client:
        for value in (
            None,
            "Bearer",
            "Bearer ",
            f"Bearer {DATA_TOKEN}",
            f"Basic {TOKEN}",
            f"Bearer {TOKEN}x",
            "Bearer é",
        ):
            assert "unauthorized" == await client.code("GET", "/capabilities", Authorization=value)
        for token, status in ((DATA_TOKEN, 200), (TOKEN, 401)):
            headers = {"Authorization": f"Bearer {token}"}
            async with client.session.post("/data", json={"x": 1}, headers=headers) as reply:
                assert status == reply.status
                body = await reply.json(content_type=None)
                assert body == {"echo": {"x": 1}} or reply.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("beyond", "expected"), [(-1, 200), (0, 200), (1, 413)])
async def test_bodies_around_the_limit(
    served: Served, tmp_path: Path, beyond: int, expected: int, *, chunked: bool
) -> None:
    """C71: limit − 1 and limit are accepted, limit + 1 is refused in the error form, chunked and not."""
    async with served(tmp_path) as client:
        text = json.dumps({"receipts": []}).encode()
        text += b" " * (20_000 + beyond - len(text))

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(text), 3_000):
                yield text[at : at + 3_000]

        status, reply = await client.call("POST", "/acks", pieces() if chunked else text)
        assert expected == status
        assert reply == {"outcomes": []} or reply["code"] == "payload_too_large"
        assert "payload_too_large" == await client.code(
            "POST", "/rollouts", {"rollouts": [start_item(f"r{number}") for number in range(11)]}
        )
        assert (await client.call("GET", "/checkpoint"))[0] == 200, "the server goes on"


async def test_an_operation_reaches_its_end_although_the_client_has_gone(served: Served, tmp_path: Path) -> None:
    """C33: TCP is dropped while a prepare waits for a tool; the participant is prepared when the tool has ended."""
    async with served(tmp_path) as client:
        gym = client.gym
        gym.world.hold("a/1/1")
        await gym.start("a")
        gym.loop.reply("a", [("add", 1)])
        await until(lambda: gym.world.begun)
        body = json.dumps(PREPARE | {"timeout_ms": 20_000}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        head = [f"POST {PREFIX}/checkpoint/prepare HTTP/1.1", "Host: gym", f"Content-Length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in client.headers().items()]
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        await until(lambda: gym.status["phase"] == "preparing")
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await reader.read()
        gym.world.release("a/1/1")
        await until(lambda: gym.status["phase"] == "prepared")
        await until(lambda: gym.participant.machine.serving == 0)


async def test_operations_of_what_is_not_owned_or_not_offered(served: Served, tmp_path: Path) -> None:
    """CKPT-DISC-004, CKPT-ERR-026: not_found for rollouts of a session owner, unsupported for a profile not listed."""
    async with served(tmp_path, rollouts=False, profiles=("results",)) as client:
        assert ["sessions"] == (await client.call("GET", "/capabilities"))[1]["owns"]
        for method, path in (("GET", "/rollouts"), ("POST", "/rollouts"), ("GET", "/results"), ("POST", "/acks")):
            assert "not_found" == await client.code(method, path, {} if method == "POST" else None)
        assert "unsupported" == await client.code("POST", "/checkpoint/prepare", PREPARE)
        assert "unsupported" == await client.code("GET", "/checkpoints/1-1/artifacts/manifest.json")
        status, _ = await client.call("POST", "/checkpoint/abort", {"checkpoint_id": "1-0", "timeout_ms": 0})
        assert 200 == status
        assert "feed" not in (await client.call("GET", "/checkpoint"))[1]


async def test_a_snapshot_travels_over_http(served: Served, tmp_path: Path) -> None:
    """CKPT-ART-001 to -011: fetched from one participant, put to another, restored there."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    files: dict[str, bytes] = {}
    async with served(tmp_path, staging=tmp_path / "one") as client:
        gym = client.gym
        await gym.start("a")
        gym.loop.reply("a", [("add", 3)])
        await until(lambda: gym.world.done)
        await gym.waiting("a")
        assert "not_found" == await client.code("GET", "/checkpoints/1-1/artifacts/manifest.json")
        await gym.prepare("1-1")
        committed = await gym.commit("1-1", target={"scheme": "http"})
        for name in ("manifest.json", "rollouts.jsonl", "state.jsonl", "results.jsonl", "tombstones.jsonl"):
            path = f"{PREFIX}/checkpoints/1-1/artifacts/{name}"
            async with client.session.get(path, headers=client.headers()) as reply:
                assert (200, "application/octet-stream") == (reply.status, reply.headers["Content-Type"])
                files[name] = await reply.read()
        assert committed["manifest"]["digest"] == wire.bytes_digest(files["manifest.json"])
        put = {"Content-Type": "application/octet-stream"}
        assert "invalid_phase" == await client.code("PUT", "/checkpoints/1-1/artifacts/x", b"x", **put)
        await gym.resume("1-1")
        await gym.prepare("1-2")
        assert "not_found" == await client.code("GET", "/checkpoints/1-1/artifacts/manifest.json")
    limits = Limits(max_artifact_bytes=2_000)
    async with served(tmp_path, staging=tmp_path / "two", limits=limits) as client:
        for name, data in files.items():
            for _ in range(2):
                assert (204, None) == await client.call("PUT", f"/checkpoints/1-1/artifacts/{name}", data, **put)
        at = "/checkpoints/1-1/artifacts/"
        assert "argument_conflict" == await client.code("PUT", f"{at}state.jsonl", b"other", **put)
        assert "payload_too_large" == await client.code("PUT", f"{at}large", b"x" * 2_001, **put)
        assert "unsupported_media_type" == await client.code("PUT", f"{at}y", b"x", Content_Type="application/json")
        for bad in (".hidden", "a%2Fb", "..", "%00"):
            assert await client.code("PUT", f"{at}{bad}", b"x", **put) in ("invalid_request", "not_found")
        source = {"scheme": "http", "checkpoint_id": "1-1", "manifest_digest": committed["manifest"]["digest"]}
        restored = await client.gym.restore("1-3", "1-1", None, [("a", 0, 1, 1)], source=source)
        assert 1 == restored["restored_count"]
        await client.gym.resume("1-3")
        assert "not_found" == await client.code("GET", f"{at}manifest.json")
        assert not list((tmp_path / "two").glob("uploads/*"))


async def test_draining_ends_long_polls_and_keeps_the_control_plane(served: Served, tmp_path: Path) -> None:
    """CKPT-SEC-018 to -022: starts are not admitted, a restore is unavailable, a commit still becomes durable."""
    async with served(tmp_path, limits=Limits(shutdown_grace_ms=20_000)) as client:
        gym = client.gym
        await gym.start("live")
        polling = asyncio.ensure_future(client.call("GET", "/results?wait_ms=30000"))
        await asyncio.sleep(0)
        draining = asyncio.ensure_future(client.server.drain())
        assert [] == (await polling)[1]["results"]
        assert ["admission_closed"] == await gym.start("a")
        status, problem = await client.call("POST", "/checkpoint/restore", RESET | {"checkpoint_id": "1-1"})
        assert (503, "unavailable") == (status, problem["code"])
        assert not draining.done()
        await gym.prepare("1-1")
        await gym.commit("1-1")
        await asyncio.wait_for(draining, 5)


RESET = {
    "run_id": RUN,
    "source": None,
    "rollouts": [],
    "results": [],
    "fences": [],
    "timeout_ms": 0,
    "lease_ms": 1_000,
}


async def test_draining_ends_when_there_is_nothing_left_to_lose(tmp_path: Path) -> None:
    """CKPT-SEC-020: kept by a live rollout, its unreleased result, an open checkpoint; by nothing else."""
    clock = MovedClock()
    gym = Gym(tmp_path, clock=clock, limits=Limits(shutdown_grace_ms=600_000))
    await gym.start("a")
    draining = asyncio.ensure_future(serving.drain(gym.participant))
    await clock.advance(1)
    assert not draining.done(), "a rollout is live"
    (receipt,) = await gym.finish("a")
    await clock.advance(1)
    assert not draining.done(), "a result is unreleased"
    await gym.prepare("1-2")
    assert ["released"] == await gym.acks(receipt)
    await clock.advance(1)
    assert not draining.done(), "a checkpoint is open"
    await gym.abort("1-2")
    await clock.advance(1)
    assert draining.done()
    await serving.drain(Gym(tmp_path).participant)


async def test_draining_ends_with_the_grace(tmp_path: Path) -> None:
    """CKPT-SEC-020: four fifths of it, whatever is still held."""
    clock = MovedClock()
    gym = Gym(tmp_path, clock=clock, limits=Limits(shutdown_grace_ms=10_000))
    await gym.start("a")
    draining = asyncio.ensure_future(serving.drain(gym.participant))
    await clock.advance(0)
    await clock.advance(7.9)
    assert not draining.done()
    await clock.advance(0.2)
    assert draining.done()


async def test_who_is_called_stays_for_as_long_as_its_callers(tmp_path: Path) -> None:
    """CKPT-SEC-020: without a session it waits for the agent as well; what the agent leaves behind holds nothing."""
    clock = MovedClock()
    gym = Gym(tmp_path, clock=clock, rollouts=False, limits=Limits(shutdown_grace_ms=600_000))
    callers = [True]
    draining = asyncio.ensure_future(serving.drain(gym.participant, lambda: callers[0]))
    await clock.advance(1)
    assert not draining.done()
    await gym.sessions.open("a", 0, "counter", "task", Counter(gym.world))
    assert gym.participant.holds_work
    callers[0] = False
    await clock.advance(1)
    assert draining.done()


SCRIPT = """
import asyncio, signal, sys
from pathlib import Path
from reference_gym.participant import Limits, serving
from tests.gym.participant import test_http
from tests.gym.participant.kit import Gym

async def main():
    gym = Gym(Path(sys.argv[1]), limits=Limits(shutdown_grace_ms=int(sys.argv[3])))
    signals = serving.Signals()
    server = await test_http.WORLDS[sys.argv[2]](gym)
    if sys.argv[4] == "busy":
        await gym.start("a")
    print(server.port, flush=True)
    await serving.serve_until_terminated(server, signals)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def process(
    root: Path, world: str, grace_ms: int, how: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Serve a Gym in a process of its own; yields it and its address."""
    top = Path(spec.__file__).parents[1]
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SCRIPT, str(root), world, str(grace_ms), how),
        cwd=top,
        env={**os.environ, "PYTHONPATH": str(top)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert started.stdout is not None
        yield started, f"http://127.0.0.1:{int(await asyncio.wait_for(started.stdout.readline(), 30))}"
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


@pytest.mark.parametrize("world", WORLDS)
async def test_sigterm_ends_the_process_within_its_grace(tmp_path: Path, world: str) -> None:
    """C70: with a live rollout, an open long poll and an idle connection it ends with exit code 0 in time."""
    authorized = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        process(tmp_path, world, 1_000, "busy") as (gym, url),
        aiohttp.ClientSession(url, headers=authorized) as session,
    ):
        polling = asyncio.ensure_future(session.get(f"{PREFIX}/results?wait_ms=30000"))
        async with session.get(f"{PREFIX}/checkpoint") as reply:
            assert not (await reply.json())["draining"]
        gym.send_signal(signal.SIGTERM)
        async with await polling as reply:
            assert 200 == reply.status
        async with session.get(f"{PREFIX}/checkpoint") as reply:
            assert (await reply.json())["draining"], "the control plane is kept"
        started = asyncio.get_running_loop().time()
        assert 0 == await asyncio.wait_for(gym.wait(), 10)
        assert asyncio.get_running_loop().time() - started < 5


@pytest.mark.parametrize("world", WORLDS)
async def test_sigterm_with_nothing_to_lose_ends_the_process_at_once(tmp_path: Path, world: str) -> None:
    """CKPT-SEC-020, -025: right after it has said where it listens, with minutes of grace: it ends with 0 now."""
    async with process(tmp_path, world, 600_000, "idle") as (gym, _):
        gym.send_signal(signal.SIGTERM)
        assert 0 == await asyncio.wait_for(gym.wait(), 20)


async def test_a_body_that_breaks_off_is_no_call_and_no_fault(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """N1: TCP is dropped in the middle of a body; nothing changes, and the log has no failure of the server."""
    async with served(tmp_path) as client:
        before = client.gym.status
        _, writer = await asyncio.open_connection("127.0.0.1", client.port)
        head = [f"POST {PREFIX}/retire HTTP/1.1", "Host: gym", "Content-Length: 100"]
        head += [f"{name}: {value}" for name, value in client.headers().items()]
        writer.write("\r\n".join(head).encode() + b'\r\n\r\n{"rollouts": [')
        await writer.drain()
        assert (await client.call("GET", "/checkpoint"))[0] == 200, "the server has read what was sent before"
        writer.transport.abort()
        for _ in range(3):
            assert (await client.call("GET", "/checkpoint"))[0] == 200
        assert before == client.gym.status
    assert [] == [record.getMessage() for record in caplog.records if "failed, reference" in record.getMessage()]


async def test_what_an_older_route_raises_is_answered_as_without_the_protocol(tmp_path: Path) -> None:
    """CKPT-DISC-028: a refusal, a redirect and a failure of the author's own handler on aiohttp, byte by byte."""

    async def older(request: web.Request) -> web.Response:
        match request.match_info["how"]:
            case "refused":
                raise web.HTTPBadRequest(text='{"mine": 1}', content_type="application/json")
            case "moved":
                raise web.HTTPFound("/elsewhere")
            case "large":
                return web.json_response(len(await request.read()))
        raise ValueError("a fault of the author's")

    async def answers(url: str) -> list[Any]:
        found = []
        async with aiohttp.ClientSession(url) as session:
            for how in ("refused", "moved", "failed", "large"):
                body = io.BytesIO(bytes(1024**2 + 1)) if how == "large" else None
                async with session.post(f"/older/{how}", data=body, allow_redirects=False) as reply:
                    headers = {name: value for name, value in reply.headers.items() if name != "Date"}
                    found.append((reply.status, headers, await reply.read()))
        return found

    gym = Gym(tmp_path, limits=Limits(max_body_bytes=1024**2, shutdown_grace_ms=500))
    app = serve_aiohttp.create_app(gym.participant, control_token=TOKEN)
    app.router.add_post("/older/{how}", older)
    alone = web.Application()
    alone.router.add_post("/older/{how}", older)
    runner = web.AppRunner(alone)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with await serve_aiohttp.start(app) as server:
            with_it = await answers(server.url)
        assert await answers(f"http://127.0.0.1:{runner.addresses[0][1]}") == with_it
        assert [400, 302, 500, 413] == [status for status, _, _ in with_it]
    finally:
        await runner.cleanup()
