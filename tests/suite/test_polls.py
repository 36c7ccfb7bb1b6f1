# SPDX-License-Identifier: Apache-2.0
"""Requests on connections of their own: what each was told, and whether it was told anything."""

from __future__ import annotations

import socket
import threading
import time

from conformance.polls import Polls

BOUND_S = 5.0
ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b'HTTP/1.1 503 Busy\r\nContent-Length: 22\r\n\r\n{"code":"unavailable"}',
    b"HTTP/1.1 500 Broken\r\nContent-Length: 2\r\n\r\nno",
    b"",
)


def test_each_poll_knows_its_answer() -> None:
    """A status, a code where there is one, and neither where the connection was closed; one still waits."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in ANSWERS:
                accepted, _ = server.accept()
                with accepted:
                    accepted.recv(65_536)
                    accepted.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with Polls(f"http://127.0.0.1:{server.getsockname()[1]}", "/x?y=1", {"A": "b"}) as polls:
            for _ in (*ANSWERS, b"never accepted"):
                polls.ask()
            end = time.monotonic() + BOUND_S
            while sum(poll.answered_at is not None for poll in polls.all) < len(ANSWERS) and time.monotonic() < end:
                polls.read(BOUND_S)
            thread.join(BOUND_S)
            told = [(poll.answered_at is not None, poll.status, poll.code) for poll in polls.all]
    answered = [(True, 200, None), (True, 503, "unavailable"), (True, 500, None), (True, None, None)]
    assert [*answered, (False, None, None)] == told
