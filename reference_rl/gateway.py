# SPDX-License-Identifier: Apache-2.0
"""A small policy gateway: passes every policy call on, and keeps the token row of each completed turn.

The row is in the data plane, under (rollout, attempt, turn), before the answer leaves: whatever a Gym has closed as a
turn has its row, and a restored run trains from the rows that its snapshot pinned.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Final

import httpx
from aiohttp import web

from reference_rl.dataplane import DataPlane, RowKey
from spec import wire
from spec.messages import Policy

MAX_BODY: Final = 64 * 1024 * 1024
"""The longest policy call that is passed on, in bytes."""

PASSED_ON: Final = ("Authorization", "Content-Type")


class Gateway:
    """Stands before the real policy.

    Args:
        policy: the real one.
        plane: where rows are kept.
        http: the way to the policy; answers may take as long as they take.

    Requirements: CKPT-DUTY-026.
    """

    def __init__(self, policy: Policy, plane: DataPlane, http: httpx.AsyncClient) -> None:
        self._upstream = policy.base_url.rstrip("/")
        self._plane = plane
        self._http = http

    async def answer(self, request: web.Request) -> web.Response:
        """Pass one call on; store its row before the answer is given."""
        body = await request.read()
        names = (*PASSED_ON, wire.HEADER_ROLLOUT_ID, wire.HEADER_ATTEMPT, wire.HEADER_TURN)
        headers = {name: request.headers[name] for name in names if name in request.headers}
        try:
            url = f"{self._upstream}/{request.match_info['call']}"
            reply = await self._http.post(url, content=body, headers=headers)
        except httpx.HTTPError as error:
            return web.json_response({"error": {"message": type(error).__name__}}, status=502)
        key = _key(request)
        if reply.status_code == httpx.codes.OK and key is not None:
            with contextlib.suppress(ValueError):
                row = {"call": json.loads(body), "answer": reply.json()}
                await self._plane.put(key, row)
        back = {n: v for n, v in reply.headers.items() if n.lower() in _BACK}
        return web.Response(status=reply.status_code, body=reply.content, headers=back)


_BACK: Final = ("content-type", "retry-after", wire.HEADER_POLICY_VERSION.lower())


def _key(request: web.Request) -> RowKey | None:
    """Return the key of the turn that a call is for; ``None`` when it is none of a managed rollout."""
    rollout_id = request.headers.get(wire.HEADER_ROLLOUT_ID, "")
    attempt, turn = (request.headers.get(name, "") for name in (wire.HEADER_ATTEMPT, wire.HEADER_TURN))
    if not wire.is_rollout_id(rollout_id) or not attempt.isdecimal() or not turn.isdecimal():
        return None
    return RowKey(rollout_id, int(attempt), int(turn))


@contextlib.asynccontextmanager
async def gateway(policy: Policy, plane: DataPlane, host: str = "127.0.0.1") -> AsyncIterator[Policy]:
    """Serve a gateway on a free port; yield the policy as the Gyms are to see it."""
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as http:  # noqa: S113  # a generation takes as long as it takes
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/{call:chat/completions|responses}", Gateway(policy, plane, http).answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, 0)
            await site.start()
            port = runner.addresses[0][1]
            yield policy.model_copy(update={"base_url": f"http://{host}:{port}/v1"})
        finally:
            await runner.cleanup()
