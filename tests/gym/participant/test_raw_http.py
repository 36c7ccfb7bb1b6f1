# SPDX-License-Identifier: Apache-2.0
"""What a stranger can do with a socket: rubbish, silence, and more of both, to a server in each world."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from reference_gym.participant import Limits, serving
from reference_gym.participant.result import validator
from spec import wire
from tests.gym.participant.kit import Gym, until
from tests.gym.participant.test_http import PREFIX, TOKEN, WORLDS

BOUND_S = 10
JSON = "Content-Type: application/json\r\n"
BYTES = "Content-Type: application/octet-stream\r\n"
AUTHORIZED = f"Authorization: Bearer {TOKEN}\r\n"


@dataclass(frozen=True)
class Reply:
    """One response as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The code of a problem document, which it has to be."""
        problem = json.loads(self.body)
        validator("problem").validate(problem)
        assert wire.PROBLEM_MEDIA_TYPE == self.headers["content-type"]
        assert wire.HEADER_INCARNATION.lower() in self.headers, "it says of which incarnation it is"
        return str(problem["code"])


@dataclass
class Raw:
    """A served Gym, met with sockets."""

    gym: Gym
    server: serving.Server

    @property
    def mutating(self) -> str:
        """The headers of a mutating call, all but the media type."""
        return (
            f"{AUTHORIZED}{wire.HEADER_CONTROLLER_ID}: rl\r\n{wire.HEADER_CONTROLLER_EPOCH}: 1\r\n"
            f"{wire.HEADER_EXPECT_INCARNATION}: {self.gym.participant.incarnation}\r\n"
        )

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new connection."""
        return await asyncio.open_connection("127.0.0.1", self.server.port)

    async def send(self, *pieces: str | bytes) -> Reply:
        """Send what may be a request, piece by piece, and return the first final response."""
        reader, writer = await self.connect()
        try:
            for piece in pieces:
                writer.write(piece.encode("latin-1") if isinstance(piece, str) else piece)
                await writer.drain()
                await asyncio.sleep(0.02 if len(pieces) > 1 else 0)  # So that it is a piece of its own.
            return await asyncio.wait_for(read(reader), BOUND_S)
        finally:
            writer.transport.abort()

    async def alive(self) -> None:
        """Check that the server goes on."""
        assert 200 == (await self.send(request("GET", "/checkpoint", AUTHORIZED))).status


async def read(reader: asyncio.StreamReader) -> Reply:
    """Return the next response that is no interim one."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        if status >= 200:
            return Reply(status, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


def request(method: str, path: str, headers: str = "", body: bytes | None = None) -> bytes:
    """Return a request, with its length if it has a body."""
    length = "" if body is None else f"Content-Length: {len(body)}\r\n"
    return f"{method} {PREFIX}{path} HTTP/1.1\r\nHost: gym\r\n{headers}{length}\r\n".encode() + (body or b"")


Serve = Callable[..., contextlib.AbstractAsyncContextManager[Raw]]


@pytest.fixture(params=WORLDS)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Serve:
    """Return what serves a Gym on a free port, in each world."""

    @contextlib.asynccontextmanager
    async def serve(**limits: int) -> AsyncIterator[Raw]:
        (tmp_path / "staging").mkdir(exist_ok=True)
        bounds = Limits(**{"max_body_bytes": 20_000, "shutdown_grace_ms": 500} | limits)
        gym = Gym(tmp_path, staging=tmp_path / "staging", limits=bounds)
        async with await WORLDS[request.param](gym) as server:
            yield Raw(gym, server)

    return serve


HEAD = f"POST {PREFIX}/acks HTTP/1.1\r\n"
RUBBISH: dict[str, bytes] = {
    "no host": f"GET {PREFIX}/capabilities HTTP/1.1\r\n\r\n".encode(),
    "two lengths": f"{HEAD}Host: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxxx".encode(),
    "a negative length": f"{HEAD}Host: a\r\nContent-Length: -1\r\n\r\n".encode(),
    "a huge length": f"{HEAD}Host: a\r\nContent-Length: {10**30}\r\n\r\n".encode(),
    "a bad chunk": f"{HEAD}Host: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nxx\r\n".encode(),
    "an unknown transfer coding": f"{HEAD}Host: a\r\nTransfer-Encoding: gzip\r\n\r\n".encode(),
    "a NUL in a header": f"GET {PREFIX}/checkpoint HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n".encode(),
    "a space before a colon": f"GET {PREFIX}/checkpoint HTTP/1.1\r\nHost: a\r\nX : a\r\n\r\n".encode(),
    "two hosts": f"GET {PREFIX}/checkpoint HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n".encode(),
    "a target that is not ASCII": f"GET {PREFIX}/é HTTP/1.1\r\nHost: a\r\n\r\n".encode(),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "an endless head": b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000,
}


@pytest.mark.parametrize("name", RUBBISH)
async def test_rubbish_is_refused_in_the_form_of_all_errors_and_fills_no_log(
    served: Serve, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """CKPT-ERR-008, CKPT-ID-017: what is not HTTP, from somebody without a token; nothing is logged of it."""
    async with served() as raw:
        caplog.clear()
        reply = await raw.send(RUBBISH[name])
        assert (400, "invalid_request") == (reply.status, reply.code)
        await raw.alive()
        assert [] == told(caplog)


async def test_what_the_framework_refuses_by_itself_has_the_form_of_all_errors(
    served: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """CKPT-ERR-008: an expectation, an upgrade, a method that nobody knows, a large head: refused, or not minded."""
    async with served() as raw:
        caplog.clear()
        for sent in (
            request("GET", "/nothing", f"{AUTHORIZED}Expect: foo\r\n"),
            request("FOO", "/capabilities", AUTHORIZED),
            request("GET", "/nothing", f"{AUTHORIZED}Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"),
            request("GET", "/nothing", AUTHORIZED + "".join(f"X{number}: x\r\n" for number in range(300))),
            request("GET", "/nothing", f"{AUTHORIZED}X: {9_000 * 'x'}\r\n"),
            request("POST", "/acks", f"{JSON}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n") + b"0\r\n\r\n",
        ):
            reply = await raw.send(sent)
            assert 400 <= reply.status < 500
            assert reply.code
        await raw.alive()
        assert [] == told(caplog)


CODED = {
    "unknown": ("br", b"x"),
    "false": ("gzip", b"no gzip"),
    "true": ("gzip", gzip.compress(b'{"receipts":[]}')),
    "a bomb": ("gzip", gzip.compress(b'{"receipts":[]}' + b" " * 10_000_000)),
}


@pytest.mark.parametrize(("coding", "body"), CODED.values(), ids=CODED)
async def test_a_body_in_a_content_coding_is_refused(
    served: Serve, caplog: pytest.LogCaptureFixture, coding: str, body: bytes
) -> None:
    """CKPT-ERR-042: what a body would unpack to is nobody's business; also of an artifact, and the server goes on."""
    async with served() as raw:
        caplog.clear()
        for sent in (
            request("POST", "/acks", f"{raw.mutating}{JSON}Content-Encoding: {coding}\r\n", body),
            request(
                "PUT", "/checkpoints/1-1/artifacts/a", f"{raw.mutating}{BYTES}Content-Encoding: {coding}\r\n", body
            ),
        ):
            assert "unsupported_media_type" == (await raw.send(sent)).code
        await raw.alive()
        plain = request("POST", "/acks", f"{raw.mutating}{JSON}Content-Encoding: identity\r\n", b'{"receipts":[]}')
        assert 200 == (await raw.send(plain)).status
        assert [] == told(caplog)


@pytest.mark.parametrize("how", ["fin", "rst", "bad chunk"])
@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_a_body_that_breaks_off_is_no_failure_of_the_server(
    served: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, how: str
) -> None:
    """C33: the client goes away within its body, or breaks its form: nothing is logged, nothing is left."""
    async with served(**({} if how == "bad chunk" else {"max_silence_ms": 300})) as raw:
        before = kept(raw)
        caplog.clear()
        path = "/acks" if method == "POST" else "/checkpoints/1-1/artifacts/a"
        length = "Transfer-Encoding: chunked\r\n" if how == "bad chunk" else "Content-Length: 100\r\n"
        reader, writer = await raw.connect()
        head = request(method, path, raw.mutating + (JSON if method == "POST" else BYTES) + length)
        writer.write(head + (b"1\r\n{\r\n" if how == "bad chunk" else b"{"))
        await writer.drain()
        if method == "PUT":
            await until(lambda: list(tmp_path.rglob(".upload-*")))
        if how == "bad chunk":
            writer.write(b"zz\r\n")  # It is answered at once, not when it has been silent for long.
            assert "invalid_request" == (await asyncio.wait_for(read(reader), BOUND_S)).code
            assert b"" == await asyncio.wait_for(reader.read(), BOUND_S), "nothing follows it"
        elif how == "rst":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, *7 * [0]]))
        writer.close()
        await until(lambda: not list((tmp_path / "staging").rglob(".upload-*")))
        await raw.alive()
        assert before == kept(raw)
        assert [] == list((tmp_path / "staging" / "uploads").iterdir()), "not even a directory"
        assert [] == told(caplog)


async def test_a_client_that_leaves_its_file_unread_is_no_failure(
    served: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A download that is broken off is not logged, and the file is closed."""
    async with served() as raw:
        sent = request("PUT", "/checkpoints/1-1/artifacts/a", raw.mutating + BYTES, bytes(8_000_000))
        assert 204 == (await raw.send(sent)).status
        caplog.clear()
        _, writer = await raw.connect()
        writer.write(request("GET", "/checkpoints/1-1/artifacts/a", AUTHORIZED))
        await until(lambda: held_open(tmp_path))
        writer.transport.abort()
        await until(lambda: not held_open(tmp_path))
        await raw.alive()
        assert [] == told(caplog)


async def test_a_file_that_nobody_reads_is_not_sent_for_ever(
    served: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CKPT-SEC-017: who asks for a file, stays, and reads nothing, holds neither the file nor a connection."""
    async with served(max_silence_ms=500) as raw:
        sent = request("PUT", "/checkpoints/1-1/artifacts/a", raw.mutating + BYTES, bytes(8_000_000))
        assert 204 == (await raw.send(sent)).status
        caplog.clear()
        with socket.create_connection(("127.0.0.1", raw.server.port)) as idle:
            idle.sendall(request("GET", "/checkpoints/1-1/artifacts/a", AUTHORIZED))
            await until(lambda: held_open(tmp_path))
            await until(lambda: not held_open(tmp_path), within_s=BOUND_S)
        await raw.alive()
        assert [] == told(caplog)


def held_open(directory: Path) -> list[str]:
    """The files below a directory that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(link.readlink()))
    return [path for path in found if path.startswith(str(directory))]


SILENT = {
    "nothing": "",
    "half a head": f"GET {PREFIX}/checkpoint HTTP/1.1\r\nHost:",
    "a whole request": f"GET {PREFIX}/checkpoint HTTP/1.1\r\nHost: a\r\n{AUTHORIZED}\r\n",
    "a body without a token": f"POST {PREFIX}/acks HTTP/1.1\r\nHost: a\r\n{JSON}Content-Length: 9\r\n\r\n{{",
}


@pytest.mark.parametrize("sent", SILENT)
async def test_a_silent_connection_is_closed(served: Serve, sent: str) -> None:
    """CKPT-TIME-017: one that sends nothing, half a head, or no further request; also byte by byte."""
    async with served(max_silence_ms=300) as raw:
        reader, writer = await raw.connect()
        writer.write(SILENT[sent].encode())
        ended = asyncio.ensure_future(asyncio.wait_for(reader.read(), BOUND_S))
        while not ended.done():
            if sent.startswith(("half", "a body")):
                writer.write(b"x")
            await asyncio.wait([ended], timeout=0.05)
        with contextlib.suppress(ConnectionError):
            await ended
        writer.transport.abort()
        await raw.alive()


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("trickle", [False, True])
async def test_a_body_has_to_arrive(served: Serve, tmp_path: Path, method: str, *, trickle: bool) -> None:
    """CKPT-TIME-015, -016: silence within a body, and a byte now and then, are given up; nothing has changed."""
    async with served(max_silence_ms=300) as raw:
        before = kept(raw)
        path = "/acks" if method == "POST" else "/checkpoints/1-1/artifacts/a"
        media = JSON if method == "POST" else BYTES
        reader, writer = await raw.connect()
        writer.write(request(method, path, f"{raw.mutating}{media}Content-Length: 10000\r\n") + b"{")
        reply = asyncio.ensure_future(asyncio.wait_for(read(reader), BOUND_S))
        while trickle and not reply.done():
            writer.write(b" ")
            await asyncio.wait([reply], timeout=0.05)
        assert "unavailable" == (await reply).code
        writer.close()
        assert before == kept(raw)
        assert [] == list((tmp_path / "staging" / "uploads").iterdir())


async def test_a_long_poll_is_not_silence(served: Serve) -> None:
    """CKPT-TIME-017: a request that is served keeps its connection, however long it waits."""
    async with served(max_silence_ms=200) as raw:
        reader, writer = await raw.connect()
        for _ in range(2):
            writer.write(request("GET", "/results?wait_ms=700", AUTHORIZED))
            reply = await asyncio.wait_for(read(reader), BOUND_S)
            assert (200, []) == (reply.status, json.loads(reply.body)["results"])
        writer.close()


async def test_idle_connections_make_room(served: Serve) -> None:
    """CKPT-SEC-028: a stranger's idle connections keep nobody out; the one that was idle for longest goes."""
    async with served(max_connections=4) as raw:
        idle = [await raw.connect() for _ in range(12)]
        await raw.alive()
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in idle]
        await until(lambda: sum(each.done() for each in ended) >= 8)
        assert all(each.done() for each in ended[:8]), "the oldest"
        for _, writer in idle:
            writer.close()


async def test_a_connection_too_many_is_told_so(served: Serve) -> None:
    """CKPT-SEC-028: while as many long polls are served as may be, a further one is `unavailable`, and comes again."""
    async with served(max_connections=3) as raw:
        polls = [await raw.connect() for _ in range(3)]
        feed, waiting = raw.gym.participant.feed, []
        wait = feed.wait

        async def counted() -> None:
            waiting.append(1)
            await wait()

        feed.wait = counted  # type: ignore[method-assign]  # to see that they have come so far
        for _, writer in polls:
            writer.write(request("GET", "/results?wait_ms=30000", AUTHORIZED))
        await until(lambda: len(waiting) == 3)
        reply = await raw.send(request("GET", "/checkpoint", AUTHORIZED))
        assert (503, "unavailable") == (reply.status, reply.code)
        assert "retry-after" in reply.headers
        for _, writer in polls:
            writer.close()

        async def served_again() -> bool:
            return (await raw.send(request("GET", "/checkpoint", AUTHORIZED))).status == 200

        async with asyncio.timeout(BOUND_S):
            while not await served_again():
                pass


async def test_uploads_are_bounded(served: Serve, tmp_path: Path) -> None:
    """CKPT-ART-015: their number, their bytes together, and what is under way; what is refused leaves nothing."""
    async with served(max_artifacts=3, max_artifacts_bytes=1_000) as raw:

        async def put(path: str, size: int) -> Reply:
            return await raw.send(request("PUT", f"/checkpoints/{path}", raw.mutating + BYTES, bytes(size)))

        assert 204 == (await put("1-1/artifacts/a", 600)).status
        assert "insufficient_storage" == (await put("1-1/artifacts/b", 401)).code
        assert "insufficient_storage" == (await put("2-2/artifacts/b", 401)).code
        assert ["1-1"] == [path.name for path in (tmp_path / "staging" / "uploads").iterdir()]
        assert "insufficient_storage" == (await put("1-1/artifacts/a", 600)).code, "a repeat takes room while it lasts"
        assert 204 == (await put("3-3/artifacts/b", 400)).status
        assert 204 == (await put("3-3/artifacts/c", 0)).status
        assert "insufficient_storage" == (await put("4-4/artifacts/d", 0)).code
        await raw.gym.restore("1-5", None)
        await raw.gym.resume("1-5")
        assert 204 == (await put("4-4/artifacts/d", 1_000)).status


def kept(raw: Raw) -> dict[str, object]:
    """The status but for the controller, which an upload adopts with its head."""
    return {name: value for name, value in raw.gym.status.items() if name != "controller"}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What an operator would have found in the log."""
    return [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
