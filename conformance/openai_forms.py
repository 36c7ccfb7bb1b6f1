# SPDX-License-Identifier: Apache-2.0
"""The two OpenAI forms that the witness speaks: reading a conversation, writing a reply, as a whole or streamed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conformance.script import ToolCall, Turn

Json = dict[str, Any]


def conversation_digest(items: Sequence[Any]) -> str:
    """Return 16 hex digits that name a conversation by its content."""
    return hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()[:16]


def call_id(turn: int, number: int) -> str:
    """Return the id of the n-th tool call (from 1) of a turn; the same in every rollout, so that bodies compare."""
    return f"call_{turn}_{number}"


# --- Chat Completions ---------------------------------------------------------------------------------------------


def chat_turn(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of the turn that a Chat Completions conversation asks for: 1 + its assistant messages."""
    return 1 + sum(1 for message in messages if message.get("role") == "assistant")


def _chat_calls(turn: int, calls: Sequence[ToolCall]) -> list[Json]:
    return [
        {
            "id": call_id(turn, number),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for number, call in enumerate(calls, 1)
    ]


def chat_reply(model: str, messages: Sequence[Any], turn: int, answer: Turn) -> Json:
    """Return the Chat Completions reply of one turn."""
    message: Json = {"role": "assistant", "content": answer if isinstance(answer, str) else None}
    if not isinstance(answer, str):
        message["tool_calls"] = _chat_calls(turn, answer)
    return {
        "id": f"chatcmpl-{conversation_digest(messages)}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": "stop" if isinstance(answer, str) else "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": len(messages), "completion_tokens": 1, "total_tokens": len(messages) + 1},
    }


def chat_stream(reply: Json) -> Iterator[bytes]:
    """Cut a Chat Completions reply into server-sent events, tool call arguments in two pieces."""

    def event(delta: Json, finish: str | None) -> bytes:
        chunk = {
            "id": reply["id"],
            "object": "chat.completion.chunk",
            "created": 0,
            "model": reply["model"],
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
        }
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    choice = reply["choices"][0]
    message = choice["message"]
    yield event({"role": "assistant", "content": message["content"]}, None)
    for index, call in enumerate(message.get("tool_calls", ())):
        text = call["function"]["arguments"]
        head = {"name": call["function"]["name"], "arguments": text[:1]}
        yield event({"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": head}]}, None)
        yield event({"tool_calls": [{"index": index, "function": {"arguments": text[1:]}}]}, None)
    yield event({}, choice["finish_reason"])
    yield b"data: [DONE]\n\n"


# --- Responses ----------------------------------------------------------------------------------------------------


def _is_policy_item(item: Mapping[str, Any]) -> bool:
    return item.get("type") in {"function_call", "reasoning"} or item.get("role") == "assistant"


def response_items(given: Any) -> list[Any]:
    """Return the input of a Responses request as a list of items."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())


def response_turn(items: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of the turn that a Responses conversation asks for: 1 + its runs of policy items."""
    turns, before = 0, False
    for item in items:
        now = _is_policy_item(item)
        turns += now and not before
        before = now
    return 1 + turns


def response_reply(model: str, items: Sequence[Any], turn: int, answer: Turn) -> Json:
    """Return the Responses reply of one turn."""
    digest = conversation_digest(items)
    if isinstance(answer, str):
        content = [{"type": "output_text", "text": answer, "annotations": []}]
        output: list[Json] = [
            {"type": "message", "id": f"msg_{turn}", "status": "completed", "role": "assistant", "content": content}
        ]
    else:
        output = [
            {
                "type": "function_call",
                "id": f"fc_{turn}_{number}",
                "call_id": call_id(turn, number),
                "name": call.name,
                "arguments": json.dumps(dict(call.arguments)),
                "status": "completed",
            }
            for number, call in enumerate(answer, 1)
        ]
    return {
        "id": f"resp_{digest}",
        "object": "response",
        "created_at": 0,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {"input_tokens": len(items), "output_tokens": 1, "total_tokens": len(items) + 1},
    }


def response_stream(reply: Json) -> Iterator[bytes]:
    """Cut a Responses reply into server-sent events."""
    number = 0

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        data = {"type": kind, "sequence_number": number, **fields}
        number += 1
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()

    started = {**reply, "status": "in_progress", "output": []}
    yield event("response.created", response=started)
    for index, item in enumerate(reply["output"]):
        yield event("response.output_item.added", output_index=index, item={**item, "status": "in_progress"})
        if item["type"] == "function_call":
            yield event(
                "response.function_call_arguments.done",
                output_index=index,
                item_id=item["id"],
                arguments=item["arguments"],
            )
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.completed", response=reply)
