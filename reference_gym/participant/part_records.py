# SPDX-License-Identifier: Apache-2.0
"""The boundary of a rollout of which only parts are held here, sessions or rows; others do its turns."""

from __future__ import annotations

from reference_gym.participant.encoding import PartValues, head, part_piece
from reference_gym.participant.records import Record


def part_record(rollout_id: str, values: PartValues) -> Record:
    """Return what a cut holds of a rollout: what its parts hold, and the most that one of them knows.

    Args:
        rollout_id: whose.
        values: what each part has captured, by the part's name; at least one.
    """
    captured = list(values.values())
    first = max(captured, key=lambda each: each.turns_done)
    attempt = max(each.attempt for each in captured)
    environment = next((each.environment for each in captured if each.environment), None)
    return Record(
        rollout_id=rollout_id,
        attempt=attempt,
        turns_done=first.turns_done,
        task_digest=next((each.task_digest for each in captured if each.task_digest is not None), None),
        environment=environment,
        effects={environment: sum(each.effects for each in captured)} if environment else {},
        payload=(head(rollout_id, attempt, None), part_piece(values)),
        policy_version=max((each.policy_version for each in captured if each.policy_version is not None), default=None),
        data_refs=tuple(reference for each in captured for reference in each.data_refs),
        restart=next((each.restart for each in captured if each.restart is not None), None),
    )
