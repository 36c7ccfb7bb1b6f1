# SPDX-License-Identifier: Apache-2.0
"""The rendered specification builds, shows every requirement, and cannot be built with a dead reference."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import spec

ROOT = Path(__file__).resolve().parents[2]


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build the pages without the API page, whose script is fetched, and treat each warning as an error."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-D", "api_page=0"]
    return subprocess.run(
        [*command, "-d", str(target / "doctrees"), str(source), str(target / "html")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=100,
    )


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="an installed distribution has no documentation sources")
def test_every_requirement_has_a_permanent_anchor_in_its_chapter(tmp_path: Path) -> None:
    """The pages build without a warning, and `chapter.html#ID` exists for every id; nothing is loaded from outside."""
    done = build(ROOT / "docs", tmp_path)
    assert (0, "") == (done.returncode, done.stderr)
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "html" / "v1").glob("*.html")}
    for requirement in spec.load("1.0").requirements.values():
        assert f'id="{requirement.id}"' in pages[requirement.chapter], requirement.id
    for code in spec.load("1.0").errors:
        assert f'id="error-{code}"' in pages["errors"], code
    for name, text in pages.items():
        assert 'src="http' not in text, name


def test_a_dead_reference_fails_the_build(tmp_path: Path) -> None:
    """A mention of a requirement that does not exist, or a link to a page that does not, is an error."""
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text((ROOT / "docs" / "conf.py").read_text(encoding="utf-8"), encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "_ext", source / "_ext", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "_static").mkdir()
    (source / "index.md").write_text("# Page\n\nSee {req}`CKPT-NONE-001` and [there](nowhere.md).\n", encoding="utf-8")
    done = build(source, tmp_path / "out")
    assert done.returncode != 0
    assert "there is no requirement CKPT-NONE-001" in done.stderr
    assert "nowhere" in done.stderr
