# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for every file of the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMENTED = {".py", ".yaml", ".yml", ".js", ".css", ".svg", ".html", ".toml"}
PACKAGES = ("spec", "reference_gym", "reference_rl", "conformance")


def tracked() -> list[Path]:
    """Return the files that git knows, or every source file where there is no git (an unpacked archive)."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [path for path in map(ROOT.joinpath, listed.stdout.splitlines()) if path.is_file()]
    return [p for top in (*PACKAGES, "tests", "docs", "benchmarks") for p in (ROOT / top).rglob("*") if p.is_file()]


def test_every_source_file_names_its_licence() -> None:
    """One SPDX line near the top of each source file."""
    without = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.suffix in COMMENTED
        and path.stat().st_size
        and "SPDX-License-Identifier: Apache-2.0" not in path.read_text(encoding="utf-8")[:400]
    ]
    assert [] == without


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_point_one_way(package: str) -> None:
    """`spec` imports none of the others; none of the others imports another; the suite does not use the messages."""
    allowed = {"spec", package}
    wrong = []
    for path in (ROOT / package).rglob("*.py"):
        for name in imports(path):
            top = name.split(".")[0]
            if top in PACKAGES and top not in allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
            if package == "conformance" and name.startswith("spec.messages"):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert [] == wrong


def test_nothing_names_a_place_on_somebodys_machine() -> None:
    """No absolute path of a home or work directory, and no host of a package index."""
    pattern = re.compile(r"/(?:home|work|root|Users)/[a-z]|pypi\.org|pythonhosted|registry\.npmjs")
    named = []
    for path in tracked():
        if path.suffix in {".png", ".ico"} or path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                named.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert [] == named


def imports(path: Path) -> list[str]:
    """Return the modules that a file imports, `from a import b` as `a.b`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found
