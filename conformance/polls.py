# SPDX-License-Identifier: Apache-2.0
"""Many requests at the same time, each on a connection of its own, and when each was answered."""

from __future__ import annotations

import http.client
import json
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from conformance.wire import CONNECT_WITHIN_S

READ_WITHIN_S = 2.0


@dataclass
class Poll:
    """One request.

    Args:
        sock: its connection.
        asked_at: when it was sent, in seconds of the monotonic clock.
        answered_at: when its answer, or the end of its connection, was seen.
        status: of the answer; None: there is none.
        code: of the problem document in the answer.
    """

    sock: socket.socket
    asked_at: float
    answered_at: float | None = None
    status: int | None = None
    code: str | None = None


class Polls:
    """Equal GET requests to one server, one per connection; all are closed at the end of the block.

    Args:
        url: of the server.
        target: path and query.
        headers: of each request.
    """

    def __init__(self, url: str, target: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self.all: list[Poll] = []
        self._place = (parts.hostname or "", parts.port or 80)
        lines = [
            f"GET {target} HTTP/1.1",
            f"Host: {parts.netloc}",
            *(f"{key}: {text}" for key, text in headers.items()),
        ]
        self._head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._selector.close()
        for poll in self.all:
            poll.sock.close()

    def ask(self) -> None:
        """Open one more connection, and send the request."""
        sock = socket.create_connection(self._place, CONNECT_WITHIN_S)
        sock.settimeout(READ_WITHIN_S)
        poll = Poll(sock, time.monotonic())
        self.all.append(poll)
        try:
            sock.sendall(self._head)
        except OSError:
            poll.answered_at = time.monotonic()
            return
        self._selector.register(sock, selectors.EVENT_READ, poll)

    def read(self, within_s: float) -> None:
        """Wait up to `within_s` seconds for answers, and read those that are there."""
        for key, _ in self._selector.select(max(0.0, within_s)):
            poll: Poll = key.data
            self._selector.unregister(poll.sock)
            poll.answered_at = time.monotonic()
            try:
                response = http.client.HTTPResponse(poll.sock, method="GET")
                response.begin()
                document = json.loads(response.read())
            except (OSError, http.client.HTTPException):
                continue  # It was closed: another has its place.
            except ValueError:
                document = None
            poll.status = response.status
            poll.code = document.get("code") if isinstance(document, dict) else None
