# SPDX-License-Identifier: Apache-2.0
"""Reaches the policy: one HTTP request per call, nothing retried, every reply bounded, completed calls recorded.

Whether to try again is the agent's decision, because the agent keeps the rollout's time budget. Implements CKPT-ID-008
to -010, CKPT-ROLL-032, -035, CKPT-FENCE-002 and CKPT-RESULT-020.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from reference_gym.agent.conversation import MalformedReply, parse_reply
from reference_gym.http import parse_retry_after, parse_version, read_bounded
from reference_gym.model.ledger import Ledger, Row
from reference_gym.participant.state import Policy
from reference_gym.ports import Api, PolicyAnswer, TurnId
from spec import wire

MAX_REPLY_BYTES = 16 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0
PATHS: Mapping[Api, str] = {"chat_completions": "/chat/completions", "responses": "/responses"}


class PolicyProxy:
    """The direct way.

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
                body = await read_bounded(reply.content, MAX_REPLY_BYTES)
                retry_after_ms = parse_retry_after(reply.headers.get("Retry-After"))
                version = parse_version(reply.headers.get(wire.HEADER_POLICY_VERSION))
                return PolicyAnswer(reply.status, retry_after_ms, body, version)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return PolicyAnswer(None, None, b"")
        except ValueError:
            # Too long a body: a reply of a kind that no repetition makes shorter.
            return PolicyAnswer(413, None, b"")

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None


Observe = Callable[[str, int], None]
"""Tells the participant of a call by (rollout, attempt): fences lower ones, raises `StaleAttempt` for a fenced one."""


class RecordingPolicy:
    """A way to the policy that records one row per completed call of a rollout.

    Args:
        proxy: the direct way.
        ledger: where the rows go.
        observe: see `Observe`.
    """

    def __init__(self, proxy: PolicyProxy, ledger: Ledger, observe: Observe) -> None:
        self._proxy = proxy
        self._ledger = ledger
        self._observe = observe

    async def call(self, address: Policy, request: Mapping[str, Any], turn: TurnId | None) -> PolicyAnswer:
        """Make one call and record it; raises `StaleAttempt`, also for a reply that came after the fence."""
        if turn is None:
            return await self._proxy.call(address, request, None)
        self._observe(turn.rollout_id, turn.attempt)
        answer = await self._proxy.call(address, request, turn)
        self._observe(turn.rollout_id, turn.attempt)
        if answer.status == 200:
            self._ledger.add(turn, _describe(address, answer, turn.turn))
        return answer

    async def forget(self, rollout_id: str, attempt: int) -> None:
        """Keep the rows: where the rollout is owned as well they go with its release."""


def _describe(address: Policy, answer: PolicyAnswer, turn: int) -> Row:
    try:
        usage = parse_reply(address.api, answer.body, turn, answer.version).usage
    except MalformedReply:
        # The call is completed and paid for, whatever it brought.
        usage = {}
    return Row(turn, wire.bytes_digest(answer.body), len(answer.body), usage, answer.version)
