# SPDX-License-Identifier: Apache-2.0
"""The two OpenAI forms of a policy call, as pure functions; inside, a conversation is always in the chat form.

Implements CKPT-ROLL-062, CKPT-ROLL-063 and CKPT-RESULT-023.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reference_gym.participant import jsontext
from reference_gym.participant.jsontext import is_integer
from reference_gym.participant.policy_call import Api, Message, ToolSpec

MAX_COUNT = 2**53 - 1


class MalformedReply(Exception):
    """The policy answered with something that is not of the form that was asked for."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One effect that the policy asks for; `args` is None when its arguments are no JSON."""

    call_id: str
    name: str
    args: object


@dataclass(frozen=True, slots=True)
class Reply:
    """One completed policy call."""

    message: Message
    calls: tuple[ToolCall, ...]
    usage: Mapping[str, int]
    version: int | None
    data_ref: Mapping[str, str] | None


def build_request(
    api: Api, model: str, messages: Sequence[Message], tools: Sequence[ToolSpec], seed: int | None
) -> dict[str, Any]:
    """The body of a policy call; `seed` is left out when the start call gave none."""
    extra: dict[str, Any] = {} if seed is None else {"seed": seed}
    if api == "responses":
        return {
            "model": model,
            "input": [item for message in messages for item in _items(message)],
            "tools": [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                    "strict": False,
                }
                for tool in tools
            ],
            "store": False,
            **extra,
        }
    return {
        "model": model,
        "messages": list(messages),
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                },
            }
            for tool in tools
        ],
        **extra,
    }


def _items(message: Message) -> list[dict[str, Any]]:
    """One message of the chat form as items of the responses form."""
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    items: list[dict[str, Any]] = []
    if message["content"] or not message.get("tool_calls"):
        items.append({"role": message["role"], "content": message["content"] or ""})
    items += [
        {
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }
        for call in message.get("tool_calls", ())
    ]
    return items


def parse_reply(api: Api, raw: bytes, turn: int, version: int | None) -> Reply:
    """The reply to a policy call.

    Args:
        api: the form that was asked for.
        raw: the body.
        turn: used to name calls that the policy left without an id; one that has an earlier call's id gets another.
        version: the weights version that the reply carried.

    Raises:
        MalformedReply: it has another form.
    """
    try:
        body = json.loads(raw)
        if api == "responses":
            text, calls = _read_output(body["output"])
        else:
            message = body["choices"][0]["message"]
            text, asked = message.get("content"), message.get("tool_calls") or []
            calls = [(call.get("id"), call["function"]["name"], call["function"]["arguments"]) for call in asked]
        return _reply(text, calls, body, turn, version)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise MalformedReply(f"the policy's reply is not of the form {api}: {type(error).__name__}") from error


def _read_output(output: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[tuple[Any, Any, Any]]]:
    texts, calls = [], []
    for item in output:
        kind = item.get("type", "message")
        if kind == "message":
            content = item["content"]
            parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            texts += parts
        elif kind == "function_call":
            calls.append((item.get("call_id"), item["name"], item["arguments"]))
    return ("".join(texts) if texts else None), calls


def _reply(
    text: object, calls: Sequence[tuple[Any, Any, Any]], body: Mapping[str, Any], turn: int, version: int | None
) -> Reply:
    if text is not None and not isinstance(text, str):
        raise MalformedReply("the content of the policy's reply is not text")
    message: Message = {"role": "assistant", "content": text}
    tool_calls, parsed = [], []
    known: set[str] = set()
    for ordinal, (given_id, name, arguments) in enumerate(calls, start=1):
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise MalformedReply("a tool call's name or arguments are not text")
        call_id = given_id if isinstance(given_id, str) and given_id else f"call_{turn}_{ordinal}"
        while call_id in known:
            call_id += f"_{ordinal}"  # Its answer must be told from the others'; its effect is told by its ordinal.
        known.add(call_id)
        tool_calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        parsed.append(ToolCall(call_id, _sendable(name), parse_arguments(arguments)))
    if tool_calls:
        message["tool_calls"] = tool_calls
    reference = body.get("data_ref")
    return Reply(
        message=message,
        calls=tuple(parsed),
        usage=_usage(body.get("usage")),
        version=version,
        data_ref=reference if _is_data_ref(reference) else None,
    )


def _sendable(name: str) -> str:
    """A tool's name without what has no UTF-8 form; no tool has such a name."""
    return name.encode("utf-8", "replace").decode()


def _is_data_ref(reference: object) -> bool:
    if not isinstance(reference, dict) or len(reference) != 1 or not set(reference) <= {"key", "prefix"}:
        return False
    return all(isinstance(text, str) and 0 < len(text) <= 1024 and text.isascii() for text in reference.values())


def parse_arguments(text: str) -> object:
    """The arguments of a tool call; None when they are no JSON (NaN, a lone surrogate, too deep nesting are none)."""
    try:
        return jsontext.decode(text.encode("utf-8"))
    except ValueError:
        return None


def _usage(usage: object) -> dict[str, int]:
    if not isinstance(usage, dict):
        return {}
    return {str(key): value for key, value in usage.items() if is_integer(value, 0, MAX_COUNT)}


def tool_message(call_id: str, text: str) -> Message:
    """The answer to one tool call."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}
