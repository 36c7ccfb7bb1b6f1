# SPDX-License-Identifier: Apache-2.0
"""The index of a cut: one row per rollout, in the standard form that any reader understands (CKPT-DIR-008)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reference_gym.participant.records import Cut, Record
from reference_gym.participant.result import Finished


def index_rows(cut: Cut) -> Iterator[dict[str, Any]]:
    """Yield the rows of the index, sorted by rollout id."""
    results = {finished.receipt.rollout_id: finished for finished in cut.results}
    for rollout_id in sorted(cut.records.keys() | results.keys()):
        if rollout_id in results:
            yield _finished_row(results[rollout_id])
        else:
            yield _record_row(cut.records[rollout_id], cut.restarts.get(rollout_id))


def _record_row(record: Record, reason: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "rollout_id": record.rollout_id,
        "attempt": record.attempt,
        "state": "turn" if reason is None else "restart",
    }
    if reason is not None:
        row["reason"] = reason
    row["turns_done"] = record.turns_done
    row["task_digest"] = record.task_digest
    row["environment"] = record.environment
    row["effects"] = dict(record.effects)
    if record.policy_version is not None:
        row["policy_version"] = record.policy_version
    row["data_refs"] = list(record.data_refs)
    return row


def _finished_row(finished: Finished) -> dict[str, Any]:
    row: dict[str, Any] = {
        "rollout_id": finished.receipt.rollout_id,
        "attempt": finished.receipt.attempt,
        "state": "finished",
        "turns_done": finished.turns_done,
        "task_digest": finished.task_digest,
        "environment": finished.environment,
        "effects": {finished.environment: finished.effects},
        "receipt": finished.receipt.as_json(),
    }
    if finished.policy_version is not None:
        row["policy_version"] = finished.policy_version
    row["data_refs"] = list(finished.data_refs)
    return row
