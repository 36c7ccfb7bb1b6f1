# SPDX-License-Identifier: Apache-2.0
"""A process that has everything imported and forks Gym processes, so that two hundred lives take minutes.

It reads one JSON object per line: ``config``, ``role``, ``announce``, ``log``, ``failpoint`` (armed by SIGUSR2 to the
process, so that a test chooses the moment, or from the beginning if ``armed``), ``hits`` (a file), ``broken`` (what is
made wrong in this life, so that the crash test can be seen to fail). It answers ``{"pid"}``, and ``{"ended",
"status"}`` when the process is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reference_gym import logs, server, settings
from reference_gym.participant import failpoints, log
from reference_gym.participant.journal import LogJournal
from reference_gym.participant.log_writer import LogWriter


def live(order: dict[str, Any]) -> None:
    """Be one life of one process of a Gym; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        written = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(written, 1)
        os.dup2(written, 2)

        def arm(_number: int, _frame: object) -> None:
            failpoints.armed = failpoints.parse(order["failpoint"])
            failpoints.hits_file = order["hits"]

        signal.signal(signal.SIGUSR2, arm)
        if order["armed"]:
            arm(0, None)
        if order["broken"]:
            BROKEN[order["broken"]]()
        logs.configure(())
        loaded = settings.load(Path(order["config"]), insecure_no_auth=False)
        code = asyncio.run(server.serve(loaded, order["role"], Path(order["announce"])))
    finally:
        os._exit(code)


def _nobody_waits() -> None:
    """Replies and policy calls leave before what they depend on is written, and writing takes a while."""

    async def settled(_self: LogJournal) -> None:
        return

    LogJournal.settled = settled  # type: ignore[method-assign]  # This is what is broken.
    write = LogWriter._write

    def slowly(self: LogWriter, batches: Any) -> None:
        time.sleep(0.02)
        write(self, batches)

    LogWriter._write = slowly  # type: ignore[method-assign]  # This is what is broken.


def _every_log_is_believed() -> None:
    """Nothing speaks against keeping an incarnation, ever."""
    log.disbelief = lambda *_: None  # type: ignore[assignment]  # This is what is broken.


BROKEN: dict[str, Callable[[], None]] = {"nobody_waits": _nobody_waits, "believed": _every_log_is_believed}


def tell(value: dict[str, Any]) -> None:
    """Answer with one line."""
    os.write(1, json.dumps(value).encode() + b"\n")


def main() -> None:
    """Serve orders until standard input ends; then nothing of it is left."""
    ends, wake = os.pipe()
    os.set_blocking(ends, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    pending = b""
    while True:
        ready, _, _ = select.select([0, ends], [], [])
        if ends in ready:
            os.read(ends, 4096)
            _reap(children)
        if 0 not in ready:
            continue
        data = os.read(0, 65_536)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            child = os.fork()
            if child == 0:
                live(json.loads(line))
            children.add(child)
            tell({"pid": child})
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _reap(children: set[int]) -> None:
    for child in tuple(children):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            children.discard(child)
            tell({"ended": child, "status": status})


if __name__ == "__main__":
    main()
