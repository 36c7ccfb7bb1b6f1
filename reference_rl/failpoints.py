# SPDX-License-Identifier: Apache-2.0
"""Named points between the steps of saving and restarting, at which a test can end or delay the process.

``REFERENCE_RL_FAILPOINT=name[:nth][:kill|raise|delay|stop]``: at the ``nth`` visit (default the first) the process
gets SIGKILL (the default), the point raises, it waits a second, or the process stops itself (SIGSTOP) until somebody
sends SIGCONT: a clock for whoever kills other processes at that instant. Several are separated by commas. Unset, a
point costs one test for ``None``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from typing import Final

VARIABLE: Final = "REFERENCE_RL_FAILPOINT"
DELAY_S: Final = 1.0

POINTS: Final = frozenset(
    {
        "snapshot.begun",
        "snapshot.prepared",
        "snapshot.captured",
        "snapshot.resumed",
        "snapshot.ledger_copied",
        "snapshot.durable",
        "snapshot.assembled",
        "snapshot.manifest_written",
        "snapshot.renamed",
        "snapshot.retained",
        "restart.claimed",
        "restart.known",
        "restart.feeds_read",
        "restart.reserved",
        "restart.rows_restored",
        "restart.participants_restored",
        "restart.ledger_restored",
        "restart.resumed",
        "restart.closed",
        "result.saved",
        "result.acked",
        "start.marked",
        "start.answered",
    }
)
"""Every point; ``hit`` refuses another name, so that none is misspelt."""


class FailpointReached(RuntimeError):
    """What a point raises when told to."""


def _parse(text: str) -> dict[str, tuple[int, str]]:
    wanted = {}
    for item in filter(None, text.split(",")):
        name, *rest = item.split(":")
        if name not in POINTS:
            raise ValueError(f"{VARIABLE}: there is no point {name!r}")
        nth = next((int(part) for part in rest if part.isdecimal()), 1)
        action = next((part for part in rest if not part.isdecimal()), "kill")
        if action not in ("kill", "raise", "delay", "stop"):
            raise ValueError(f"{VARIABLE}: {action!r} is not kill, raise, delay or stop")
        wanted[name] = (nth, action)
    return wanted


_wanted: dict[str, tuple[int, str]] | None = _parse(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
_visits: Counter[str] = Counter()


def hit(name: str) -> None:
    """Visit a point.

    Raises:
        FailpointReached: when told to.
    """
    if _wanted is None:
        return
    assert name in POINTS, name
    _visits[name] += 1
    nth, action = _wanted.get(name, (0, ""))
    if _visits[name] != nth:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "raise":
        raise FailpointReached(name)
    if action == "stop":
        # To this very thread: a signal to the process stops it a moment later, when this thread may be past the point.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return
    time.sleep(DELAY_S)
