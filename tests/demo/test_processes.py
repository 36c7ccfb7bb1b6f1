# SPDX-License-Identifier: Apache-2.0
"""Starting, waiting and ending: nothing that the demo started stays behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reference_rl.demo.errors import ProcessDiedError, WaitedTooLongError
from reference_rl.demo.processes import Processes, Started, is_alive, wait_until

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Ends everything when the test is over."""
    with Processes() as started:
        yield started


def start(processes: Processes, tmp_path: Path, code: str) -> Started:
    """A small Python process."""
    return processes.start("the sleeper", [sys.executable, "-c", code], tmp_path / "log", {})


def child_of(parent: Started) -> int:
    """The pid that the parent prints."""
    wait_until(lambda: parent.log.read_text(encoding="utf-8").endswith("\n"), "the child's pid", 10, [parent])
    return int(parent.log.read_text(encoding="utf-8"))


def test_kill_ends_a_process_and_its_announced_child(processes: Processes, tmp_path: Path) -> None:
    """Both are gone when kill returns."""
    parent = start(processes, tmp_path, PARENT)
    child = child_of(parent)
    assert is_alive(child)
    processes.kill([parent], [child])
    assert not is_alive(child)
    assert -9 == parent.process.returncode


def test_leaving_the_block_ends_a_process_and_its_child(tmp_path: Path) -> None:
    """Also when the block is left by an error or Ctrl-C."""
    seen = []

    def interrupted_in_the_middle() -> None:
        with Processes() as processes:
            parent = start(processes, tmp_path, PARENT)
            seen.extend([parent.pid, child_of(parent)])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_in_the_middle()
    wait_until(lambda: not any(map(is_alive, seen)), "the end of the process and of its child", 5)


def test_a_process_that_ignores_sigterm_is_ended_all_the_same(processes: Processes, tmp_path: Path) -> None:
    """Politeness is bounded."""
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    deaf = start(processes, tmp_path, code)
    wait_until(lambda: "deaf" in deaf.log.read_text(encoding="utf-8"), "the process to be deaf", 10, [deaf])
    processes.stop([deaf])
    assert -9 == deaf.process.returncode


def test_a_process_that_dies_while_something_is_waited_for_is_named_with_its_log(
    processes: Processes, tmp_path: Path
) -> None:
    """The error says who died, how, for what one waited, and what the log says last."""
    dying = start(processes, tmp_path, "raise SystemExit('out of luck')")
    with pytest.raises(ProcessDiedError, match=r"the sleeper .* code 1 .* good news; its log is .*\n.*out of luck"):
        wait_until(lambda: False, "good news", 10, [dying])


def test_a_wait_is_bounded_and_names_what_it_waited_for(tmp_path: Path) -> None:
    """I7: no wait is unbounded."""
    with pytest.raises(WaitedTooLongError, match="good news; the logs are in"):
        wait_until(lambda: False, "good news", 0.05, logs=tmp_path)
