# SPDX-License-Identifier: Apache-2.0
"""Fail points: none is misspelt, each is some process's, and the variable says what is done where."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import reference_gym
from reference_gym.participant import failpoints

ROLES = ("all", "agent", "model", "resources")


def test_every_point_of_the_code_is_listed_and_every_listed_one_is_in_the_code() -> None:
    """What the code reaches is what the list says; the points of replies are named by their operation."""
    files = Path(str(reference_gym.__file__)).parent.rglob("*.py")
    found = set(re.findall(r'failpoints\.reach\(\s*"([a-z._]+)"', "".join(file.read_text() for file in files)))
    replies = {name for name in failpoints.POINTS if name.endswith(".answered")} - {"call.answered"}
    assert failpoints.POINTS.keys() == found | replies


def test_every_point_is_reached_by_some_role() -> None:
    """One process reaches all but those that need a caller elsewhere; each of three reaches its own."""
    apart = {name for name, point in failpoints.POINTS.items() if point.apart}
    assert failpoints.POINTS.keys() - apart == set(failpoints.points_of("all"))
    assert failpoints.POINTS.keys() == {name for role in ROLES for name in failpoints.points_of(role)}
    assert "boundary.crossed" not in failpoints.points_of("resources")
    assert "effect.begun" not in failpoints.points_of("model")


def run(tmp_path: Path, text: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Reach one point twice in a process of its own, as the agent."""
    code = (
        "from reference_gym.participant import failpoints as f; f.assume('agent')\n"
        "for _ in range(2):\n f.reach('turn.opened'); print('on', flush=True)"
    )
    more = {"REFERENCE_GYM_FAILPOINT": text, "REFERENCE_GYM_FAILPOINT_HITS": str(tmp_path / "hits")} | more
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | more, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_point_kills_its_process_at_its_visit_and_says_so(tmp_path: Path) -> None:
    """SIGKILL at the second visit; the hit is written down, and a process that comes later lives."""
    ended = run(tmp_path, "turn.opened:2")
    assert (-signal.SIGKILL, "on\n") == (ended.returncode, ended.stdout)
    assert (tmp_path / "hits").read_text().startswith("turn.opened ")
    assert 0 == run(tmp_path, "turn.opened:2").returncode


def test_a_point_of_another_role_does_nothing(tmp_path: Path) -> None:
    """Where three processes inherit one environment, one of them is meant."""
    assert 0 == run(tmp_path, "turn.opened", REFERENCE_GYM_FAILPOINT_ROLE="model").returncode
    assert -signal.SIGKILL == run(tmp_path, "turn.opened", REFERENCE_GYM_FAILPOINT_ROLE="agent").returncode


def test_a_point_raises_what_a_failing_disk_raises(tmp_path: Path) -> None:
    """An OSError with a number, so that every handler of disk faults takes it for one."""
    ended = run(tmp_path, "turn.opened:raise")
    assert "FailPointReached: [Errno 5] fail point turn.opened" in ended.stderr
    assert issubclass(failpoints.FailPointReached, OSError)


@pytest.mark.parametrize("text", ["nothing", "turn.opened:explode", "turn.opened:1:2:3:kil"])
def test_what_names_no_point_or_no_action_is_refused(text: str) -> None:
    """A misspelt fail point must not look like one that was never reached."""
    with pytest.raises(ValueError, match="FAILPOINT"):
        failpoints.parse(text)


def directed(tmp_path: Path, line: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that a file directs."""
    file = tmp_path / "directs"
    file.write_text(f"{line}\n")
    lines = [
        f"import pathlib; file = pathlib.Path({str(file)!r})",
        "from reference_gym.participant import failpoints as f",
    ]
    code = "\n".join([*lines, code])
    environment = os.environ | {"REFERENCE_GYM_FAILPOINT_FILE": str(file)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_file_directs_a_point_while_the_process_runs(tmp_path: Path) -> None:
    """Lack of space, as often as the file says so; the point is named in the file beside it; no other point acts."""
    code = (
        "f.reach('commit.captured')\ntry: f.reach('commit.files')\nexcept OSError as e: print(e.errno)\nfile.unlink()\n"
    )
    ended = directed(tmp_path, "commit.files fail", code + "f.reach('commit.files'); print('on')")
    assert f"{errno.ENOSPC}\non\n" == ended.stdout
    assert ["commit.files"] == [line.split()[0] for line in (tmp_path / "directs.reached").read_text().splitlines()]


def test_a_point_that_is_held_does_as_the_file_says_then(tmp_path: Path) -> None:
    """It waits on a thread, and gets SIGKILL once the file says kill."""
    code = "import threading; t = threading.Thread(target=f.reach, args=('commit.files',)); t.start(); t.join(0.2)\n"
    ended = directed(
        tmp_path,
        "commit.files hold",
        code + "print(t.is_alive(), flush=True)\nfile.write_text('commit.files kill')\nt.join()",
    )
    assert (-signal.SIGKILL, "True\n") == (ended.returncode, ended.stdout)


@pytest.mark.parametrize("named", [False, True])
def test_unset_a_point_looks_at_one_thing_and_a_file_alone_sets_it(named: bool, tmp_path: Path) -> None:
    """The suite directs by the file alone: without it nothing is armed, and with it the points obey it."""
    file = tmp_path / "directed"
    file.write_text("start.judged fail")
    code = (
        "from reference_gym.participant import failpoints as f; f.assume('agent')\n"
        "try: f.reach('start.judged')\nexcept OSError as error: print(error.errno)\n"
        "print(f.armed is None)"
    )
    more = {failpoints.FILE_VARIABLE: str(file)} if named else {}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **more}, capture_output=True, text=True, timeout=30, check=True
    )
    assert ([str(errno.ENOSPC), "False"] if named else ["True"]) == done.stdout.split()
