# SPDX-License-Identifier: Apache-2.0
"""`run.yaml`: what one run is, read once and then unchangeable."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from reference_rl.client import ClientSettings
from reference_rl.columns import SWITCHES, Column, Switches
from reference_rl.errors import SettingsError
from reference_rl.records import Granularity, PlannedGroup, PlannedRollout
from reference_rl.retry import RetryPolicy
from spec import wire
from spec.messages import Policy

Seconds = Annotated[float, Field(gt=0)]
Millis = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GymSettings(_Settings):
    """One Gym: where to find it, and under which path it sees this run's snapshots, if it sees them at all.

    With ``shares_files: false`` its cuts travel over HTTP (feature `artifacts_http`).
    """

    alias: Name
    url: Annotated[str, Field(pattern=r"^https?://[^/?#]")] | None = None
    announce: Path | None = None
    optional: bool = False
    snapshot_dir: Path | None = None
    shares_files: bool = True

    @model_validator(mode="after")
    def _one_address(self) -> Self:
        if (self.url is None) == (self.announce is None):
            raise ValueError("exactly one of url and announce")
        return self

    def urls(self) -> list[str]:
        """Return the addresses to begin discovery with; an announce file is read anew each time.

        Raises:
            FileNotFoundError: the announce file is not there (yet).
        """
        if self.url is not None:
            return [self.url]
        content = json.loads(self.announce.read_text())  # type: ignore[union-attr] # one of the two is set
        return [entry["url"] for entry in content["participants"]]

    def older_route_url(self) -> str:
        """Return the address that serves ``POST /run``: the agent's."""
        if self.url is not None:
            return self.url
        content = json.loads(self.announce.read_text())  # type: ignore[union-attr] # one of the two is set
        agents = [e["url"] for e in content["participants"] if e.get("role") == "agent"]
        return str((agents or [e["url"] for e in content["participants"]])[0])


class TaskSettings(_Settings):
    """One source of prompts: `groups` prompts with `siblings` rollouts each."""

    environment: str
    name: Name = "tasks"
    gym: Name | None = None
    agent: str | None = None
    groups: Annotated[int, Field(ge=1)] = 1
    siblings: Annotated[int, Field(ge=1)] = 1
    max_turns: Annotated[int, Field(ge=1)] = 20
    episode_ms: Millis = 3_600_000
    task: dict[str, Any] = Field(default_factory=dict)
    granularity: Granularity | None = None


class AgentSettings(_Settings):
    """What holds for the rollouts of one agent of the Gyms, by its name in their capabilities."""

    granularity: Granularity | None = None


class SnapshotSettings(_Settings):
    """When snapshots are taken and how long each step may take.

    ``failures_before_fallback`` failures in a row make the run continue in column 2; it is tried again at each
    interval.
    """

    interval_s: Seconds | None = None
    keep: Annotated[int, Field(ge=1)] = 3
    timeout_ms: Millis = 30_000
    durable_timeout_ms: Millis = 300_000
    lease_ms: Millis = 60_000
    leave_out_blocked: bool = False
    failures_before_fallback: Annotated[int, Field(ge=1)] = 3
    backoff_s: Seconds = 1.0


class TokenSource(_Settings):
    """Where a bearer token comes from; never from the settings themselves.

    Requirements: CKPT-SEC-004.
    """

    env: str | None = None
    file: Path | None = None

    def read(self) -> str | None:
        """Return the token, or ``None`` when the variable is not set.

        Raises:
            SettingsError: the file cannot be read.
        """
        if self.file is not None:
            try:
                return self.file.read_text().strip()
            except OSError as error:
                raise SettingsError(f"the token file cannot be read: {error.strerror}") from error
        return os.environ.get(self.env) if self.env else None


class TokenSettings(_Settings):
    """The tokens of the two planes."""

    control: TokenSource = TokenSource(env="GYM_CHECKPOINT_TOKEN")
    data: TokenSource = TokenSource(env="GYM_CHECKPOINT_DATA_TOKEN")


class TrainerSettings(_Settings):
    """The reference trainer: it counts steps and consumes finished rollouts.

    With ``survives`` it is taken for a process of its own that goes on at the step that the ledger last recorded;
    otherwise it comes back at the step of the snapshot, as weights in memory do. ``checkpoint_every`` steps write a
    fallback marker and then a snapshot; 0 for never.
    """

    survives: bool = False
    checkpoint_every: Annotated[int, Field(ge=0)] = 0


class ClientOptions(_Settings):
    """Limits of single calls; times in milliseconds or seconds as named."""

    attempts: Annotated[int, Field(ge=1)] = 4
    first_wait_s: Seconds = 0.1
    longest_wait_s: Seconds = 2.0
    call_ms: Millis = 10_000
    grace_s: Seconds = 5.0
    connect_s: Seconds = 5.0

    def build(self) -> ClientSettings:
        """Return the client's own settings."""
        retry = RetryPolicy(self.attempts, self.first_wait_s, self.longest_wait_s)
        return ClientSettings(retry, self.call_ms, self.grace_s, self.connect_s)


class RecoverySettings(_Settings):
    """How long a Gym is waited for and how often a restore is tried.

    ``salvage: weights`` keeps results that were made with weights not newer than the restored ones, ``all`` keeps
    every one. With ``redo_groups`` a restart that does not adopt a Gym redoes its unfinished groups of granularity
    `prompt_group` whole: every sibling starts at turn 1, also one that has finished.
    """

    reach_s: Seconds = 120.0
    restore_tries: Annotated[int, Field(ge=1)] = 5
    salvage: Literal["weights", "all"] = "weights"
    redo_groups: bool = False
    health_s: Seconds = 2.0


class RunSettings(_Settings):
    """Everything that one run needs to know.

    The granularity of a group is that of its task source, else that of its agent in ``agents``, else the run's. With
    ``gateway`` (columns 2 and 3) the Gyms call the policy through this process, which keeps its token rows.
    """

    run_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    run_dir: Path
    column: Column = 0
    gyms: Annotated[tuple[GymSettings, ...], Field(min_length=1)]
    policy: Policy
    gateway: bool = False
    tasks: tuple[TaskSettings, ...]
    granularity: Granularity = "sibling"
    agents: dict[str, AgentSettings] = Field(default_factory=dict)
    snapshot: SnapshotSettings = SnapshotSettings()
    tokens: TokenSettings = TokenSettings()
    trainer: TrainerSettings = TrainerSettings()
    client: ClientOptions = ClientOptions()
    recovery: RecoverySettings = RecoverySettings()
    max_failures: Annotated[int, Field(ge=1)] = 5
    max_batch: Annotated[int, Field(ge=1)] = 500
    max_live: Annotated[int, Field(ge=1)] = 1000

    @model_validator(mode="before")
    @classmethod
    def _one_source_or_many(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("tasks"), dict):
            data = {**data, "tasks": [data["tasks"]]}
        return data

    @model_validator(mode="after")
    def _names(self) -> Self:
        aliases = [gym.alias for gym in self.gyms]
        if len(set(aliases)) != len(aliases):
            raise ValueError("the aliases of the gyms differ")
        for task in self.tasks:
            if task.gym is not None and task.gym not in aliases:
                raise ValueError(f"tasks.gym {task.gym!r} is no alias of a gym")
        return self

    @property
    def switches(self) -> Switches:
        """Return what the column turns on."""
        return SWITCHES[self.column]

    def groups(self) -> list[PlannedGroup]:
        """Return every group of the run, in order; the same settings always give the same groups."""
        planned: list[PlannedGroup] = []
        for source in self.tasks:
            for _ in range(source.groups):
                number = len(planned)
                alias = source.gym or self.gyms[number % len(self.gyms)].alias
                granularity = source.granularity or self._of_agent(source.agent) or self.granularity
                rollouts = tuple(self._rollout(source, alias, number, s) for s in range(source.siblings))
                planned.append(PlannedGroup(number, source.name, alias, granularity, rollouts))
        return planned

    def _of_agent(self, agent: str | None) -> Granularity | None:
        settings = self.agents.get(agent) if agent is not None else None
        return settings.granularity if settings is not None else None

    def _rollout(self, source: TaskSettings, alias: str, group: int, sibling: int) -> PlannedRollout:
        task = group_task(source.task, group)
        return PlannedRollout(
            rollout_id=f"{self.run_id}_g{group}_s{sibling}",
            group=group,
            sibling=sibling,
            gym=alias,
            environment=source.environment,
            agent=source.agent,
            task=task,
            task_digest=wire.bytes_digest(json.dumps([source.environment, task], sort_keys=True).encode()),
            seed=sibling_seed(group, sibling),
            limits={"max_turns": source.max_turns, "episode_ms": source.episode_ms},
        )


def sibling_seed(group: int, sibling: int) -> int:
    """Return the seed of one sibling; siblings share their task and differ in this alone."""
    return 1000 * group + sibling


def group_task(task: dict[str, Any], group: int) -> dict[str, Any]:
    """Return the task of one group: as configured, a seed in it moved by the group's number."""
    seed = task.get("seed")
    return {**task, "seed": seed + group} if type(seed) is int else dict(task)


def load_settings(path: Path) -> RunSettings:
    """Read `run.yaml`; relative paths in it are relative to the file.

    Raises:
        SettingsError: it cannot be read or used; the text names the field.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: it is not a mapping")
    return settings_of(content, path.parent)


def settings_of(content: dict[str, Any], base: Path) -> RunSettings:
    """Return checked settings.

    Args:
        content: what the YAML holds.
        base: what relative paths are relative to.

    Raises:
        SettingsError: naming the first field that is wrong.
    """
    try:
        settings = RunSettings.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsError(f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']}") from error
    gyms = tuple(
        gym.model_copy(update={"announce": base / gym.announce}) if gym.announce else gym for gym in settings.gyms
    )
    return settings.model_copy(update={"run_dir": (base / settings.run_dir).resolve(), "gyms": gyms})
