# SPDX-License-Identifier: Apache-2.0
"""Keys, ids and digests mean the same to both sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec import wire

LEGAL = ["a", "p7_g2", "A.b-c_d", "0", "a-a", "a-ax", "a-a1x", "x" * 128]
ILLEGAL = ["", "-x", "_x", ".x", "..", "a/b", "a\n", "\na", "a b", "é", "a-a1", "a-a01", "a-a0-a7", "x" * 129, "٣"]

rollout_ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True).filter(wire.is_rollout_id)
attempts = st.integers(0, wire.MAX_ATTEMPT)


@pytest.mark.parametrize("text", LEGAL)
def test_legal_rollout_ids_are_accepted(text: str) -> None:
    """C14: ids of the right form that do not end in the reserved suffix."""
    assert wire.is_rollout_id(text)


@pytest.mark.parametrize("text", ILLEGAL)
def test_illegal_rollout_ids_are_refused(text: str) -> None:
    """C14: wrong characters, lengths and the reserved suffix."""
    assert not wire.is_rollout_id(text)


@given(rollout_ids, attempts, rollout_ids, attempts)
def test_no_two_attempts_share_a_key(one: str, first: int, other: str, second: int) -> None:
    """C14: the reserved suffix makes keys one-to-one."""
    same = wire.rollout_key(one, first) == wire.rollout_key(other, second)
    assert same == ((one, first) == (other, second))


@pytest.mark.parametrize("attempt", [-1, 2**31, 2**63])
def test_an_attempt_out_of_range_has_no_key(attempt: int) -> None:
    """C14: attempts are 0 … 2³¹−1."""
    with pytest.raises(ValueError, match="attempt"):
        wire.rollout_key("a", attempt)


@pytest.mark.parametrize(
    "text", ["0-1", "1", "1-", "-1", "01-1", "1-01", "1-1\n", "1-1-1", "1-" + "9" * 16, "a-1", "1--1"]
)
def test_malformed_checkpoint_ids_are_refused(text: str) -> None:
    """An id is `<epoch>-<sequence>`, without leading zeros, at most 15 digits each."""
    with pytest.raises(ValueError, match="checkpoint id"):
        wire.parse_checkpoint_id(text)


def test_checkpoint_ids_are_ordered_as_numbers() -> None:
    """C42: 9, 10 and 100 in this order, whatever their text says."""
    texts = ["1-100", "10-0", "1-9", "9-7", "1-10"]
    assert ["1-9", "1-10", "1-100", "9-7", "10-0"] == sorted(texts, key=wire.parse_checkpoint_id)


def test_controllers_are_ordered_by_epoch_and_then_bytewise() -> None:
    """Bytes, not code points of some locale, decide between two controllers of one epoch."""
    assert wire.ControllerPair.of(2, "a") > wire.ControllerPair.of(1, "z")
    assert wire.ControllerPair.of(1, "a") > wire.ControllerPair.of(1, "Z")


def test_a_digest_is_over_the_bytes_of_the_text() -> None:
    """Nothing is canonicalised: one space more is another result."""
    assert wire.result_digest('{"a":1}') != wire.result_digest('{"a": 1}')
    assert wire.is_digest(wire.result_digest("")) and not wire.is_digest("sha256:" + "0" * 63)


def test_a_lone_surrogate_has_no_digest() -> None:
    """N10: text without a UTF-8 form is an error at once, never a silent replacement."""
    with pytest.raises(UnicodeEncodeError):
        wire.result_digest("\ud800")
