# SPDX-License-Identifier: Apache-2.0
"""What the Gym's own data-plane routes share: strict messages, and the three headers of a turn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from reference_gym.participant import serve_aiohttp
from reference_gym.participant.errors import InvalidRequest
from reference_gym.participant.exchange import Request
from reference_gym.participant.http import Handler
from reference_gym.participant.policy_call import TurnId
from reference_gym.participant.service import Participant
from reference_gym.settings import explain
from spec import wire

_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
M = TypeVar("M", bound="PrivateMessage")


@dataclass(frozen=True, slots=True)
class DataPlane:
    """Where the Gym's own routes are added.

    Args:
        app: of the participant.
        participant: whose limits hold.
        token: bearer token of the data plane; None without authentication.
    """

    app: web.Application
    participant: Participant
    token: str | None

    def post(self, path: str, handler: Handler, *, schema: str | None = None) -> None:
        """Serve a POST; with a schema of the specification the handler gets the typed message."""
        served = serve_aiohttp.data_plane(self.participant, self.token, handler, schema=schema)
        self.app.router.add_post(path, served)


class PrivateMessage(BaseModel):
    """Base of the messages that only parts of this Gym exchange."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def read(kind: type[M], body: Any) -> M:
    """The message in a body; raises `InvalidRequest`."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise InvalidRequest(explain(error)) from error


def turn_of(request: Request) -> TurnId | None:
    """The turn that the headers name, None without any; raises `InvalidRequest` when they are malformed."""
    names = (wire.HEADER_ROLLOUT_ID, wire.HEADER_ATTEMPT, wire.HEADER_TURN)
    rollout_id, attempt, turn = (request.header(name) for name in names)
    if rollout_id is None and attempt is None and turn is None:
        return None
    if rollout_id is None or not wire.is_rollout_id(rollout_id):
        raise InvalidRequest(f"{wire.HEADER_ROLLOUT_ID} is missing or malformed")
    if attempt is None or _NUMBER.fullmatch(attempt) is None or int(attempt) > wire.MAX_ATTEMPT:
        raise InvalidRequest(f"{wire.HEADER_ATTEMPT} is missing or malformed")
    if turn is None or _NUMBER.fullmatch(turn) is None or not 1 <= int(turn) <= wire.MAX_ATTEMPT:
        raise InvalidRequest(f"{wire.HEADER_TURN} is missing or malformed")
    return TurnId(rollout_id, int(attempt), int(turn))


def required_turn_of(request: Request) -> TurnId:
    """The turn that the headers name; raises `InvalidRequest` without them."""
    turn = turn_of(request)
    if turn is None:
        raise InvalidRequest(f"{wire.HEADER_ROLLOUT_ID} is missing")
    return turn
