# SPDX-License-Identifier: Apache-2.0
"""Ties a supervised process to its supervisor: when that is gone, for whatever reason, the process ends at once.

Two means, because each has a hole: the kernel's parent-death signal (not sent if the parent was gone before it was
asked for), and a pipe whose other end only the supervisor holds (needs a thread that is scheduled).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
ORPHANED = 1


def hold(descriptor: int) -> None:
    """Die with the process that holds the other end of the pipe.

    Args:
        descriptor: the end that is read; nothing is ever written to the other.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_watch, args=(descriptor,), name="lifeline", daemon=True).start()


def still_open(descriptor: int) -> Callable[[], bool]:
    """Return what tells whether the other end of a pipe is open; nothing more is written to it."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)

    def look() -> bool:
        return not poll.poll(0)

    return look


def _watch(descriptor: int) -> None:
    while True:
        try:
            if os.read(descriptor, 1) == b"":
                os._exit(ORPHANED)
        except InterruptedError:
            continue
        except OSError:
            os._exit(ORPHANED)
