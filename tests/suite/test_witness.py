# SPDX-License-Identifier: Apache-2.0
"""The witness: what it answers, what it holds, what it counts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from conformance.errors import TimedOut
from conformance.script import add, script, world
from conformance.witness import Witness

USER = {"role": "user", "content": "conformance seed=7"}


def headers(rollout: str = "r1", attempt: int = 0, turn: int = 1) -> dict[str, str]:
    """The headers of a policy call."""
    return {"Gym-Rollout-Id": rollout, "Gym-Attempt": str(attempt), "Gym-Turn": str(turn), "Authorization": "Bearer x"}


def ask(http: httpx.Client, witness: Witness, messages: list[Any], address: str = "main", **given: Any) -> Any:
    """Ask for one chat completion."""
    head = headers(**given)
    body = {"model": "m", "messages": messages}
    return http.post(witness.address(address) + "/chat/completions", json=body, headers=head)


def test_it_answers_by_the_conversation_and_not_by_how_often_it_was_asked(http: httpx.Client, witness: Witness) -> None:
    """The same conversation gets the same reply, also after other calls."""
    witness.script("r1", script(add(5), [add(-3), world("x")], "bye"))
    first = ask(http, witness, [USER]).json()
    again = ask(http, witness, [USER]).json()
    later = ask(http, witness, [USER, first["choices"][0]["message"]], turn=2).json()
    last = ask(http, witness, [USER, {"role": "assistant"}, {"role": "assistant"}], turn=3).json()
    assert first == again
    assert [call["function"]["name"] for call in later["choices"][0]["message"]["tool_calls"]] == ["add", "world"]
    assert last["choices"][0]["message"]["content"] == "bye"
    assert last["choices"][0]["finish_reason"] == "stop"


def test_it_counts_per_rollout_attempt_and_turn(http: httpx.Client, witness: Witness) -> None:
    """Asked and completed are counted by the headers and the conversation."""
    witness.script("r1", script(add(1), add(2), "bye"))
    ask(http, witness, [USER])
    ask(http, witness, [USER], attempt=1)
    ask(http, witness, [USER, {"role": "assistant"}], attempt=1, turn=2)
    assert witness.completed("r1") == 3
    assert witness.completed("r1", 1) == 2
    assert witness.completed("r1", attempt=1) == 2
    assert {1: 2, 2: 1} == dict(witness.completed_by_turn("r1"))
    assert [(g.attempt, g.turn) for g in witness.generations("r1")] == [(0, 1), (1, 1), (1, 2)]


def test_a_credential_is_never_recorded(http: httpx.Client, witness: Witness) -> None:
    """The recorded headers say that a credential was there, not which."""
    ask(http, witness, [USER])
    assert witness.generations()[0].headers["authorization"] == "***"


def test_a_held_generation_ends_on_release(http: httpx.Client, witness: Witness) -> None:
    """Hold → asked and open; release → answered."""
    hold = witness.hold("r1", 1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, http, witness, [USER])
        assert hold.wait_asked().state == "asked"
        assert not asked.done()
        hold.release()
        assert asked.result(5).status_code == 200
    assert witness.wait_completed("r1", 1).state == "completed"


def test_a_caller_that_goes_away_leaves_an_abandoned_generation(http: httpx.Client, witness: Witness) -> None:
    """A closed connection is seen although the generation is held."""
    witness.hold("r1", 1)
    with pytest.raises(httpx.ReadTimeout):
        http.post(witness.address() + "/chat/completions", json={"messages": [USER]}, headers=headers(), timeout=0.2)
    witness.wait_until(lambda: witness.generations(state="abandoned"), "the call is abandoned")


def test_it_refuses_with_a_status_as_often_as_ordered(http: httpx.Client, witness: Witness) -> None:
    """429 twice, then the answer; a refusal is no completed generation."""
    witness.answer(429, "r1", times=2, retry_after_s=0.5)
    statuses = [ask(http, witness, [USER]).status_code for _ in range(3)]
    assert statuses == [429, 429, 200]
    assert witness.asked("r1") == 3
    assert witness.completed("r1") == 1


def test_it_drops_a_connection_on_order(http: httpx.Client, witness: Witness) -> None:
    """The caller gets a broken connection, the next call an answer."""
    witness.drop("r1", 1)
    with pytest.raises(httpx.TransportError):
        ask(http, witness, [USER])
    assert ask(http, witness, [USER]).status_code == 200
    assert [g.state for g in witness.generations("r1")] == ["dropped", "completed"]


def test_it_refuses_and_accepts_connections_per_address(http: httpx.Client, witness: Witness) -> None:
    """A refused address comes back on the same port; another one is untouched."""
    before = witness.address("other")
    witness.refuse("other")
    with pytest.raises(httpx.ConnectError):
        ask(http, witness, [USER], address="other")
    assert ask(http, witness, [USER]).status_code == 200
    witness.accept("other")
    assert ask(http, witness, [USER], address="other").status_code == 200
    assert before == witness.address("other")
    assert [g.address for g in witness.generations()] == ["main", "other"]


def test_chat_completions_are_streamed(http: httpx.Client, witness: Witness) -> None:
    """The pieces of a stream put together are the whole reply."""
    witness.script("r1", script([add(12), world("x")]))
    body = {"model": "m", "messages": [USER], "stream": True}
    text = http.post(witness.address() + "/chat/completions", json=body, headers=headers()).text
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    pieces: dict[int, str] = {}
    for event in events[:-1]:
        for call in json.loads(event)["choices"][0]["delta"].get("tool_calls", []):
            pieces[call["index"]] = pieces.get(call["index"], "") + call["function"]["arguments"]
    assert [json.loads(piece) for piece in pieces.values()] == [{"n": 12}, {"tag": "x"}]


def test_responses_count_a_run_of_function_calls_as_one_turn(http: httpx.Client, witness: Witness) -> None:
    """Two parallel calls and their outputs are one turn; the next reply is turn 2."""
    witness.script("r1", script([add(1), add(2)], "bye"))
    url = witness.address() + "/responses"
    first = http.post(url, json={"model": "m", "input": [USER]}, headers=headers()).json()
    calls = first["output"]
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "{}"} for call in calls]
    second = http.post(url, json={"model": "m", "input": [USER, *calls, *outputs]}, headers=headers(turn=2)).json()
    linked = {"model": "m", "input": outputs, "previous_response_id": first["id"], "stream": True}
    third = http.post(url, json=linked, headers=headers(turn=2)).text
    assert [call["type"] for call in calls] == ["function_call", "function_call"]
    assert second["output"][0]["content"][0]["text"] == "bye"
    assert "event: response.completed" in third
    assert [g.conversation_turn for g in witness.generations("r1")] == [1, 2, 2]


def test_a_wait_that_does_not_come_true_says_what_was_there_instead(witness: Witness) -> None:
    """The failure names the condition and the calls that were seen."""
    with pytest.raises(TimedOut, match="turn 3 of r9") as caught:
        witness.wait_asked("r9", 3, within_s=0.05)
    assert "policy calls so far 0" in caught.value.got


def test_forget_takes_one_namespace_only(http: httpx.Client, witness: Witness) -> None:
    """Records and scripts of other rollouts stay."""
    ask(http, witness, [USER], rollout="a-1")
    ask(http, witness, [USER], rollout="b-1")
    witness.forget("a-")
    assert [g.rollout_id for g in witness.generations()] == ["b-1"]
