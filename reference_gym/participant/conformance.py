# SPDX-License-Identifier: Apache-2.0
"""The conformance module for any Gym with the kit: environments with slow, failing, counted effects, and a probe.

A Gym registers them only when it was started for conformance; their outside is a world that the suite serves, and their
rollouts are driven by the Gym's own agent loop like any other::

    module = Conformance(world_url)
    ParticipantConfig(..., environments=[*own, *module.environments], features=["conformance"])
    module.check(start.task)                                   # in Agent.check, for NAMES
    session = module.open(start.task)                          # instead of a session of the Gym's own
    app.add("POST", PROBE_PATH, probe(participant, data_token, sessions.effect))

Implements CKPT-CONF-004 to -007, -015 to -041 and -053.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

import aiohttp

from reference_gym.participant import conformance_core as core
from reference_gym.participant.config import EnvironmentInfo
from reference_gym.participant.errors import InvalidRequest
from reference_gym.participant.exchange import Request
from reference_gym.participant.http import DataCall
from reference_gym.participant.jsontext import is_integer
from reference_gym.participant.policy_call import Message, ToolSpec
from reference_gym.participant.replies import read_bounded
from reference_gym.participant.rollout import Perform
from reference_gym.participant.service import Participant
from reference_gym.participant.state import EffectCall, Json, RolloutFailure, TaskRefused
from spec import wire
from spec.messages import ProbeRequest

MAX_WORLD_REPLY = 1_048_576
STATE_VERSION = "1"
NAMES = ("conformance", "conformance-restart")
PROBE_PATH = wire.PROBE_PATH
"""Where the probe is served, on each participant that owns sessions."""

TOOLS = (
    ToolSpec(
        "add",
        "Draw a number and add it, and n, to the counter.",
        {
            "type": "object",
            "properties": {
                "n": {
                    "type": "integer",
                    "minimum": -core.MAX_STEP,
                    "maximum": core.MAX_STEP,
                }
            },
            "required": ["n"],
            "additionalProperties": False,
        },
    ),
    ToolSpec(
        "world",
        "Ask the world outside for a number and add it to the counter.",
        {
            "type": "object",
            "properties": {"tag": {"type": "string", "maxLength": core.MAX_TAG}},
            "required": ["tag"],
            "additionalProperties": False,
        },
    ),
    ToolSpec(
        "grow",
        "Store that many more bytes.",
        {
            "type": "object",
            "properties": {"bytes": {"type": "integer", "minimum": 0, "maximum": core.MAX_GROW}},
            "required": ["bytes"],
            "additionalProperties": False,
        },
    ),
    ToolSpec(
        "refuse",
        "Be refused; nothing changes.",
        {"type": "object", "properties": {}, "additionalProperties": False},
    ),
)


class WorldError(Exception):
    """The world did not answer as it must, or there is none: the handler of the effect dies of it."""


class World:
    """The outside; one connection pool for all sessions, opened at the first use."""

    def __init__(self, url: str | None) -> None:
        self.url = url
        self._http: aiohttp.ClientSession | None = None

    async def post(self, path: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """One POST that is never repeated and has no time limit; raises `WorldError`."""
        if self.url is None:
            raise WorldError("this rollout has no world")
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),
                # A kept connection may be closed by the other side just now, and a POST is never repeated.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                trust_env=False,
            )
        try:
            async with self._http.post(self.url + path, json=dict(message), allow_redirects=False) as reply:
                raw = await read_bounded(reply.content, MAX_WORLD_REPLY)
                if reply.status != 200:
                    raise WorldError(f"the world answered {reply.status}")
                answer: object = json.loads(raw)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise WorldError(f"the world did not answer: {type(error).__name__}") from error
        if not isinstance(answer, dict):
            raise WorldError("the world did not answer with an object")
        return answer

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None


class ConformanceSession:
    """One rollout in the conformance environment; a `SessionState` whose effects answer with the observation's text.

    `opening` are the messages with which its conversation starts, `tools` what is offered to the policy. It never ends
    by itself: `outcome` stays None.
    """

    tools = TOOLS
    outcome: Literal["completed"] | None = None

    def __init__(self, state: core.CoreState, world: World, task: Mapping[str, Any]) -> None:
        self._state = state
        self._world = world if task["world_url"] is not None else World(None)
        self._task = dict(task)

    @property
    def opening(self) -> list[Message]:
        """One user message and no system message."""
        return [{"role": "user", "content": f"conformance seed={self._task['seed']}"}]

    async def apply(self, call: EffectCall) -> str:
        """Run one of the four tools; raises `WorldError` when the world does not play along."""
        args = call.args
        if not core.fits(call.tool, args):
            return core.INVALID
        match call.tool:
            case "add":
                return self._state.add(args["n"])
            case "grow":
                return self._state.grow(args["bytes"])
            case "world":
                return self._state.world(await self._ask(args["tag"], call))
        return core.REFUSED

    async def _ask(self, tag: str, call: EffectCall) -> int:
        asked = {"tag": tag, "rollout_id": call.rollout_id, "attempt": call.attempt}
        answer = await self._world.post("/effects", asked | {"turn": call.turn, "request_id": call.request_id})
        value = answer.get("value")
        if not is_integer(value, -core.MAX_STEP, core.MAX_STEP):
            raise WorldError("the world's value is not an integer in its range")
        assert isinstance(value, int)
        return value

    async def verify(self, rollout_id: str, attempt: int) -> tuple[float, Json]:
        """Return reward and final state, after the world has agreed if the task wants that.

        Raises:
            RolloutFailure: `verification_failed`, not terminal.
        """
        if self._task["verify_in_world"]:
            try:
                await self._world.post("/verify", {"rollout_id": rollout_id, "attempt": attempt})
            except WorldError as error:
                raise RolloutFailure("verification_failed", str(error), terminal=False, stage="verification") from error
        return self._state.reward(), self._state.final()

    def save(self) -> Json:
        """Return task and state as JSON data."""
        return {"task": self._task, "state": self._state.export()}

    def close(self) -> None:
        """Nothing outside of memory is held."""


class Conformance:
    """The conformance environments of one Gym.

    Args:
        world_url: the only world that a task may name; None when the Gym was started with none.
    """

    def __init__(self, world_url: str | None) -> None:
        self._world = World(world_url)

    @property
    def environments(self) -> tuple[EnvironmentInfo, ...]:
        """What capabilities say of the two."""
        continues, restarts = NAMES
        return (
            EnvironmentInfo(continues, "export_restore", "wait", STATE_VERSION),
            EnvironmentInfo(restarts, "restart_only", "wait", STATE_VERSION),
        )

    def check(self, task: Mapping[str, Any]) -> None:
        """Raise `TaskRefused` unless the task has exactly its three members."""
        if set(task) != {"seed", "world_url", "verify_in_world"}:
            raise TaskRefused("the task needs exactly seed, world_url and verify_in_world")
        if not is_integer(task["seed"], 0, 2**32 - 1):
            raise TaskRefused("seed is not an integer from 0 to 4294967295")
        if not isinstance(task["verify_in_world"], bool):
            raise TaskRefused("verify_in_world is not true or false")
        if task["world_url"] is not None and task["world_url"] != self._world.url:
            raise TaskRefused("world_url is not the one that this Gym was started with")

    def open(self, task: Mapping[str, Any]) -> ConformanceSession:
        """Return a session at its beginning; raises `TaskRefused`."""
        self.check(task)
        return ConformanceSession(core.CoreState(task["seed"]), self._world, task)

    def load(self, saved: Mapping[str, Any]) -> ConformanceSession:
        """Return a session as `save` saw it; raises ValueError when that is damaged."""
        task, state = saved["task"], saved["state"]
        if set(task) != {"seed", "world_url", "verify_in_world"}:
            raise ValueError("the saved task is not one of this environment")
        return ConformanceSession(core.CoreState.restore(state), self._world, task)

    async def aclose(self) -> None:
        """Close the connections to the world."""
        await self._world.aclose()


def probe(participant: Participant, token: str | None, effect: Perform, text: Callable[[Json], str] = str) -> DataCall:
    """Return the probe: one effect on the session of a live rollout, outside of the agent's turns.

    Args:
        participant: the owner of the sessions.
        token: of the data plane.
        effect: runs an effect, e.g. `Sessions.effect`.
        text: takes the observation's text out of a reply.
    """

    async def run(_request: Request, message: ProbeRequest) -> Json:
        if not message.request_id.startswith(f"{message.rollout_id}/{message.turn}/"):
            raise InvalidRequest("request_id does not begin with rollout_id and turn")
        reply = await effect(
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
        return {"observation": text(reply)}

    return DataCall(participant, token, run, schema="probe-request")
