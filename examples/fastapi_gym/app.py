# SPDX-License-Identifier: Apache-2.0
"""The FastAPI application with its own older route, and the participant that is put in front of it."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel, Field

from examples.fastapi_gym.agent import MOST_TURNS, ToolAgent
from examples.fastapi_gym.environment import Game, Pig
from reference_gym.participant import (
    AgentInfo,
    BoundaryLog,
    EffectCall,
    Limits,
    Participant,
    ParticipantConfig,
    Policy,
    Restored,
    Sessions,
    StateSchema,
)
from reference_gym.participant.budget import EpisodeBudget
from reference_gym.participant.conformance import PROBE_PATH, Conformance, probe
from reference_gym.participant.conversation import tool_message
from reference_gym.participant.opentime import OpenTime
from reference_gym.participant.policy import Conversation, PolicyClient
from reference_gym.participant.policy_call import PolicyRefused, PolicyUnavailable
from reference_gym.participant.policy_http import PolicyHttp
from reference_gym.participant.serve_asgi import Application, create_app

POLICY_CALL_S = 600.0
MOST_BYTES = 1_000_000


@dataclass(frozen=True)
class Settings:
    """What the Gym is started with; tokens are None only on loopback."""

    storage: Path
    uploads: Path
    limits: Mapping[str, int] = field(default_factory=dict)
    conformance: bool = False
    world_url: str | None = None
    control_token: str | None = field(default=None, repr=False)
    data_token: str | None = field(default=None, repr=False)
    policy_token: str | None = field(default=None, repr=False)
    log: BoundaryLog | None = None


class PolicyAddress(BaseModel):
    """Where the policy is."""

    base_url: str
    model: str
    api: Literal["chat_completions", "responses"] = "chat_completions"


class PlayRequest(BaseModel):
    """One game by the older route."""

    seed: Annotated[int, Field(gt=0, lt=10**6)]
    goal: Annotated[int, Field(gt=0, lt=10**6)] = 20
    policy: PolicyAddress


def create_gym(settings: Settings) -> Application:
    """Put everything together; needs a running event loop."""
    module = Conformance(settings.world_url)
    environments: dict[str, Any] = {Pig.info.name: Pig()}
    infos = [Pig.info]
    if settings.conformance:
        infos += module.environments
        environments |= {info.name: module for info in module.environments}
    config = ParticipantConfig(
        "pig-gym",
        "gym",
        10,
        environments=infos,
        agents=[AgentInfo("tools", "export_restore")],
        storage_roots=[settings.storage],
        staging=settings.uploads,
        features=["conformance"] if settings.conformance else [],
        state_schema=StateSchema("pig-gym"),
        implementation="fastapi-gym",
        version="1.0.0",
        limits=Limits(**settings.limits),
    )
    http = PolicyHttp(settings.policy_token, POLICY_CALL_S)
    client = PolicyClient(http, config.limits.policy_retry_ms, time.monotonic)
    agent = ToolAgent(environments, client)
    participant = Participant(config, agent=agent, journal=None if settings.log is None else settings.log.journal)
    open_time = OpenTime(participant.gate, time.monotonic)

    def load(environment: str, saved: Any, _rollout: Restored) -> Any:
        return environments[environment].load(saved)

    def contained(_environment: str, tool: str) -> bool:
        return tool != "world"  # Every other tool changes nothing but its session, which ends with the process.

    agent.connect(Sessions(participant, load, contained=contained), open_time.now)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(open_time.follow())
        yield
        following.cancel()
        await http.aclose()
        await module.aclose()

    app = FastAPI(title="Pig", lifespan=lifespan)
    add_older_route(app, participant, client, settings.data_token)
    gym = create_app(participant, control_token=settings.control_token, inner=app, inner_body_bytes=MOST_BYTES)
    if settings.conformance:
        gym.add("POST", PROBE_PATH, probe(participant, settings.data_token, agent.sessions.effect))
    return gym


def add_older_route(app: FastAPI, participant: Participant, client: PolicyClient, token: str | None) -> None:
    """Serve `POST /play`, which knew nothing of checkpoints and still does not: its games are unmanaged."""

    def authorized(authorization: Annotated[str, Header()] = "") -> None:
        if token is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401)

    @app.post("/play", dependencies=[Depends(authorized)])
    async def play(asked: PlayRequest) -> dict[str, Any]:
        game = Game(asked.seed, asked.goal)
        address = Policy(asked.policy.base_url, asked.policy.model, asked.policy.api)
        try:
            with participant.unmanaged():
                turns = await play_alone(game, address, client)
        except (PolicyRefused, PolicyUnavailable) as error:
            raise HTTPException(502, str(error)) from error
        reward, final = await game.verify("", 0)
        return {"reward": reward, "turns": turns, "final": final}


async def play_alone(game: Game, address: Policy, client: PolicyClient) -> int:
    """Play one game that nobody saves; the number of its turns."""
    messages: list[Any] = list(game.opening)
    budget = EpisodeBudget(None, 0, time.monotonic)
    for number in range(1, MOST_TURNS + 1):
        about = Conversation(messages, game.tools, None, number, None)
        reply = await client.generate(lambda: address, about, budget)
        messages.append(reply.message)
        for call in reply.calls:
            effect = EffectCall("", 0, number, "", call.name, call.args, None)
            messages.append(tool_message(call.call_id, await game.apply(effect)))
        if game.outcome is not None or not reply.calls:
            return number
    return MOST_TURNS
