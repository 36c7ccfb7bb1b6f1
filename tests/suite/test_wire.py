# SPDX-License-Identifier: Apache-2.0
"""The transport: recording, judging both directions, and injecting faults, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from conformance import curl
from conformance.controller import Controller, Participant
from conformance.errors import LostReply, LostRequest, MalformedRequest, ResponseViolation
from conformance.judge import Judge
from conformance.loopback import Listener, Loopback
from conformance.patience import Patience
from conformance.wire import OPERATIONS, Fault, Wire
from spec import load
from spec import wire as names

RESUMED = {"phase": "idle", "ended_as": "committed", "pause_ms": 3}
HEADERS = {"Gym-Incarnation": "life-1"}


class Scripted:
    """A server that answers every path with the next prepared answer, or with a resume response."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.hold: asyncio.Event | None = None

    def then(self, body: Any, status: int = 200, media: str = "application/json", **headers: str) -> None:
        """Prepare an answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.answers.append((status, {**HEADERS, "Content-Type": media, **headers}, content))

    async def handle(self, request: web.Request) -> web.Response:
        """Answer."""
        self.seen.append((request.method, request.path_qs, dict(request.headers), await request.read()))
        if self.hold is not None:
            await self.hold.wait()
        default = (200, {**HEADERS, "Content-Type": "application/json"}, json.dumps(RESUMED).encode())
        status, headers, content = self.answers.pop(0) if self.answers else default
        return web.Response(status=status, headers=headers, body=content)


@pytest.fixture
def server() -> Scripted:
    """The scripted server."""
    return Scripted()


@pytest.fixture
def url(loopback: Loopback, server: Scripted) -> Iterator[str]:
    """Its URL."""
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", server.handle)
    listener = Listener(loopback, app)
    yield listener.url
    listener.close()


@pytest.fixture
def wire(patience: Patience) -> Iterator[Wire]:
    """A transport that judges by the specification."""
    specification = load()
    made = Wire(
        Judge(specification.openapi, specification.errors), patience, {"control": "secret-1", "data": "secret-2"}
    )
    yield made
    made.close()


def resume(wire: Wire, url: str, **kwargs: Any) -> Any:
    """Send one well-formed call."""
    participant = Participant(wire, url, {"name": "gym", "incarnation": "life-1"})
    return Controller("c", 7).resume(participant, "7-1", **kwargs)


def test_operations_are_those_of_the_document() -> None:
    """The suite's table of methods and paths is the one of openapi.yaml."""
    found = {
        operation["operationId"]: (method.upper(), path)
        for path, item in load().openapi["paths"].items()
        for method, operation in item.items()
        if isinstance(operation, dict) and "operationId" in operation
    }
    assert found == dict(OPERATIONS)


def test_a_call_is_recorded_with_its_answer(wire: Wire, url: str, server: Scripted) -> None:
    """Headers, token of the plane, body and reply are in the record."""
    with wire.recording() as exchanges:
        reply = resume(wire, url)
    assert (reply.status, reply["ended_as"], reply.incarnation) == (200, "committed", "life-1")
    (exchange,) = exchanges
    assert (exchange.operation, exchange.status) == ("resume", 200)
    method, path, headers, body = server.seen[0]
    assert (method, path) == ("POST", names.PREFIX + "/checkpoint/resume")
    assert headers["Authorization"] == "Bearer secret-1"
    assert json.loads(body) == {"checkpoint_id": "7-1", "timeout_ms": 10000}


def test_a_malformed_request_of_our_own_is_never_sent(wire: Wire, url: str, server: Scripted) -> None:
    """It is the suite's fault, with an error of its own."""
    with pytest.raises(MalformedRequest, match="checkpoint_id"):
        wire.call("resume", url, body={"timeout_ms": 1}, headers={"Gym-Controller-Id": "c"})
    assert server.seen == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"phase": "idle", "ended_as": "committed"}, "pause_ms"),
        ({**RESUMED, "phase": "asleep"}, "asleep"),
        (b"<html>", "json|JSON|deserialize"),
    ],
)
def test_a_response_that_does_not_fit_is_the_gyms_fault(
    wire: Wire, url: str, server: Scripted, answer: Any, said: str
) -> None:
    """A missing field, an unknown phase and a body that is no JSON are violations."""
    server.then(answer)
    with pytest.raises(ResponseViolation, match=said):
        resume(wire, url)


def test_a_missing_incarnation_header_is_a_violation(wire: Wire, url: str, server: Scripted) -> None:
    """Every response carries Gym-Incarnation."""
    server.answers.append((200, {"Content-Type": "application/json"}, json.dumps(RESUMED).encode()))
    with pytest.raises(ResponseViolation, match="Gym-Incarnation"):
        resume(wire, url)


def problem(code: str, **changed: Any) -> dict[str, Any]:
    """A problem document."""
    known = load().errors[code]
    fields = {"code": code, "title": known.title, "detail": "d", "retryable": known.retryable}
    return {**fields, "definite": known.definite_on("resume"), **changed}


def test_a_problem_is_held_against_the_catalogue(wire: Wire, url: str, server: Scripted) -> None:
    """Status, retryable and definite are those of the code."""
    server.then(problem("stale_checkpoint"), 409, names.PROBLEM_MEDIA_TYPE)
    assert resume(wire, url).code == "stale_checkpoint"
    for changed, said in (({"retryable": True}, "retryable"), ({"definite": False}, "definite")):
        server.then(problem("stale_checkpoint", **changed), 409, names.PROBLEM_MEDIA_TYPE)
        with pytest.raises(ResponseViolation, match=said):
            resume(wire, url)
    server.then(problem("stale_checkpoint"), 404, names.PROBLEM_MEDIA_TYPE)
    with pytest.raises(ResponseViolation, match="status 409"):
        resume(wire, url)


def test_raw_sends_what_is_malformed_and_judges_nothing(wire: Wire, url: str, server: Scripted) -> None:
    """A deliberately malformed request goes out as it is."""
    server.then(b"what?", 418, "text/plain")
    reply = wire.raw("POST", url + "/nowhere", content=b"{")
    assert (reply.status, reply.json, server.seen[0][3]) == (418, None, b"{")


def test_a_lost_request_never_arrives(wire: Wire, url: str, server: Scripted) -> None:
    """Nothing reaches the server."""
    with pytest.raises(LostRequest):
        resume(wire, url, fault=Fault.lost_request())
    assert server.seen == []


def test_a_lost_reply_was_acted_on(wire: Wire, url: str, server: Scripted) -> None:
    """The server has answered; the record holds what the caller never saw."""
    with pytest.raises(LostReply) as caught:
        resume(wire, url, fault=Fault.lost_reply())
    assert len(server.seen) == 1
    assert caught.value.exchange is not None
    assert caught.value.exchange.status == 200


def test_a_duplicate_arrives_twice(wire: Wire, url: str, server: Scripted) -> None:
    """Both replies are there."""
    reply = resume(wire, url, fault=Fault.duplicate())
    assert len(server.seen) == 2
    assert reply.twin is not None


def test_a_disconnect_leaves_the_server_with_the_request(
    wire: Wire, url: str, server: Scripted, patience: Patience
) -> None:
    """The request arrives whole although nobody waits for the answer."""
    with pytest.raises(LostReply):
        resume(wire, url, fault=Fault.disconnect(1))
    patience.until(lambda: server.seen, "the request has arrived")
    assert json.loads(server.seen[0][3])["checkpoint_id"] == "7-1"


def test_a_server_that_is_not_there_is_a_lost_request(wire: Wire) -> None:
    """A refused connection certainly changed nothing."""
    with pytest.raises(LostRequest):
        resume(wire, "http://127.0.0.1:9")


def test_a_server_that_does_not_answer_is_a_lost_reply(wire: Wire, url: str, server: Scripted) -> None:
    """The bound ends the wait; the outcome is unknown."""
    server.hold = asyncio.Event()
    with pytest.raises(LostReply):
        resume(wire, url, within_s=0.1)


def test_calls_go_out_together(wire: Wire, url: str, server: Scripted) -> None:
    """Fifty calls, fifty replies, in order."""
    replies = wire.together([lambda: resume(wire, url)] * 50)
    assert [reply.status for reply in replies] == [200] * 50
    assert len(server.seen) == 50


def test_an_exchange_is_shown_as_curl_without_the_token(wire: Wire, url: str) -> None:
    """The line can be repeated by a person who has the token."""
    with wire.recording() as exchanges:
        resume(wire, url)
    line = curl.curl(exchanges[0], wire.tokens.values())
    assert line.startswith("curl -s -X POST")
    assert '"Authorization: Bearer $TOKEN"' in line
    assert "secret-1" not in line
    assert curl.answer(exchanges[0]).startswith('200 {"phase": "idle"')
