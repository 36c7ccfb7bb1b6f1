# SPDX-License-Identifier: Apache-2.0
"""The way in: who may call, faults on order, problem documents."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from spec import wire
from tests.rl.scripted.machine import SPEC, Machine
from tests.rl.scripted.values import Fault, ProblemError, Received


class Served(Machine):
    """Answers calls with what the verbs return, or with the fault that a test has ordered."""

    def _guarded(self, operation: str, handler: Any) -> Any:
        async def guarded(request: web.Request) -> web.StreamResponse:
            raw = await request.read()
            body = json.loads(raw or b"{}") if request.method == "POST" else {}
            self.received.append(Received(operation, request.method, request.raw_path, dict(request.headers), raw))
            self.calls.append((operation, body if request.method == "POST" else dict(request.query)))
            self.watch(operation)
            if operation in self.hold:
                await self.hold[operation].wait()
            fault = self.faults.get(operation)
            if fault is not None and fault.after > 0:
                fault.after -= 1
                fault = None
            if fault is None or fault.times <= 0:
                return await self._answer(operation, handler, request, body)
            fault.times -= 1
            self.hits[operation] += 1
            return await self._faulty(fault, operation, handler, request, body)

        return guarded

    async def _faulty(
        self, fault: Fault, operation: str, handler: Any, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        kind = fault.kind
        if kind == "reset_before":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if kind == "silence":
            await asyncio.Event().wait()
        reply = None
        if kind in ("reset_after", "cut_json") or fault.acts:
            reply = await self._answer(operation, handler, request, body)
        if kind == "reset_after":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if kind == "cut_json":
            text = reply.text if isinstance(reply, web.Response) else ""
            return web.Response(text=(text or "{}")[:-1], content_type="application/json")
        if kind == "html":
            return web.Response(text="<html>bad gateway</html>", content_type="text/html", status=200)
        if kind == "502":
            return web.Response(text="<html>bad gateway</html>", content_type="text/html", status=502)
        codes = {"500": "internal", "503": "unavailable", "504": "deadline_exceeded"}
        if kind in codes:
            answer = self._problem(ProblemError(codes[kind], continues=kind == "504", retry_after_ms=1), operation)
            if kind == "503":
                answer.headers["Retry-After"] = "0"
            return answer
        return self._problem(ProblemError(kind), operation)

    async def _answer(self, operation: str, handler: Any, request: web.Request, body: dict[str, Any]) -> web.Response:
        try:
            if request.method == "POST":
                self._check_controller(request, body)
            reply = await handler(request, body)
        except ProblemError as problem:
            return self._problem(problem, operation)
        return web.json_response(reply, headers={wire.HEADER_INCARNATION: self.incarnation})

    def _problem(self, problem: ProblemError, operation: str) -> web.Response:
        error = SPEC.errors[problem.code]
        body = {
            "code": error.code,
            "title": error.title,
            "detail": str(problem.fields.pop("detail", error.title)),
            "retryable": error.retryable,
            "definite": error.definite_on(operation),
            **{k: v for k, v in problem.fields.items() if v is not None},
        }
        headers = {wire.HEADER_INCARNATION: self.incarnation}
        return web.json_response(body, status=error.status, headers=headers, content_type="application/problem+json")

    def _check_controller(self, request: web.Request, body: dict[str, Any]) -> None:
        headers = request.headers
        if headers[wire.HEADER_EXPECT_INCARNATION] != self.incarnation:
            raise ProblemError("stale_incarnation")
        pair = wire.ControllerPair.of(int(headers[wire.HEADER_CONTROLLER_EPOCH]), headers[wire.HEADER_CONTROLLER_ID])
        if self.controller is not None and pair < self.controller:
            current = {"id": self.controller.name, "epoch": self.controller.epoch}
            raise ProblemError("stale_controller", controller=current)
        if self.controller is not None and pair > self.controller:
            self._event("higher_controller")
        self.controller = pair
        if "checkpoint_id" in body:
            assert body["checkpoint_id"].split("-")[0] == headers[wire.HEADER_CONTROLLER_EPOCH]
