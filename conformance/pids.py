# SPDX-License-Identifier: Apache-2.0
"""What can be seen of a process that was signalled; where there is no ``/proc``, less."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_GONE = "ZX"
_STOPPED = "Tt"


def alive(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    if not (_PROC / "self").exists():
        return _exists(pid)
    return _state(_PROC / str(pid)) not in _GONE


def stands(pid: int) -> bool:
    """Say whether no thread of a process goes on after a SIGSTOP; what cannot be seen is believed."""
    try:
        tasks = list((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return True
    return all(_state(task) in _STOPPED + _GONE for task in tasks)


def _state(process: Path) -> str:
    """Return the letter of a process or thread, that of a dead one if there is none."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return _GONE[-1]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
