# SPDX-License-Identifier: Apache-2.0
"""Process control: start, term, kill, stop, cont, restart, logs, on a small process of our own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.errors import TargetUnreachable, UsageError
from conformance.patience import Patience
from conformance.target import ProcessTarget, TargetFile

SERVER = """
import json, os, pathlib, signal, sys, threading
lives = pathlib.Path("lives"); lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
print("token", bool(os.environ["GYM_CHECKPOINT_TOKEN"]), "world", os.environ["GYM_CONFORMANCE_WORLD_URL"], flush=True)
end = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: end.set())
text = json.dumps({"pid": os.getpid(), "participants": [{"name": "gym", "url": "http://x", "pid": os.getpid()}]})
pathlib.Path(sys.argv[1] + ".tmp").write_text(text); os.rename(sys.argv[1] + ".tmp", sys.argv[1])
while not end.wait(0.05): pass
"""


@pytest.fixture
def target(tmp_path: Path) -> Iterator[ProcessTarget]:
    """A target whose process only announces itself."""
    file = TargetFile(start=("{python}", "{dir}/server.py", "{announce}"), files={"server.py": SERVER})
    made = ProcessTarget(file, tmp_path, "http://127.0.0.1:9", Patience())
    yield made
    made.close()


def test_it_starts_ends_and_keeps_its_data(target: ProcessTarget) -> None:
    """Announced, terminated with code 0, started again on the same directory, and on an empty one."""
    target.start()
    assert target.endpoints[0].url == "http://x"
    first = target.pids
    assert target.term() == 0
    target.start()
    assert (target.data_dir / "lives").read_text() == "xx"
    assert target.pids != first
    target.restart(fresh=True)
    assert (target.data_dir / "lives").read_text() == "x"


def test_a_kill_leaves_nothing_alive(target: ProcessTarget) -> None:
    """Every announced pid is gone."""
    target.start()
    (pid,) = target.pids
    target.kill()
    assert not target.running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_stopped_process_can_be_continued_and_killed(target: ProcessTarget) -> None:
    """No thread goes on once the stop has returned, SIGCONT undoes it."""
    target.start()
    (pid,) = target.pids

    def states() -> set[str]:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}

    target.stop()
    assert {"T"} == states()
    target.cont()
    target.patience.until(lambda: "T" not in states(), "it goes on")
    target.stop()
    target.kill()
    assert not target.running


def test_logs_of_every_life_are_kept(target: ProcessTarget) -> None:
    """Tokens and the world URL are in the environment, and the output of both lives in the log."""
    target.start()
    target.restart()
    lines = target.logs().splitlines()
    assert lines == ["token True world http://127.0.0.1:9"] * 2
    assert target.tokens["control"] != target.tokens["data"]


def test_a_process_that_ends_at_once_is_unreachable(tmp_path: Path) -> None:
    """The end of its log is shown."""
    file = TargetFile(start=(sys.executable, "-c", "raise SystemExit('no room')"))
    target = ProcessTarget(file, tmp_path, "http://127.0.0.1:9", Patience())
    with pytest.raises(TargetUnreachable, match="no room"):
        target.start()


@pytest.mark.parametrize("text", ["", "start: 5", "env: {}", "start: [x]\ntokens: {other: y}", "start: [x]\nmore: 1"])
def test_a_malformed_target_file_is_a_usage_error(tmp_path: Path, text: str) -> None:
    """Nothing is guessed."""
    path = tmp_path / "target.yaml"
    path.write_text(text)
    with pytest.raises(UsageError):
        TargetFile.read(path)
