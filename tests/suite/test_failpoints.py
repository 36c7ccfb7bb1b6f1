# SPDX-License-Identifier: Apache-2.0
"""Fail points of a target: what a target file says of them, and the file that directs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.errors import NotOffered, SuiteFault, UsageError
from conformance.failpoints import MOMENTS, FailPoints, read_declaration
from conformance.patience import Patience

TARGETS = Path(__file__).parent / "targets"
PAGE = Path(__file__).parents[2] / "conformance" / "TARGET.md"


@pytest.fixture
def points(tmp_path: Path) -> FailPoints:
    """The fail points of a Gym that has one of them."""
    return FailPoints("GYM_POINT", {"commit.write": "writing"}, tmp_path / "point", Patience())


def test_a_moment_is_armed_until_its_block_ends(points: FailPoints) -> None:
    """The file holds the Gym's word and the action; another action replaces it; afterwards it is gone."""
    with points.arm("commit.write", "hold") as armed:
        assert "writing hold\n" == points.file.read_text()
        armed.turn_into("fail")
        assert "writing fail\n" == points.file.read_text()
    assert not points.file.exists()


def test_the_gym_says_that_it_reached_a_moment(points: FailPoints) -> None:
    """What it appended counts from the arming on, and other words do not count."""
    reached = Path(f"{points.file}.reached")
    reached.write_text("writing 1\n")
    with points.arm("commit.write", "hold") as armed:
        assert not armed.reached
        reached.write_text("other 1\nwriting 1\nwriting 2\n")
        armed.wait_reached()
        assert 2 == points.visits("commit.write")


def test_what_a_gym_does_not_have_is_not_offered(points: FailPoints) -> None:
    """A moment without a word; an action where it is not used is the suite's own fault."""
    with pytest.raises(NotOffered, match=r"restore\.build"):
        points.arm("restore.build", "kill")
    with pytest.raises(SuiteFault):
        points.arm("turn.close", "hold")


@pytest.mark.parametrize("section", [{}, {"env": "A"}, {"env": "A", "points": []}, {"env": "A", "points": {"no": "x"}}])
def test_a_section_of_another_form_is_refused(section: object) -> None:
    """A moment that is none must not look like one that was never reached."""
    with pytest.raises(UsageError, match="failpoints"):
        read_declaration(section)


def test_the_page_lists_every_moment() -> None:
    """TARGET.md says the same of each as the suite does."""
    page = PAGE.read_text()
    assert [] == [name for name, text in MOMENTS.items() if f"| `{name}` | {text} |" not in page]
