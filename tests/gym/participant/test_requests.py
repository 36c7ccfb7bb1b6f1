# SPDX-License-Identifier: Apache-2.0
"""Long requests are judged in pieces, and nothing about them is different for it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from reference_gym.participant.errors import InvalidRequest
from reference_gym.participant.requests import PIECE, read_message
from spec.messages import MESSAGES

MANY = 3 * PIECE + 7
DIGEST = "sha256:" + "0" * 64
RESTORE = {
    "checkpoint_id": "1-1",
    "run_id": "run",
    "source": {"scheme": "file", "path": "/s", "checkpoint_id": "1-0", "manifest_digest": DIGEST},
    "rollouts": [
        {"rollout_id": f"r{n}", "attempt": 0, "next_attempt": 1, "turns_done": n, "task_digest": "t"}
        for n in range(MANY)
    ],
    "results": [{"rollout_id": f"f{n}", "attempt": 0, "digest": DIGEST} for n in range(2 * PIECE)],
    "fences": [{"rollout_id": "x", "through_attempt": 3}],
    "timeout_ms": 1_000,
    "lease_ms": 1_000,
}
RETIRE = {"rollouts": [{"rollout_id": f"r{n}", "through_attempt": n} for n in range(MANY)], "timeout_ms": 1_000}


@pytest.mark.parametrize(("schema", "value"), [("restore-request", RESTORE), ("retire-request", RETIRE)])
def test_a_long_request_is_what_it_would_be_as_a_whole(schema: str, value: Any) -> None:
    """The same message, item by item and in order."""
    assert MESSAGES[schema].of(value) == read_message(schema, json.dumps(value).encode())


@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, MANY - 1])
def test_what_is_wrong_in_a_long_request_is_named_by_its_place(at: int) -> None:
    """Whichever piece it is in, the place is that in the request."""
    value = copy.deepcopy(RESTORE)
    value["rollouts"][at]["turns_done"] = -1  # type: ignore[index]  # a value of JSON
    with pytest.raises(InvalidRequest, match=f"^invalid_request: rollouts/{at}/turns_done: "):
        read_message("restore-request", json.dumps(value).encode())


@pytest.mark.parametrize(
    ("schema", "change", "match"),
    [
        ("restore-request", {"source": None}, "rollouts"),
        ("restore-request", {"extra": 1}, "extra"),
        ("retire-request", {"rollouts": RETIRE["rollouts"] * 17}, "rollouts: "),
    ],
    ids=["lists from nowhere", "unknown field", "too many"],
)
def test_a_long_request_is_refused_for_what_is_wrong_with_the_whole(schema: str, change: Any, match: str) -> None:
    """What the lists are together, and the other fields, are judged as well."""
    value = (RESTORE if schema == "restore-request" else RETIRE) | change
    with pytest.raises(InvalidRequest, match=match):
        read_message(schema, json.dumps(value).encode())
