# SPDX-License-Identifier: Apache-2.0
"""The demo's command line: what it accepts and what it refuses to touch."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference_rl.demo.__main__ import main, parse
from reference_rl.demo.errors import UsageError


def test_all_columns_are_the_default() -> None:
    """`--all-columns` only says aloud what happens anyway."""
    assert (0, 1, 2, 3) == parse([]).columns == parse(["--all-columns"]).columns
    assert (3,) == parse(["--columns", "3"]).columns


def test_one_column_and_all_columns_exclude_each_other() -> None:
    """Two answers to one question."""
    with pytest.raises(UsageError, match="exclude"):
        parse(["--columns", "3", "--all-columns"])


def test_a_directory_of_somebody_else_is_not_emptied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only what an earlier demo made is removed."""
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    assert 2 == main(["--out", str(tmp_path)])
    assert "no demo made it" in capsys.readouterr().err
    assert "years of work" == (tmp_path / "thesis.txt").read_text(encoding="utf-8")


def test_a_size_that_makes_no_example_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """The message says what would be right."""
    assert 2 == main(["--siblings", "1"])
    assert "--siblings must be 2" in capsys.readouterr().err
