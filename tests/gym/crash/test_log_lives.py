# SPDX-License-Identifier: Apache-2.0
"""The boundary log alone is killed at each of its system calls, and while the system carries one out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gym.crash.lives import ROOT
from tests.gym.running import environment


def test_a_log_is_believed_whatever_call_its_process_was_killed_in(tmp_path: Path) -> None:
    """C25, CKPT-ID-022: also where the system had noted a file's time and not written a byte: nobody else was there."""
    few = ("--steps", "40", "--kills", "30")
    command = [sys.executable, "-m", "tests.gym.crash.log_lives", str(tmp_path / "logs"), *few]
    found = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (0, "") == (found.returncode, found.stderr), found.stdout
