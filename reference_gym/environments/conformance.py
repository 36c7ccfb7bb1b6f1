# SPDX-License-Identifier: Apache-2.0
"""The conformance environment: slow, failing and counted effects for a suite, under two names and one behaviour.

It is registered only when the Gym was started for conformance. Its outside is a world that the suite serves. Implements
CKPT-CONF-004 to -007 and -015 to -031.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import aiohttp

from reference_gym.environments import conformance_core as core
from reference_gym.environments.base import (
    EffectContext,
    Observation,
    StateInvalid,
    TaskInvalid,
    ToolSpec,
    Verdict,
    VerificationFailed,
    VerifyMode,
    is_integer,
)
from reference_gym.http import read_bounded

MAX_WORLD_REPLY = 1_048_576

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
    """One rollout in the conformance environment."""

    def __init__(self, state: core.CoreState, world: World, task: Mapping[str, Any]) -> None:
        self._state = state
        self._world = world if task["world_url"] is not None else World(None)
        self._seed = int(task["seed"])
        self._verify_in_world = bool(task["verify_in_world"])

    def opening(self) -> list[dict[str, Any]]:
        """One user message and no system message."""
        return [{"role": "user", "content": f"conformance seed={self._seed}"}]

    async def call(self, tool: str, args: object, context: EffectContext) -> Observation:
        """Run one of the four tools; raises `WorldError` when the world does not play along."""
        if not core.fits(tool, args) or not isinstance(args, dict):
            return Observation(core.INVALID)
        match tool:
            case "add":
                return Observation(self._state.add(args["n"]))
            case "grow":
                return Observation(self._state.grow(args["bytes"]))
            case "world":
                return Observation(self._state.world(await self._ask(args["tag"], context)))
        return Observation(core.REFUSED)

    async def _ask(self, tag: str, context: EffectContext) -> int:
        answer = await self._world.post(
            "/effects",
            {
                "tag": tag,
                "rollout_id": context.rollout_id,
                "attempt": context.attempt,
                "turn": context.turn,
                "request_id": context.request_id,
            },
        )
        value = answer.get("value")
        if not is_integer(value, -core.MAX_STEP, core.MAX_STEP):
            raise WorldError("the world's value is not an integer in its range")
        assert isinstance(value, int)
        return value

    async def verify(self, rollout_id: str, attempt: int) -> Verdict:
        """Pay for the counter, after the world has agreed if the task wants that."""
        if self._verify_in_world:
            try:
                await self._world.post("/verify", {"rollout_id": rollout_id, "attempt": attempt})
            except WorldError as error:
                raise VerificationFailed(str(error)) from error
        return Verdict(self._state.reward(), self._state.final())

    def export(self) -> dict[str, Any]:
        """The state as JSON data."""
        return self._state.export()


class ConformanceEnvironment:
    """The environment under one of its names.

    Args:
        name: `conformance` continues after a restore, `conformance-restart` starts again.
        world_url: the only world that a task may name; None when the Gym was started with none.
    """

    verify_mode: VerifyMode = "wait"
    state_version = "1"
    tools = TOOLS

    def __init__(self, name: Literal["conformance", "conformance-restart"], world_url: str | None) -> None:
        self.name: str = name
        self.continuation: Literal["export_restore", "restart_only"] = (
            "export_restore" if name == "conformance" else "restart_only"
        )
        self._world = World(world_url)

    def check(self, task: Mapping[str, Any], seed: int | None) -> None:
        """Raise `TaskInvalid` unless the task has exactly its three members; `seed` is ignored."""
        del seed
        if set(task) != {"seed", "world_url", "verify_in_world"}:
            raise TaskInvalid("the task needs exactly seed, world_url and verify_in_world")
        if not is_integer(task["seed"], 0, 2**32 - 1):
            raise TaskInvalid("seed is not an integer from 0 to 4294967295")
        if not isinstance(task["verify_in_world"], bool):
            raise TaskInvalid("verify_in_world is not true or false")
        if task["world_url"] is not None and task["world_url"] != self._world.url:
            raise TaskInvalid("world_url is not the one that this Gym was started with")

    def open(self, task: Mapping[str, Any], seed: int | None) -> ConformanceSession:
        """A session at its beginning."""
        self.check(task, seed)
        return ConformanceSession(core.CoreState(task["seed"]), self._world, task)

    def restore(self, task: Mapping[str, Any], state: Mapping[str, Any]) -> ConformanceSession:
        """A session as it was exported; raises `StateInvalid`."""
        if set(task) != {"seed", "world_url", "verify_in_world"}:
            raise StateInvalid("the saved task is not one of this environment")
        return ConformanceSession(core.CoreState.restore(state), self._world, task)

    async def aclose(self) -> None:
        """Close the connections to the world."""
        await self._world.aclose()
