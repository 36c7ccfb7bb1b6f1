# SPDX-License-Identifier: Apache-2.0
"""Fail points: named places between the steps of the operations and of the log, where a test may end the process.

``REFERENCE_GYM_FAILPOINT=name[:nth][:kill|raise|delay]`` arms one of them; unset, each costs one comparison with None.
``REFERENCE_GYM_FAILPOINT_HITS`` may name a file into which the hit is written before it acts, so that a test can tell
a point that was reached from one that never was.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

VARIABLE = "REFERENCE_GYM_FAILPOINT"
HITS_VARIABLE = "REFERENCE_GYM_FAILPOINT_HITS"
DELAY_S = 0.5

POINTS: Mapping[str, str] = {
    "start.judged": "a start is accepted in memory, nothing of it is written",
    "start.answered": "the start is written, its reply has not left",
    "turn.opened": "a turn is open, its first effect has not begun",
    "effect.begun": "an effect is about to run; its beginning is written if it reaches outside",
    "effect.done": "an effect has run and is not recorded",
    "effect.recorded": "an effect is recorded in memory",
    "boundary.crossed": "a boundary is crossed in memory, nothing of it is written",
    "boundary.written": "a boundary is written, nothing that depends on it has left",
    "finish.recorded": "a result is recorded in memory, nothing of it is written",
    "finish.written": "a result is written, nobody has seen it",
    "ack.released": "a result is released in memory, nothing of it is written",
    "retire.fenced": "a retired rollout is fenced and dropped in memory",
    "reply.written": "everything a reply depends on is written, the reply has not left",
    "prepare.closed": "the gate is closed for a prepare",
    "commit.captured": "the cut is captured, nothing of it is written to the target",
    "commit.files": "the payload files are in the target, the manifest is not",
    "commit.manifest": "the manifest is in the target, the machine does not know it",
    "commit.durable": "the machine has the cut as durable",
    "resume.opened": "the gate is open after a resume",
    "abort.ended": "an abort has ended the checkpoint in memory",
    "restore.verified": "the source of a restore is verified, the gate is closed",
    "restore.built": "everything is built aside, nothing is installed",
    "restore.installed": "what was built is current, nothing of it is written",
    "log.append": "the writer is about to write a frame",
    "log.half": "the writer has written half of a frame",
    "log.appended": "a frame is written, nobody has been told",
    "log.sealed": "a segment has ended, the next one has no name yet",
    "log.based": "the next segment has its base, the present one has not ended",
    "log.compacted": "live entries of a mostly dead segment are copied, the segment is still there",
    "log.removed": "a segment without live entries is removed",
}
"""Every fail point, and what is true when it is reached."""


class FailPointReached(Exception):
    """Raised by a fail point that is armed with ``raise``."""


@dataclass(slots=True)
class _Armed:
    name: str
    left: int
    action: Literal["kill", "raise", "delay"]


def parse(text: str | None) -> _Armed | None:
    """Return what the variable arms, or None.

    Raises:
        ValueError: it names no fail point, or no action.
    """
    if not text:
        return None
    name, *rest = text.split(":")
    if name not in POINTS:
        raise ValueError(f"{VARIABLE} names no fail point: {name!r}")
    nth, action = 1, "kill"
    for word in rest:
        if word.isdecimal():
            nth = int(word)
        else:
            action = word
    if action not in ("kill", "raise", "delay"):
        raise ValueError(f"{VARIABLE}: {action!r} is none of kill, raise, delay")
    return _Armed(name, nth, action)  # type: ignore[arg-type]  # Just compared with the three words.


armed: _Armed | None = parse(os.environ.get(VARIABLE))
hits_file: str | None = os.environ.get(HITS_VARIABLE)


def reach(name: str) -> None:
    """Act if this fail point is armed and it is its turn.

    Args:
        name: a key of ``POINTS``.

    Raises:
        FailPointReached: it is armed with ``raise``.
    """
    if armed is None or armed.name != name:
        return
    armed.left -= 1
    if armed.left != 0:
        return
    if hits_file:
        Path(hits_file).write_text(name, encoding="utf-8")
    if armed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if armed.action == "raise":
        raise FailPointReached(name)
    time.sleep(DELAY_S)
