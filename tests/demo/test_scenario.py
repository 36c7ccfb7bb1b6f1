# SPDX-License-Identifier: Apache-2.0
"""Who is held where, and what each column is expected to cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_rl.demo.errors import UsageError
from reference_rl.demo.scenario import COLUMNS, Scenario


def test_the_default_is_the_worked_example() -> None:
    """A has finished, B has 2 turns and is held in its third, C has 4 and is held in its fifth."""
    assert {1: 3, 2: 5} == Scenario().held
    assert {0: 5, 1: 2, 2: 4} == Scenario().completed_at_crash


def test_the_worked_example_costs_six_six_six_nothing() -> None:
    """2 + 4 turns are thrown away wherever a restart begins at turn 1."""
    assert [6, 6, 6, 0] == [Scenario().expected(column) for column in COLUMNS]


@given(st.integers(2, 256), st.integers(2, 60))
def test_every_size_holds_all_but_the_first_at_a_turn_that_exists(siblings: int, turns: int) -> None:
    """Held turns lie in 1 … turns, never fall, and reach the last turn."""
    held = Scenario(siblings, turns).held
    assert list(range(1, siblings)) == list(held)
    assert sorted(held.values()) == list(held.values())
    assert min(held.values()) >= 1
    assert turns == max(held.values())


@given(st.integers(2, 256), st.integers(2, 60))
def test_the_expected_count_is_what_the_unfinished_siblings_have_completed(siblings: int, turns: int) -> None:
    """Everything that was completed at the crash, except by the finished sibling, is lost in column 0."""
    scenario = Scenario(siblings, turns)
    assert sum(scenario.completed_at_crash.values()) - turns == scenario.expected(0)


@given(st.integers(2, 256))
def test_names_and_seeds_tell_all_siblings_apart(siblings: int) -> None:
    """No two siblings share a name or a seed."""
    scenario = Scenario(siblings, 5)
    assert siblings == len({scenario.name(sibling) for sibling in range(siblings)})
    assert siblings == len(scenario.policy_seeds)


@pytest.mark.parametrize(("siblings", "turns"), [(1, 5), (3, 1), (257, 5), (3, 61)])
def test_sizes_that_make_no_example_are_refused(siblings: int, turns: int) -> None:
    """One sibling has nobody to wait for, and an episode must be able to last for all of its turns."""
    with pytest.raises(UsageError, match="must be 2"):
        Scenario(siblings, turns)
