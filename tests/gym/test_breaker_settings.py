# SPDX-License-Identifier: Apache-2.0
"""Mistakes of an operator: each is one sentence and exit code 2, never a stack trace and never a guess."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reference_gym import announce, settings
from reference_gym.errors import SettingsError
from tests.gym.running import environment


def run(directory: Path, config: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Serve, which must not come to listen."""
    (directory / "gym.yaml").write_text(config)
    command = [sys.executable, "-m", "reference_gym.cli", "serve", "--config", str(directory / "gym.yaml"), *more]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("storage_roots: [gym.yaml]", "gym.yaml cannot be used: File exists"),
        ("storage_roots: [gym.yaml/x]", "cannot be used: Not a directory"),
        ("storage_roots: [/nowhere/snapshots]", "/nowhere/snapshots is no directory"),
        ("data_dir: gym.yaml", "data_dir"),
        ("name: a\nname: b", "name is there twice"),
        ("limits: {max_batch: 1, max_batch: 2}", "max_batch is there twice"),
        ("conformance: {world_url: 'ftp://x'}", "conformance.world_url: not of the form http://host:port"),
        ("conformance: {world_url: 'http://h:99999'}", "conformance.world_url: not of the form http://host:port"),
        ("peers: {model: nowhere}", "peers.model: not of the form http://host:port"),
    ],
)
def test_a_mistake_in_the_file_names_its_place(tmp_path: Path, config: str, expected: str) -> None:
    """The place and the reason; a share that is not mounted is not taken for an empty one."""
    (tmp_path / "gym.yaml").write_text(config)
    with pytest.raises(SettingsError) as raised:
        settings.require_directories(settings.load(tmp_path / "gym.yaml", insecure_no_auth=True))
    assert expected in str(raised.value)


def test_a_root_that_is_no_directory_is_one_sentence(tmp_path: Path) -> None:
    """Exit code 2, and no stack trace."""
    ended = run(tmp_path, "storage_roots: [gym.yaml]")
    assert (2, "") == (ended.returncode, ended.stdout)
    assert "cannot be used: File exists" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("processes", ["one", "three"])
def test_an_announcement_that_cannot_be_written_is_one_sentence(tmp_path: Path, processes: str) -> None:
    """A Gym whose address nobody can learn does not begin to serve."""
    ended = run(tmp_path, f"processes: {processes}", "--announce", str(tmp_path / "missing" / "announce.json"))
    assert 2 == ended.returncode
    assert "announce.json cannot be written: No such file or directory" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_world_of_the_environment_is_judged_as_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the address comes from, it has to be one."""
    (tmp_path / "gym.yaml").write_text("conformance: {}")
    monkeypatch.setenv(settings.WORLD_URL_VARIABLE, "garbage")
    with pytest.raises(SettingsError, match="GYM_CONFORMANCE_WORLD_URL is not of the form"):
        settings.load(tmp_path / "gym.yaml", insecure_no_auth=True)


def test_what_a_relative_path_names_is_made(tmp_path: Path) -> None:
    """The directory of the file belongs to the Gym."""
    (tmp_path / "gym.yaml").write_text("storage_roots: [run/snapshots]")
    settings.require_directories(settings.load(tmp_path / "gym.yaml", insecure_no_auth=True))
    assert (tmp_path / "run" / "snapshots").is_dir()


def test_an_announcement_names_its_file_when_it_fails(tmp_path: Path) -> None:
    """The supervisor, which announces again after a restart, can tell this from a failure of its own."""
    with pytest.raises(SettingsError, match="cannot be written"):
        announce.announce([], tmp_path / "missing" / "announce.json")
