# SPDX-License-Identifier: Apache-2.0
"""SIGKILL to the real Gym and the real RL client at seeded random moments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reference_rl.demo.__main__ import main


@pytest.mark.timeout(180)
def test_kills_at_random_moments_cost_no_turn_of_a_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C40, N15: the newest published snapshot is restored, whole; a second kill right after it changes nothing."""
    size = ["--siblings", "4", "--turns", "20", "--latency", "0.15", "--gym", "one"]
    code = main(["--out", str(tmp_path / "demo"), "--chaos", "3", "--seed", "1", *size])
    said = capsys.readouterr()
    assert 0 == code, said.err
    assert re.search(r"3 SIGKILLs: no half snapshot in use", said.out)
    assert re.search(r"kill \d: .*newest snapshot \d+-\d+, [1-9]\d* turns in it", said.out)
