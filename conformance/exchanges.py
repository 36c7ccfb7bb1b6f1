# SPDX-License-Identifier: Apache-2.0
"""What the transport records and returns: an exchange, the reply in it, and the fault that was done to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spec import wire as names


@dataclass(frozen=True)
class Fault:
    """What the transport does to one exchange; build it with one of the class methods."""

    kind: Literal["lost_request", "lost_reply", "duplicate", "delay", "disconnect"]
    ms: int = 0

    @classmethod
    def lost_request(cls) -> Fault:
        """The request is never sent; `LostRequest` is raised."""
        return cls("lost_request")

    @classmethod
    def lost_reply(cls) -> Fault:
        """The Gym acts and answers; the caller never sees it; `LostReply` is raised."""
        return cls("lost_reply")

    @classmethod
    def duplicate(cls) -> Fault:
        """The request is sent twice at the same time; the second reply is `Reply.twin`."""
        return cls("duplicate")

    @classmethod
    def delay(cls, ms: int) -> Fault:
        """The request is sent `ms` milliseconds late."""
        return cls("delay", ms)

    @classmethod
    def disconnect(cls, after_ms: int = 10) -> Fault:
        """The request is sent whole and the connection reset `after_ms` later; `LostReply` is raised."""
        return cls("disconnect", after_ms)


@dataclass
class Exchange:
    """One recorded request and what came of it; bodies are cut at 64 KiB."""

    number: int
    operation: str
    method: str
    url: str
    request_headers: dict[str, str] = field(repr=False)
    request_body: bytes = field(repr=False)
    started_at: float
    status: int | None = None
    response_headers: dict[str, str] = field(default_factory=dict, repr=False)
    response_body: bytes = field(default=b"", repr=False)
    seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Reply:
    """A response as raw facts: status, headers, bytes, and the JSON in them (None if there is none)."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    json: Any
    exchange: Exchange
    twin: Reply | None = None

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def code(self) -> str | None:
        """The `code` of a problem document, else None."""
        return self.json.get("code") if not self.ok and isinstance(self.json, dict) else None

    @property
    def incarnation(self) -> str | None:
        """The `Gym-Incarnation` header."""
        return self.headers.get(names.HEADER_INCARNATION.lower())

    def __getitem__(self, name: str) -> Any:
        """Return a field of the JSON object."""
        return self.json[name]

    @property
    def brief(self) -> str:
        """The reply on one line, for failure texts."""
        if self.code is not None:
            return f"{self.status} {self.code}"
        text = self.content.decode("utf-8", "replace")
        return f"{self.status} {text[:200]}{'…' if len(text) > 200 else ''}"


def parsed(content: bytes) -> Any:
    """Return the JSON in a body, or None if there is none."""
    try:
        return json.loads(content)
    except ValueError:
        return None
