# SPDX-License-Identifier: Apache-2.0
"""Fail points: named places between the steps of the operations and of the log, where a test may end the process.

``REFERENCE_GYM_FAILPOINT=name[:nth][:kill|raise|delay|stop]`` arms one of them: at its ``nth`` visit (default the
first) the process gets SIGKILL (the default), the point raises as a failing disk would, it blocks for ``DELAY_S``, or
the process stops itself (SIGSTOP) until somebody sends SIGCONT. Unset, each point costs one comparison with None.

``REFERENCE_GYM_FAILPOINT_ROLE`` may name the only role whose process is meant (``all``, ``agent``, ``model``,
``resources``), where several processes inherit one environment. ``REFERENCE_GYM_FAILPOINT_HITS`` may name a file into
which the hit is written before it acts, so that a test can tell a point that was reached from one that never was; once
it is there no process acts any more, so that one that is started again lives.

``REFERENCE_GYM_FAILPOINT_FILE`` names a file by which the conformance suite directs every process while it runs: its
one line ``name action`` makes a point ``kill``, ``fail`` as for lack of space, or ``hold`` until the line is another or
gone. What is reached so is appended to the file ``….reached``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VARIABLE: Final = "REFERENCE_GYM_FAILPOINT"
ROLE_VARIABLE: Final = "REFERENCE_GYM_FAILPOINT_ROLE"
HITS_VARIABLE: Final = "REFERENCE_GYM_FAILPOINT_HITS"
FILE_VARIABLE: Final = "REFERENCE_GYM_FAILPOINT_FILE"
HELD_S: Final = 0.005
ACTIONS: Final = ("kill", "raise", "delay", "stop")
DELAY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Point:
    """One fail point.

    ``operation`` is what it is a step of, ``what`` is true when it is reached, ``owners`` are those of whom one owns
    what a participant must own to reach it; ``apart``: only where another participant owns the rollouts.
    """

    operation: str
    what: str
    owners: frozenset[str]
    apart: bool = False


_ANY = frozenset({"rollouts", "sessions", "ledger"})
_ROLLOUTS, _SESSIONS, _PARTS = frozenset({"rollouts"}), frozenset({"sessions"}), frozenset({"sessions", "ledger"})
_ROLES: Final[Mapping[str, frozenset[str]]] = {
    "all": _ANY,
    "agent": _ROLLOUTS,
    "model": frozenset({"ledger"}),
    "resources": _SESSIONS,
}

POINTS: Final[Mapping[str, Point]] = {
    "start.judged": Point("start", "a start is accepted in memory, nothing of it is written", _ROLLOUTS),
    "start.answered": Point("start", "the start is written, its reply has not left", _ROLLOUTS),
    "session.opened": Point("start", "a session is opened in memory", _SESSIONS),
    "session.closed": Point("finish", "a session is closed in memory", _SESSIONS),
    "part.changed": Point("turn", "an effect, a row, an opening or a close is recorded in memory", _PARTS),
    "call.answered": Point(
        "turn", "what a call of the data plane changed is written, its reply has not left", _PARTS, apart=True
    ),
    "turn.opened": Point("turn", "a turn is open, its first effect has not begun", _ROLLOUTS),
    "effect.begun": Point(
        "turn", "an effect is about to run; its beginning is written if it reaches outside", _SESSIONS
    ),
    "effect.done": Point("turn", "an effect has run and is not recorded", _SESSIONS),
    "effect.recorded": Point("turn", "an effect is recorded in memory", _SESSIONS),
    "boundary.crossed": Point("turn", "a boundary is crossed in memory, nothing of it is written", _ROLLOUTS),
    "boundary.written": Point("turn", "a boundary is written, nothing that depends on it has left", _ROLLOUTS),
    "verification.begun": Point("finish", "a verification has begun", _ROLLOUTS),
    "verification.judged": Point("finish", "a verification has its verdict, the result is not recorded", _ROLLOUTS),
    "finish.recorded": Point("finish", "a result is recorded in memory, nothing of it is written", _ROLLOUTS),
    "finish.written": Point("finish", "a result is written, nobody has seen it", _ROLLOUTS),
    "results.answered": Point("results", "a page of results has not left", _ROLLOUTS),
    "acks.released": Point("acks", "a result is released in memory, nothing of it is written", _ROLLOUTS),
    "acks.answered": Point("acks", "the release is written, its reply has not left", _ROLLOUTS),
    "retire.fenced": Point("retire", "a retired rollout is fenced and dropped in memory", _ANY),
    "retire.freed": Point("retire", "nothing of a retired rollout runs any more", _ANY),
    "retire.answered": Point("retire", "the fence is written, the reply has not left", _ANY),
    "controller.adopted": Point("adopt", "a higher controller is adopted in memory", _ANY),
    "prepare.closed": Point("prepare", "the gate is closed for a prepare", _ANY),
    "prepare.quiescent": Point("prepare", "preparing has become prepared in memory", _ANY),
    "prepare.answered": Point("prepare", "the reply of a prepare has not left", _ANY),
    "commit.captured": Point("commit", "the cut is captured, nothing of it is written to the target", _ANY),
    "commit.linked": Point("commit", "a segment of the log is linked into the target", _ANY),
    "commit.record": Point("commit", "a record of a payload file is about to be written", _ANY),
    "commit.file": Point("commit", "one more file of the target is written and synced", _ANY),
    "commit.files": Point("commit", "the files are in the target and synced, the manifest is not", _ANY),
    "commit.unnamed": Point("commit", "the manifest is written and synced, and has a temporary name", _ANY),
    "commit.manifest": Point("commit", "the manifest is in the target and synced, the machine does not know it", _ANY),
    "commit.durable": Point("commit", "the machine has the cut as durable, in memory", _ANY),
    "commit.answered": Point("commit", "the reply of a commit has not left", _ANY),
    "resume.opened": Point("resume", "the gate is open after a resume, in memory", _ANY),
    "resume.answered": Point("resume", "the reply of a resume has not left", _ANY),
    "abort.ended": Point("abort", "an abort has ended the checkpoint in memory, or has begun to", _ANY),
    "abort.stopped": Point("abort", "what an abort had to stop has stopped", _ANY),
    "abort.answered": Point("abort", "the reply of an abort has not left", _ANY),
    "lease.ended": Point("lease", "the end of a lease has ended the checkpoint in memory", _ANY),
    "renew.extended": Point("renew", "a lease is extended in memory", _ANY),
    "renew.answered": Point("renew", "the reply of a renew has not left", _ANY),
    "restore.begun": Point("restore", "the restore is open, nothing of its source is read", _ANY),
    "restore.read": Point("restore", "the source is read and sound, the gate is open", _ANY),
    "restore.verified": Point("restore", "the lists fit the source, the gate is closed", _ANY),
    "restore.quiesced": Point("restore", "no handler runs here any more", _ANY),
    "restore.parts": Point("restore", "the parts are built aside, the rollouts are not", _ANY),
    "restore.built": Point("restore", "everything is built aside, nothing is installed", _ANY),
    "restore.dropped": Point("restore", "the earlier work is fenced and dropped in memory, nothing new is there", _ANY),
    "restore.installed": Point("restore", "what was built is current, nothing of it is written", _ANY),
    "restore.answered": Point("restore", "the restore is written, its reply has not left", _ANY),
    "restore.discarded": Point("abort", "what a restore installed is dropped in memory, because it was aborted", _ANY),
    "upload.unnamed": Point("upload", "an artifact is written and synced, and has a temporary name", _ANY),
    "upload.finished": Point("upload", "an artifact is uploaded, its reply has not left", _ANY),
    "log.append": Point("log", "the writer is about to write a frame", _ANY),
    "log.half": Point("log", "the writer has written half of a frame", _ANY),
    "log.written": Point("log", "a frame is written, and not synced where that is asked for", _ANY),
    "log.appended": Point("log", "a frame is written and synced, nobody has been told", _ANY),
    "log.based": Point("log", "the next segment has its base and no name, the present one has not ended", _ANY),
    "log.ended": Point("log", "a segment says that another one follows, and is not synced", _ANY),
    "log.sealed": Point("log", "a segment has ended, the next one has no name yet", _ANY),
    "log.named": Point("log", "the next segment has its name", _ANY),
    "log.compacted": Point("log", "live entries of a mostly dead segment are copied, the segment is still there", _ANY),
    "log.removed": Point("log", "a segment without live entries is removed", _ANY),
    "recover.read": Point("recover", "the log of an earlier life is read, nothing of it is believed", _ANY),
    "recover.built": Point("recover", "everything is built, nothing of it is current", _ANY),
    "recover.current": Point("recover", "the earlier life is current, the log has no segment of this one", _ANY),
    "recover.based": Point("recover", "the first segment of this life has its base and no name", _ANY),
    "recover.sealed": Point(
        "recover", "the last segment of the earlier life has ended, the next one has no name", _ANY
    ),
    "recover.opened": Point("recover", "the log goes on, what was open is not ended", _ANY),
    "recover.ended": Point("recover", "what was open is ended in memory", _ANY),
    "recover.listening": Point("recover", "the participant listens, nothing of the earlier life goes on", _ANY),
}
"""Every fail point by its name. ``points_of`` tells which of them the process of a role reaches."""


def points_of(role: str) -> list[str]:
    """Return the fail points that the process of a role can reach.

    Args:
        role: ``all`` (one process), ``agent``, ``model`` or ``resources``.
    """
    owned = _ROLES[role]
    return [name for name, point in POINTS.items() if point.owners & owned and not (point.apart and role == "all")]


class FailPointReached(OSError):
    """Raised by a fail point that is armed with ``raise``: what a disk that fails would say."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EIO, f"fail point {name}")


@dataclass(slots=True)
class Armed:
    """One fail point that is armed: its name, the visits until it acts, and how."""

    name: str
    left: int
    action: str


def parse(text: str | None) -> Armed | None:
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
    if action not in ACTIONS:
        raise ValueError(f"{VARIABLE}: {action!r} is none of {', '.join(ACTIONS)}")
    return Armed(name, nth, action)


hits_file: str | None = os.environ.get(HITS_VARIABLE)
directing_file: str | None = os.environ.get(FILE_VARIABLE)
_BY_FILE: Final = None if directing_file is None else Armed("", 0, "kill")
"""What is armed where a file alone directs: no point of its own."""
armed: Armed | None = parse(os.environ.get(VARIABLE)) or _BY_FILE
"""None where nothing is set: the one thing that a point looks at then."""


def assume(role: str) -> None:
    """Forget what is armed if it is meant for the process of another role."""
    global armed  # noqa: PLW0603 - read by every point, so it is no object's
    if os.environ.get(ROLE_VARIABLE, role) != role:
        armed = _BY_FILE


def reach(name: str) -> None:
    """Act if this fail point is armed and it is its turn.

    Args:
        name: a key of ``POINTS``, or the like of an operation that has no such point.

    Raises:
        FailPointReached: it is armed with ``raise``.
        OSError: for lack of space, where the file says ``fail``.
    """
    if armed is None:
        return
    if directing_file is not None:
        _obey(name, directing_file)
    if armed.name != name:
        return
    armed.left -= 1
    if armed.left != 0 or not _first(name):
        return
    match armed.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise FailPointReached(name)
        case _:
            time.sleep(DELAY_S)


async def held(name: str) -> None:
    """Wait, before ``reach`` on an event loop, while the file directs this point to hold; the loop goes on."""
    if directing_file is not None and _directed(directing_file) == f"{name} hold":
        _note(name, directing_file)
        while _directed(directing_file) == f"{name} hold":  # noqa: ASYNC110 - a file tells nobody of its change
            await asyncio.sleep(HELD_S)


def _obey(name: str, file: str) -> None:
    """Do what the file directs at this point."""
    if not _directed(file).startswith(f"{name} "):
        return
    _note(name, file)
    while _directed(file) == f"{name} hold":
        time.sleep(HELD_S)
    match _directed(file).removeprefix(f"{name} "):
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fail":
            raise OSError(errno.ENOSPC, f"fail point {name}")


def _directed(file: str) -> str:
    """Return the line of the file, or nothing."""
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def _note(name: str, file: str) -> None:
    with Path(f"{file}.reached").open("a", encoding="utf-8") as reached:
        reached.write(f"{name} {os.getpid()}\n")


def _first(name: str) -> bool:
    """Write the hit down; return whether it is the first one."""
    if not hits_file:
        return True
    try:
        descriptor = os.open(hits_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    os.write(descriptor, f"{name} {os.getpid()}\n".encode())
    os.close(descriptor)
    return True
