# SPDX-License-Identifier: Apache-2.0
"""The order of events, told with stand-ins for the Gym and the RL client: the demo can fail, and says why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reference_rl.demo.errors import ProcessDiedError
from reference_rl.demo.policy import TOKEN_ENV
from reference_rl.demo.processes import Processes
from reference_rl.demo.scenario import Scenario
from reference_rl.demo.stage import Commands
from reference_rl.demo.story import Column, Policy, Teller

STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in.py")))
LATENCY_S = 0.01


@pytest.fixture
def teller(tmp_path: Path) -> Iterator[Teller]:
    """A teller whose Gym and RL client are stand-ins."""
    secrets = {TOKEN_ENV: "token-of-the-test"}
    with Processes() as processes:
        policy = Policy(processes, tmp_path, LATENCY_S, secrets)
        teller = Teller(processes, policy, tmp_path, Scenario(), "one", secrets, LATENCY_S, lambda line: None)
        teller.commands = Commands(STAND_IN, STAND_IN)
        yield teller


def tell(teller: Teller, column: int) -> Column:
    """One column after the uninterrupted run."""
    return teller.column(column, teller.uninterrupted())


def test_a_restart_at_turn_one_throws_six_turns_away(teller: Teller) -> None:
    """2 turns of B, 4 of C, none of A; bodies are the same all the same."""
    column = tell(teller, 0)
    assert [0, 2, 4] == [count.thrown_away for count in column.counts]
    assert column.bodies_equal and column.as_promised


def test_a_restart_that_continues_throws_nothing_away(teller: Teller) -> None:
    """The calls that were held at the crash are asked again, and count as no completed turn."""
    column = tell(teller, 3)
    assert [0, 0, 0] == [count.thrown_away for count in column.counts]
    assert [0, 1, 1] == [count.cut_off for count in column.counts]
    assert column.as_promised


def test_the_marks_stand_in_the_order_of_the_story(teller: Teller) -> None:
    """Snapshot before kill, kill before restart, restart before the end."""
    marks = tell(teller, 3).marks
    kinds = ["start", "started", "snapshot", "kill", "restart", "restarted", "release", "done"]
    assert kinds == [mark.kind for mark in marks]
    assert sorted(mark.t for mark in marks) == [mark.t for mark in marks]


def test_a_client_that_forgets_turns_is_found_out(teller: Teller) -> None:
    """Column 3 that restarts at turn 1 is not as promised, whatever it says about itself."""
    teller.secrets = {**teller.secrets, "STAND_IN_FORGETS": "1"}
    column = tell(teller, 3)
    assert 6 == column.thrown_away
    assert not column.as_promised


def test_a_body_that_differs_is_found_out(teller: Teller) -> None:
    """Every turn kept, but the result is another one: not as promised."""
    teller.secrets = {**teller.secrets, "STAND_IN_DIFFERS": "1"}
    column = tell(teller, 3)
    assert 0 == column.thrown_away
    assert not column.bodies_equal and not column.as_promised


def test_a_client_that_dies_is_named_with_its_log(teller: Teller, tmp_path: Path) -> None:
    """The message leads to the cause."""
    teller.commands = Commands(STAND_IN, (sys.executable, "-c", "raise SystemExit('no luck today')"))
    log = tmp_path / "uninterrupted" / "rl-1.log"
    with pytest.raises(ProcessDiedError, match=rf"the RL client .* ended with code 1 .* its log is {log}:\n.*no luck"):
        teller.uninterrupted()
