# SPDX-License-Identifier: Apache-2.0
"""The demo's policy: the same conversation, the same reply; who is who without protocol headers; holds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout, web
from hypothesis import given
from hypothesis import strategies as st

from reference_rl.demo.calls import read_calls, read_lines
from reference_rl.demo.policy import PolicyServer, reply, turn_of

TOKEN = "token-of-the-test"
OPENING = [{"role": "user", "content": "pick up the passenger"}]


def conversation(turns: int, seed: int = 0) -> list[dict[str, Any]]:
    """A conversation in which the given number of turns is done."""
    messages: list[dict[str, Any]] = list(OPENING)
    for turn in range(turns):
        message = reply(seed, messages)
        tools = [{"role": "tool", "tool_call_id": c["id"], "content": f"seen {turn}"} for c in message["tool_calls"]]
        messages = [*messages, message, *tools]
    return messages


@given(st.integers(0, 2**31), st.integers(0, 6))
def test_equal_conversations_get_equal_replies(seed: int, turns: int) -> None:
    """Determinism is what makes interrupted and uninterrupted comparable."""
    assert reply(seed, conversation(turns, seed)) == reply(seed, conversation(turns, seed))


@given(st.integers(0, 2**31), st.integers(1, 6))
def test_a_conversation_that_differs_in_one_observation_gets_another_reply(seed: int, turns: int) -> None:
    """A restored environment that is not the saved one shows in every later turn."""
    other = conversation(turns, seed)
    other[-1] = {**other[-1], "content": other[-1]["content"] + "."}
    assert reply(seed, conversation(turns, seed)) != reply(seed, other)


@given(st.integers(0, 2**31), st.integers(0, 8))
def test_the_passenger_is_never_dropped_off(seed: int, turns: int) -> None:
    """The episode must last for all of its turns, with one to three tool calls in each."""
    calls = reply(seed, conversation(turns, seed))["tool_calls"]
    actions = [json.loads(call["function"]["arguments"])["action"] for call in calls]
    assert set(actions) <= {"south", "north", "east", "west", "pickup"}
    assert 1 <= len(actions) <= 3


def test_the_turn_is_the_number_of_replies_and_one() -> None:
    """No header is needed to know which turn is asked for."""
    assert [1, 2, 5] == [turn_of(conversation(turns)) for turns in (0, 1, 4)]


class Served:
    """A policy that listens, and a client that talks to it."""

    def __init__(self, url: str, session: ClientSession, log: Path) -> None:
        self.url, self.session, self.log = url, session, log

    async def ask(self, seed: int, turns: int, **headers: str) -> tuple[int, Any]:
        """Ask for the turn that follows the given number of turns."""
        body = {"model": "m", "seed": seed, "messages": conversation(turns, seed)}
        async with self.session.post(f"{self.url}/run/v1/chat/completions", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def events(self, wanted: Callable[[list[str]], bool]) -> list[str]:
        """The kinds of the log's events, as soon as they are as wanted (bound: 5 s)."""
        async with asyncio.timeout(5):
            # ASYNC110: what is waited for is another party's file; it signals nothing.
            while not wanted(kinds := [line["event"] for line in read_lines(self.log)]):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return kinds


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A policy with one run of three siblings; sibling 1 is held in turn 3."""
    runner = web.AppRunner(PolicyServer(0.001, TOKEN).app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with ClientSession(headers=headers, timeout=ClientTimeout(total=10)) as session:
        log = tmp_path / "policy.jsonl"
        body = {"siblings": {"0": 0, "1": 1, "2": 2}, "holds": {"1": 3}, "log": str(log)}
        async with session.put(f"{url}/run", json=body) as response:
            assert 200 == response.status
        yield Served(url, session, log)
    await runner.cleanup()


async def test_a_call_is_logged_as_asked_and_completed_by_seed_and_conversation(served: Served) -> None:
    """Columns 0 and 1 send no protocol headers and are counted all the same."""
    status, answer = await served.ask(2, 3)
    assert 200 == status
    assert reply(2, conversation(3, 2)) == answer["choices"][0]["message"]
    (call,) = read_calls(served.log)
    assert (2, 4) == (call.sibling, call.turn)
    assert call.completed is not None and call.completed >= call.asked
    assert call.attempt is None


async def test_protocol_headers_are_noted_where_they_are_sent(served: Served) -> None:
    """Columns 2 and 3 send rollout, attempt and turn; the log keeps them beside what the policy saw itself."""
    await served.ask(0, 1, **{"Gym-Rollout-Id": "g0_s0", "Gym-Attempt": "1", "Gym-Turn": "2"})
    lines = read_lines(served.log)
    assert ("g0_s0", 1, 2, 2) == tuple(lines[0][name] for name in ("rollout_id", "attempt", "header_turn", "turn"))


async def test_a_named_call_is_held_until_it_is_released(served: Served) -> None:
    """Only the named turn of the named sibling waits."""
    assert 200 == (await served.ask(1, 1))[0]
    asked = asyncio.create_task(served.ask(1, 2))
    await served.events(lambda kinds: "held" in kinds)
    assert not asked.done()
    async with served.session.post(f"{served.url}/run/release") as response:
        assert 200 == response.status
    assert 200 == (await asked)[0]
    assert ["asked", "held", "released", "completed"] == (await served.events(lambda kinds: len(kinds) >= 6))[2:]
    assert 200 == (await served.ask(1, 2))[0]


async def test_a_caller_that_goes_away_leaves_a_dropped_call_and_no_completed_turn(served: Served) -> None:
    """What a SIGKILL of the Gym does to the calls that are held."""
    asked = asyncio.create_task(served.ask(1, 2))
    await served.events(lambda kinds: "held" in kinds)
    asked.cancel()
    assert ["asked", "held", "dropped"] == await served.events(lambda kinds: "dropped" in kinds)


async def test_strangers_are_refused(served: Served) -> None:
    """A wrong token, an unknown seed and an unknown run are errors, and nothing is counted."""
    assert 401 == (await served.ask(0, 0, Authorization="Bearer other"))[0]
    assert 400 == (await served.ask(7, 0))[0]
    async with served.session.post(f"{served.url}/other/v1/chat/completions", json={}) as response:
        assert 404 == response.status
    assert [] == read_calls(served.log)
