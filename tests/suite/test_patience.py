# SPDX-License-Identifier: Apache-2.0
"""Bounded waits."""

from __future__ import annotations

import itertools
import time

import pytest

from conformance.errors import TimedOut
from conformance.patience import Patience


def test_a_condition_that_comes_true_ends_the_wait() -> None:
    """Its value is returned."""
    numbers = itertools.count()
    assert Patience().until(lambda: (n := next(numbers)) >= 3 and n, "three") == 3


def test_a_condition_that_does_not_is_named() -> None:
    """The failure says what was waited for, and for how long."""
    with pytest.raises(TimedOut, match=r"pigs fly.*0\.05 s"):
        Patience().until(lambda: None, "pigs fly", within_s=0.05)


def test_one_knob_scales_every_bound() -> None:
    """A scale of 0.1 waits a tenth."""
    patience = Patience(0.1)
    started = time.monotonic()
    with pytest.raises(TimedOut):
        patience.until(lambda: None, "never", within_s=1.0)
    assert time.monotonic() - started < 0.9
    assert (patience.ms(1000), patience.seconds(3.0)) == (100, pytest.approx(0.3))


def test_a_condition_that_stops_being_true_is_seen() -> None:
    """`stays` is false as soon as it changes, true if it holds for the whole time."""
    numbers = itertools.count()
    assert Patience().stays(lambda: True, 0.05)
    assert not Patience().stays(lambda: next(numbers) < 2, 5.0)
