# SPDX-License-Identifier: Apache-2.0
"""The data plane: rows under (rollout, attempt, turn), pins against deletion, and which rows belong to what."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reference_rl import settling, transitions
from reference_rl.dataplane import EmbeddedDataPlane, RowKey, export_rows, import_rows
from reference_rl.ledger import Ledger
from reference_rl.records import Reservation
from reference_rl.rows import named_by, owners_of_turns, rows_of_attempt, rows_of_cut, rows_of_live, rows_of_results
from spec.messages import IndexRecord
from tests.rl.test_ledger import planned, success

KEYS = [RowKey("r_g0_s0", attempt, turn) for attempt in (0, 1) for turn in (1, 2, 3)]


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[EmbeddedDataPlane]:
    """A data plane with three rows of two attempts each, and one of another rollout."""
    opened = EmbeddedDataPlane(tmp_path / "plane.sqlite")
    await opened.put_many([(key, {"ids": [key.turn], "logprobs": [-0.5]}) for key in KEYS])
    await opened.put(RowKey("r_g0_s1", 0, 1), {"ids": [9]})
    yield opened
    await opened.close()


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A ledger in which attempt 1 of the first sibling continues attempt 0 after 2 turns."""
    opened = Ledger(tmp_path / "ledger.sqlite", "r1")
    opened.call(transitions.plan, [planned()])
    opened.call(transitions.reserve, [Reservation("r_g0_s0", "restore", continues=0, turns_kept=2)], 1)
    return opened


async def test_rows_are_kept_by_rollout_attempt_and_turn(plane: EmbeddedDataPlane) -> None:
    """CKPT-DUTY-026: a row is found by its key, a list by the prefix of one."""
    assert {"ids": [2], "logprobs": [-0.5]} == await plane.get(RowKey("r_g0_s0", 1, 2))
    assert await plane.get(RowKey("r_g0_s0", 7, 1)) is None
    assert KEYS[3:] == await plane.list("r_g0_s0/1/")
    assert 7 == len(await plane.list())
    assert KEYS[4] == RowKey.parse(str(KEYS[4]))


async def test_pinned_rows_outlive_their_deletion(plane: EmbeddedDataPlane) -> None:
    """CKPT-SNAP-007: while a snapshot is taken no row goes; what was deleted meanwhile goes when it is done."""
    await plane.pin("snapshot")
    await plane.pin("other", [KEYS[0]])
    assert 0 == await plane.delete(KEYS[:2])
    assert 7 == len(await plane.list())
    await plane.unpin("snapshot")
    assert KEYS[0] in await plane.list()
    assert KEYS[1] not in await plane.list()
    await plane.unpin("other")
    assert KEYS[0] not in await plane.list()


async def test_rows_survive_through_a_snapshot(plane: EmbeddedDataPlane, tmp_path: Path) -> None:
    """CKPT-SNAP-016: what was exported comes back where it is missing, and nothing that is there is touched."""
    assert 2 == await export_rows(plane, [*KEYS[:2], RowKey("gone", 0, 1)], tmp_path / "rows.jsonl")
    await plane.delete(KEYS[:1])
    assert 1 == await import_rows(plane, tmp_path / "rows.jsonl")
    assert {"ids": [1], "logprobs": [-0.5]} == await plane.get(KEYS[0])


async def test_rows_are_there_after_the_process(plane: EmbeddedDataPlane, tmp_path: Path) -> None:
    """Flushed rows are read by another connection to the same file."""
    await plane.flush()
    again = EmbeddedDataPlane(tmp_path / "plane.sqlite")
    assert 7 == len(await again.list())
    await again.close()


async def test_a_continued_attempt_owns_the_turns_after_the_saved_ones(
    plane: EmbeddedDataPlane, ledger: Ledger
) -> None:
    """N15: rows of saved turns stay with the attempt that made them, the redone third one does not count."""
    listed = await plane.list()
    assert [(1, 3, None), (0, 1, 2)] == ledger.read(owners_of_turns, "r_g0_s0", 1)
    assert {KEYS[0], KEYS[1], KEYS[5]} == ledger.read(rows_of_attempt, "r_g0_s0", 1, listed)
    assert {KEYS[0], KEYS[1], KEYS[5], RowKey("r_g0_s1", 0, 1)} == ledger.read(rows_of_live, listed)
    ledger.close()


async def test_results_and_cuts_name_their_rows(plane: EmbeddedDataPlane, ledger: Ledger) -> None:
    """CKPT-SNAP-016: a result names the rows of its attempt, a saved turn those up to it, references their own."""
    listed = await plane.list()
    ledger.call(settling.settle, "gym", [success("r_g0_s0", attempt=1)], 3)
    assert {KEYS[0], KEYS[1], KEYS[5]} == ledger.read(rows_of_results, listed)
    row = {"rollout_id": "r_g0_s0", "attempt": 1, "state": "turn", "turns_done": 2, "task_digest": "d"}
    row |= {"environment": "taxi", "effects": {}, "data_refs": [{"key": "r_g0_s0/1/1"}]}
    index = [IndexRecord.read(json.dumps(row))]
    assert {KEYS[0], KEYS[1], KEYS[3]} == ledger.read(rows_of_cut, index, listed)
    assert set(KEYS[:3]) == named_by([{"prefix": "r_g0_s0/0/"}], listed)
    ledger.close()
