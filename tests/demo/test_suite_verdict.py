# SPDX-License-Identifier: Apache-2.0
"""What the page says of the conformance run."""

from __future__ import annotations

import pytest

from reference_rl.demo.suite import verdict_of


@pytest.mark.parametrize(
    ("exit_code", "counts", "phrase"),
    [
        (0, {"passed": 40}, "40 requirements passed, none failed"),
        (
            0,
            {"passed": 40, "planned": 9, "not_run": 1},
            "40 requirements passed, none failed; 10 not judged",
        ),
        (1, {"passed": 38, "failed": 2}, "2 of 40 judged requirements failed"),
        (4, {"passed": 38}, "flaky"),
        (9, {"passed": 38}, "exit code 9"),
    ],
)
def test_the_phrase_says_what_passed_failed_and_was_left_out(
    exit_code: int, counts: dict[str, int], phrase: str
) -> None:
    """A run that leaves something out never reads like a whole one."""
    assert phrase == verdict_of({"verdict": {"requirements": counts}}, exit_code)
