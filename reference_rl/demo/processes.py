# SPDX-License-Identifier: Apache-2.0
"""The demo's processes: started with a log file each, waited for with a bound, ended by pid.

Whatever happens to the demo (an error, Ctrl-C, even SIGKILL on Linux), nothing that it started stays behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from reference_rl.demo.errors import ProcessDiedError, WaitedTooLongError

POLL_S = 0.02
END_S = 10.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Started:
    """One process that this demo started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def ended(self) -> bool:
        """True once the process has ended."""
        return self.process.poll() is not None

    def obituary(self, waiting_for: str) -> str:
        """How it ended while something else was waited for, with the end of its log."""
        text = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last_words = "\n".join(f"    {line}" for line in text[-8:]) or "    (it is empty)"
        return (
            f"{self.name} (pid {self.pid}) ended with code {self.process.returncode} while the demo waited for "
            f"{waiting_for}; its log is {self.log}:\n{last_words}"
        )


class Processes:
    """All processes of one demo; leaving the `with` block ends those that are left."""

    def __init__(self) -> None:
        self._started: list[Started] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop(self._started)

    def start(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> Started:
        """Start a process in a session of its own, so that Ctrl-C reaches the demo alone.

        Args:
            name: what messages call it.
            argv: program and arguments.
            log: file to which its output is appended.
            env: variables set besides the inherited ones.
        """
        # PLW1509: unsafe with threads; a thread that draws may exist, but this hook only makes one system call.
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
                preexec_fn=_die_with_parent if _LIBC else None,  # noqa: PLW1509
            )
        started = Started(name, process, log)
        self._started.append(started)
        return started

    def kill(self, victims: Iterable[Started], children: Iterable[int] = ()) -> None:
        """SIGKILL processes of this demo and the children that they announced, all before any is waited for.

        Args:
            victims: processes started here.
            children: pids of their children.

        Raises:
            WaitedTooLongError: if one of them is still there after 10 s.
        """
        victims, children = list(victims), list(children)
        for pid in [victim.pid for victim in victims if not victim.ended()] + children:
            _signal(pid, signal.SIGKILL)
        for victim in victims:
            _signal_group(victim.pid)
        wait_until(
            lambda: all(victim.ended() for victim in victims) and not any(map(is_alive, children)),
            f"the end of {', '.join(victim.name for victim in victims)} after SIGKILL",
            END_S,
        )

    def stop(self, ending: Iterable[Started]) -> None:
        """End processes politely (SIGTERM), and by SIGKILL those that do not end within 3 s."""
        ending = [started for started in ending if not started.ended()]
        for started in ending:
            _signal(started.pid, signal.SIGTERM)
        bound = time.monotonic() + 3.0
        while any(not started.ended() for started in ending) and time.monotonic() < bound:
            time.sleep(POLL_S)
        for started in ending:
            _signal_group(started.pid)
            started.process.wait(END_S)


def wait_until(
    condition: Callable[[], bool],
    what: str,
    timeout_s: float,
    watching: Iterable[Started] = (),
    logs: Path | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Wait for a stated condition.

    Args:
        condition: asked about fifty times a second.
        what: names the condition in the error.
        timeout_s: bound in seconds.
        watching: processes that must live meanwhile.
        logs: directory that the error points to.
        meanwhile: called after every look at the condition (draws the progress).

    Raises:
        ProcessDiedError: if one of the watched processes ended.
        WaitedTooLongError: if the bound passed.
    """
    watching = list(watching)
    bound = time.monotonic() + timeout_s
    while not condition():
        meanwhile()
        for started in watching:
            if started.ended() and not condition():
                raise ProcessDiedError(started.obituary(what))
        if time.monotonic() > bound:
            where = f"; the logs are in {logs}" if logs is not None else ""
            raise WaitedTooLongError(f"waited {timeout_s:g} s for {what}{where}")
        time.sleep(POLL_S)


def is_alive(pid: int) -> bool:
    """True if a process with this id runs (one that only waits to be reaped does not)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return sys.platform != "linux"


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(leader: int) -> None:
    """SIGKILL what is left of the session of a process that this demo started as its leader."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _die_with_parent() -> None:
    """Runs in the child: have the kernel kill it when the demo itself is killed."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
