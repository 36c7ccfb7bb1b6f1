# SPDX-License-Identifier: Apache-2.0
"""Where the limit of a record lies, byte by byte."""

from __future__ import annotations

import pytest

from reference_gym.participant.records import MemoryStore, Record

LIMIT = 1_000


@pytest.mark.parametrize(("size", "expected"), [(LIMIT - 1, {}), (LIMIT, {}), (LIMIT + 1, {"a": "record_too_large"})])
def test_a_record_may_be_as_long_as_the_limit_and_not_one_byte_longer(size: int, expected: dict[str, str]) -> None:
    """C49: all of its pieces count, and the next boundary that fits makes good for one that did not."""
    store = MemoryStore(LIMIT)

    def put(length: int) -> None:
        payload = (b"x" * 10, b"x" * (length - 10))
        store.put(Record("a", 0, 1, None, None, {}, payload))

    put(size)
    assert expected == dict(store.unable)
    records, restarts = store.cut()
    assert (["a"], expected) == (list(records), dict(restarts))
    put(LIMIT)
    assert {} == dict(store.unable)
