# SPDX-License-Identifier: Apache-2.0
"""A process that has everything imported and forks one Gym at a time, so that two hundred lives take minutes.

It reads one JSON object per line: ``config``, ``announce``, ``log``, ``failpoint`` (armed by SIGUSR2 to the Gym, so
that a test chooses the moment), ``hits`` (a file), ``broken`` (what is made wrong in this life, so that the crash test
can be seen to fail). It answers ``{"pid"}``, and ``{"ended", "status"}`` when the Gym is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reference_gym import logs, server, settings
from reference_gym.participant import failpoints, log
from reference_gym.participant.journal import LogJournal
from reference_gym.participant.log_writer import LogWriter


def live(order: dict[str, Any]) -> None:
    """Be one life of a Gym; never returns."""
    code = 1
    try:
        written = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(written, 1)
        os.dup2(written, 2)
        point = order["failpoint"]

        def arm(_number: int, _frame: object) -> None:
            failpoints.armed = failpoints.parse(point)
            failpoints.hits_file = order["hits"]

        signal.signal(signal.SIGUSR2, arm)
        if order["broken"]:
            BROKEN[order["broken"]]()
        logs.configure(())
        loaded = settings.load(Path(order["config"]), insecure_no_auth=False)
        code = asyncio.run(server.serve(loaded, "all", Path(order["announce"])))
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
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve orders until standard input ends."""
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            live(order)
        tell({"pid": child})
        _, status = os.waitpid(child, 0)
        tell({"ended": child, "status": status})


if __name__ == "__main__":
    main()
