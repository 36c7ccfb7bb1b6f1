# SPDX-License-Identifier: Apache-2.0
"""The ledger of completed policy calls by itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reference_gym.model.ledger import Ledger, Row
from reference_gym.participant.policy_call import TurnId
from reference_gym.participant.state import Restored


def row(turn: int, version: int | None = None) -> Row:
    """A row."""
    return Row(turn, f"sha256:{turn:064x}", 10, {"total_tokens": turn}, version)


def restored(turns_done: int, data: Any) -> Restored:
    """One rollout of a restore."""
    return Restored("r", attempt=3, saved_attempt=1, turns_done=turns_done, data=data)


async def test_a_restore_keeps_the_rows_of_listed_rollouts_up_to_their_turns() -> None:
    """CKPT-ENV-021, CKPT-ENV-022: later rows and other rollouts are gone, and a build changes nothing by itself."""
    changed: list[str] = []
    ledger = Ledger(changed.append)
    for turn in (1, 2, 3):
        ledger.add(TurnId("r", 1, turn), row(turn, version=turn))
    ledger.add(TurnId("other", 0, 1), row(1))
    captured = ledger.capture("r")
    assert captured is not None
    assert (1, 3, 3) == (captured.attempt, captured.turns_done, captured.policy_version)
    built = await ledger.build([restored(2, json.loads(json.dumps(captured.data)))])
    assert 3 == len(ledger.rows("r"))
    ledger.install(built)
    assert [1, 2] == [each.turn for each in ledger.rows("r")]
    assert [] == ledger.rows("other")
    assert ["r", "r", "r", "other"] == changed


def test_a_turn_that_is_generated_again_replaces_its_row() -> None:
    """One row per turn; a late call of a lower attempt leaves it alone."""
    ledger = Ledger(lambda _: None)
    ledger.add(TurnId("r", 1, 1), row(1, version=1))
    ledger.add(TurnId("r", 2, 1), row(1, version=2))
    ledger.add(TurnId("r", 1, 1), row(1, version=3))
    assert [2] == [each.version for each in ledger.rows("r")]


@pytest.mark.parametrize("damage", [{"turn": 0}, {"turn": True}, {"reply_digest": 1}, {"usage": []}, {"version": "1"}])
async def test_a_damaged_row_fails_the_build(damage: dict[str, Any]) -> None:
    """Nothing half-built is installed."""
    with pytest.raises(ValueError, match="damaged"):
        await Ledger(lambda _: None).build([restored(1, [row(1).as_json() | damage])])


def test_a_capture_does_not_change_afterwards() -> None:
    """What was captured stays as it was when further rows come."""
    ledger = Ledger(lambda _: None)
    ledger.add(TurnId("r", 0, 1), row(1))
    captured = ledger.capture("r")
    ledger.add(TurnId("r", 0, 2), row(2))
    assert captured is not None
    assert 1 == len(captured.data)
    ledger.forget("r", 0)
    assert ledger.capture("r") is None
    ledger.add(TurnId("r", 2, 1), row(1))
    ledger.forget("r", 1)
    assert [1] == [each.turn for each in ledger.rows("r")]
