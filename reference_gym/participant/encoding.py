# SPDX-License-Identifier: Apache-2.0
"""The payload of one rollout: what the participant writes of it at a boundary, and reads in a restore.

``{"rollout_id":…,"attempt":…,"policy":…,"start":…,"turns_done":…,…,"state":…,"parts":{…}}``, in pieces, so that
what never changes (the start) is encoded once, and a replaced policy replaces one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from reference_gym.participant.jsontext import NotJson, decode_private, encode_private
from reference_gym.participant.rollout import Rollout
from reference_gym.participant.state import Captured, Encoded, Policy, Start
from spec.messages import StartRollout

PartValues = Mapping[str, Captured]
"""What the parts hold of one rollout, by the part's name."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One rollout as a payload holds it; ``start`` is None where rollouts are not owned."""

    rollout_id: str
    attempt: int
    parts: Mapping[str, Any]
    policy: Policy | None = None
    start: Start | None = None
    turns_done: int = 0
    effects: int = 0
    policy_versions: tuple[int, ...] = ()
    data_refs: tuple[Any, ...] = ()
    usage: Mapping[str, int] | None = None
    state: Any = None


def start_of(item: StartRollout, policy: Policy) -> Start:
    """Return what an item of a start call asks for."""
    return Start(
        rollout_id=item.rollout_id,
        attempt=item.attempt,
        environment=item.environment,
        task=item.task,
        task_digest=item.task_digest,
        policy=policy,
        agent=item.agent,
        seed=item.seed,
        max_turns=None if item.limits is None else item.limits.max_turns,
        episode_ms=None if item.limits is None else item.limits.episode_ms,
        labels=item.labels,
    )


def start_text(start: Start) -> bytes:
    """Return the piece of a payload that never changes."""
    value = {
        "environment": start.environment,
        "agent": start.agent,
        "task": start.task,
        "task_digest": start.task_digest,
        "seed": start.seed,
        "max_turns": start.max_turns,
        "episode_ms": start.episode_ms,
        "labels": start.labels,
    }
    return b',"start":' + encode_private(value)


def head(rollout_id: str, attempt: int, policy: Policy | None) -> bytes:
    """Return the first piece of a payload; the id is its first field."""
    value: dict[str, Any] = {"rollout_id": rollout_id, "attempt": attempt}
    if policy is not None:
        value["policy"] = asdict(policy)
    return encode_private(value)[:-1]


def state_pieces(rollout: Rollout, start: bytes, parts: PartValues) -> tuple[bytes, ...]:
    """Return the payload of a rollout at the boundary where it stands.

    Raises:
        NotRepresentable: the author's state is no JSON value.
    """
    counted = {
        "turns_done": rollout.turns_done,
        "effects": rollout.effects,
        "policy_versions": rollout.policy_versions,
        "data_refs": rollout.data_refs,
        "usage": rollout.usage,
        "state": rollout.state,
    }
    return (
        head(rollout.rollout_id, rollout.attempt, rollout.policy),
        start,
        b"," + encode_private(counted)[1:-1],
        part_piece(parts),
    )


def part_piece(parts: PartValues) -> bytes:
    """Return the last piece of a payload: what the parts hold."""
    values = b",".join(
        b'"%s":%s' % (name.encode(), data.text if isinstance(data, Encoded) else encode_private(data))
        for name, data in ((name, captured.data) for name, captured in sorted(parts.items()))
    )
    return b',"parts":{%s}}' % values


def continued(payload: bytes, rollout_id: str, attempt: int, policy: Policy | None) -> tuple[bytes, ...]:
    """Return a saved payload as that of the attempt that continues it: all but its first piece stays as it is.

    Args:
        payload: as it was saved.
        rollout_id: whose.
        attempt: the new one.
        policy: the one that holds from now on; None where rollouts are not owned.
    """
    # Within a JSON string a quote is escaped, so this text can only be the key that follows the first piece.
    rest = payload.index(b',"parts":' if policy is None else b',"start":')
    return head(rollout_id, attempt, policy), payload[rest:]


def read_payload(record: bytes) -> Saved:
    """Return what a payload holds.

    Raises:
        NotJson: it is none.
    """
    value = decode_private(record)
    try:
        if "start" not in value:
            return Saved(value["rollout_id"], value["attempt"], value["parts"])
        policy = Policy(**value["policy"])
        return Saved(
            rollout_id=value["rollout_id"],
            attempt=value["attempt"],
            parts=value["parts"],
            policy=policy,
            start=Start(rollout_id=value["rollout_id"], attempt=value["attempt"], policy=policy, **value["start"]),
            turns_done=value["turns_done"],
            effects=value["effects"],
            policy_versions=tuple(value["policy_versions"]),
            data_refs=tuple(value["data_refs"]),
            usage=value["usage"],
            state=value["state"],
        )
    except (KeyError, TypeError) as error:
        raise NotJson(f"the payload lacks {error}") from error
