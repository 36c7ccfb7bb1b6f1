# SPDX-License-Identifier: Apache-2.0
"""One participant: typed calls over HTTP, and what each failure means.

The client owns no event loop and no policy of when to call what. It sends one call, reads the reply against its
schema, and turns everything else into an error that says which participant, which operation, and whether the effect
is definite.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import httpx
from pydantic import ValidationError

from reference_rl.errors import (
    BrokenReply,
    GymError,
    Indefinite,
    NotAParticipant,
    Problem,
    Refused,
    Superseded,
    Unreachable,
)
from reference_rl.retry import Pace, RetryPolicy
from spec import load, messages, wire

M = TypeVar("M", bound=messages.Response)
T = TypeVar("T")

# Never sent, so never done. Everything else that httpx raises leaves the outcome open.
_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

MAX_CONNECTIONS: Final = 32


@dataclass
class Controller:
    """Who is calling: set once the epoch is claimed, read by every client of the run."""

    id: str
    epoch: int | None = None


@dataclass(frozen=True)
class ClientSettings:
    """How calls are made.

    Attributes:
        retry: when a call is sent again.
        call_ms: the ``timeout_ms`` of a call that only waits for short work, in milliseconds.
        grace_s: how long after ``timeout_ms`` the reply may come, in seconds; then the outcome is open.
        connect_s: limit for making a connection, in seconds.
    """

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    call_ms: int = 10_000
    grace_s: float = 5.0
    connect_s: float = 5.0


def make_http(settings: ClientSettings, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """Return the one pool that all clients of a run share.

    Args:
        settings: the connect limit.
        transport: another way to the participants than the network, e.g. ``httpx.MockTransport``.
    """
    limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
    timeout = httpx.Timeout(settings.grace_s, connect=settings.connect_s, pool=settings.connect_s)
    return httpx.AsyncClient(transport=transport, limits=limits, timeout=timeout, follow_redirects=False)


class GymClient:
    """Calls one participant.

    Args:
        url: its address without the protocol's prefix.
        http: the shared pool.
        controller: who is calling.
        token: the bearer token of the control plane, or ``None``.
        settings: limits and retries.
        name: the participant's name; its URL until discovery.

    Requirements: CKPT-ID-029…031, CKPT-DUTY-020, CKPT-DUTY-021, CKPT-ERR-002, CKPT-ERR-014, CKPT-ERR-016,
    CKPT-SEC-007, CKPT-VER-008.
    """

    def __init__(
        self,
        url: str,
        http: httpx.AsyncClient,
        controller: Controller,
        *,
        token: str | None = None,
        settings: ClientSettings | None = None,
        name: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.name = name or self.url
        self.expected_incarnation: str | None = None
        self.seen_incarnation: str | None = None
        self._http = http
        self._controller = controller
        self._token = token
        self._settings = settings or ClientSettings()

    # --- reading ----------------------------------------------------------------------------------------------

    async def capabilities(self) -> messages.Capabilities:
        """Return what the participant is and can."""
        return await self._get("getCapabilities", "/capabilities", messages.Capabilities)

    async def status(self) -> messages.Status:
        """Return where it stands; renews nothing."""
        return await self._get("getCheckpoint", "/checkpoint", messages.Status)

    async def rollouts(self, after: str | None = None, state: str | None = None) -> messages.RolloutsPage:
        """Return one page of its rollouts, those in one state alone when given."""
        return await self._get("listRollouts", "/rollouts", messages.RolloutsPage, {"after": after, "state": state})

    async def rollout(self, rollout_id: str) -> messages.Rollout:
        """Return one rollout."""
        return await self._get("getRollout", f"/rollouts/{rollout_id}", messages.Rollout)

    async def results(self, after: str | None, wait_ms: int, limit: int | None = None) -> messages.ResultsPage:
        """Return one page of the results feed.

        Args:
            after: the cursor of the page before, ``None`` for the beginning.
            wait_ms: how long the participant may wait for a first result, in milliseconds.
            limit: results at most.
        """
        query = {"after": after, "wait_ms": wait_ms, "limit": limit}
        return await self._get("getResults", "/results", messages.ResultsPage, query, wait_ms=wait_ms)

    # --- the checkpoint ---------------------------------------------------------------------------------------

    async def prepare(
        self, checkpoint_id: str, run_id: str, *, timeout_ms: int, lease_ms: int, budget_s: float
    ) -> messages.PrepareResponse:
        """Close the gate; say whether the participant is ready, or what blocks.

        Args:
            checkpoint_id: of the cut.
            run_id: of the run that takes it.
            timeout_ms: how long the participant may wait until it is ready, in milliseconds.
            lease_ms: how long the gate stays closed without another call, in milliseconds.
            budget_s: no try begins after so many seconds, and none lasts longer but for the grace of a reply.
        """
        body = {"checkpoint_id": checkpoint_id, "run_id": run_id, "timeout_ms": timeout_ms, "lease_ms": lease_ms}
        return await self._post(
            "prepare", "/checkpoint/prepare", body, messages.PrepareResponse, timeout_ms, budget_s=budget_s
        )

    async def commit(
        self,
        checkpoint_id: str,
        target: Mapping[str, str],
        *,
        wait: str,
        timeout_ms: int,
        budget_s: float,
        leave_out_blocked: bool = False,
    ) -> messages.CommitResponse:
        """Capture the cut, or wait until it is durable; joins for as long as ``budget_s``."""
        body: dict[str, Any] = {"checkpoint_id": checkpoint_id, "target": dict(target), "wait": wait}
        if leave_out_blocked:
            body["leave_out_blocked"] = True
        body["timeout_ms"] = timeout_ms
        return await self._post(
            "commit", "/checkpoint/commit", body, messages.CommitResponse, timeout_ms, budget_s=budget_s
        )

    async def resume(self, checkpoint_id: str, *, timeout_ms: int) -> messages.ResumeResponse:
        """Open the gate after capture or restore."""
        body = {"checkpoint_id": checkpoint_id, "timeout_ms": timeout_ms}
        return await self._post("resume", "/checkpoint/resume", body, messages.ResumeResponse, timeout_ms)

    async def abort(self, checkpoint_id: str, *, timeout_ms: int) -> messages.AbortResponse:
        """Open the gate; this id can never publish."""
        body = {"checkpoint_id": checkpoint_id, "timeout_ms": timeout_ms}
        return await self._post("abort", "/checkpoint/abort", body, messages.AbortResponse, timeout_ms)

    async def renew(self, checkpoint_id: str, *, lease_ms: int) -> messages.RenewResponse:
        """Extend the lease."""
        body = {"checkpoint_id": checkpoint_id, "lease_ms": lease_ms}
        return await self._post("renew", "/checkpoint/renew", body, messages.RenewResponse, self._settings.call_ms)

    async def restore(self, body: Mapping[str, Any], *, budget_s: float) -> messages.RestoreResponse:
        """Verify everything, then install; stays paused. ``body`` is a restore-request."""
        timeout_ms = int(body["timeout_ms"])
        return await self._post(
            "restore", "/checkpoint/restore", body, messages.RestoreResponse, timeout_ms, budget_s=budget_s
        )

    async def retire(self, rollouts: Sequence[tuple[str, int]], *, timeout_ms: int) -> messages.RetireResponse:
        """Fence attempts up to the given one, stop them, free them."""
        body = {
            "rollouts": [{"rollout_id": r, "through_attempt": a} for r, a in rollouts],
            "timeout_ms": timeout_ms,
        }
        return await self._post("retire", "/retire", body, messages.RetireResponse, timeout_ms)

    # --- rollouts and results ---------------------------------------------------------------------------------

    async def start(self, rollouts: Sequence[Mapping[str, Any]], policy: Mapping[str, str]) -> messages.StartResponse:
        """Start a batch."""
        body = {"policy": dict(policy), "rollouts": list(rollouts)}
        return await self._post("startRollouts", "/rollouts", body, messages.StartResponse, self._settings.call_ms)

    async def acks(self, receipts: Sequence[Any]) -> messages.AcksResponse:
        """Say that results are saved or settled."""
        body = {"receipts": [{"rollout_id": r[0], "attempt": r[1], "digest": r[2]} for r in receipts]}
        return await self._post("ackResults", "/acks", body, messages.AcksResponse, self._settings.call_ms)

    # --- artifacts --------------------------------------------------------------------------------------------

    async def get_artifact(self, checkpoint_id: str, name: str) -> bytes:
        """Return one file of a committed cut."""
        path = f"/checkpoints/{checkpoint_id}/artifacts/{name}"
        return await self._retrying(
            _Call("getArtifact", "GET", path, self._settings.call_ms), lambda reply: reply.content
        )

    async def put_artifact(self, checkpoint_id: str, name: str, data: bytes) -> None:
        """Upload one file for a restore."""
        path = f"/checkpoints/{checkpoint_id}/artifacts/{name}"
        await self._retrying(_Call("putArtifact", "PUT", path, self._settings.call_ms, body=data), lambda _: None)

    # --- one call ---------------------------------------------------------------------------------------------

    async def _get(
        self, operation: str, path: str, kind: type[M], query: Mapping[str, Any] | None = None, *, wait_ms: int = 0
    ) -> M:
        call = _Call(operation, "GET", path, self._settings.call_ms + wait_ms, query=query)
        return await self._retrying(call, lambda reply: self._parsed(operation, reply, kind))

    async def _post(
        self,
        operation: str,
        path: str,
        body: Mapping[str, Any],
        kind: type[M],
        timeout_ms: int,
        *,
        budget_s: float | None = None,
    ) -> M:
        call = _Call(operation, "POST", path, timeout_ms, body=body, budget_s=budget_s)
        return await self._retrying(call, lambda reply: self._parsed(operation, reply, kind))

    async def _retrying(self, call: _Call, read: Callable[[httpx.Response], T]) -> T:
        retry, grace_s = self._settings.retry, self._settings.grace_s
        whole_s = (call.timeout_ms / 1000 + grace_s) * retry.attempts
        budget_s = whole_s if call.budget_s is None else call.budget_s
        end = time.monotonic() + budget_s

        async def once() -> T:
            # A try that begins late does not add its whole wait to the budget: everybody else may be waiting for it.
            present = call if call.budget_s is None else call.within(end - time.monotonic())
            # Reading belongs to the try: a cut reply is as indefinite as a reset.
            return read(await self._once(present, present.timeout_ms / 1000 + grace_s))

        return await retry.run(once, budget_s)

    def pace(self) -> Pace:
        """Return what keeps two calls apart of which the participant should have made the second one wait."""
        return Pace(self._settings.retry.first_wait_s)

    async def _once(self, call: _Call, limit_s: float) -> httpx.Response:
        if self._http.is_closed:
            raise Unreachable(self.name, call.operation, "the run is ending, its connections are closed")
        request = self._http.build_request(
            call.method,
            self.url + wire.PREFIX + call.path,
            params={k: v for k, v in (call.query or {}).items() if v is not None},
            headers=self._headers(call.method, call.body),
            content=_content(call.body),
            timeout=httpx.Timeout(limit_s, connect=self._settings.connect_s, pool=limit_s),
        )
        try:
            # httpx limits each read, not the whole reply: a server that trickles bytes must not hold the caller.
            async with asyncio.timeout(limit_s + self._settings.connect_s):
                reply = await self._http.send(request)
        except _NOT_SENT as error:
            raise Unreachable(self.name, call.operation, str(error) or type(error).__name__) from error
        except (httpx.HTTPError, TimeoutError) as error:
            raise Indefinite(self.name, call.operation, str(error) or type(error).__name__) from error
        self.seen_incarnation = reply.headers.get(wire.HEADER_INCARNATION, self.seen_incarnation)
        if reply.is_success:
            return reply
        raise self._failure(call.operation, reply)

    def _headers(self, method: str, body: Mapping[str, Any] | bytes | None) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if body is not None:
            headers["Content-Type"] = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        if method == "GET":
            return headers
        if self._controller.epoch is None or self.expected_incarnation is None:
            raise RuntimeError("a mutating call needs a claimed epoch and a discovered participant")
        headers[wire.HEADER_CONTROLLER_ID] = self._controller.id
        headers[wire.HEADER_CONTROLLER_EPOCH] = str(self._controller.epoch)
        headers[wire.HEADER_EXPECT_INCARNATION] = self.expected_incarnation
        return headers

    def _parsed(self, operation: str, reply: httpx.Response, kind: type[M]) -> M:
        try:
            return kind.read(reply.content)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "json_invalid":
                raise Indefinite(self.name, operation, f"the reply is not JSON: {first['msg']}") from error
            where = ".".join(str(part) for part in first["loc"])
            raise BrokenReply(self.name, operation, f"{where}: {first['msg']}") from error

    def _failure(self, operation: str, reply: httpx.Response) -> Exception:
        try:
            content = reply.json()
        except ValueError:
            content = None
        if operation == "getCapabilities" and reply.status_code == 404:
            return NotAParticipant(self.name, operation)
        if not isinstance(content, dict) or not isinstance(content.get("code"), str):
            kind = reply.headers.get("content-type", "no content type")
            return Indefinite(self.name, operation, f"status {reply.status_code} without a problem document ({kind})")
        problem = read_problem(content, reply, operation)
        if problem.code == "stale_controller":
            current = problem.controller or {}
            return Superseded(
                f"{self.name} obeys controller {current.get('id')} of epoch {current.get('epoch')}, "
                f"not {self._controller.id} of {self._controller.epoch}"
            )
        return Refused(self.name, operation, problem)


def read_problem(content: Mapping[str, Any], reply: httpx.Response, operation: str) -> Problem:
    """Return a problem document; where the catalogue knows its code, the catalogue decides about ``definite``.

    A body that contradicts the catalogue is a broken server, and believing the weaker claim is the safe side; nothing
    ``continues`` where the catalogue says that the failure is definite.
    """
    code = content["code"]
    known = load().errors.get(code)
    retryable = bool(content.get("retryable", known.retryable if known else False))
    definite = bool(content.get("definite", False)) and (known is None or known.definite_on(operation))
    wait = content.get("retry_after_ms")
    header = reply.headers.get("retry-after", "")
    if wait is None and header.isdecimal():
        wait = int(header) * 1000
    return Problem(
        code=code,
        status=reply.status_code,
        title=str(content.get("title", "")),
        detail=str(content.get("detail", "")),
        retryable=retryable,
        definite=definite,
        retry_after_ms=wait,
        phase=content.get("phase"),
        checkpoint_id=content.get("checkpoint_id"),
        continues=bool(content.get("continues", False)) and (known is None or not known.definite_on(operation)),
        blockers=content.get("blockers", ()),
        controller=content.get("controller"),
        rollouts=content.get("rollouts", ()),
        raw=content,
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """One call: its limit is in milliseconds, its budget with all repeats in seconds."""

    operation: str
    method: str
    path: str
    timeout_ms: int
    query: Mapping[str, Any] | None = None
    body: Mapping[str, Any] | bytes | None = None
    budget_s: float | None = None

    def within(self, left_s: float) -> _Call:
        """Return the call with a wait that ends with what is left of its budget."""
        left_ms = max(1, round(left_s * 1000))
        if left_ms >= self.timeout_ms or not isinstance(self.body, Mapping):
            return self
        return replace(self, timeout_ms=left_ms, body={**self.body, "timeout_ms": left_ms})


def is_gone(error: GymError) -> bool:
    """Return whether the participant's state is another one than the caller expects."""
    return error.code == "stale_incarnation"


def _content(body: Mapping[str, Any] | bytes | None) -> bytes | None:
    if body is None or isinstance(body, bytes):
        return body
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
