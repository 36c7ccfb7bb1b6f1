# SPDX-License-Identifier: Apache-2.0
"""HTTP calls that a rollout makes: to its policy and to the world."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

CONNECT_WITHIN_S = 10.0


class Reply(NamedTuple):
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Call:
    """One POST of JSON that takes as long as it takes, unless somebody hangs up.

    Args:
        url: where to.
        payload: the JSON value.
        headers: further headers.
    """

    def __init__(self, url: str, payload: object, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_WITHIN_S)
        self._path = parts.path or "/"
        self._body = json.dumps(payload).encode("ascii")
        self._headers = {"Content-Type": "application/json", "Connection": "close", **(headers or {})}
        self._socket: socket.socket | None = None
        self._hung_up = False

    def hang_up(self) -> None:
        """Make the call end at once; called from any thread."""
        self._hung_up = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def make(self) -> Reply:
        """Make the call once.

        Raises:
            OSError: it could not be completed.
        """
        try:
            self._connection.connect()
            self._socket = self._connection.sock
            self._socket.settimeout(None)
            if self._hung_up:
                raise ConnectionAbortedError("hung up")
            self._connection.request("POST", self._path, self._body, self._headers)
            answer = self._connection.getresponse()
            return Reply(answer.status, dict(answer.headers.items()), answer.read())
        except (http.client.HTTPException, ValueError) as error:
            raise ConnectionError(str(error)) from error
        finally:
            self._connection.close()


def post_to_world(url: str, payload: object) -> Any:
    """Send one POST to the world, never again and without a time limit; return the JSON value of its 200.

    Raises:
        OSError, ValueError: there was no such answer.
    """
    reply = Call(url, payload).make()
    if reply.status != 200:
        raise ConnectionError(f"the world answered {reply.status}")
    return json.loads(reply.body)
