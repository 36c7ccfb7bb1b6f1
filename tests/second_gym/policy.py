# SPDX-License-Identifier: Apache-2.0
"""The two forms of a policy call, and what their replies say. A conversation is kept in the chat form."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tests.second_gym.calls import Reply
from tests.second_gym.sessions import TOOLS

Json = dict[str, Any]


class ToolCall(NamedTuple):
    """One tool call of a reply."""

    id: str
    name: str
    arguments: str


class Said(NamedTuple):
    """What the policy said: its message in the chat form, the tool calls in it, and what it told about itself."""

    message: Json
    calls: list[ToolCall]
    version: int | None
    data_ref: Json | None


def request(policy: Json, messages: list[Json], seed: int | None) -> tuple[str, Json]:
    """Return URL and body of the next call."""
    functions = [{"name": name, "parameters": _parameters(form)} for name, form in TOOLS.items()]
    body: Json = {"model": policy["model"]} | ({} if seed is None else {"seed": seed})
    base = policy["base_url"].rstrip("/")
    if policy["api"] == "chat_completions":
        tools = [{"type": "function", "function": function} for function in functions]
        return f"{base}/chat/completions", {**body, "messages": messages, "tools": tools}
    items = [item for message in messages for item in _items(message)]
    return f"{base}/responses", {**body, "input": items, "tools": [{"type": "function", **f} for f in functions]}


def understand(api: str, reply: Reply) -> Said:
    """Return what a 200 of the policy says.

    Raises:
        ValueError, KeyError, TypeError, IndexError, AttributeError: it is no reply of this form.
    """
    content = json.loads(reply.body)
    message = content["choices"][0]["message"] if api == "chat_completions" else _message(content["output"])
    calls = [
        ToolCall(str(call["id"]), str(call["function"]["name"]), str(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    data_ref = content.get("data_ref")
    return Said(message, calls, _version(reply), data_ref if isinstance(data_ref, dict) else None)


def _version(reply: Reply) -> int | None:
    """Return the weights version that a reply carries."""
    told = {name.lower(): value for name, value in reply.headers.items()}.get("gym-policy-version", "")
    return int(told) if told.isascii() and told.isdigit() and len(told) < 16 else None


def _parameters(form: Json) -> Json:
    return {"type": "object", "properties": form, "required": list(form), "additionalProperties": False}


def _items(message: Json) -> list[Json]:
    """Return a message of the chat form as items of the responses form."""
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    items: list[Json] = []
    if message.get("content"):
        items.append({"role": message["role"], "content": message["content"]})
    calls = message.get("tool_calls") or []
    return items + [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]


def _message(output: list[Json]) -> Json:
    """Return the items of a responses reply as one message of the chat form."""
    text = "".join(
        part["text"] for item in output if item["type"] == "message" for part in item["content"] if "text" in part
    )
    calls = [
        {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        for item in output
        if item["type"] == "function_call"
    ]
    return {"role": "assistant", "content": text or None} | ({"tool_calls": calls} if calls else {})
