# SPDX-License-Identifier: Apache-2.0
"""What a manifest may not say, although its digest is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reference_gym.participant.errors import CheckpointCorrupt
from spec import wire
from tests.gym.participant.kit import Gym

FILES = ("state.jsonl", "results.jsonl", "rollouts.jsonl", "tombstones.jsonl")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("same", [True, False])
async def test_a_manifest_that_names_a_file_twice_is_refused(tmp_path: Path, name: str, *, same: bool) -> None:
    """CKPT-ERR-033: two entries of one name, equal or not: nobody could tell which of them holds; the file is named."""
    gym = Gym(tmp_path)
    await gym.start("a")
    await gym.snapshot("1-1")
    path = tmp_path / "1-1" / "manifest.json"
    manifest = json.loads(path.read_text())
    (entry,) = [file for file in manifest["files"] if file["name"] == name]
    manifest["files"].append(entry if same else entry | {"bytes": entry["bytes"] + 1})
    path.write_text(json.dumps(manifest))
    other = Gym(tmp_path)
    with pytest.raises(CheckpointCorrupt) as raised:
        await other.restore("2-1", "1-1", wire.bytes_digest(path.read_bytes()), [("a", 0, 1, 0)])
    assert f"{name} twice" in raised.value.detail
    assert "idle" == other.status["phase"]
