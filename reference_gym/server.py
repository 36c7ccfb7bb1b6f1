# SPDX-License-Identifier: Apache-2.0
"""Puts one process together: a participant with agent, sessions and ledger, or with one of them, and its web server.

One process is one participant that owns all three; its agent reaches sessions and policy in memory. With a role it is
one of three, and the agent reaches the other two over HTTP. Agent, sessions and ledger are the same code in both forms.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from reference_gym import announce
from reference_gym.agent import app as agent_app
from reference_gym.agent.loop import GymAgent, Ways
from reference_gym.announce import Listening
from reference_gym.environments import Environment, build
from reference_gym.errors import SettingsError
from reference_gym.model import app as model_app
from reference_gym.model.app import RemotePolicy
from reference_gym.model.ledger import Ledger
from reference_gym.model.proxy import RecordingPolicy
from reference_gym.participant import config as kit
from reference_gym.participant import failpoints, recovery, serve_aiohttp
from reference_gym.participant.collecting import FullCollections
from reference_gym.participant.conformance import PROBE_PATH, probe
from reference_gym.participant.connections import raise_descriptor_limit
from reference_gym.participant.journal import LogJournal
from reference_gym.participant.log import LogFile
from reference_gym.participant.opentime import OpenTime
from reference_gym.participant.policy import PolicyClient
from reference_gym.participant.policy_call import PolicyPort
from reference_gym.participant.policy_http import PolicyHttp
from reference_gym.participant.service import Participant
from reference_gym.participant.serving import Signals, serve_until_terminated
from reference_gym.participant.sessions import Sessions
from reference_gym.peers import Peer
from reference_gym.ports import ResourcesPort
from reference_gym.private import DataPlane
from reference_gym.resources import app as resources_app
from reference_gym.resources.handle import SessionFactory
from reference_gym.resources.ports import LocalResources, RemoteResources
from reference_gym.resources.shared import SharedResources
from reference_gym.settings import LoadedSettings

STAGES: Mapping[str, int] = {"all": 10, "agent": 10, "model": 20, "resources": 30}


@dataclass(frozen=True, slots=True)
class Assembled:
    """One process, put together and not yet listening.

    Args:
        participant: what the protocol is spoken to.
        app: its web application.
        journal: for its boundary log; None without `data_dir`.
        closers: what is closed at the end.
        followers: what has to run while the process lives.
    """

    participant: Participant
    app: web.Application
    journal: LogJournal | None
    closers: tuple[Callable[[], Awaitable[None]], ...]
    followers: tuple[Callable[[], Awaitable[None]], ...]


class Assembly:
    """Builds one process.

    Args:
        loaded: the settings.
        role: `all`, or the one of three.
    """

    def __init__(self, loaded: LoadedSettings, role: str) -> None:
        settings = loaded.settings
        self._loaded = loaded
        self._role = role
        self._environments: Mapping[str, Environment] = (
            {}
            if role == "model"
            else build(settings.environments, conformance=settings.conformance is not None, world_url=loaded.world_url)
        )
        self._closers: list[Callable[[], Awaitable[None]]] = [each.aclose for each in self._environments.values()]
        self._followers: list[Callable[[], Awaitable[None]]] = []
        self._ways: Ways | None = None

    def assemble(self) -> Assembled:
        """Build it; raises `SettingsError`."""
        loaded, role = self._loaded, self._role
        agent = GymAgent(self._environments, self._connected) if role in ("all", "agent") else None
        journal = None if loaded.settings.data_dir is None else LogJournal()
        participant = Participant(participant_config(loaded, role, self._environments), agent=agent, journal=journal)
        app = serve_aiohttp.create_app(participant, control_token=loaded.control_token)
        plane = DataPlane(app, participant, loaded.data_token)
        open_time = OpenTime(participant.gate, time.monotonic)
        self._followers += [
            open_time.follow,
            FullCollections(lambda: participant.held, lambda: participant.busy).follow,
        ]
        resources = self._resources(plane, open_time)
        policy = self._policy(plane)
        if agent is not None:
            assert resources is not None
            assert policy is not None
            client = PolicyClient(policy, loaded.settings.limits.policy_retry_ms, time.monotonic)
            self._ways = Ways(resources, client, open_time.now)
            agent_app.add_routes(plane, self._environments, client)
        return Assembled(participant, app, journal, tuple(self._closers), tuple(self._followers))

    def _connected(self) -> Ways:
        assert self._ways is not None, "no rollout runs before everything is connected"
        return self._ways

    def _resources(self, plane: DataPlane, open_time: OpenTime) -> ResourcesPort | None:
        """The sessions of this process, or the way to them; None where nobody asks for either."""
        if self._role == "model":
            return None
        if self._role == "agent":
            return RemoteResources(self._peer("resources", self._loaded.settings.timeouts.peer_retry_ms))
        factory = SessionFactory(self._environments, open_time.now)
        sessions = Sessions(plane.participant, load=factory.load, contained=factory.contained)
        settings = self._loaded.settings
        resources: ResourcesPort = LocalResources(sessions, factory)
        if self._role == "resources":
            shared = SharedResources(
                sessions,
                factory,
                most=settings.limits.max_live_rollouts,
                idle_s=settings.timeouts.session_idle_ms / 1000,
            )
            resources = shared
            resources_app.add_routes(plane, resources)
            self._followers.append(shared.reap)
        if settings.conformance is not None:
            call = probe(plane.participant, plane.token, resources.effect, lambda reply: str(reply["text"]))
            plane.app.router.add_post(PROBE_PATH, serve_aiohttp.handler_of(call))
        return resources

    def _policy(self, plane: DataPlane) -> PolicyPort | None:
        """The policy, with the ledger of this process or through that of the model server."""
        if self._role == "resources":
            return None
        if self._role == "agent":
            return RemotePolicy(self._peer("model", 0))
        proxy = PolicyHttp(self._loaded.policy_token, self._loaded.settings.timeouts.policy_call_ms / 1000)
        self._closers.append(proxy.aclose)
        ledger = Ledger(plane.participant.changed)
        plane.participant.add(ledger)
        recording = RecordingPolicy(proxy, ledger, plane.participant.observe, plane.participant.settled)
        if self._role == "model":
            model_app.add_routes(plane, recording, ledger)
        return recording

    def _peer(self, role: str, retry_ms: int) -> Peer:
        url = getattr(self._loaded.settings.peers, role)
        if url is None:
            raise SettingsError(f"peers.{role} is missing: an agent by itself has to know where the others are")
        limit = self._loaded.settings.limits.max_record_bytes
        peer = Peer(url, self._loaded.data_token, retry_ms, limit)
        self._closers.append(peer.aclose)
        return peer


def participant_config(
    loaded: LoadedSettings, role: str, environments: Mapping[str, Environment]
) -> kit.ParticipantConfig:
    """What the participant of one process is told; makes the directories that it needs."""
    settings = loaded.settings
    name = settings.name if role == "all" else role
    roots = [loaded.path(root) for root in settings.storage_roots]
    staging = loaded.path(settings.own_dir) / name / "artifacts"
    for directory in (*roots, staging):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    peers = []
    if role == "agent" and settings.peers.model is not None and settings.peers.resources is not None:
        peers = [kit.Peer("model", settings.peers.model), kit.Peer("resources", settings.peers.resources)]
    return kit.ParticipantConfig(
        name=name,
        role="agent" if role == "all" else role,
        stage=STAGES[role],
        environments=[
            kit.EnvironmentInfo(each.name, each.continuation, each.verify_mode, each.state_version)
            for each in environments.values()
        ],
        agents=[kit.AgentInfo("tools", "export_restore")] if role in ("all", "agent") else [],
        storage_roots=roots,
        staging=staging,
        participants=peers,
        features=["conformance"] if settings.conformance is not None and role != "model" else [],
        limits=kit.Limits(**settings.limits.model_dump()),
    )


async def open_log(loaded: LoadedSettings, assembled: Assembled) -> None:
    """Recover what an earlier process left in the boundary log, and begin to write it.

    Raises:
        SettingsError: another process writes the log, or its directory cannot be used.
    """
    settings, participant = loaded.settings, assembled.participant
    if assembled.journal is None or settings.data_dir is None:
        return
    directory = loaded.path(settings.data_dir) / participant.config.name / "log"
    try:
        log = LogFile.claim(directory, sync=settings.log.sync, segment_bytes=settings.log.segment_bytes)
        if log is None:
            raise SettingsError(f"another process writes the boundary log in {settings.data_dir}")
        await recovery.open_log(participant, assembled.journal, log)
    except OSError as error:
        raise SettingsError(f"the boundary log in {settings.data_dir} cannot be used: {error.strerror}") from error


async def serve(
    loaded: LoadedSettings, role: str, file: Path | None, *, callers: Callable[[], bool] | None = None
) -> int:
    """Serve until SIGTERM or SIGINT; the exit code.

    Args:
        loaded: the settings.
        role: `all`, or the one of three.
        file: where to announce, or None.
        callers: tells whether the participants that call this one are still there; None: nobody knows.

    Raises:
        SettingsError: the address cannot be listened at, or a peer is missing.
    """
    failpoints.assume(role)
    settings = loaded.settings
    raise_descriptor_limit(settings.limits.max_connections)
    assembled = Assembly(loaded, role).assemble()
    port = getattr(settings.ports, "agent" if role == "all" else role)
    await open_log(loaded, assembled)
    followers = [asyncio.ensure_future(follow()) for follow in assembled.followers]
    signals = Signals()
    try:
        try:
            server = await serve_aiohttp.start(assembled.app, host=settings.host, port=port)
        except OSError as error:
            raise SettingsError(f"cannot listen at {settings.host}:{port}: {error.strerror}") from error
        config = assembled.participant.config
        announce.announce([Listening(config.name, config.role, server.url, os.getpid())], file)
        assembled.participant.go_on()
        await serve_until_terminated(server, signals, callers=callers)
    finally:
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*(close() for close in assembled.closers))
    return 0
