# SPDX-License-Identifier: Apache-2.0
"""HTTP between the participants of one Gym: bearer token of the data plane, the three headers, problem documents back.

A call whose reply was lost is repeated with the same content; effects are safe to repeat because of their request ids,
the others because they are idempotent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from reference_gym.errors import PeerRefused, PeerUnavailable
from reference_gym.participant.errors import SessionLost, StaleAttempt
from reference_gym.participant.policy_call import TurnId
from reference_gym.participant.replies import parse_retry_after, read_bounded
from reference_gym.participant.state import SessionUncertain

CONNECT_TIMEOUT_S = 10.0
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 1.0


class Peer:
    """One other participant.

    Args:
        url: its base URL.
        token: of the data plane; None without authentication.
        retry_ms: how long a participant that cannot be reached is tried again, in milliseconds.
        max_reply_bytes: the longest reply that is accepted.
    """

    def __init__(self, url: str, token: str | None, retry_ms: int, max_reply_bytes: int) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._retry_s = retry_ms / 1000
        self._max_reply_bytes = max_reply_bytes
        self._http: aiohttp.ClientSession | None = None

    async def call(self, path: str, message: Mapping[str, Any], turn: TurnId | None) -> Any:
        """Make one call until it is answered; there is no limit on how long the answer may take.

        Raises:
            StaleAttempt: the attempt is fenced there.
            SessionLost: no such session, or not at the caller's effects.
            SessionUncertain: the work was begun there and failed.
            PeerUnavailable: it could not be reached for `retry_ms`.
            PeerRefused: any other refusal.
        """
        loop = asyncio.get_running_loop()
        failing_since: float | None = None
        reached = False
        delay = FIRST_DELAY_S
        while True:
            began = loop.time()
            wait: float | None = None
            try:
                status, headers, body = await self._once(path, message, turn)
            except aiohttp.ClientConnectorError as error:
                reason = type(error).__name__
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                reached, reason = True, type(error).__name__
            else:
                if status == 200:
                    return body
                if status != 503:
                    raise refusal(status, body)
                reason = "503"
                retry_after_ms = parse_retry_after(headers.get("Retry-After"))
                wait = None if retry_after_ms is None else retry_after_ms / 1000
                if isinstance(body, dict) and body.get("code") == "admission_closed":
                    # It lives and its gate is closed: a gate opens by itself, so this wait has an end.
                    failing_since = loop.time()
            failing_since = began if failing_since is None else failing_since
            left = failing_since + self._retry_s - loop.time()
            if left <= 0:
                raise PeerUnavailable(f"a participant could not be reached ({reason})", reached=reached)
            await asyncio.sleep(min(delay if wait is None else max(wait, delay), max(left, delay)))
            delay = min(delay * 2, LONGEST_DELAY_S)

    async def _once(
        self, path: str, message: Mapping[str, Any], turn: TurnId | None
    ) -> tuple[int, Mapping[str, str], Any]:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                connector=aiohttp.TCPConnector(limit=0),
                trust_env=False,
            )
        headers = self._headers | ({} if turn is None else turn.headers())
        async with self._http.post(
            self._url + path, json=dict(message), headers=headers, allow_redirects=False
        ) as reply:
            try:
                raw = await read_bounded(reply.content, self._max_reply_bytes)
                return reply.status, reply.headers, json.loads(raw)
            except ValueError as error:
                if reply.status >= 400:
                    return reply.status, reply.headers, None
                raise PeerRefused(f"a reply that cannot be read: {error}") from error

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None


def refusal(status: int, body: Any) -> Exception:
    """The exception for a problem document of another participant."""
    problem = body if isinstance(body, dict) else {}
    code = problem.get("code")
    detail = str(problem.get("detail", f"status {status}"))[:1000]
    match code:
        case "stale_attempt":
            return StaleAttempt(detail, rollouts=problem.get("rollouts"))
        case "session_lost":
            return SessionLost(detail)
        case "argument_conflict" | "internal":
            return SessionUncertain(detail)
    return PeerRefused(f"{code or status}: {detail}")
