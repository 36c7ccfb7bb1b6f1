# SPDX-License-Identifier: Apache-2.0
"""The judges of the random kills can fail."""

from __future__ import annotations

import json
from pathlib import Path

from reference_rl.demo.calls import Call
from reference_rl.demo.chaos import damaged_files, generated_again, listed_turns, published
from reference_rl.sealed import seal
from spec.wire import bytes_digest


def call(turn: int, completed: float | None) -> Call:
    """A call of rollout `p`."""
    return Call(number=1, sibling=0, turn=turn, asked=1.0, completed=completed, rollout_id="p")


def test_a_completed_call_for_a_listed_turn_is_found() -> None:
    """I2: turns 1 and 2 are in the snapshot; turn 2 completed again is a violation, turn 3 is not."""
    assert [2] == [c.turn for c in generated_again([call(2, 9.0), call(3, 9.0)], {"p": 2})]


def test_a_call_that_never_completed_is_no_violation() -> None:
    """It was asked before the second kill and nothing was generated."""
    assert [] == generated_again([call(2, None)], {"p": 2})


def test_unpublished_directories_are_no_snapshots(tmp_path: Path) -> None:
    """C42: numbers are compared as numbers; `.tmp` and trash are invisible."""
    for name in ("1-9", "1-10", "1-100.tmp", "trash", "2-0"):
        (tmp_path / name).mkdir()
    assert ["1-9", "1-10", "2-0"] == published(tmp_path)


def test_listed_turns_are_those_of_rows_that_continue_or_are_finished(tmp_path: Path) -> None:
    """A `restart` row promises nothing; a ledger's row for a turn that was still open does not either."""
    rows = [
        {"rollout_id": "a", "state": "finished", "turns_done": 5},
        {"rollout_id": "b", "state": "turn", "turns_done": 2},
        {"rollout_id": "c", "state": "restart", "turns_done": 4},
    ]
    participants = []
    for name, owns, more in (("agent", "rollouts", 0), ("model", "ledger", 1)):
        directory = tmp_path / "gym" / "one" / name
        directory.mkdir(parents=True)
        text = "".join(json.dumps({**row, "turns_done": row["turns_done"] + more}) + "\n" for row in rows)
        (directory / "rollouts.jsonl").write_text(text, encoding="utf-8")
        participants.append({"name": name, "owns": [owns], "index": {"name": "rollouts.jsonl"}})
    manifest = seal({"gyms": [{"alias": "one", "participants": participants}], "files": []})
    (tmp_path / "manifest.json").write_bytes(manifest)
    assert {"a": 5, "b": 2} == listed_turns(tmp_path)


def test_a_file_that_is_missing_or_altered_is_found(tmp_path: Path) -> None:
    """C41: the judge of the snapshot in use does not take the client's word for it."""
    whole, altered = b"whole", b"altered"
    (tmp_path / "whole").write_bytes(whole)
    (tmp_path / "altered").write_bytes(altered + b"\n")
    files = [{"path": name.decode(), "digest": bytes_digest(name)} for name in (whole, altered, b"missing")]
    (tmp_path / "manifest.json").write_bytes(seal({"gyms": [], "files": files}))
    assert ["altered", "missing"] == damaged_files(tmp_path)
