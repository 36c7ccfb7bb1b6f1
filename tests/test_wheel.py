# SPDX-License-Identifier: Apache-2.0
"""The distribution carries the specification and everything that its three commands need."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "conformance.cli": "gym-conformance",
    "reference_gym.cli": "reference-gym",
    "reference_rl.cli": "reference-rl",
}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel without network and unpack it far from the checkout."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = (directory / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site")
    return directory / "site"


def run(unpacked: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the unpacked wheel before everything else, from a directory that holds nothing."""
    empty = unpacked.parent / "empty"
    empty.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=empty,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_wheel_finds_the_whole_specification(unpacked: Path) -> None:
    """Requirements, schemas, the phase machine, errors and the OpenAPI document are read from inside the wheel."""
    code = (
        "import spec; s = spec.load('1.0'); print(spec.__file__, len(s.requirements) > 900, len(s.schemas) > 30, "
        "len(s.errors), s.openapi['openapi'], (s.root / 'lifecycle.md').is_file())"
    )
    done = run(unpacked, "-c", code)
    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith(str(unpacked))
    assert done.stdout.split()[1:] == ["True", "True", "27", "3.1.0", "True"]


@pytest.mark.parametrize("module", COMMANDS)
def test_each_command_runs_from_the_wheel(unpacked: Path, module: str) -> None:
    """The entry point exists in the metadata and prints its help from the unpacked wheel."""
    (metadata,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert f"{COMMANDS[module]} = {module}:main" in metadata.read_text(encoding="utf-8")
    done = run(
        unpacked, "-c", f"import sys; sys.argv = ['{COMMANDS[module]}', '--help']; from {module} import main; main()"
    )
    assert 0 == done.returncode, done.stderr
    assert "Usage" in done.stdout


def test_the_wheel_carries_nothing_but_the_four_packages(unpacked: Path) -> None:
    """No tests, no build output and no documentation sources travel with it."""
    tops = {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")}
    assert {"spec", "reference_gym", "reference_rl", "conformance"} == tops
