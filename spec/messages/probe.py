# SPDX-License-Identifier: Apache-2.0
"""Messages of the conformance environment: the probe, and what it says to the world."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spec.messages._base import Attempt, Count, JsonObject, Request, RequestId, Response, RolloutId, Turn


class ProbeRequest(Request):
    """One effect on a live rollout's session; ``effects_done`` None is not compared."""

    rollout_id: RolloutId
    attempt: Attempt
    turn: Turn
    request_id: RequestId
    tool: Annotated[str, Field(min_length=1, max_length=128)]
    args: JsonObject
    effects_done: Count | None


class ProbeResponse(Response):
    """What the tool answered, exactly as it is put into the tool message."""

    observation: Annotated[str, Field(max_length=67_108_864)]


class WorldEffectRequest(Request):
    """What the tool ``world`` posts to the world."""

    tag: Annotated[str, Field(max_length=64)]
    rollout_id: RolloutId
    attempt: Attempt
    turn: Turn
    request_id: RequestId


class WorldEffectResponse(Response):
    """What the world answers: added to the counter."""

    value: Annotated[int, Field(ge=-1_000_000, le=1_000_000)]


class WorldVerifyRequest(Request):
    """What a verification in the world posts."""

    rollout_id: RolloutId
    attempt: Attempt
