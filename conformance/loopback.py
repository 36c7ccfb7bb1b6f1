# SPDX-License-Identifier: Apache-2.0
"""A thread with its own event loop, on which the suite serves its witness and its world."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import web

from conformance.errors import SuiteFault

T = TypeVar("T")

STOP_WITHIN_S = 5.0


class Loopback:
    """Runs aiohttp applications on 127.0.0.1 from a thread of its own.

    A context manager; leaving it closes every listener and ends the thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="conformance-loopback", daemon=True)
        self._thread.start()
        self._closed = False

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result to the calling thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(STOP_WITHIN_S * 4)

    def soon(self, callback: Callable[[], object]) -> None:
        """Run a callback on the loop, soon."""
        self._loop.call_soon_threadsafe(callback)

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread."""
        if self._closed:
            return
        self._closed = True
        self.call(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_WITHIN_S)
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Listener:
    """One application on one port; it can stop listening and listen again on the same port.

    Args:
        loopback: the thread that serves it.
        application: the aiohttp application.
        port: 0 for any free one.
    """

    def __init__(self, loopback: Loopback, application: web.Application, port: int = 0) -> None:
        self._loopback = loopback
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        self._site: web.SockSite | None = None
        self.port = port
        loopback.call(self._runner.setup())
        self.open()

    @property
    def url(self) -> str:
        """The URL of the listener, without a path."""
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Listen; does nothing if it does already."""
        if self._site is None:
            self._loopback.call(self._open())

    async def _open(self) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", self.port))
        except OSError as error:
            sock.close()
            raise SuiteFault(f"cannot listen on 127.0.0.1:{self.port}: {error}") from error
        self.port = sock.getsockname()[1]
        self._site = web.SockSite(self._runner, sock)
        await self._site.start()

    def refuse(self) -> None:
        """Stop listening: new connections are refused, and the open ones are dropped."""
        if self._site is not None:
            self._loopback.call(self._refuse())

    async def _refuse(self) -> None:
        site, self._site = self._site, None
        if site is not None:
            await site.stop()
        server = self._runner.server
        if server is not None:
            for protocol in list(server.connections):
                protocol.force_close()

    def close(self) -> None:
        """Stop listening for good."""
        self.refuse()
        self._loopback.call(self._runner.cleanup())
