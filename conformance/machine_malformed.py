# SPDX-License-Identifier: Apache-2.0
"""Requests that are malformed in one way each; a participant refuses them and changes nothing."""

from __future__ import annotations

import json
from typing import Any

from conformance.controller import Json, Participant
from conformance.errors import Failed
from conformance.machine_orders import Driver
from conformance.wire import OPERATIONS as PATHS
from spec import wire as names

OPERATIONS = ("prepare", "commit", "resume", "abort", "renew", "restore", "retire", "startRollouts", "ackResults")
"""operationIds of what has a JSON body."""

WAYS = ("unknown field", "missing field", "wrong type", "not JSON", "no controller", "bad epoch", "higher and bad")
"""What is wrong; `higher and bad`: a higher controller, who is not adopted by what is malformed."""


def send(walk: Driver, operation: str, way: str) -> None:
    """Send one malformed request to every participant and judge its refusal."""
    for participant in walk.everyone:
        if operation in ("startRollouts", "ackResults") and not participant.owns("rollouts"):
            continue
        reply = _send(walk, participant, operation, way)
        walk.case.step(f"{operation}, malformed ({way}) at {participant.name} → {reply.brief}")
        walk.case.wire.judge_reply(reply, operation)
        if (reply.status, reply.code) != (400, "invalid_request"):
            raise Failed(
                f"{operation} that is malformed ({way}) at {participant.name}",
                expected="400 invalid_request",
                got=reply.brief,
                requirements=("CKPT-ERR-006",),
            )


def _send(walk: Driver, participant: Participant, operation: str, way: str) -> Any:
    body, headers = _body(walk, operation), walk.controller.headers(participant)
    first = next(iter(body))
    if way == "unknown field":
        body["unheard_of"] = 1
    elif way == "missing field":
        del body[first]
    elif way in ("wrong type", "higher and bad"):
        body[first] = 3.5
    if way == "no controller":
        del headers[names.HEADER_CONTROLLER_ID]
    elif way == "bad epoch":
        headers[names.HEADER_CONTROLLER_EPOCH] = "01"
    elif way == "higher and bad":
        headers[names.HEADER_CONTROLLER_EPOCH] = str(walk.controller.epoch + 7)
    content = b'{"cut' if way == "not JSON" else json.dumps(body).encode()
    headers["Content-Type"] = "application/json"
    method, path = PATHS[operation]
    url = participant.url.rstrip("/") + path
    return walk.case.wire.raw(method, url, headers=headers, content=content, operation=operation)


def _body(walk: Driver, operation: str) -> Json:
    id = {"checkpoint_id": str(walk.ids("open") or walk.ids("last") or f"{walk.controller.epoch}-1")}
    bodies: dict[str, Json] = {
        "prepare": {**id, "run_id": "machine", "timeout_ms": 0, "lease_ms": 1000},
        "commit": {**id, "target": {"scheme": "file", "path": "/nowhere"}, "wait": "captured", "timeout_ms": 0},
        "resume": {**id, "timeout_ms": 0},
        "abort": {**id, "timeout_ms": 0},
        "renew": {**id, "lease_ms": 1000},
        "restore": {
            **id,
            "run_id": "machine",
            "source": None,
            "rollouts": [],
            "results": [],
            "fences": [],
            "timeout_ms": 0,
            "lease_ms": 1000,
        },
        "retire": {"rollouts": [], "timeout_ms": 0},
        "startRollouts": {"rollouts": []},
        "ackResults": {"receipts": []},
    }
    return bodies[operation]
