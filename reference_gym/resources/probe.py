# SPDX-License-Identifier: Apache-2.0
"""The conformance probe: one effect on the session of a live rollout, outside of the agent's turns.

Only a Gym that was started for conformance serves it (CKPT-CONF-032 to -041, -053); it is refused like any effect.
"""

from __future__ import annotations

from typing import Any

from reference_gym.participant.errors import InvalidRequest
from reference_gym.participant.exchange import Request
from reference_gym.participant.state import EffectCall
from reference_gym.ports import ResourcesPort
from reference_gym.private import DataPlane
from spec import wire
from spec.messages import ProbeRequest


def add_routes(plane: DataPlane, resources: ResourcesPort) -> None:
    """Serve the probe.

    Args:
        plane: of the participant that owns the sessions.
        resources: the sessions.
    """

    async def probe(request: Request, message: ProbeRequest) -> Any:
        del request
        if not message.request_id.startswith(f"{message.rollout_id}/{message.turn}/"):
            raise InvalidRequest("request_id does not begin with rollout_id and turn")
        reply = await resources.effect(
            EffectCall(
                rollout_id=message.rollout_id,
                attempt=message.attempt,
                turn=message.turn,
                request_id=message.request_id,
                tool=message.tool,
                args=dict(message.args),
                effects_done=message.effects_done,
            )
        )
        return {"observation": reply["text"]}

    plane.post(wire.PROBE_PATH, probe, schema="probe-request")
