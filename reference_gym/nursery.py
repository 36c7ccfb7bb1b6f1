# SPDX-License-Identifier: Apache-2.0
"""Children by fork: what all processes of a Gym import is imported once, so that three are up nearly as soon as one.

To be used before the process has threads or an event loop. A child that is started when it has is a new program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

STDIN, STDOUT = 0, 1


class Forked:
    """A forked child, as far as `asyncio.subprocess.Process` is needed of one.

    Args:
        pid: of the child.
        stdin: where the parent writes what the child reads; descriptor.
        stdout: where the parent reads what the child writes; descriptor.
    """

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = Input(stdin)
        self.stdout = Output(stdout)
        self._ended: asyncio.Event | None = None

    async def wait(self) -> int:
        """Wait for the end, and let go of both pipes; the exit code, or the negative number of the signal."""
        if self._ended is None:
            self._ended = asyncio.Event()
            threading.Thread(
                target=self._watch, args=(asyncio.get_running_loop(), self._ended), name="child", daemon=True
            ).start()
        await self._ended.wait()
        assert self.returncode is not None
        self.stdin.close()
        self.stdout.close()
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM; nothing if it has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL; nothing if it has ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _watch(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(ended.set)


@dataclass(slots=True)
class Input:
    """The standard input of a child.

    Args:
        descriptor: the end that is written to.
    """

    descriptor: int
    _open: bool = field(default=True, init=False)

    def write(self, data: bytes) -> None:
        """Write a few bytes, less than a pipe holds; nothing if the child has gone."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.descriptor, data)

    def close(self) -> None:
        """Close it; the child sees the end of its input."""
        if self._open:
            self._open = False
            os.close(self.descriptor)


class Output:
    """The standard output of a child.

    Args:
        descriptor: the end that is read.
    """

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "rb")
        self._reader: asyncio.StreamReader | None = None
        self._transport: asyncio.ReadTransport | None = None

    async def readline(self) -> bytes:
        """One line; what came before the end, if no line ends."""
        if self._reader is None:
            loop = asyncio.get_running_loop()
            reader = self._reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            self._transport, _ = await loop.connect_read_pipe(lambda: protocol, self._file)
        return await self._reader.readline()

    def close(self) -> None:
        """Close it; what was not read is lost."""
        if self._transport is not None:
            self._transport.close()
        else:
            self._file.close()


def fork(names: Sequence[str], lifeline: tuple[int, int]) -> str | dict[str, Forked]:
    """Fork a child for each name, each in a session of its own and with pipes as standard input and output.

    Args:
        names: of the children.
        lifeline: a pipe; a child holds the end that is read, only the parent the other one.

    Returns:
        In a child its name; in the parent the children by name.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    children: dict[str, Forked] = {}
    parents: list[int] = [lifeline[1]]
    for name in names:
        read_in, write_in = os.pipe()
        read_out, write_out = os.pipe()
        parents += (write_in, read_out)
        pid = os.fork()
        if pid == 0:
            os.setsid()  # A terminal's signals reach the parent alone, which tells its children.
            os.dup2(read_in, STDIN)
            os.dup2(write_out, STDOUT)
            for descriptor in (*parents, read_in, write_out):
                os.close(descriptor)
            return name
        os.close(read_in)
        os.close(write_out)
        children[name] = Forked(pid, write_in, read_out)
    return children
