# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: which operation a request means, the order of checks, and answers in the one form."""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote

from tests.second_gym import forms
from tests.second_gym.gym import Gym
from tests.second_gym.refusals import Refusal

Json = dict[str, Any]
LOG = logging.getLogger("second_gym")
PREFIX = "/gym-checkpoint/"
PROBE = "/gym-conformance/v1/effect"
MOST_SKIPPED = 256 * 1024 * 1024
STATES = ("running", "parked", "waiting_policy", "restart", "finished", "failed", "released", "retired")
CONTROLLER_HEADERS = ("Gym-Controller-Id", "Gym-Controller-Epoch", "Gym-Expect-Incarnation")
ROUTES: dict[str, dict[str, str]] = {
    "/capabilities": {"GET": "capabilities"},
    "/checkpoint": {"GET": "status"},
    **{f"/checkpoint/{n}": {"POST": n} for n in ("prepare", "commit", "resume", "abort", "renew", "restore")},
    "/retire": {"POST": "retire"},
    "/rollouts": {"GET": "list_rollouts", "POST": "start"},
    "/results": {"GET": "results"},
    "/acks": {"POST": "ack"},
}
BATCHES = {"start": ("rollouts", "max_batch"), "ack": ("receipts", "max_batch"), "retire": ("rollouts", "max_batch")}


@dataclass(frozen=True)
class Tokens:
    """The bearer tokens of the two planes; None: none is asked for."""

    control: str | None
    data: str | None


class Server(ThreadingHTTPServer):
    """Serves a Gym on one address."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], gym: Gym, tokens: Tokens) -> None:
        self.gym = gym
        self.tokens = tokens
        super().__init__(address, Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing about clients that went away."""


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    # --- from request to answer ---

    def _serve(self) -> None:
        operation = "unknown"
        self._body: bytes | Refusal | None = None
        try:
            path = unquote(self.path.partition("?")[0])
            self._body = self._read_body()
            operation, answer = self._route(path)
            status, document = 200, answer(time.monotonic())
            headers: Json = {}
        except Refusal as refusal:
            status, document = refusal.problem(operation)
            headers = refusal.headers
        except Exception:
            reference = secrets.token_hex(4)
            LOG.exception("fault %s in %s", reference, operation)
            status, document = Refusal("internal", f"See the log of the server, {reference}.").problem(operation)
            headers = {}
        self._answer(status, document, headers)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = _serve  # noqa: N815 (named by http.server)

    def _answer(self, status: int, document: object, headers: Json) -> None:
        body = json.dumps(document).encode("ascii")
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if status < 400 else "application/problem+json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Gym-Incarnation", self.server.gym.incarnation)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what http.server itself refuses, in the one form."""
        self.close_connection = True
        refused = Refusal("method_not_allowed" if code == 501 else "invalid_request", message or "This is not HTTP.")
        if not hasattr(self, "headers"):
            self.command, self.request_version = "", self.protocol_version
        status, document = refused.problem("unknown")
        self._answer(status, document, {"Allow": "GET, POST"} if code == 501 else {})

    def log_message(self, *_: object) -> None:
        """Write no access log: nothing to keep a token out of."""

    def _read_body(self) -> bytes | Refusal:
        """Return the body, or why it is refused once the token has been checked."""
        most = self.server.gym.limits["max_body_bytes"]
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            return self._read_chunks(most)
        told = self.headers.get("Content-Length", "0")
        if not re.fullmatch(r"[0-9]{1,18}", told):
            self.close_connection = True
            return Refusal("invalid_request", "Content-Length is not a number.")
        length = int(told)
        if length <= most:
            return self.rfile.read(length)
        self.close_connection = True
        left = min(length, MOST_SKIPPED)
        while left > 0 and (skipped := self.rfile.read(min(left, 65536))):
            left -= len(skipped)
        return Refusal("payload_too_large", f"The body has {length} bytes.")

    def _read_chunks(self, most: int) -> bytes | Refusal:
        body, total = bytearray(), 0
        while True:
            try:
                size = int(self.rfile.readline(64).split(b";")[0], 16)
            except ValueError:
                self.close_connection = True
                return Refusal("invalid_request", "A chunk has no size.")
            total += size
            chunk = self.rfile.read(size) if total <= most else b""
            body += chunk
            if total > most:
                self.close_connection = True
                return Refusal("payload_too_large", "The body is too large.")
            self.rfile.readline(64)
            if size == 0:
                return bytes(body)

    # --- the order of checks ---

    def _route(self, path: str) -> tuple[str, Callable[[float], Json]]:
        """Return the operation that a request means and what carries it out; refuse what no operation is."""
        gym = self.server.gym
        if path == PROBE and gym.environments:
            self._authorize(self.server.tokens.data)
            self._allow(("POST",))
            body = self._json("probe")
            if not body["request_id"].startswith(f"{body['rollout_id']}/{body['turn']}/"):
                forms.malformed("body.request_id", "is of another rollout or turn")
            return "probe", lambda arrived: gym.probe(body, arrived)
        if not path.startswith(PREFIX):
            raise Refusal("not_found", "There is nothing at this path.")
        self._authorize(self.server.tokens.control)
        version, _, rest = path.removeprefix(PREFIX).partition("/")
        if re.fullmatch(r"v[0-9]+", version) and version != "v1":
            raise Refusal("unsupported_version", f"{version} is not spoken here.")
        route = "/" + rest
        if version == "v1" and route in ROUTES:
            self._allow(tuple(ROUTES[route]))
            operation = ROUTES[route][self.command]
            return operation, self._read(operation) if self.command == "GET" else self._change(operation)
        name = re.fullmatch(r"/rollouts/([^/]+)", route)
        if version == "v1" and name:
            self._allow(("GET",))
            forms.rollout_id(name[1], "rollout_id")
            return "show", lambda _: self._locked(lambda: gym.show_rollout(name[1]))
        artifact = re.fullmatch(r"/checkpoints/([^/]+)/artifacts/([^/]+)", route)
        if version == "v1" and artifact:
            self._allow(("GET", "PUT"))
            self._artifact(artifact[1], artifact[2])
        raise Refusal("not_found", "There is nothing at this path.")

    def _authorize(self, token: str | None) -> None:
        sent = self.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(f"Bearer {token}".encode(), sent.encode("utf-8", "replace")):
            raise Refusal("unauthorized", "The bearer token is missing or wrong.", None, {"WWW-Authenticate": "Bearer"})

    def _allow(self, methods: tuple[str, ...]) -> None:
        if self.command not in methods:
            detail = f"{self.command} is not served here."
            raise Refusal("method_not_allowed", detail, None, {"Allow": ", ".join(methods)})

    def _typed(self, wanted: str) -> bytes:
        if isinstance(self._body, Refusal):
            raise self._body
        codings = [coding.strip().lower() for coding in self.headers.get("Content-Encoding", "").split(",")]
        if any(coding not in ("", "identity") for coding in codings):
            raise Refusal("unsupported_media_type", "No content coding is decoded.")
        if self.headers.get("Content-Type", "").split(";")[0].strip().lower() != wanted:
            raise Refusal("unsupported_media_type", f"The body is not {wanted}.")
        return self._body or b""

    def _json(self, operation: str) -> Json:
        body = forms.parse(self._typed("application/json"))
        name, limit = BATCHES.get(operation, ("rollouts", "max_live_rollouts" if operation == "restore" else ""))
        items = body.get(name) if isinstance(body, dict) else None
        if limit and isinstance(items, list) and len(items) > self.server.gym.limits[limit]:
            raise Refusal("payload_too_large", f"{name} holds more than {limit} allows.")
        forms.FORMS[operation](body, "body")
        if operation == "restore":
            forms.restore_agrees_with_itself(body)
        return dict(body)

    def _controller(self) -> tuple[int, str, str]:
        """Return epoch, controller id and expected incarnation."""
        for name in CONTROLLER_HEADERS:
            values = self.headers.get_all(name, [])
            if len(values) != 1:
                forms.malformed(name, "is missing or doubled")
            pattern = r"[1-9][0-9]{0,14}" if name == "Gym-Controller-Epoch" else r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
            if not re.fullmatch(pattern, values[0]):
                forms.malformed(name, "does not have its form")
        owner, epoch, expected = (str(self.headers[name]) for name in CONTROLLER_HEADERS)
        return int(epoch), owner, expected

    def _artifact(self, checkpoint_id: str, name: str) -> None:
        """Refuse the artifact requests, whose feature is not offered; faults of form come first."""
        forms.CHECKPOINT_ID(checkpoint_id, "checkpoint_id")
        forms.NAME_128(name, "name")
        if self.command == "PUT":
            self._typed("application/octet-stream")
            self._controller()
        raise Refusal("unsupported", "The feature artifacts_http is not offered.")

    def _change(self, operation: str) -> Callable[[float], Json]:
        """Judge a changing call up to its controller and return what carries it out."""
        gym = self.server.gym
        body = self._json(operation)
        epoch, owner, expected = self._controller()
        if "checkpoint_id" in body and int(body["checkpoint_id"].split("-")[0]) != epoch:
            forms.malformed("body.checkpoint_id", "has another epoch than the header")
        place = body.get("target") or body.get("source") or {}
        if place.get("scheme") == "http":
            raise Refusal("unsupported", "The storage scheme http is not offered.")
        run: dict[str, Callable[[Json, float], Json]] = {
            "start": gym.start,
            "ack": gym.acknowledge,
            "retire": gym.retire,
            "restore": gym.restoring.restore,
            **{name: getattr(gym.saving, name) for name in ("prepare", "commit", "resume", "abort", "renew")},
        }

        def carry_out(arrived: float) -> Json:
            if expected != gym.incarnation:
                raise Refusal("stale_incarnation", f"This is incarnation {gym.incarnation}.")
            gym.phases.adopt(epoch, owner)
            return run[operation](body, arrived)

        return lambda arrived: self._locked(lambda: carry_out(arrived))

    def _read(self, operation: str) -> Callable[[float], Json]:
        gym = self.server.gym
        if operation == "capabilities":
            return lambda _: gym.capabilities()
        if operation == "status":
            return lambda _: self._locked(gym.phases.status)
        given = parse_qsl(self.path.partition("?")[2], keep_blank_values=True)
        query = dict(given)
        known = {"after", "limit", "state" if operation == "list_rollouts" else "wait_ms"}
        if len(query) < len(given) or not query.keys() <= known:
            forms.malformed("query", "has a parameter that is unknown or given twice")
        after = query.get("after", "")
        if len(after) > 1024:
            forms.malformed("after", "is longer than 1024 characters")
        most = self._number(query, "limit", 1, 1000000, gym.limits["max_page_items"])
        if operation == "list_rollouts":
            state = query.get("state")
            if state is not None:
                forms.one_of(*STATES)(state, "state")
            return lambda _: self._locked(lambda: gym.list_rollouts(after, most, state))
        wait_ms = self._number(query, "wait_ms", 0, 86400000, 0)
        return lambda arrived: self._locked(lambda: gym.read_feed(after, most, gym.phases.deadline(arrived, wait_ms)))

    @staticmethod
    def _number(query: dict[str, str], name: str, low: int, high: int, default: int) -> int:
        text = query.get(name)
        if text is None:
            return default
        if not re.fullmatch(r"[0-9]{1,15}", text) or not low <= int(text) <= high:
            forms.malformed(name, f"is not an integer from {low} to {high}")
        return int(text)

    def _locked(self, answer: Callable[[], Json]) -> Json:
        """Answer while nobody else changes anything."""
        with self.server.gym.gate.lock:
            self.server.gym.phases.settle()
            return answer()
