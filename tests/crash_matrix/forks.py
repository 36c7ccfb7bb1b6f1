# SPDX-License-Identifier: Apache-2.0
"""Processes without the price of their imports: a server that has imported both commands, and forks one on request.

What it forks is a process of its own, with its own memory, files, environment and exit code; only the seconds that an
interpreter needs to import everything are saved, several times per cell.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import random
import select
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import spec

ROOT = Path(__file__).resolve().parents[2]
READY = "ready"
COMMANDS = ("reference_gym.cli", "reference_rl.cli")
PRELOAD = (*COMMANDS, "reference_gym.server", "reference_gym.environments.toy_text")
POINTS = ("reference_rl.failpoints", "reference_gym.participant.failpoints")
"""Modules that read their environment variable when they are imported."""

GYM_POINTS = "reference_gym.participant.failpoints"
ARMED_VARIABLE = "CRASH_MATRIX_ARMED"
"""The point of the Gym (`name:visit`) at which a process kills itself, from the moment at which SIGUSR2 comes."""

POINT_VARIABLE = "REFERENCE_GYM_FAILPOINT"
"""The point at which it kills itself from its start."""

HITS_VARIABLE = "REFERENCE_GYM_FAILPOINT_HITS"
"""The file into which a process writes the point that it has hit; beside it, that it is armed."""


@dataclass
class Forked:
    """A process that the server has forked."""

    pid: int
    output: Path
    returncode: int | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            # Gone, and the server has not said so yet: its number is not given again so soon.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def wait(self, bound_s: float = 30.0) -> int:
        """Return its exit code, negative for a signal."""
        async with asyncio.timeout(bound_s):
            await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    async def kill(self) -> None:
        """SIGKILL it and wait for its end."""
        self.send(signal.SIGKILL)
        await self.wait()

    def end(self, code: int) -> None:
        """Note how it ended."""
        self.returncode = code
        self._ended.set()


class ForkServer:
    """The way to one server process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._children: dict[int, Forked] = {}
        self._answers: asyncio.Queue[int] = asyncio.Queue()
        self._one = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    async def read(self) -> None:
        """Take what the server says until it ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if "forked" in said:
                self._children[said["forked"]] = Forked(said["forked"], Path())
                self._answers.put_nowait(said["forked"])
            else:
                self._children[said["ended"]].end(said["code"])

    async def start(self, directory: Path, name: str, *arguments: str, environment: Mapping[str, str]) -> Forked:
        """Fork `python -m <name>` with its output in a file of the directory."""
        assert self._process.stdin is not None
        output = directory / f"{name.split('.')[0]}.log"
        request = {
            "name": name,
            "arguments": arguments,
            "environment": dict(environment),
            "directory": str(directory),
            "output": str(output),
        }
        async with self._one:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            forked = self._children[await self._answers.get()]
        forked.output = output
        return forked


@contextlib.asynccontextmanager
async def fork_server() -> AsyncIterator[ForkServer]:
    """Run a server; what it forked and still lives is killed with it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.crash_matrix.forks",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert READY == json.loads(await process.stdout.readline())
    server = ForkServer(process)
    reader = asyncio.create_task(server.read())
    try:
        yield server
    finally:
        process.stdin.close()
        await process.wait()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


def serve() -> None:
    """Fork on request, report every end; kill what is left when nobody asks any more."""
    for name in PRELOAD:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    spec.load()
    spec.load("1.0")  # kept apart from the one above, and asked for in both ways
    ends, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    _say(READY)
    children: set[int] = set()
    pending = b""
    while True:
        ready, _, _ = select.select([0, ends], [], [])
        if ends in ready:
            os.read(ends, 4096)
        while (ended := _ended()) is not None:
            children.discard(ended[0])
            _say({"ended": ended[0], "code": ended[1]})
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            children.add(_fork(json.loads(line)))
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _say(message: Any) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _ended() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _fork(request: Mapping[str, Any]) -> int:
    pid = os.fork()
    if pid:
        _say({"forked": pid})
        return pid
    code = 1
    try:
        code = _become(request)
    finally:
        os._exit(code)


def _become(request: Mapping[str, Any]) -> int:
    """Be a fresh process of one command; return its exit code."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(request["directory"])
    output = os.open(request["output"], os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.update(request["environment"])
    random.seed()  # two processes never share the numbers that the server would have drawn next
    for name in POINTS:
        if name in sys.modules:
            importlib.reload(sys.modules[name])
    if point := os.environ.get(ARMED_VARIABLE):
        signal.signal(signal.SIGUSR2, lambda number, frame: _arm(point))
    return _call(request["name"], request["arguments"])


def _arm(point: str) -> None:
    points = sys.modules[GYM_POINTS]
    points.armed = points.parse(point)  # type: ignore[attr-defined] # what its variable would have armed at the start
    Path(f"{os.environ[HITS_VARIABLE]}.armed").touch()


def _call(name: str, arguments: Sequence[str]) -> int:
    sys.argv = [name, *arguments]
    try:
        sys.modules[name].main()
    except SystemExit as ended:
        code = ended.code
        return code if isinstance(code, int) else int(code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    return 0


if __name__ == "__main__":
    serve()
