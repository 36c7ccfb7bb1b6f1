# SPDX-License-Identifier: Apache-2.0
"""What a participant is told when it is built: its name, what it serves, where it may write, and its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from reference_gym.participant.state import Continuation, Verify


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the capabilities; every ``_ms`` in milliseconds, every ``_bytes`` in bytes."""

    max_body_bytes: int = 16 * 1024 * 1024
    max_batch: int = 1_000
    max_page_items: int = 1_000
    max_page_bytes: int = 8 * 1024 * 1024
    max_wait_ms: int = 30_000
    min_lease_ms: int = 1_000
    max_lease_ms: int = 600_000
    max_write_ms: int = 600_000
    max_result_bytes: int = 4 * 1024 * 1024
    max_record_bytes: int = 128 * 1024 * 1024
    max_artifact_bytes: int = 4 * 1024 * 1024 * 1024
    max_live_rollouts: int = 100_000
    shutdown_grace_ms: int = 10_000
    policy_retry_ms: int = 300_000
    max_connections: int = 10_000
    max_silence_ms: int = 60_000
    max_artifacts: int = 10_000
    max_artifacts_bytes: int = 64 * 1024 * 1024 * 1024

    def as_json(self) -> dict[str, int]:
        """Return them as in the capabilities."""
        return asdict(self)

    def wait_s(self, timeout_ms: int) -> float:
        """Return how long a call may wait, in seconds: its own limit, at most ``max_wait_ms`` (CKPT-TIME-010)."""
        return min(timeout_ms, self.max_wait_ms) / 1000

    def lease_ms(self, asked: int) -> int:
        """Return the lease that is granted, in milliseconds (CKPT-LEASE-002, CKPT-LEASE-003)."""
        return max(self.min_lease_ms, min(asked, self.max_lease_ms))


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    """One environment, as in the capabilities."""

    name: str
    continuation: Continuation
    verify: Verify
    state_version: str


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """One agent, as in the capabilities."""

    name: str
    continuation: Continuation


@dataclass(frozen=True, slots=True)
class StateSchema:
    """The form of the saved state: what is written, and which versions can be read."""

    id: str = "reference-gym"
    version: int = 1
    reads: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class Peer:
    """Another participant of the same Gym."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class ParticipantConfig:
    """Everything that is fixed for the life of a participant.

    ``storage_roots`` are the directories inside which ``file`` targets and sources may lie; ``staging`` is a private
    directory for the ``http`` scheme, and None means that the feature ``artifacts_http`` is not offered. With a
    boundary log every cut but each ``full_copy_every``-th shares the log's segments.
    """

    name: str
    role: str
    stage: int
    environments: Sequence[EnvironmentInfo] = ()
    agents: Sequence[AgentInfo] = ()
    storage_roots: Sequence[Path] = ()
    staging: Path | None = None
    participants: Sequence[Peer] = ()
    features: Sequence[str] = ()
    profiles: Sequence[str] = ("results", "checkpoint", "turn-recovery")
    state_schema: StateSchema = field(default_factory=StateSchema)
    implementation: str = "reference-gym"
    version: str = "0.1.0"
    workers: int = 1
    coordinated: bool = True
    full_copy_every: int = 8
    limits: Limits = field(default_factory=Limits)

    def environment(self, name: str) -> EnvironmentInfo | None:
        """Return an environment by name, or None."""
        return next((known for known in self.environments if known.name == name), None)

    def agent(self, name: str | None) -> AgentInfo | None:
        """Return an agent by name (None: the first one), or None."""
        return next((known for known in self.agents if name in (None, known.name)), None)

    def restart_only(self, environment: str, agent: str | None) -> bool:
        """Return whether a rollout of these parts starts again after a restore (CKPT-ENV-001)."""
        parts = (self.environment(environment), self.agent(agent))
        return any(part is None or part.continuation == "restart_only" for part in parts)
