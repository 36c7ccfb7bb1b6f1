# SPDX-License-Identifier: Apache-2.0
"""The policy client: both forms, retries, the clock of the budget, an address that changes."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from reference_gym.participant.budget import EpisodeBudget
from reference_gym.participant.conformance import TOOLS
from reference_gym.participant.conversation import MalformedReply, build_request, parse_arguments, parse_reply
from reference_gym.participant.policy import Conversation, PolicyClient
from reference_gym.participant.policy_call import EpisodeOver, PolicyAnswer, PolicyRefused, PolicyUnavailable, TurnId
from reference_gym.participant.policy_http import PolicyHttp
from reference_gym.participant.replies import parse_retry_after
from reference_gym.participant.state import Policy
from tests.gym.stubs import PolicyStub

HELLO = [{"role": "user", "content": "hello"}]
TURN = TurnId("p7_g2", 1, 4)
ABOUT = Conversation(HELLO, TOOLS, 5, 4, TURN)


@pytest.fixture
async def proxy() -> AsyncIterator[PolicyHttp]:
    """The direct way to a policy."""
    way = PolicyHttp("policy-secret", 30.0)
    yield way
    await way.aclose()


def client_of(proxy: PolicyHttp, retry_ms: int = 5_000) -> PolicyClient:
    """A client with a short patience."""
    return PolicyClient(proxy, retry_ms, time.monotonic)


def budget_of(limit_ms: int | None = None) -> EpisodeBudget:
    """A fresh budget."""
    return EpisodeBudget(limit_ms, 0, time.monotonic)


def policy_of(stub: PolicyStub, api: Any = "chat_completions") -> Policy:
    """The stub's address."""
    return Policy(f"{stub.url}/v1", "stub", api)


@pytest.mark.parametrize("api", ["chat_completions", "responses"])
async def test_both_forms_bring_the_same_reply(api: Any, proxy: PolicyHttp) -> None:
    """A call carries its turn, the token, the seed and the tools; its reply reads alike in both forms."""
    async with PolicyStub([[("add", {"n": 1}), ("refuse", {})]]) as stub:
        stub.extra = {"data_ref": {"key": "p7_g2-a1/4"}}
        stub.headers = {"Gym-Policy-Version": "7"}
        reply = await client_of(proxy).generate(lambda: policy_of(stub, api), ABOUT, budget_of())
        (asked,) = stub.asked
    assert ("p7_g2", "1", "4") == (asked.rollout_id, asked.attempt, asked.turn)
    assert "Bearer policy-secret" == asked.headers["Authorization"]
    assert 5 == asked.body["seed"]
    tools = asked.body["tools"]
    assert ["add", "world", "grow", "refuse"] == [tool.get("function", tool)["name"] for tool in tools]
    assert [("add", {"n": 1}), ("refuse", {})] == [(call.name, call.args) for call in reply.calls]
    assert (7, {"key": "p7_g2-a1/4"}) == (reply.version, reply.data_ref)
    assert "assistant" == reply.message["role"]


async def test_a_rollout_of_the_older_route_sends_no_header_of_the_protocol(proxy: PolicyHttp) -> None:
    """N14: without a turn nothing on the wire names the protocol, and no seed is sent that nobody gave."""
    async with PolicyStub(["done"]) as stub:
        about = Conversation(HELLO, TOOLS, None, 1, None)
        await client_of(proxy).generate(lambda: policy_of(stub), about, budget_of())
        (asked,) = stub.asked
    assert [] == [name for name in asked.headers if name.lower().startswith("gym-")]
    assert "seed" not in asked.body


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_an_unavailable_policy_is_tried_again_off_the_budget(status: int, proxy: PolicyHttp) -> None:
    """C28: while the policy is unavailable the budget does not run; Retry-After is honoured."""
    async with PolicyStub(["done"]) as stub:
        stub.refuse = [(status, {"Retry-After": "1"})]
        budget = budget_of(900)
        began = time.monotonic()
        await client_of(proxy).generate(lambda: policy_of(stub), ABOUT, budget)
    assert time.monotonic() - began >= 1.0
    assert budget.used_ms < 500
    assert 2 == len(stub.asked)


async def test_an_unreachable_policy_ends_as_unavailable(proxy: PolicyHttp) -> None:
    """A policy that cannot be reached for `policy_retry_ms` is given up, with its own error."""
    async with PolicyStub([]) as stub:
        policy = policy_of(stub)
    with pytest.raises(PolicyUnavailable):
        await client_of(proxy, 300).generate(lambda: policy, ABOUT, budget_of())


async def test_another_address_is_used_by_the_next_try(proxy: PolicyHttp) -> None:
    """N18: a rollout that waits for a dead address goes on as soon as it gets a living one."""
    async with PolicyStub([]) as dead:
        policies = [policy_of(dead)]
    async with PolicyStub(["done"]) as alive:

        class Replacing:
            async def call(self, address: Policy, request: Mapping[str, Any], turn: TurnId | None) -> PolicyAnswer:
                answer = await proxy.call(address, request, turn)
                policies[0] = policy_of(alive)
                return answer

            async def forget(self, rollout_id: str, attempt: int) -> None:
                """Nothing to forget."""

        client = PolicyClient(Replacing(), 60_000, time.monotonic)
        reply = await client.generate(lambda: policies[0], ABOUT, budget_of())
    assert "done" == reply.message["content"]


@pytest.mark.parametrize(("status", "terminal"), [(400, True), (401, False), (404, False), (500, False)])
async def test_other_answers_are_not_tried_again(status: int, terminal: bool, proxy: PolicyHttp) -> None:
    """A refusal ends the rollout; it is terminal only where the same request would be refused again."""
    async with PolicyStub([]) as stub:
        stub.refuse = [(status, {})]
        with pytest.raises(PolicyRefused) as raised:
            await client_of(proxy).generate(lambda: policy_of(stub), ABOUT, budget_of())
    assert terminal is raised.value.terminal
    assert 1 == len(stub.asked)


async def test_a_budget_that_ends_during_a_call_ends_the_call(proxy: PolicyHttp) -> None:
    """The time budget bounds a policy call."""
    async with PolicyStub([]) as stub:
        stub.hold("p7_g2", 4)
        with pytest.raises(EpisodeOver):
            await client_of(proxy).generate(lambda: policy_of(stub), ABOUT, budget_of(100))
        stub.release("p7_g2", 4)


@pytest.mark.parametrize(
    "raw",
    [b"", b"<html>", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{"message":{"content":1}}]}', b"[" * 100_000],
)
def test_malformed_replies_are_told_apart(raw: bytes) -> None:
    """A reply of another form is an error of its own, however deep it nests."""
    with pytest.raises(MalformedReply):
        parse_reply("chat_completions", raw, 1, None)


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"n": Infinity}', '{"n": "\\ud800"}', '"\ud800"', "[" * 100_000])
def test_arguments_that_are_no_json_are_none(text: str) -> None:
    """Unreadable arguments become an effect that is answered with an error, not a crash."""
    assert parse_arguments(text) is None


def test_a_conversation_survives_the_responses_form() -> None:
    """Assistant text, calls and their outputs are distinct items."""
    messages = [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    expected = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "so"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    assert expected == build_request("responses", "m", messages, TOOLS, None)["input"]


def test_calls_without_an_id_get_one_that_every_run_repeats() -> None:
    """An id that the policy left out does not depend on time or process."""
    message = {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    raw = json.dumps({"choices": [{"message": message}]}).encode()
    assert "call_3_1" == parse_reply("chat_completions", raw, 3, None).calls[0].call_id


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["x", "x", "x"], ["x", "x_2", "x_3"]),
        (["x_2", "x", "x"], ["x_2", "x", "x_3"]),
        (["call_3_2", None], ["call_3_2", "call_3_2_2"]),
        ([None, "call_3_1"], ["call_3_1", "call_3_1_2"]),
    ],
    ids=str,
)
def test_calls_that_share_an_id_are_told_apart(given: list[str | None], expected: list[str]) -> None:
    """Each is an effect of its own, and its answer names it; in both forms, and in the message that is sent back."""
    function = {"name": "add", "arguments": "{}"}
    chat = {"choices": [{"message": {"content": None, "tool_calls": [{"id": i, "function": function} for i in given]}}]}
    output = {"output": [{"type": "function_call", "call_id": i, **function} for i in given]}
    for api, body in (("chat_completions", chat), ("responses", output)):
        reply = parse_reply(api, json.dumps(body).encode(), 3, None)  # type: ignore[arg-type]  # each is a form
        assert expected == [call.call_id for call in reply.calls]
        assert expected == [call["id"] for call in reply.message["tool_calls"]]


@pytest.mark.parametrize(
    ("header", "expected"),
    [(None, None), ("2", 2000), ("soon", None), ("-1", None), ("Thu, 01 Jan 1970 00:00:00 GMT", 0)],
)
def test_retry_after_is_read_in_both_forms(header: str | None, expected: int | None) -> None:
    """Seconds or a date; anything else counts as none."""
    assert expected == parse_retry_after(header)


def test_a_budget_stands_still_while_parked_and_while_down() -> None:
    """C28: a budget of 10 s, 4 s used, parked for 20 s, down for 20 s: 6 s are left."""
    now = [0.0]
    budget = EpisodeBudget(10_000, 0, lambda: now[0])
    now[0] += 4
    with budget.stopped():
        now[0] += 10
        with budget.stopped():
            now[0] += 10
    saved = budget.used_ms
    now[0] += 20
    assert 6.0 == EpisodeBudget(10_000, saved, lambda: now[0]).left_s
