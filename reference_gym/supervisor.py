# SPDX-License-Identifier: Apache-2.0
"""Three processes from one command: starts agent, model and resources, and starts each again that ends by itself.

However it ended: a Gym without one of its participants serves nobody. Only the command itself is told to stop. The
first three are forked from this process, which has imported what they need; one that is started again is a new program.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reference_gym import announce
from reference_gym.announce import Listening
from reference_gym.errors import SettingsError
from reference_gym.nursery import Forked
from reference_gym.participant.serving import end_after
from reference_gym.settings import LoadedSettings

LIFELINE_VARIABLE = "REFERENCE_GYM_LIFELINE"
PORT_VARIABLE = "REFERENCE_GYM_PORT"
START_TIMEOUT_S = 60.0
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 5.0
SETTLED_S = 10.0
CALLER = "agent"
ROLES = (CALLER, "model", "resources")
MAX_LINE = 1_048_576
ENDED = 0.99
"""The part of the grace after which the command ends, whatever is left."""
KILLED = 0.96
"""The part of the grace after which what has not ended is killed: the command itself has to end within it."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Child:
    role: str
    peers: dict[str, str]
    port: int | None = None
    process: asyncio.subprocess.Process | Forked | None = None
    listening: Listening | None = None
    started: float = 0.0
    delay: float = field(default=FIRST_DELAY_S)


class Supervisor:
    """Runs the three participants.

    Args:
        loaded: the settings, for names and limits; the children read the file themselves.
        config: the file.
        insecure_no_auth: handed on.
        file: where to announce, or None.
        forked: the first three children, by role.
        lifeline: the pipe of which the children watch the first end, and this process holds the second.
    """

    def __init__(
        self,
        loaded: LoadedSettings,
        config: Path,
        *,
        insecure_no_auth: bool,
        file: Path | None,
        forked: Mapping[str, Forked],
        lifeline: tuple[int, int],
    ) -> None:
        self._loaded = loaded
        self._config = config
        self._insecure = insecure_no_auth
        self._file = file
        self._children: list[_Child] = []
        self._stopping = asyncio.Event()
        self._told_at: float | None = None
        self._forked = forked
        self._death, self._life = lifeline

    async def run(self) -> int:
        """Serve until told to stop; the exit code.

        Raises:
            SettingsError: a child did not come up.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told)
        stop = asyncio.create_task(self._stopping.wait())
        try:
            if await self._started(stop):
                announce.announce(self._listening(), self._file)
                watchers = [asyncio.create_task(self._watch(child)) for child in self._children]
                await stop
                await self._stop_all()
                await asyncio.gather(*watchers)
            else:
                await self._stop_all()
            codes = [child.process.returncode for child in self._children if child.process is not None]
            # A child that was still starting when it was told to stop has no other way to end; one that was killed when
            # the grace was over ended as it would have ended itself.
            return 0 if all(code in (0, -signal.SIGTERM, -signal.SIGKILL) for code in codes) else 1
        finally:
            stop.cancel()
            await self._stop_all()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # A late second one must not spoil the exit code.
            os.close(self._life)
            os.close(self._death)

    def _told(self) -> None:
        self._stop()
        # Whatever has not ended then, ends with the other end of its lifeline.
        end_after(self._loaded.settings.limits.shutdown_grace_ms * ENDED / 1000)

    def _stop(self) -> None:
        if self._told_at is None:
            self._told_at = asyncio.get_running_loop().time()
        self._stopping.set()

    async def _started(self, stop: asyncio.Task[bool]) -> bool:
        """Start all; return False if that was not finished when the command was told to stop."""
        starting = asyncio.create_task(self._start_all())
        await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            return True
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False

    async def _start_all(self) -> None:
        ports = self._loaded.settings.ports
        now = asyncio.get_running_loop().time()
        agent, model, resources = self._children = [
            _Child(role, {}, getattr(ports, role) or None, self._forked[role], started=now) for role in ROLES
        ]
        # All three have started together; only then is the agent told where the two others are.
        await asyncio.gather(self._welcome(model), self._welcome(resources))
        assert model.listening is not None
        assert resources.listening is not None
        agent.peers = {"model": model.listening.url, "resources": resources.listening.url}
        await self._welcome(agent)

    async def _launch(self, child: _Child) -> None:
        arguments = ["serve", "--config", str(self._config), "--role", child.role]
        if self._insecure:
            arguments.append("--insecure-no-auth")
        environment = dict(os.environ)
        environment[LIFELINE_VARIABLE] = str(self._death)
        if child.port is not None:
            environment[PORT_VARIABLE] = str(child.port)
        child.started = asyncio.get_running_loop().time()
        child.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "reference_gym.cli",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            pass_fds=(self._death,),
            # A terminal's signals reach the supervisor alone, which tells its children.
            start_new_session=True,
            limit=MAX_LINE,
        )

    async def _welcome(self, child: _Child) -> None:
        """Tell a child where its peers are, and learn where it listens; raises `SettingsError`."""
        assert child.process is not None
        assert child.process.stdin is not None
        assert child.process.stdout is not None
        child.process.stdin.write(json.dumps(child.peers).encode() + b"\n")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await child.process.stdout.readline()
            (child.listening,) = announce.parse(line)
        except (TimeoutError, ValueError) as error:
            raise SettingsError(f"the process of the role {child.role} did not come up") from error
        child.port = int(child.listening.url.rpartition(":")[2])

    async def _watch(self, child: _Child) -> None:
        """Wait for the end of one child, and start it again as long as that is wanted."""
        loop = asyncio.get_running_loop()
        while child.process is not None:
            code = await child.process.wait()
            if self._stopping.is_set():
                log.info("stopped", extra={"role": child.role, "code": code})
                return
            log.error("ended by itself", extra={"role": child.role, "code": code})
            if loop.time() - child.started > SETTLED_S:
                child.delay = FIRST_DELAY_S
            if await self._stops_within(child.delay):
                return
            child.delay = min(child.delay * 2, LONGEST_DELAY_S)
            try:
                await self._launch(child)
                if self._stopping.is_set():
                    child.process.terminate()  # It was not there yet when all the others were told.
                    continue
                await self._welcome(child)
            except (SettingsError, OSError):  # Also where the system has no process or descriptor to give just now.
                log.exception("restart failed", extra={"role": child.role})
                if child.process.returncode is None:
                    child.process.kill()
                continue
            log.info("restarted", extra={"role": child.role})
            try:
                announce.announce(self._listening(), self._file)
            except SettingsError:  # The others and the line on standard output are as good as before.
                log.exception("not announced", extra={"role": child.role})

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    async def _stop_all(self) -> None:
        """Tell every child to stop, and wait for it; what has not ended when the grace is nearly over is killed."""
        self._stop()
        assert self._told_at is not None
        grace_s = self._loaded.settings.limits.shutdown_grace_ms / 1000
        alive = [
            child.process for child in self._children if child.process is not None and child.process.returncode is None
        ]
        for process in alive:
            process.terminate()
        leaving = asyncio.create_task(self._let_go())
        try:
            async with asyncio.timeout_at(self._told_at + grace_s * KILLED):
                await asyncio.gather(*(process.wait() for process in alive))
        except TimeoutError:
            for process in alive:
                if process.returncode is None:
                    log.warning("killed at the end of the grace", extra={"pid": process.pid})
                    process.kill()
            await asyncio.gather(*(process.wait() for process in alive))
        leaving.cancel()

    async def _let_go(self) -> None:
        """When the agent has ended, tell those that it called, by the end of their standard input."""
        for child in sorted(self._children, key=lambda child: child.role != CALLER):
            if child.process is None or child.process.stdin is None:
                continue
            if child.role == CALLER:
                await child.process.wait()
            else:
                child.process.stdin.close()

    def _listening(self) -> list[Listening]:
        return [child.listening for child in self._children if child.listening is not None]
