# SPDX-License-Identifier: Apache-2.0
"""How the Gym under test is reached and, from level 1 on, started, stopped, continued and killed. See TARGET.md."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from conformance.errors import NotOffered, TargetUnreachable, TimedOut
from conformance.failpoints import FailPoints, read_declaration
from conformance.masking import mask
from conformance.patience import Patience
from conformance.pids import alive, stands
from conformance.target_file import TargetFile, fill

START_WITHIN_S = 30.0
END_WITHIN_S = 15.0
SERVER_ENVIRONMENT_WORLD_URL = "GYM_CONFORMANCE_WORLD_URL"


@dataclass(frozen=True)
class Endpoint:
    """One server of the Gym under test, as announced or given on the command line."""

    url: str
    name: str | None = None
    pid: int | None = None


class Target:
    """The Gym under test at level 0: URLs, tokens, and perhaps a directory that both sides see.

    Args:
        urls: at least one URL; participants that its capabilities list are found from there.
        tokens: bearer token by plane, `control` and `data`.
        shared_dir: a directory inside a storage root of the Gym, writable by the suite, or None (http artifacts).
        patience: scales the bounds.
    """

    level = 0
    moments: frozenset[str] = frozenset()
    """The fail points that it has, by the suite's names."""
    alone = True
    """Whether there can be no second one beside it."""

    def __init__(
        self, urls: Sequence[str], tokens: Mapping[str, str], shared_dir: Path | None, patience: Patience
    ) -> None:
        self._urls = list(urls)
        self.tokens = dict(tokens)
        self.shared_dir = shared_dir
        self.patience = patience

    @property
    def endpoints(self) -> list[Endpoint]:
        """The servers as they are reached now."""
        return [Endpoint(url) for url in self._urls]

    def close(self) -> None:
        """Leave the Gym; at level 0 there is nothing to end."""


class ProcessTarget(Target):
    """The Gym under test at level 1: a process that the suite starts, ends, stops, continues and kills.

    Args:
        file: how it is started.
        work_dir: the suite's scratch directory; `{dir}` and the logs lie in it.
        world_url: the suite's world.
        patience: scales the bounds.

    Only pids that the process announced, and the process itself, are ever signalled.
    """

    level = 1

    def __init__(self, file: TargetFile, work_dir: Path, world_url: str, patience: Patience) -> None:
        shared = Path(file.shared_dir) if file.shared_dir else work_dir / "shared"
        tokens = {
            "control": os.environ.get(file.control_env) or secrets.token_urlsafe(24),
            "data": os.environ.get(file.data_env) or secrets.token_urlsafe(24),
        }
        super().__init__([], tokens, shared, patience)
        self.file = file
        self.alone = file.alone
        self.policy_token = os.environ.get(file.policy_env) or secrets.token_urlsafe(24)
        self.level = 2 if file.failpoints else 1
        self._failpoints: FailPoints | None = None
        if file.failpoints is not None:
            self._failpoints = FailPoints(*read_declaration(file.failpoints), work_dir / "failpoint", patience)
            self.moments = frozenset(self._failpoints.points)
        self._work_dir = work_dir
        self._world_url = world_url
        self._lives = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._announced: list[Endpoint] = []
        self.bystanders: list[str] = []
        self.remembers = True  # Until a check has seen that a killed Gym does not know its state again.
        shared.mkdir(mode=0o700, parents=True, exist_ok=True)

    # --- facts ---

    @property
    def data_dir(self) -> Path:
        """`{dir}`: what belongs to the Gym and outlives its process."""
        return self._work_dir / "gym"

    @property
    def endpoints(self) -> list[Endpoint]:
        """The servers as announced by the running process."""
        return list(self._announced)

    @property
    def pids(self) -> list[int]:
        """Every pid of the running Gym, the started process first."""
        if self._process is None:
            return []
        announced = [endpoint.pid for endpoint in self._announced if endpoint.pid is not None]
        return list(dict.fromkeys([self._process.pid, *announced]))

    @property
    def failpoints(self) -> FailPoints:
        """The fail points of the Gym.

        Raises:
            NotOffered: it has none.
        """
        if self._failpoints is None:
            raise NotOffered("fail points (level 2) are not offered")
        return self._failpoints

    @property
    def running(self) -> bool:
        """Whether the started process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def whole(self) -> bool:
        """Whether every process of the Gym that was announced is alive."""
        return self.running and all(alive(pid) for pid in self.pids)

    def logs(self) -> str:
        """Return what all lives so far wrote to stdout and stderr."""
        paths = sorted(self._work_dir.glob("gym-*.log"))
        return "".join(path.read_text(errors="replace") for path in paths)

    # --- verbs ---

    def start(self, *, fresh: bool = False) -> None:
        """Start the process and wait until it announces its servers.

        Args:
            fresh: on no data: `{dir}` is emptied first.

        Raises:
            TargetUnreachable: it ended, or announced nothing within the bound.
        """
        if self.running:
            return
        self.disarm()
        if fresh and self.data_dir.exists():
            shutil.rmtree(self.data_dir)
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lives += 1
        announce = self._work_dir / f"announce-{self._lives}.json"
        values = self._values(announce)
        for name, text in self.file.files.items():
            (self.data_dir / name).write_text(fill(text, values))
        environment = self._environment(values)
        self._close_log()
        self._log = (self._work_dir / f"gym-{self._lives:03}.log").open("wb")
        argv = [fill(word, values) for word in self.file.start]
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.data_dir,
                start_new_session=True,
            )
        except OSError as error:
            raise TargetUnreachable(f"cannot start {argv[0]}: {error}") from error
        self._await_announcement(announce)

    def _values(self, announce: Path) -> dict[str, str]:
        """Return what the placeholders of target.yaml stand for."""
        return {
            "dir": str(self.data_dir),
            "announce": str(announce),
            "world_url": self._world_url,
            "shared_dir": str(self.shared_dir),
            "python": sys.executable,
        }

    def _environment(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the Gym's process."""
        environment = {**os.environ, **{key: fill(value, values) for key, value in self.file.env.items()}}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
        environment[self.file.control_env] = self.tokens["control"]
        environment[self.file.data_env] = self.tokens["data"]
        environment[self.file.policy_env] = self.policy_token
        environment[SERVER_ENVIRONMENT_WORLD_URL] = self._world_url
        if self._failpoints is not None:
            environment[self._failpoints.env] = str(self._failpoints.file)
        return environment

    def _await_announcement(self, announce: Path) -> None:
        def announced() -> Any:
            if not self.running:
                self._close_log()
                raise TargetUnreachable(f"the Gym ended while starting; {self._last_words()}")
            return announce.exists() and json.loads(announce.read_text())

        try:
            found = self.patience.until(announced, "the Gym announces its servers", within_s=START_WITHIN_S)
        except TimedOut as error:
            self.kill()
            raise TargetUnreachable(f"{error}; {self._last_words()}") from error
        self._announced = [Endpoint(row["url"], row.get("name"), row.get("pid")) for row in found["participants"]]
        self.bystanders = [str(url) for url in found.get("bystanders", ())]

    def _last_words(self) -> str:
        return "its log ends with:\n" + mask(self.logs(), self.secrets)[-2000:]

    @property
    def secrets(self) -> tuple[str, ...]:
        """Every token that the Gym was started with."""
        return (*self.tokens.values(), self.policy_token)

    @contextlib.contextmanager
    def tokenless(self, *more: str) -> Iterator[list[Endpoint]]:
        """Start a second process whose environment holds no token, and kill it at the end of the block.

        Args:
            more: words that are added to `start`.

        Yields:
            Where it announced to listen; the first entry stands for the process itself. Empty if it ended instead.
        """
        directory = Path(tempfile.mkdtemp(prefix="tokenless-", dir=self._work_dir))
        announce = directory / "announce.json"
        values = {**self._values(announce), "dir": str(directory)}
        for name, text in self.file.files.items():
            (directory / name).write_text(fill(text, values))
        hidden = {self.file.control_env, self.file.data_env}
        environment = {key: value for key, value in self._environment(values).items() if key not in hidden}
        argv = [fill(word, values) for word in (*self.file.start, *more)]
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=directory
            )
            found: list[Endpoint] = []
            try:
                self.patience.until(
                    lambda: process.poll() is not None or announce.exists(),
                    "it ends or listens",
                    within_s=START_WITHIN_S,
                )
                if announce.exists():
                    rows = json.loads(announce.read_text())["participants"]
                    found = [Endpoint(row["url"], row.get("name"), row.get("pid")) for row in rows]
                    found.insert(0, Endpoint(found[0].url, None, process.pid))
                yield found
            finally:
                for pid in {process.pid, *(endpoint.pid for endpoint in found if endpoint.pid is not None)}:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()

    def term(self) -> int:
        """Send SIGTERM, wait for the end, and return the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to every process of the Gym and wait for the end."""
        self._end(signal.SIGKILL)

    def stop(self, participant: str | None = None) -> None:
        """Send SIGSTOP to every process of the Gym, or to that of one participant alone, and wait until they stand."""
        pids = self.pids
        if participant is not None:
            pids = [e.pid for e in self._announced if e.name == participant and e.pid is not None]
        self._signal(signal.SIGSTOP, pids)
        self.patience.until(lambda: all(map(stands, pids)), "every process of the Gym has stopped")

    def cont(self) -> None:
        """Send SIGCONT to every process of the Gym."""
        self._signal(signal.SIGCONT, self.pids)

    def restart(self, *, fresh: bool = False) -> None:
        """Kill it if it runs, and start it again, on the same data or on none."""
        if self.running:
            self.kill()
        self.start(fresh=fresh)

    def disarm(self) -> None:
        """Direct no fail point any more."""
        if self._failpoints is not None:
            self._failpoints.disarm()

    def close(self) -> None:
        """Kill it if it runs."""
        if self.running:
            self.kill()
        self._close_log()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the started process alone and do not wait."""
        if self._process is not None:
            os.kill(self._process.pid, number)

    def wait(self, *, within_s: float = END_WITHIN_S) -> int:
        """Wait for the end of the started process and return its exit code."""
        if self._process is None:
            raise TargetUnreachable("the Gym was never started")
        try:
            return self._process.wait(self.patience.seconds(within_s))
        except subprocess.TimeoutExpired as error:
            raise TimedOut("the Gym's process ends", expected=f"within {within_s:g} s", got="still running") from error

    def _signal(self, number: signal.Signals, pids: Iterable[int]) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _end(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        others = self.pids[1:]
        if number == signal.SIGKILL:
            self._signal(number, self.pids)
        else:
            self.send_signal(number)
        try:
            code = self.wait()
        except TimedOut:
            self._signal(signal.SIGKILL, self.pids)
            self._process.wait()
            raise
        self.patience.until(lambda: not any(alive(pid) for pid in others), "every process of the Gym is gone")
        self._announced = []
        self._close_log()
        return code


__all__ = ["Endpoint", "ProcessTarget", "Target", "TargetFile"]
