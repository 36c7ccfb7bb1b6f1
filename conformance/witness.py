# SPDX-License-Identifier: Apache-2.0
"""The witness: an OpenAI-compatible policy that the suite serves; clock and witness of turns.

It decides when a generation ends, and it counts what is asked and completed per (rollout, attempt, turn). What it
answers depends on the script of the rollout and on the conversation alone, never on how often it was asked.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from conformance import openai_forms as forms
from conformance.generations import Api, Generation, Order, State
from conformance.loopback import Listener, Loopback
from conformance.patience import Journal, Patience
from conformance.script import Script, script
from spec import wire as names

MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass(eq=False)
class Hold:
    """An order to keep generations open; `release()` (or leaving it as a context manager) lets them end."""

    rollout_id: str | None
    turn: int | None
    attempt: int | None
    _witness: Witness = field(repr=False)
    _event: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    released: bool = False

    def wait_asked(self, count: int = 1, *, within_s: float = 5.0) -> Generation:
        """Wait until `count` generations that this order holds are open, and return the last of them."""
        return self._witness.wait_asked(
            self.rollout_id, self.turn, attempt=self.attempt, count=count, still_open=True, within_s=within_s
        )

    def release(self) -> None:
        """Let the held generations end; later ones are not held any more."""
        self._witness._release(self)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Witness:
    """The policy model that the suite serves.

    Args:
        loopback: the thread that serves it.
        patience: scales the bounds of its waits.

    It listens on one address, `main`; `address(name)` opens more, so that a rollout can be sent to another one.
    """

    MODEL = "witness"

    def __init__(self, loopback: Loopback, patience: Patience) -> None:
        self._loopback = loopback
        self._journal = Journal(patience)
        self._generations: list[Generation] = []
        self._scripts: dict[str, Script] = {}
        self._default = script("done")
        self._holds: list[Hold] = []
        self._orders: list[Order] = []
        self._responses: dict[str, list[Any]] = {}
        self._marks: dict[str, tuple[dict[int, int], bool]] = {}
        self._listeners: dict[str, Listener] = {}
        self.address("main")

    # --- addresses ---

    def address(self, name: str = "main") -> str:
        """Return the base URL of a named address, opening it the first time."""
        if name not in self._listeners:
            app = web.Application(client_max_size=MAX_BODY_BYTES)
            app.router.add_post("/v1/chat/completions", self._handler(name, "chat_completions"))
            app.router.add_post("/v1/responses", self._handler(name, "responses"))
            app.router.add_get("/v1/models", self._models)
            self._listeners[name] = Listener(self._loopback, app)
        return self._listeners[name].url + "/v1"

    def policy(self, address: str = "main", *, api: Api = "chat_completions") -> dict[str, str]:
        """Return the `policy` object of the protocol for one address."""
        return {"base_url": self.address(address), "model": self.MODEL, "api": api}

    def refuse(self, address: str = "main") -> None:
        """Refuse connections on an address and drop the open ones."""
        self.address(address)
        self._listeners[address].refuse()

    def accept(self, address: str = "main") -> None:
        """Accept connections on an address again, on the same port."""
        self._listeners[address].open()

    def close(self) -> None:
        """Release everything and stop listening."""
        self.release_all()
        for listener in self._listeners.values():
            listener.close()

    # --- orders ---

    def script(self, rollout_id: str, written: Script) -> None:
        """Set what the policy says in one rollout; a rollout without a script is answered `done`."""
        with self._journal.changed:
            self._scripts[rollout_id] = written

    def hold(self, rollout_id: str | None = None, turn: int | None = None, *, attempt: int | None = None) -> Hold:
        """Keep generations open from now on (None stands for any) until the returned order is released."""
        order = Hold(rollout_id, turn, attempt, self)
        with self._journal.changed:
            self._holds.append(order)
        return order

    def release_all(self, prefix: str = "") -> None:
        """Release every hold whose rollout id starts with `prefix`; with the empty prefix, every hold."""
        with self._journal.changed:
            chosen = [hold for hold in self._holds if (hold.rollout_id or "").startswith(prefix)]
        for hold in chosen:
            self._release(hold)

    def _release(self, hold: Hold) -> None:
        with self._journal.changed:
            hold.released = True
            if hold in self._holds:
                self._holds.remove(hold)
        self._loopback.soon(hold._event.set)

    def answer(
        self,
        status: int,
        rollout_id: str | None = None,
        turn: int | None = None,
        *,
        attempt: int | None = None,
        times: int = 1,
        retry_after_s: float | None = None,
    ) -> None:
        """Answer the next `times` matching calls with an error status (429, 503, …) instead of a generation."""
        with self._journal.changed:
            self._orders.append(Order(rollout_id, turn, attempt, status, retry_after_s, times))

    def drop(
        self, rollout_id: str | None = None, turn: int | None = None, *, attempt: int | None = None, times: int = 1
    ) -> None:
        """Cut the connection of the next `times` matching calls without an answer."""
        with self._journal.changed:
            self._orders.append(Order(rollout_id, turn, attempt, None, None, times))

    def mark(self, rollout_id: str, versions: Mapping[int, int], *, data_refs: bool = False) -> None:
        """Let replies carry `Gym-Policy-Version` by turn, and with `data_refs` a `data_ref` `<rollout_id>/<turn>`."""
        with self._journal.changed:
            self._marks[rollout_id] = (dict(versions), data_refs)

    def forget(self, prefix: str) -> None:
        """Forget scripts, holds, orders and records of the rollouts whose id starts with `prefix` (not empty)."""
        if not prefix:
            raise ValueError("a prefix is needed")
        self.release_all(prefix)
        with self._journal.changed:
            self._scripts = {key: value for key, value in self._scripts.items() if not key.startswith(prefix)}
            self._orders = [order for order in self._orders if not (order.rollout_id or "").startswith(prefix)]
            self._generations = [g for g in self._generations if not (g.rollout_id or "").startswith(prefix)]

    # --- what happened ---

    def generations(
        self,
        rollout_id: str | None = None,
        turn: int | None = None,
        *,
        attempt: int | None = None,
        state: State | None = None,
        address: str | None = None,
    ) -> list[Generation]:
        """Return the matching policy calls in the order in which they were asked; None stands for any."""
        with self._journal.changed:
            return [
                g
                for g in self._generations
                if g.matches(rollout_id, turn, attempt) and state in (None, g.state) and address in (None, g.address)
            ]

    def asked(self, rollout_id: str | None = None, turn: int | None = None, *, attempt: int | None = None) -> int:
        """Return how often the policy was asked, whatever came of it."""
        return len(self.generations(rollout_id, turn, attempt=attempt))

    def completed(self, rollout_id: str | None = None, turn: int | None = None, *, attempt: int | None = None) -> int:
        """Return how many generations were completed."""
        return len(self.generations(rollout_id, turn, attempt=attempt, state="completed"))

    def completed_by_turn(self, rollout_id: str) -> Counter[int]:
        """Return how often each turn of a rollout was completed, over all attempts."""
        return Counter(g.conversation_turn for g in self.generations(rollout_id, state="completed"))

    def wait_asked(
        self,
        rollout_id: str | None = None,
        turn: int | None = None,
        *,
        attempt: int | None = None,
        count: int = 1,
        still_open: bool = False,
        within_s: float = 5.0,
    ) -> Generation:
        """Wait until the policy was asked `count` times (with `still_open`: has that many open), return the last.

        Raises:
            TimedOut: it was not asked that often within the bound.
        """
        state: State | None = "asked" if still_open else None
        what = f"the policy is asked for turn {turn or 'any'} of {rollout_id or 'any rollout'}"
        return self._wait(rollout_id, turn, attempt, state, count, what, within_s)

    def wait_completed(
        self,
        rollout_id: str | None = None,
        turn: int | None = None,
        *,
        attempt: int | None = None,
        count: int = 1,
        within_s: float = 5.0,
    ) -> Generation:
        """Wait until `count` matching generations were completed, and return the last of them.

        Raises:
            TimedOut: they were not within the bound.
        """
        what = f"turn {turn or 'any'} of {rollout_id or 'any rollout'} is generated"
        return self._wait(rollout_id, turn, attempt, "completed", count, what, within_s)

    def wait_until(self, condition: Callable[[], Any], what: str, *, within_s: float = 5.0) -> Any:
        """Wait until a condition over this witness is true; it is looked at after each of its records."""
        return self._journal.wait_for(condition, what, within_s=within_s, got=self._summary)

    def _wait(
        self,
        rollout_id: str | None,
        turn: int | None,
        attempt: int | None,
        state: State | None,
        count: int,
        what: str,
        within_s: float,
    ) -> Generation:
        def found() -> list[Generation]:
            seen = [g for g in self._generations if g.matches(rollout_id, turn, attempt) and state in (None, g.state)]
            return seen if len(seen) >= count else []

        times = "" if count == 1 else f" {count} times"
        return self._journal.wait_for(found, what + times, within_s=within_s, got=self._summary)[-1]

    def _summary(self) -> str:
        last = self._generations[-8:]
        seen = ", ".join(f"{g.rollout_id}/a{g.attempt}/t{g.conversation_turn}:{g.state}" for g in last)
        return f"policy calls so far {len(self._generations)}, the last: {seen or 'none'}"

    # --- serving (on the loopback thread) ---

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.MODEL, "object": "model"}]})

    def _handler(self, address: str, api: Api) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._serve(request, address, api)

        return handle

    async def _serve(self, request: web.Request, address: str, api: Api) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
            items = body["messages"] if api == "chat_completions" else self._conversation(body)
            turn = forms.chat_turn(items) if api == "chat_completions" else forms.response_turn(items)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return web.json_response({"error": {"message": f"not an OpenAI request: {error}"}}, status=400)
        number = self._ask(request, address, api, turn, body)
        try:
            return await self._end(request, number, body, items)
        except (asyncio.CancelledError, ConnectionError):
            self._mark(number, "abandoned")
            raise

    def _conversation(self, body: dict[str, Any]) -> list[Any]:
        before = self._responses.get(body.get("previous_response_id") or "", [])
        return [*before, *forms.response_items(body["input"])]

    def _ask(self, request: web.Request, address: str, api: Api, turn: int, body: dict[str, Any]) -> int:
        headers = {name.lower(): value for name, value in request.headers.items()}
        if "authorization" in headers:
            headers["authorization"] = "***"
        with self._journal.changed:
            number = len(self._generations) and self._generations[-1].number + 1
            self._generations.append(
                Generation(
                    number=number,
                    address=address,
                    api=api,
                    rollout_id=request.headers.get(names.HEADER_ROLLOUT_ID),
                    attempt=_integer(request.headers.get(names.HEADER_ATTEMPT)),
                    turn=_integer(request.headers.get(names.HEADER_TURN)),
                    conversation_turn=turn,
                    stream=bool(body.get("stream")),
                    body=body,
                    headers=headers,
                    asked_at=time.monotonic(),
                )
            )
            self._journal.changed.notify_all()
        return number

    def _mark(self, number: int, state: State) -> None:
        with self._journal.changed:
            for place in range(len(self._generations) - 1, -1, -1):
                found = self._generations[place]
                if found.number == number and found.state == "asked":
                    self._generations[place] = replace(found, state=state, ended_at=time.monotonic())
            self._journal.changed.notify_all()

    async def _end(
        self, request: web.Request, number: int, body: dict[str, Any], items: list[Any]
    ) -> web.StreamResponse:
        with self._journal.changed:
            generation = next(g for g in reversed(self._generations) if g.number == number)
        while hold := self._holding(generation):
            await hold._event.wait()
        order = self._ordered(generation)
        if order is not None:
            return await self._misbehave(request, number, order)
        with self._journal.changed:
            written = self._scripts.get(generation.rollout_id or "", self._default)
            versions, data_refs = self._marks.get(generation.rollout_id or "", ({}, False))
        answer = written.turn(generation.conversation_turn)
        model = str(body.get("model", self.MODEL))
        if generation.api == "chat_completions":
            reply = forms.chat_reply(model, items, generation.conversation_turn, answer)
            events = forms.chat_stream(reply)
        else:
            reply = forms.response_reply(model, items, generation.conversation_turn, answer)
            events = forms.response_stream(reply)
            self._responses[reply["id"]] = [*items, *reply["output"]]
        if data_refs:
            reply["data_ref"] = {"key": f"{generation.rollout_id}/{generation.conversation_turn}"}
        version = versions.get(generation.conversation_turn)
        headers = {} if version is None else {names.HEADER_POLICY_VERSION: str(version)}
        self._mark(number, "completed")
        if not generation.stream:
            return web.json_response(reply, headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        await response.write_eof()
        return response

    def _holding(self, generation: Generation) -> Hold | None:
        with self._journal.changed:
            for hold in self._holds:
                if not hold.released and generation.matches(hold.rollout_id, hold.turn, hold.attempt):
                    return hold
        return None

    def _ordered(self, generation: Generation) -> Order | None:
        with self._journal.changed:
            for order in self._orders:
                if order.left > 0 and generation.matches(order.rollout_id, order.turn, order.attempt):
                    order.left -= 1
                    return order
        return None

    async def _misbehave(self, request: web.Request, number: int, order: Order) -> web.Response:
        if order.status is None:
            self._mark(number, "dropped")
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=500)
        self._mark(number, "refused")
        headers = {} if order.retry_after_s is None else {"Retry-After": f"{order.retry_after_s:g}"}
        error = {"error": {"message": "on order of the suite", "type": "server_error", "code": str(order.status)}}
        return web.json_response(error, status=order.status, headers=headers)


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


__all__ = ["Api", "Generation", "Hold", "State", "Witness"]
