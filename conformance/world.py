# SPDX-License-Identifier: Apache-2.0
"""The world: the outside that the conformance environment calls; clock and witness of effects.

It decides when an effect begins and ends and whether it fails, and it counts, by request id and by tag, what really
happened: a request id that comes again is answered as before and happens no second time.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aiohttp import web

from conformance.loopback import Listener, Loopback
from conformance.patience import Journal, Patience

Kind = Literal["effect", "verify"]
State = Literal["begun", "ended", "failed", "abandoned"]

DEFAULT_VALUE = 1


@dataclass(frozen=True)
class WorldCall:
    """One call of the conformance environment to the outside.

    Args:
        number: ordinal, from 0.
        kind: `effect` or `verify`.
        rollout_id: as sent.
        attempt: as sent.
        tag: of an effect, else None.
        turn: of an effect, else None.
        request_id: of an effect, else None.
        begun_at: monotonic seconds.
        state: `begun` (still open), `ended` (answered 200), `failed` (an error on order), `abandoned` (caller gone).
        repeated: the request id had happened before.
    """

    number: int
    kind: Kind
    rollout_id: str
    attempt: int
    tag: str | None
    turn: int | None
    request_id: str | None
    begun_at: float
    state: State = "begun"
    repeated: bool = False


@dataclass(eq=False)
class WorldHold:
    """An order to keep calls open; `release()` (or leaving it as a context manager) lets them end."""

    kind: Kind
    tag: str | None
    rollout_id: str | None
    _world: World = field(repr=False)
    _event: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    released: bool = False

    def wait_begun(self, count: int = 1, *, within_s: float = 5.0) -> WorldCall:
        """Wait until `count` calls that this order holds are open, and return the last of them."""
        return self._world.wait_begun(
            self.tag, rollout_id=self.rollout_id, kind=self.kind, count=count, still_open=True, within_s=within_s
        )

    def release(self) -> None:
        """Let the held calls end; later ones are not held any more."""
        self._world._release(self)

    def __enter__(self) -> WorldHold:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


@dataclass
class _Failure:
    kind: Kind
    tag: str | None
    rollout_id: str | None
    status: int | None
    left: int


class World:
    """The outside of the conformance environment.

    Args:
        loopback: the thread that serves it.
        patience: scales the bounds of its waits.
        port: 0 for any free one; a given one when the Gym was started with a fixed world URL.
    """

    def __init__(self, loopback: Loopback, patience: Patience, port: int = 0) -> None:
        self._loopback = loopback
        self._journal = Journal(patience)
        self._calls: list[WorldCall] = []
        self._values: dict[str, int] = {}
        self._holds: list[WorldHold] = []
        self._failures: list[_Failure] = []
        app = web.Application()
        app.router.add_post("/effects", self._serve_effect)
        app.router.add_post("/verify", self._serve_verify)
        self._listener = Listener(loopback, app, port)

    @property
    def url(self) -> str:
        """The world URL that the Gym is started with."""
        return self._listener.url

    def close(self) -> None:
        """Release everything and stop listening."""
        self.release_all()
        self._listener.close()

    # --- orders ---

    def value(self, tag: str, value: int) -> None:
        """Answer a tag with a value from now on (default 1)."""
        with self._journal.changed:
            self._values[tag] = value

    def hold(self, tag: str | None = None, *, rollout_id: str | None = None, kind: Kind = "effect") -> WorldHold:
        """Keep calls open from now on (None stands for any) until the returned order is released."""
        order = WorldHold(kind, tag, rollout_id, self)
        with self._journal.changed:
            self._holds.append(order)
        return order

    def fail(
        self,
        tag: str | None = None,
        *,
        rollout_id: str | None = None,
        kind: Kind = "effect",
        times: int = 1,
        status: int | None = 500,
    ) -> None:
        """Let the next `times` matching calls fail with a status, or, for None, by a cut connection."""
        with self._journal.changed:
            self._failures.append(_Failure(kind, tag, rollout_id, status, times))

    def release_all(self, prefix: str = "") -> None:
        """Release every hold whose rollout id starts with `prefix`; with the empty prefix, every hold."""
        with self._journal.changed:
            chosen = [hold for hold in self._holds if (hold.rollout_id or "").startswith(prefix)]
        for hold in chosen:
            self._release(hold)

    def forget(self, prefix: str) -> None:
        """Forget holds, failures and records of the rollouts whose id starts with `prefix` (not empty)."""
        if not prefix:
            raise ValueError("a prefix is needed")
        self.release_all(prefix)
        with self._journal.changed:
            self._failures = [f for f in self._failures if not (f.rollout_id or "").startswith(prefix)]
            self._calls = [call for call in self._calls if not call.rollout_id.startswith(prefix)]

    def _release(self, hold: WorldHold) -> None:
        with self._journal.changed:
            hold.released = True
            if hold in self._holds:
                self._holds.remove(hold)
        self._loopback.soon(hold._event.set)

    # --- what happened ---

    def calls(
        self,
        tag: str | None = None,
        *,
        rollout_id: str | None = None,
        kind: Kind | None = "effect",
        state: State | None = None,
        request_id: str | None = None,
    ) -> list[WorldCall]:
        """Return the matching calls in the order in which they began; None stands for any."""
        with self._journal.changed:
            return [
                call
                for call in self._calls
                if kind in (None, call.kind)
                and tag in (None, call.tag)
                and rollout_id in (None, call.rollout_id)
                and state in (None, call.state)
                and request_id in (None, call.request_id)
            ]

    def happened(self, tag: str | None = None, *, rollout_id: str | None = None) -> int:
        """Return how many effects really happened: distinct (rollout, request id) pairs that were answered."""
        ended = self.calls(tag, rollout_id=rollout_id, state="ended")
        return len({(call.rollout_id, call.request_id) for call in ended})

    def wait_begun(
        self,
        tag: str | None = None,
        *,
        rollout_id: str | None = None,
        kind: Kind = "effect",
        count: int = 1,
        still_open: bool = False,
        within_s: float = 5.0,
    ) -> WorldCall:
        """Wait until `count` matching calls began (with `still_open`: that many are open), return the last.

        Raises:
            TimedOut: they did not within the bound.
        """
        state: State | None = "begun" if still_open else None
        return self._wait(tag, rollout_id, kind, state, count, "begins", within_s)

    def wait_ended(
        self,
        tag: str | None = None,
        *,
        rollout_id: str | None = None,
        kind: Kind = "effect",
        count: int = 1,
        within_s: float = 5.0,
    ) -> WorldCall:
        """Wait until `count` matching calls were answered 200, and return the last of them."""
        return self._wait(tag, rollout_id, kind, "ended", count, "ends", within_s)

    def _wait(
        self,
        tag: str | None,
        rollout_id: str | None,
        kind: Kind,
        state: State | None,
        count: int,
        verb: str,
        within_s: float,
    ) -> WorldCall:
        def found() -> list[WorldCall]:
            seen = self.calls(tag, rollout_id=rollout_id, kind=kind, state=state)
            return seen if len(seen) >= count else []

        name = f"{kind} {tag!r}" if tag else f"{kind}"
        times = "" if count == 1 else f" {count} times"
        what = f"the {name} of {rollout_id or 'any rollout'} {verb} in the world{times}"
        return self._journal.wait_for(found, what, within_s=within_s, got=self._summary)[-1]

    def _summary(self) -> str:
        last = self._calls[-8:]
        seen = ", ".join(f"{call.rollout_id}:{call.tag or call.kind}:{call.state}" for call in last)
        return f"world calls so far {len(self._calls)}, the last: {seen or 'none'}"

    # --- serving (on the loopback thread) ---

    async def _serve_effect(self, request: web.Request) -> web.Response:
        return await self._serve(request, "effect")

    async def _serve_verify(self, request: web.Request) -> web.Response:
        return await self._serve(request, "verify")

    async def _serve(self, request: web.Request, kind: Kind) -> web.Response:
        try:
            body = json.loads(await request.read())
            number = self._begin(kind, body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return web.json_response({"error": f"not a world request: {error!r}"}, status=400)
        try:
            return await self._end(request, number)
        except (asyncio.CancelledError, ConnectionError):
            self._mark(number, "abandoned")
            raise

    def _begin(self, kind: Kind, body: dict[str, Any]) -> int:
        with self._journal.changed:
            number = self._calls[-1].number + 1 if self._calls else 0
            effect = kind == "effect"
            call = WorldCall(
                number=number,
                kind=kind,
                rollout_id=body["rollout_id"],
                attempt=body["attempt"],
                tag=body["tag"] if effect else None,
                turn=body["turn"] if effect else None,
                request_id=body["request_id"] if effect else None,
                begun_at=time.monotonic(),
            )
            before = any(
                other.state == "ended" and (other.rollout_id, other.request_id) == (call.rollout_id, call.request_id)
                for other in self._calls
            )
            self._calls.append(replace(call, repeated=effect and before))
            self._journal.changed.notify_all()
        return number

    def _find(self, number: int) -> WorldCall:
        with self._journal.changed:
            return next(call for call in reversed(self._calls) if call.number == number)

    def _mark(self, number: int, state: State) -> None:
        with self._journal.changed:
            for place in range(len(self._calls) - 1, -1, -1):
                found = self._calls[place]
                if found.number == number and found.state == "begun":
                    self._calls[place] = replace(found, state=state)
            self._journal.changed.notify_all()

    async def _end(self, request: web.Request, number: int) -> web.Response:
        call = self._find(number)
        while hold := self._holding(call):
            await hold._event.wait()
        failure = self._failing(call)
        if failure is not None:
            self._mark(number, "failed")
            if failure.status is None:
                if request.transport is not None:
                    request.transport.abort()
                return web.Response(status=500)
            return web.json_response({"error": "on order of the suite"}, status=failure.status)
        self._mark(number, "ended")
        if call.kind == "verify":
            return web.json_response({"verified": True})
        with self._journal.changed:
            value = self._values.get(call.tag or "", DEFAULT_VALUE)
        return web.json_response({"value": value})

    def _holding(self, call: WorldCall) -> WorldHold | None:
        with self._journal.changed:
            for hold in self._holds:
                if not hold.released and _matches(hold, call):
                    return hold
        return None

    def _failing(self, call: WorldCall) -> _Failure | None:
        with self._journal.changed:
            for failure in self._failures:
                if failure.left > 0 and _matches(failure, call):
                    failure.left -= 1
                    return failure
        return None


def _matches(order: WorldHold | _Failure, call: WorldCall) -> bool:
    return order.kind == call.kind and order.tag in (None, call.tag) and order.rollout_id in (None, call.rollout_id)
