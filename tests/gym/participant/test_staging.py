# SPDX-License-Identifier: Apache-2.0
"""The files of the ``http`` scheme: what a process that was killed has left there."""

from __future__ import annotations

from pathlib import Path

import spec.durable
from reference_gym.participant import Limits
from reference_gym.participant.staging import Staging


def test_an_upload_that_was_never_whole_is_gone_after_a_restart(tmp_path: Path) -> None:
    """It has no name and takes up no room; whole uploads stay where the incarnation is kept."""
    limits = Limits(max_artifacts=2)
    before = Staging(tmp_path, limits)
    whole = before.begin_upload("1-1", "whole")
    whole.write(b"bytes")
    whole.finish(spec.durable)
    whole.abandon()
    half = before.begin_upload("1-1", "half")
    half.write(b"by")  # The process is killed here.
    after = Staging(tmp_path, limits)
    after.begin("1-0")
    assert {"whole"} == {path.name for path in (tmp_path / "uploads" / "1-1").iterdir()}
    after.begin_upload("1-1", "another").abandon()
    assert b"bytes" == after.find("1-1", "whole").read_bytes()
    half.abandon()
