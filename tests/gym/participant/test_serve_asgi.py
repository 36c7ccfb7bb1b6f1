# SPDX-License-Identifier: Apache-2.0
"""The ASGI application in its hosts: mounted, in front, behind a prefix. `test_http` has what holds in both worlds."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from reference_gym.participant import Limits, serve_asgi, serve_uvicorn
from reference_gym.participant.http import DataCall
from reference_gym.participant.result import validator
from spec import wire
from tests.gym.participant.kit import Gym

TOKEN = "control-secret"
DATA_TOKEN = "data-secret"
CALL = "/gym-checkpoint-data/effect"


@dataclass
class Answer:
    """What an application sent."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The code of a problem document; fails for anything else."""
        assert wire.PROBLEM_MEDIA_TYPE == self.headers["content-type"]
        problem = json.loads(self.body)
        validator("problem").validate(problem)
        return str(problem["code"])


async def ask(
    app: serve_asgi.App,
    method: str,
    path: str,
    *,
    token: str | None = TOKEN,
    pieces: Sequence[bytes | None] = (b"",),
    root_path: str = "",
) -> Answer | None:
    """Send one request to an application; None in the body's pieces is a client that goes away. None: no answer."""
    sent: list[Any] = []
    waiting = list(pieces)

    async def receive() -> dict[str, Any]:
        piece = waiting.pop(0)
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    if token is not None:
        headers.append((b"authorization", f"Bearer {token}".encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": root_path,
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    if not sent:
        return None
    named = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], named, b"".join(message.get("body", b"") for message in sent[1:]))


async def echo(_request: Any, body: Any) -> Any:
    """Answer with the body."""
    return {"echo": body}


def application(gym: Gym, inner: serve_asgi.App | None = None) -> serve_asgi.Application:
    """The application of a Gym, with one call of the data plane."""
    app = serve_asgi.create_app(gym.participant, control_token=TOKEN, inner=inner)
    app.add("POST", CALL, DataCall(gym.participant, DATA_TOKEN, echo))
    return app


def in_front_of_fastapi(gym: Gym) -> serve_asgi.App:
    """Put it in front of a FastAPI application."""
    host = FastAPI()

    @host.get("/older")
    async def older() -> str:
        return "older"

    return application(gym, host)


def mounted_in_fastapi(gym: Gym) -> serve_asgi.App:
    """Mount it in a FastAPI application."""
    host = FastAPI()
    app = application(gym)

    @host.get("/older")
    async def older() -> str:
        return "older"

    host.mount("/gym-checkpoint", app)
    host.mount("/gym-checkpoint-data", app)
    return host


def mounted_in_starlette(gym: Gym) -> serve_asgi.App:
    """Mount it in a Starlette application."""
    app = application(gym)

    async def older(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("older")

    return Starlette(routes=[Route("/older", older), Mount("/gym-checkpoint", app), Mount("/gym-checkpoint-data", app)])


@pytest.fixture(params=[in_front_of_fastapi, mounted_in_fastapi, mounted_in_starlette], ids=lambda way: way.__name__)
def gym_and_app(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Gym, serve_asgi.App]:
    """A Gym and the application that serves it, in each host."""
    gym = Gym(tmp_path)
    return gym, request.param(gym)


async def test_a_host_serves_both_planes_and_its_own_routes(gym_and_app: tuple[Gym, serve_asgi.App]) -> None:
    """The routes are the same in front and mounted; the host's own are untouched."""
    gym, app = gym_and_app
    found = await ask(app, "GET", f"{wire.PREFIX}/capabilities")
    assert found is not None
    assert (200, gym.participant.incarnation) == (found.status, found.headers[wire.HEADER_INCARNATION.lower()])
    echoed = await ask(app, "POST", CALL, token=DATA_TOKEN, pieces=[b'{"x": ', b"1}"])
    assert echoed is not None
    assert {"echo": {"x": 1}} == json.loads(echoed.body)
    older = await ask(app, "GET", "/older", token=None)
    assert older is not None
    assert b"older" in older.body
    assert wire.HEADER_INCARNATION.lower() not in older.headers


@pytest.mark.parametrize(
    ("method", "path", "token", "status", "code"),
    [
        ("GET", "/gym-checkpoint/v1/nothing", TOKEN, 404, "not_found"),
        ("GET", "/gym-checkpoint/", TOKEN, 404, "not_found"),
        ("GET", "/gym-checkpoint/v2/capabilities", TOKEN, 501, "unsupported_version"),
        ("DELETE", "/gym-checkpoint/v1/rollouts", TOKEN, 405, "method_not_allowed"),
        ("GET", CALL, DATA_TOKEN, 405, "method_not_allowed"),
        ("GET", "/gym-checkpoint/v1/capabilities", None, 401, "unauthorized"),
        ("POST", CALL, TOKEN, 401, "unauthorized"),
    ],
)
async def test_errors_below_the_prefix_are_problem_documents_in_every_host(
    gym_and_app: tuple[Gym, serve_asgi.App], method: str, path: str, token: str | None, status: int, code: str
) -> None:
    """CKPT-ERR-008, -ID-017: also those that the mounting application would make itself; each says the incarnation."""
    gym, app = gym_and_app
    answer = await ask(app, method, path, token=token)
    assert answer is not None
    assert (status, code) == (answer.status, answer.code)
    told = gym.participant.incarnation if path.startswith("/gym-checkpoint/") else None
    assert told == answer.headers.get(wire.HEADER_INCARNATION.lower())
    assert (status == 405) == ("allow" in answer.headers)


async def test_by_itself_it_refuses_everything_else(tmp_path: Path) -> None:
    """CKPT-ERR-007: nothing is served outside of the protocol, and that too is a problem document."""
    answer = await ask(application(Gym(tmp_path)), "GET", "/elsewhere")
    assert answer is not None
    assert (404, "not_found") == (answer.status, answer.code)


@pytest.mark.parametrize(("path", "root_path"), [("/api/gym", "/api/gym"), ("/api/gym", "/api/gym/"), ("", "")])
async def test_a_prefix_of_the_host_is_not_part_of_the_protocol(tmp_path: Path, path: str, root_path: str) -> None:
    """What `root_path` names is cut off; nothing else is."""
    app = application(Gym(tmp_path))
    found = await ask(app, "GET", f"{path}{wire.PREFIX}/capabilities", root_path=root_path)
    assert found is not None
    assert 200 == found.status
    other = await ask(app, "GET", f"/other{path}{wire.PREFIX}/capabilities", root_path=root_path)
    assert other is not None
    assert "not_found" == other.code


async def test_a_client_that_goes_away_in_its_body_changes_nothing(tmp_path: Path) -> None:
    """N1: half a body is no call; nobody is answered, and an upload leaves no file."""
    staging = tmp_path / "staging"
    staging.mkdir()
    gym = Gym(tmp_path, staging=staging)
    before = gym.status
    app = application(gym)
    assert None is await ask(app, "POST", f"{wire.PREFIX}/retire", pieces=[b'{"rollouts": [', None])
    assert before == gym.status
    assert [] == [path for path in staging.rglob("*") if path.is_file()]


async def test_the_lifespan_is_that_of_the_application_behind_it(tmp_path: Path) -> None:
    """The host's lifespan runs where there is one, and servers that ask for one are answered where there is none."""
    lived: list[str] = []

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        lived.append("up")
        yield
        lived.append("down")

    for inner in (FastAPI(lifespan=lifespan), None):
        told = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
        sent: list[Any] = []

        async def receive(told: list[Any] = told) -> Any:
            return told.pop(0)

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message["type"])

        await application(Gym(tmp_path), inner)({"type": "lifespan", "state": {}}, receive, send)
        assert ["lifespan.startup.complete", "lifespan.shutdown.complete"] == sent
    assert ["up", "down"] == lived


def test_it_imports_no_framework_and_no_server() -> None:
    """The kit's core and the ASGI application need neither FastAPI nor aiohttp nor uvicorn."""
    code = "import sys, reference_gym.participant.serve_asgi; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set() == {"fastapi", "starlette", "uvicorn", "aiohttp"} & set(done.stdout.split())


@pytest.mark.parametrize("how", ["silence", "a trickle", "too much"])
async def test_the_body_of_an_older_route_has_to_arrive_and_to_end(tmp_path: Path, how: str) -> None:
    """CKPT-SEC-017: a framework reads a body before it asks for a token, and would wait for it for ever."""
    gym = Gym(tmp_path, limits=Limits(max_silence_ms=200))
    host = FastAPI()
    read: list[bytes] = []

    @host.post("/older")
    async def older(body: dict[str, Any]) -> str:
        read.append(b"read")
        return "older"

    app = serve_asgi.create_app(gym.participant, control_token=TOKEN, inner=host, inner_body_bytes=1_000)
    received = 0

    async def receive() -> dict[str, Any]:
        nonlocal received
        if how != "too much":
            await (asyncio.sleep(0.02) if how == "a trickle" else asyncio.Event().wait())
        received += 1
        return {"type": "http.request", "body": b" " * (100 if how == "too much" else 1), "more_body": True}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"},
        **{"path": "/older", "raw_path": b"/older", "root_path": "", "query_string": b""},
        "headers": [(b"content-type", b"application/json")],
    }
    await asyncio.wait_for(app(scope, receive, send), 10)
    assert [] == read
    assert 400 <= sent[0]["status"] < 500
    assert received <= 12


async def test_another_inside_of_uvicorn_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server says which part it misses, instead of failing at some later request."""
    monkeypatch.delattr(H11Protocol, "send_400_response")
    gym = Gym(tmp_path)
    with pytest.raises(RuntimeError, match=r"has no H11Protocol\.send_400_response: this server is for uvicorn"):
        await serve_uvicorn.start(application(gym), gym.participant)
