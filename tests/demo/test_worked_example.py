# SPDX-License-Identifier: Apache-2.0
"""The worked example with the real Gym (three processes) and the real RL client, killed and restarted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reference_rl.demo.__main__ import main


@pytest.mark.timeout(240)
def test_without_turn_recovery_six_turns_are_paid_twice_and_with_it_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """I8: columns 0 and 3, bodies equal to those of the uninterrupted run, other ports after the crash."""
    out = tmp_path / "demo"
    code = main(["--out", str(out), "--columns", "0", "3", "--no-suite", "--latency", "0.1"])
    said = capsys.readouterr()
    assert 0 == code, said.err
    assert "  6 0\n" in said.out
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert {"0": 6, "3": 0} == summary["turns_thrown_away"]
    assert summary["bodies_equal_to_uninterrupted"] is True
    assert [0, 1, 1] == [count["cut_off"] for count in summary["columns"]["3"]["siblings"].values()]
    assert 5 + 2 + 4 == summary["columns"]["3"]["token_rows"], "a row for each turn that the snapshot holds"
    before, after = summary["columns"]["3"]["urls_before_and_after"]
    assert 3 == len(before) == len(after)
    assert not set(before) & set(after)
    assert '<span class="figure">6</span>' in (out / "index.html").read_text(encoding="utf-8")
