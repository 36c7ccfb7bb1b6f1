# SPDX-License-Identifier: Apache-2.0
"""The files of the ``http`` scheme: what a process that was killed has left there."""

from __future__ import annotations

from pathlib import Path

import pytest

import spec.durable
from reference_gym.participant import Limits
from reference_gym.participant.errors import NotFound
from reference_gym.participant.staging import Staging
from tests.gym.participant.kit import until


def upload(staging: Staging, name: str, data: bytes) -> None:
    """Upload one file of checkpoint 1-1."""
    whole = staging.begin_upload("1-1", name)
    whole.write(data)
    whole.finish(spec.durable)
    whole.abandon()


def commit(staging: Staging, checkpoint_id: str, *names: str) -> None:
    """Write files of a cut."""
    directory = staging.new_cut(checkpoint_id)
    for name in names:
        (directory / name).write_bytes(b"bytes")


def test_an_upload_that_was_never_whole_is_gone_after_a_restart(tmp_path: Path) -> None:
    """It has no name and takes up no room; whole uploads stay where the incarnation is kept (CKPT-ART-009)."""
    limits = Limits(max_artifacts=2)
    before = Staging(tmp_path, limits)
    upload(before, "whole", b"bytes")
    half = before.begin_upload("1-1", "half")
    half.write(b"by")  # The process is killed here.
    after = Staging(tmp_path, limits)
    after.go_on()
    assert {"whole"} == {path.name for path in (tmp_path / "uploads" / "1-1").iterdir()}
    after.begin_upload("1-1", "another").abandon()
    assert b"bytes" == after.find("1-1", "whole").read_bytes()
    half.abandon()


def test_a_committed_cut_is_fetched_after_a_restart_and_one_that_was_being_written_is_gone(tmp_path: Path) -> None:
    """CKPT-ART-002, -004: the incarnation is kept, and no other id has opened, also where a higher one was aborted."""
    before = Staging(tmp_path, Limits())
    commit(before, "1-7", "state.jsonl", "manifest.json")
    commit(before, "1-8", "state.jsonl")  # The process is killed here.
    after = Staging(tmp_path, Limits())
    after.go_on()
    assert b"bytes" == after.find("1-7", "state.jsonl").read_bytes()
    assert ["1-7"] == [path.name for path in (tmp_path / "cuts").iterdir()]


async def test_a_new_incarnation_holds_no_files_of_an_earlier_one(tmp_path: Path) -> None:
    """Other bytes may be uploaded under the same names: whoever uploaded the earlier ones begins anew."""
    before = Staging(tmp_path, Limits(max_artifacts=1))
    upload(before, "whole", b"bytes")
    commit(before, "1-7", "state.jsonl", "manifest.json")
    (tmp_path / "trash" / "0").mkdir()
    (tmp_path / "trash" / "0" / "state.jsonl").touch()  # The earlier process was killed while it removed this.
    after = Staging(tmp_path, Limits(max_artifacts=1))
    after.begin()
    for checkpoint_id, name in (("1-1", "whole"), ("1-7", "state.jsonl")):
        with pytest.raises(NotFound):
            after.find(checkpoint_id, name)
    upload(after, "whole", b"others")
    assert b"others" == after.find("1-1", "whole").read_bytes()
    await until(lambda: not list((tmp_path / "trash").iterdir()))
