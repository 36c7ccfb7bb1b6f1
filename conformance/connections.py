# SPDX-License-Identifier: Apache-2.0
"""Kept HTTP/1.1 connections: one request, one answer, and whether a failure came before or after it was sent.

The standard library's client, because a run makes thousands of small calls and a richer one costs several times as much
for each.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

KEPT_FOR_S = 4.0
"""How long an idle connection is used again; servers close theirs a little later."""

_SAFE = "/%:=&?~+!$,;'@()*[]"
_Key = tuple[str, str, int]


@dataclass(frozen=True)
class Answer:
    """What came back: status, headers by lower-case name, and the body."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class NotSent(OSError):
    """No connection could be made: the request certainly never left."""


class NoAnswer(OSError):
    """The request left, in part at least, and no whole answer came back."""


class Connections:
    """Connections to any number of servers. Thread-safe; each is used by one call at a time."""

    def __init__(self) -> None:
        self._idle: dict[_Key, list[tuple[float, http.client.HTTPConnection]]] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close every connection that is not in use."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for kept in idle.values():
            for _, connection in kept:
                connection.close()

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes | Iterator[bytes] | None,
        *,
        connect_s: float,
        silence_s: float,
    ) -> Answer:
        """Send one request and return its answer.

        Args:
            method: the HTTP method.
            url: `http` or `https`; what may not stand in a URL is escaped.
            headers: what is sent beside Host and the length of the body.
            content: the body; an iterator is sent in chunks.
            connect_s: bound for the connection.
            silence_s: bound for each wait for the server.

        Raises:
            NotSent: no connection could be made.
            NoAnswer: the request left and no whole answer came back.
        """
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        key = (parts.scheme, parts.hostname or "", parts.port or (443 if secure else 80))
        connection = self._take(key) or _connect(key, connect_s)
        if connection.sock is not None:
            connection.sock.settimeout(silence_s)
        target = quote(parts.path or "/", safe=_SAFE) + (f"?{quote(parts.query, safe=_SAFE)}" if parts.query else "")
        try:
            # A server may refuse a body before it has read it all; its answer is what counts then.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, target, body=content, headers=dict(headers))
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise NoAnswer(f"{type(error).__name__} {error}") from error
        answered: dict[str, str] = {}
        for name, value in response.getheaders():
            lower = name.lower()
            answered[lower] = f"{answered[lower]}, {value}" if lower in answered else value
        if response.will_close:
            connection.close()
        else:
            self._keep(key, connection)
        return Answer(response.status, answered, body)

    def _take(self, key: _Key) -> http.client.HTTPConnection | None:
        """Return an idle connection that the server has not closed, or None."""
        while True:
            with self._lock:
                kept = self._idle.get(key)
                if not kept:
                    return None
                since, connection = kept.pop()
            if time.monotonic() - since < KEPT_FOR_S and connection.sock is not None and _quiet(connection.sock):
                return connection
            connection.close()

    def _keep(self, key: _Key, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._idle.setdefault(key, []).append((time.monotonic(), connection))


def _connect(key: _Key, within_s: float) -> http.client.HTTPConnection:
    scheme, host, port = key
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port, timeout=within_s)
    try:
        connection.connect()
    except OSError as error:
        connection.close()
        raise NotSent(str(error)) from error
    return connection


def _quiet(sock: socket.socket) -> bool:
    """Say whether nothing waits to be read: an idle connection with something to read has been closed."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return not poller.poll(0)
