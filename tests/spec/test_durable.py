# SPDX-License-Identifier: Apache-2.0
"""Durable file steps leave a whole file, the right modes, or nothing."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from spec import durable


def test_a_written_file_is_private_and_synced(tmp_path: Path, synced: list[str]) -> None:
    """Content is synced before the call returns, and others cannot read it."""
    assert 6 == durable.write_file(tmp_path / "a", iter([b"abc", b"def"]))
    assert b"abcdef" == (tmp_path / "a").read_bytes()
    assert 0o600 == stat.S_IMODE((tmp_path / "a").stat().st_mode)
    assert ["file"] == synced


def test_an_existing_file_is_never_written_into(tmp_path: Path) -> None:
    """Whoever was first keeps the file."""
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        durable.write_file(tmp_path / "a", b"new")
    assert b"old" == (tmp_path / "a").read_bytes()


def test_publishing_syncs_the_file_before_the_directory(tmp_path: Path, synced: list[str]) -> None:
    """C48: data first, then the directory; a reader sees the old file or the new one."""
    (tmp_path / "m").write_bytes(b"old")
    durable.publish_file(tmp_path / "m", b"new")
    assert b"new" == (tmp_path / "m").read_bytes()
    assert ["m"] == [path.name for path in tmp_path.iterdir()]
    assert ["file", "directory"] == synced


def test_a_left_over_temporary_file_does_not_stop_publishing(tmp_path: Path) -> None:
    """A crash between write and rename leaves a temporary file, which the next publication replaces."""
    (tmp_path / ".m.tmp").write_bytes(b"half")
    durable.publish_file(tmp_path / "m", b"whole")
    assert b"whole" == (tmp_path / "m").read_bytes()


@pytest.mark.parametrize("kernel", [True, False], ids=["renameat2", "without renameat2"])
def test_a_rename_never_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: bool) -> None:
    """C47: the second of two renames to one name fails and leaves both directories."""
    if not kernel:
        monkeypatch.setattr(durable, "_renameat2", lambda *_: errno.ENOSYS)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    durable.rename_noreplace(tmp_path / "a", tmp_path / "done")
    with pytest.raises(FileExistsError):
        durable.rename_noreplace(tmp_path / "b", tmp_path / "done")
    assert ["b", "done"] == sorted(path.name for path in tmp_path.iterdir())


def test_a_file_system_that_cannot_keep_the_promise_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C47: without the kernel's help a plain file is not renamed at all."""
    monkeypatch.setattr(durable, "_renameat2", lambda *_: errno.ENOSYS)
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(OSError, match="without replacing"):
        durable.rename_noreplace(tmp_path / "a", tmp_path / "b")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what is synced, in order, and still sync it."""
    order: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        order.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return order
