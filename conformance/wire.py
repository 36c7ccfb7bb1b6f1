# SPDX-License-Identifier: Apache-2.0
"""The one transport of the suite: records every exchange, judges every message, injects faults.

A request of the suite's own that does not fit openapi.yaml is the suite's fault (`MalformedRequest`, exit code 3); a
request that is meant to be malformed goes through `raw`. A response that does not fit is the Gym's fault
(`ResponseViolation`).
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from conformance.connections import Connections, NoAnswer, NotSent
from conformance.errors import Lost, LostReply, LostRequest, MalformedRequest, ResponseViolation, SuiteFault
from conformance.exchanges import Exchange, Fault, Reply, parsed
from conformance.judge import Judge
from conformance.patience import Patience
from spec import wire as names

T = TypeVar("T")

OPERATIONS: Mapping[str, tuple[str, str]] = {
    "getCapabilities": ("GET", names.PREFIX + "/capabilities"),
    "getCheckpoint": ("GET", names.PREFIX + "/checkpoint"),
    "prepare": ("POST", names.PREFIX + "/checkpoint/prepare"),
    "commit": ("POST", names.PREFIX + "/checkpoint/commit"),
    "resume": ("POST", names.PREFIX + "/checkpoint/resume"),
    "abort": ("POST", names.PREFIX + "/checkpoint/abort"),
    "renew": ("POST", names.PREFIX + "/checkpoint/renew"),
    "restore": ("POST", names.PREFIX + "/checkpoint/restore"),
    "retire": ("POST", names.PREFIX + "/retire"),
    "getArtifact": ("GET", names.PREFIX + "/checkpoints/{checkpoint_id}/artifacts/{name}"),
    "putArtifact": ("PUT", names.PREFIX + "/checkpoints/{checkpoint_id}/artifacts/{name}"),
    "startRollouts": ("POST", names.PREFIX + "/rollouts"),
    "listRollouts": ("GET", names.PREFIX + "/rollouts"),
    "getRollout": ("GET", names.PREFIX + "/rollouts/{rollout_id}"),
    "getResults": ("GET", names.PREFIX + "/results"),
    "ackResults": ("POST", names.PREFIX + "/acks"),
    "probeEffect": ("POST", names.PROBE_PATH),
}
"""Method and path of every operation, by its operationId."""

NO_SCHEMA, NO_INCARNATION = "CKPT-ERR-039", "CKPT-ID-017"
"""What every response of a participant must be, whatever check sees it."""

MAX_EXCHANGES = 4000
MAX_KEPT_BYTES = 64 * 1024
REPLY_WITHIN_S = 15.0
CONNECT_WITHIN_S = 5.0
WORKERS = 72

Plane = Literal["control", "data", "none"]


class Wire:
    """The transport. Thread-safe; one per run.

    Args:
        judge: validates the messages; None switches validation off (tests of the transport itself).
        patience: scales the bounds.
        tokens: bearer token by plane (`control`, `data`); a missing one is not sent.
    """

    def __init__(self, judge: Judge | None, patience: Patience, tokens: Mapping[str, str] | None = None) -> None:
        self.judge = judge
        self.patience = patience
        self.tokens = dict(tokens or {})
        self.exchanges: deque[Exchange] = deque(maxlen=MAX_EXCHANGES)
        self._count = 0
        self._lock = threading.Lock()
        self._connections = Connections()
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="conformance-wire")

    def close(self) -> None:
        """Close every connection and end the worker threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._connections.close()

    def reconnect(self) -> None:
        """Forget every open connection (the process at the other end was replaced)."""
        self._connections.close()

    @property
    def made(self) -> int:
        """How many exchanges there were, those included that are not kept any more."""
        return self._count

    # --- calls ---

    def call(
        self,
        operation: str,
        base_url: str,
        *,
        body: Any = None,
        content: bytes | None = None,
        path: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        plane: Plane = "control",
        within_s: float = REPLY_WITHIN_S,
        fault: Fault | None = None,
        judged: bool = True,
    ) -> Reply:
        """Send one well-formed request and return its judged reply.

        Args:
            operation: operationId in openapi.yaml.
            base_url: URL of the participant, without a path.
            body: the JSON to send; None sends none.
            content: bytes to send instead (artifacts).
            path: values of the path's parameters.
            query: query parameters; those that are None are left out.
            headers: protocol headers.
            plane: whose token is sent.
            within_s: bound for the reply, before scaling.
            fault: what to do to this exchange.
            judged: False leaves the response unjudged (for a server that is not promised to be a participant).

        Raises:
            MalformedRequest: the request does not fit openapi.yaml.
            ResponseViolation: the response does not.
            LostRequest: not sent (on order, or the connection was refused).
            LostReply: sent, and no usable reply came.
        """
        method, template = OPERATIONS[operation]
        where = template.format(**{key: quote(value, safe="") for key, value in (path or {}).items()})
        asked = {key: value for key, value in (query or {}).items() if value is not None}
        url = base_url.rstrip("/") + where + (f"?{urlencode(asked)}" if asked else "")
        data, sent = self._encode(body, content, headers, plane)
        if self.judge is not None:
            faults = self.judge.request_faults(method, url, sent, data)
            if faults:
                raise MalformedRequest(f"{operation}: {'; '.join(faults)}")
        reply = self._faulted(operation, method, url, sent, data, within_s, fault)
        if judged:
            self.judge_reply(reply, operation)
            if reply.twin is not None:
                self.judge_reply(reply.twin, operation)
        return reply

    def raw(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | Iterator[bytes] | None = None,
        plane: Plane = "control",
        within_s: float = REPLY_WITHIN_S,
        operation: str = "raw",
    ) -> Reply:
        """Send anything, well-formed or not, and return the reply unjudged."""
        sent = dict(headers or {})
        if plane in self.tokens and not any(name.lower() == "authorization" for name in sent):
            sent["Authorization"] = f"Bearer {self.tokens[plane]}"
        return self._send(operation, method, url, sent, content, within_s)

    def judge_reply(self, reply: Reply, operation: str) -> None:
        """Judge a reply against openapi.yaml and the error catalogue.

        Raises:
            ResponseViolation: it does not fit.
        """
        if self.judge is None:
            return
        exchange = reply.exchange
        pairs = list(reply.headers.items())
        faults = self.judge.response_faults(exchange.method, exchange.url, reply.status, pairs, reply.content)
        broken = {NO_INCARNATION if names.HEADER_INCARNATION in fault else NO_SCHEMA for fault in faults}
        if reply.status >= 400:
            against = self.judge.problem_faults(reply.status, reply.json, operation)
            faults += against.values()
            broken |= set(against)
        if faults:
            exchange.note = f"{exchange.note} violates openapi.yaml".strip()
            raise ResponseViolation(
                f"the response to {operation} fits openapi.yaml",
                expected="a response that openapi.yaml and the error catalogue describe",
                got=f"{reply.brief}: {'; '.join(faults)}",
                requirements=sorted(broken),
            )

    # --- several at a time ---

    def background(self, function: Callable[[], T]) -> Future[T]:
        """Run a call on a worker thread and return its future."""
        return self._pool.submit(function)

    def together(self, functions: Sequence[Callable[[], T]], *, within_s: float = 30.0) -> list[T]:
        """Run calls at the same time and return their results in order; the first exception is raised.

        At most 64 functions.
        """
        if len(functions) > WORKERS - 8:
            raise SuiteFault(f"{len(functions)} calls at once are more than the transport has threads")
        gate = threading.Barrier(len(functions))

        def at_once(function: Callable[[], T]) -> T:
            gate.wait(self.patience.seconds(within_s))
            return function()

        futures = [self._pool.submit(at_once, function) for function in functions]
        return [future.result(self.patience.seconds(within_s)) for future in futures]

    @contextmanager
    def recording(self) -> Iterator[list[Exchange]]:
        """Collect the exchanges of a block into the yielded list."""
        start = self._count
        found: list[Exchange] = []
        try:
            yield found
        finally:
            with self._lock:
                found.extend(exchange for exchange in self.exchanges if exchange.number >= start)

    # --- inside ---

    def _encode(
        self, body: Any, content: bytes | None, headers: Mapping[str, str] | None, plane: Plane
    ) -> tuple[bytes | None, dict[str, str]]:
        sent = dict(headers or {})
        data = content
        if body is not None:
            data = json.dumps(body, allow_nan=False).encode()
            sent["Content-Type"] = "application/json"
        elif content is not None:
            sent.setdefault("Content-Type", "application/octet-stream")
        if plane in self.tokens:
            sent["Authorization"] = f"Bearer {self.tokens[plane]}"
        return data, sent

    def _faulted(
        self,
        operation: str,
        method: str,
        url: str,
        headers: dict[str, str],
        data: bytes | None,
        within_s: float,
        fault: Fault | None,
    ) -> Reply:
        def send() -> Reply:
            return self._send(operation, method, url, headers, data, within_s)

        if fault is None:
            return send()
        if fault.kind == "lost_request":
            exchange = self._record(operation, method, url, headers, data)
            exchange.note = "request lost on order, never sent"
            raise LostRequest("the request was lost on order of the suite", exchange)
        if fault.kind == "lost_reply":
            reply = send()
            reply.exchange.note = "reply lost on order, never seen by the caller"
            raise LostReply("the reply was lost on order of the suite", reply.exchange)
        if fault.kind == "duplicate":
            first, second = self.together([send, send])
            return Reply(first.status, first.headers, first.content, first.json, first.exchange, second)
        if fault.kind == "delay":
            self.patience.pause(fault.ms / 1000)
            return send()
        return self._disconnect(operation, method, url, headers, data, fault.ms)

    def _record(
        self, operation: str, method: str, url: str, headers: Mapping[str, str], data: bytes | None
    ) -> Exchange:
        with self._lock:
            exchange = Exchange(
                self._count, operation, method, url, dict(headers), (data or b"")[:MAX_KEPT_BYTES], time.monotonic()
            )
            self._count += 1
            self.exchanges.append(exchange)
        return exchange

    def _send(
        self,
        operation: str,
        method: str,
        url: str,
        headers: Mapping[str, str],
        data: bytes | Iterator[bytes] | None,
        within_s: float,
    ) -> Reply:
        kept = data if isinstance(data, bytes) else None
        exchange = self._record(operation, method, url, headers, kept)
        connect_s, silence_s = self.patience.seconds(CONNECT_WITHIN_S), self.patience.seconds(within_s)
        try:
            answer = self._connections.send(method, url, headers, data, connect_s=connect_s, silence_s=silence_s)
        except NotSent as error:
            exchange.note = f"never sent: {error}"
            raise LostRequest(f"{method} {url}: {error}", exchange) from error
        except NoAnswer as error:
            exchange.note = f"no reply: {error}"
            raise LostReply(f"{method} {url}: {error}", exchange) from error
        finally:
            exchange.seconds = time.monotonic() - exchange.started_at
        exchange.status = answer.status
        exchange.response_headers = dict(answer.headers)
        exchange.response_body = answer.content[:MAX_KEPT_BYTES]
        return Reply(answer.status, exchange.response_headers, answer.content, parsed(answer.content), exchange)

    def _disconnect(
        self, operation: str, method: str, url: str, headers: Mapping[str, str], data: bytes | None, after_ms: int
    ) -> NoReturn:
        """Send a whole request over a bare socket and reset the connection a moment later."""
        exchange = self._record(operation, method, url, headers, data)
        parts = urlsplit(url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = [f"{method} {target} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(data or b'')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        message = "\r\n".join([*lines, "", ""]).encode("latin-1") + (data or b"")
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 80), self.patience.seconds(5)) as sock:
                sock.sendall(message)
                select.select([sock], [], [], after_ms / 1000)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        except ConnectionRefusedError as error:
            raise LostRequest(f"{method} {url}: {error}", exchange) from error
        except OSError as error:
            raise LostReply(f"{method} {url}: {error}", exchange) from error
        exchange.note = f"connection reset by the suite {after_ms} ms after the request"
        raise LostReply(exchange.note, exchange)


__all__ = ["OPERATIONS", "Exchange", "Fault", "Lost", "Plane", "Reply", "Wire"]
