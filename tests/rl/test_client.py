# SPDX-License-Identifier: Apache-2.0
"""One call: what is sent, what each failure means, and when it is sent again."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from reference_rl.client import ClientSettings, Controller, GymClient, make_http
from reference_rl.errors import BrokenReply, GymError, Indefinite, Refused, Superseded, Unreachable
from reference_rl.retry import RetryPolicy
from spec import load, wire

FAST = ClientSettings(RetryPolicy(3, 0.001, 0.01), call_ms=100, grace_s=0.2)
GOOD = {"phase": "idle", "ended_as": "aborted", "pause_ms": 0}


def problem(code: str, **fields: Any) -> httpx.Response:
    """Return the problem document of the catalogue for a code."""
    known = load().errors.get(code)
    body = {"code": code, "title": "t", "detail": "d", "retryable": False, "definite": True}
    if known is not None:
        body |= {"retryable": known.retryable, "definite": known.definite}
    return httpx.Response(known.status if known else 418, json=body | fields)


def client_of(answer: Callable[[httpx.Request], Any], settings: ClientSettings = FAST) -> GymClient:
    """Return a client of a participant that answers by a function."""
    http = make_http(settings, httpx.MockTransport(answer))
    client = GymClient("http://gym", http, Controller("ctl", 7), token="secret", settings=settings, name="gym")
    client.expected_incarnation = "i-1"
    return client


async def test_every_mutating_call_carries_controller_epoch_and_incarnation() -> None:
    """CKPT-ID-029…031: three headers with every POST; a GET needs none of them."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=GOOD, headers={wire.HEADER_INCARNATION: "i-1"})

    client = client_of(answer)
    await client.abort("7-0", timeout_ms=10)
    headers = seen[0].headers
    assert ("ctl", "7", "i-1") == (
        headers[wire.HEADER_CONTROLLER_ID],
        headers[wire.HEADER_CONTROLLER_EPOCH],
        headers[wire.HEADER_EXPECT_INCARNATION],
    )
    assert "secret" not in str(seen[0].url)
    assert "i-1" == client.seen_incarnation


async def test_a_call_before_an_epoch_is_claimed_cannot_leave() -> None:
    """CKPT-CTRL-009: no mutating call without a claim, whatever the caller does."""
    client = client_of(lambda request: httpx.Response(200, json=GOOD))
    client._controller.epoch = None
    with pytest.raises(RuntimeError, match="claimed epoch"):
        await client.abort("7-0", timeout_ms=10)


INDEFINITE: dict[str, Callable[[httpx.Request], httpx.Response]] = {
    "html": lambda r: httpx.Response(200, html="<html>"),
    "html 502": lambda r: httpx.Response(502, html="<html>"),
    "cut json": lambda r: httpx.Response(200, content=json.dumps(GOOD)[:-3]),
    "problem without a code": lambda r: httpx.Response(500, json={"title": "x"}),
    "empty": lambda r: httpx.Response(200),
}


@pytest.mark.parametrize("kind", INDEFINITE)
async def test_whatever_is_no_answer_is_indefinite_and_sent_again(kind: str) -> None:
    """CKPT-ERR-014: proxy pages and cut JSON say nothing about the outcome; the call is repeated."""
    calls = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return INDEFINITE[kind](request)

    with pytest.raises(Indefinite) as caught:
        await client_of(answer).abort("7-0", timeout_ms=10)
    assert (3, False, True, "gym", "abort") == (
        calls,
        caught.value.definite,
        caught.value.retryable,
        caught.value.participant,
        caught.value.operation,
    )


async def test_a_reset_is_indefinite_and_a_refused_connection_is_not() -> None:
    """What never left this process changed nothing; what was reset may have."""

    def reset(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset", request=request)

    def refused(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(Indefinite):
        await client_of(reset).abort("7-0", timeout_ms=10)
    with pytest.raises(Unreachable) as caught:
        await client_of(refused).abort("7-0", timeout_ms=10)
    assert caught.value.definite


async def test_silence_ends_within_the_own_limit() -> None:
    """CKPT-DUTY-020: the caller has a limit of its own, above the one that it sends."""

    async def silent(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    settings = ClientSettings(RetryPolicy(1), call_ms=10, grace_s=0.05, connect_s=0.05)
    began = time.monotonic()
    with pytest.raises(Indefinite):
        await client_of(silent, settings).abort("7-0", timeout_ms=50)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("code", [c for c, e in load().errors.items() if c != "stale_controller"])
async def test_each_code_is_repeated_exactly_when_it_may_be(code: str) -> None:
    """CKPT-ERR-015: no call is repeated after a code that is not retryable, nor where something must come first."""
    calls = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return problem(code)

    with pytest.raises(Refused) as caught:
        await client_of(answer).abort("7-0", timeout_ms=10)
    in_place = load().errors[code].retryable and code not in ("not_ready", "checkpoint_conflict", "admission_closed")
    assert (3 if in_place else 1) == calls
    assert code == caught.value.code
    assert load().errors[code].definite_on("abort") == caught.value.definite


async def test_an_unknown_code_is_handled_by_its_flags() -> None:
    """CKPT-ERR-016: `retryable` and `definite` alone decide about a code that is not known."""
    replies = [problem("brand_new", retryable=True, definite=False), httpx.Response(200, json=GOOD)]
    reply = await client_of(lambda r: replies.pop(0)).abort("7-0", timeout_ms=10)
    assert "aborted" == reply.ended_as


async def test_work_that_continues_is_joined_for_as_long_as_the_budget_lasts() -> None:
    """A 504 with `continues` costs no try: a repeat joins the work."""
    left = 8

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal left
        left -= 1
        if left:
            return problem("deadline_exceeded", continues=True, retry_after_ms=1)
        return httpx.Response(200, json={"phase": "restored", "restored_count": 0, "restarts": [], "results_count": 0})

    await client_of(answer).restore({"timeout_ms": 10}, budget_s=5)
    assert left == 0


async def test_who_does_not_wait_with_a_504_is_not_asked_at_once() -> None:
    """CKPT-DUTY-033: repeats are a least time apart, also here; where a 504 is definite, there is no work to join."""
    calls = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return problem("deadline_exceeded", continues=True, retry_after_ms=0)

    client = client_of(answer, ClientSettings(RetryPolicy(2, 0.05, 0.1), call_ms=100, grace_s=1))
    with pytest.raises(GymError, match="deadline_exceeded"):
        await client.restore({"timeout_ms": 10}, budget_s=0.5)
    assert 3 <= calls <= 14
    calls = 0
    with pytest.raises(GymError, match="deadline_exceeded"):
        await client.prepare("7-0", "r", timeout_ms=10, lease_ms=1, budget_s=0.5)
    assert calls == 2


async def test_a_prepare_that_is_silent_takes_its_budget_and_the_grace_of_one_reply() -> None:
    """CKPT-DUTY-020: others wait with closed gates: a try that begins late asks for no more than what is left."""
    began = time.monotonic()
    asked: list[int] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["timeout_ms"])
        if time.monotonic() - began < 0.3:
            raise httpx.ReadError("reset")
        await asyncio.sleep(60)
        raise AssertionError

    settings = ClientSettings(RetryPolicy(50, 0.05, 0.05), call_ms=100, grace_s=0.2, connect_s=0.2)
    with pytest.raises(GymError, match="prepare"):
        await client_of(answer, settings).prepare("7-0", "r", timeout_ms=20_000, lease_ms=1, budget_s=0.6)
    assert 0.3 < time.monotonic() - began < 5
    assert 1 < len(asked)
    assert all(0 < timeout_ms <= 600 for timeout_ms in asked)
    assert asked == sorted(asked, reverse=True)


async def test_retry_after_is_respected() -> None:
    """CKPT-ERR-017: the wait that an error names is kept before the repeat."""
    replies = [problem("unavailable", retry_after_ms=200), httpx.Response(200, json=GOOD)]
    settings = ClientSettings(RetryPolicy(2, 0.001, 1.0), call_ms=100, grace_s=2)
    began = time.monotonic()
    await client_of(lambda r: replies.pop(0), settings).abort("7-0", timeout_ms=10)
    assert time.monotonic() - began >= 0.2


async def test_a_stale_controller_stops_for_good() -> None:
    """CKPT-CTRL-016: the refusal names who is obeyed now."""
    reply = problem("stale_controller", controller={"id": "other", "epoch": 9})
    with pytest.raises(Superseded, match="controller other of epoch 9"):
        await client_of(lambda r: reply).abort("7-0", timeout_ms=10)


async def test_a_reply_that_its_schema_does_not_allow_is_broken() -> None:
    """A well-formed reply of the wrong shape names the field and is not repeated."""
    calls = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return httpx.Response(200, json=GOOD | {"pause_ms": "3"})

    with pytest.raises(BrokenReply, match="pause_ms"):
        await client_of(answer).abort("7-0", timeout_ms=10)
    assert calls == 1


async def test_unknown_fields_and_values_of_a_response_are_read() -> None:
    """CKPT-ERR-002, CKPT-VER-008: new fields are ignored, an unknown enum value becomes its documented fallback."""
    reply = GOOD | {"ended_as": "vanished", "novelty": 1}
    assert "failed" == (await client_of(lambda r: httpx.Response(200, json=reply)).abort("7-0", timeout_ms=1)).ended_as


def test_every_error_says_participant_and_whether_it_is_definite() -> None:
    """The tree's contract: each error of a call carries participant, operation, definite and retryable."""
    error = Indefinite("gym/agent", "commit", "reset")
    assert isinstance(error, GymError)
    assert ("gym/agent", "commit", False, True) == (
        error.participant,
        error.operation,
        error.definite,
        error.retryable,
    )
