# SPDX-License-Identifier: Apache-2.0
"""Reaches the policy: one HTTP request per call, nothing retried, every reply bounded.

Whether to try again is decided by `policy.PolicyClient`, which knows the rollout's time budget. Implements CKPT-ID-008
to -010, CKPT-ROLL-032, -035 and CKPT-RESULT-020.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp

from reference_gym.participant.policy_call import Api, PolicyAnswer, TurnId
from reference_gym.participant.replies import BodyTooLong, parse_retry_after, parse_version, read_bounded
from reference_gym.participant.state import Policy
from spec import wire

MAX_REPLY_BYTES = 16 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0
PATHS: Mapping[Api, str] = {"chat_completions": "/chat/completions", "responses": "/responses"}


class PolicyHttp:
    """The way to the policy over HTTP.

    Args:
        token: bearer token for the policy, from the Gym's settings.
        timeout_s: how long one call may take, in seconds.
    """

    def __init__(self, token: str | None, timeout_s: float) -> None:
        self._token = token
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._http: aiohttp.ClientSession | None = None

    async def call(self, address: Policy, request: Mapping[str, Any], turn: TurnId | None) -> PolicyAnswer:
        """Make one call; everything that is no reply counts as unreachable."""
        headers = {} if turn is None else turn.headers()
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=10)
            self._http = aiohttp.ClientSession(timeout=self._timeout, connector=connector, trust_env=False)
        url = address.base_url.rstrip("/") + PATHS[address.api]
        try:
            async with self._http.post(url, json=dict(request), headers=headers, allow_redirects=False) as reply:
                try:
                    body = await read_bounded(reply.content, MAX_REPLY_BYTES)
                except BodyTooLong:
                    # A reply of a kind that no repetition makes shorter.
                    return PolicyAnswer(413, None, b"")
                retry_after_ms = parse_retry_after(reply.headers.get("Retry-After"))
                version = parse_version(reply.headers.get(wire.HEADER_POLICY_VERSION))
                return PolicyAnswer(reply.status, retry_after_ms, body, version)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            # A ValueError is an address that no name or port can be made of; it may be replaced, like any that is dead.
            return PolicyAnswer(None, None, b"")

    async def forget(self, rollout_id: str, attempt: int) -> None:
        """Nothing is kept."""

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None
