# SPDX-License-Identifier: Apache-2.0
"""What the witness records of a policy call, and what it may be ordered to answer instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["chat_completions", "responses"]
State = Literal["asked", "completed", "refused", "dropped", "abandoned"]


@dataclass(frozen=True)
class Generation:
    """One policy call, as the witness saw it.

    Args:
        number: ordinal of the call in this witness, from 0.
        address: name of the address that was called.
        api: which of the two forms was spoken.
        rollout_id: `Gym-Rollout-Id`, or None if the header is missing.
        attempt: `Gym-Attempt`, or None if it is missing or no integer.
        turn: `Gym-Turn`, or None if it is missing or no integer.
        conversation_turn: the turn that the conversation itself asks for: 1 + its policy replies.
        stream: whether a streamed reply was asked for.
        body: the request as JSON.
        headers: the request headers, names in lower case; a credential is masked.
        asked_at: monotonic seconds.
        state: `asked` (still open), `completed` (answered), `refused` (an error was answered on order),
            `dropped` (the connection was cut on order) or `abandoned` (the caller went away).
        ended_at: monotonic seconds, or None while open.
    """

    number: int
    address: str
    api: Api
    rollout_id: str | None
    attempt: int | None
    turn: int | None
    conversation_turn: int
    stream: bool
    body: dict[str, Any] = field(repr=False)
    headers: dict[str, str] = field(repr=False)
    asked_at: float
    state: State = "asked"
    ended_at: float | None = None

    def matches(self, rollout_id: str | None, turn: int | None, attempt: int | None) -> bool:
        """Say whether this is a call of that rollout, turn and attempt; None stands for any."""
        return (
            rollout_id in (None, self.rollout_id)
            and turn in (None, self.conversation_turn)
            and attempt in (None, self.attempt)
        )


@dataclass
class Order:
    """Answer an error or cut the connection, `left` times."""

    rollout_id: str | None
    turn: int | None
    attempt: int | None
    status: int | None
    retry_after_s: float | None
    left: int
