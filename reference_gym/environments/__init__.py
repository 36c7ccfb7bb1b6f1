# SPDX-License-Identifier: Apache-2.0
"""The environments of the reference Gym, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from reference_gym.environments.base import (
    EffectContext,
    Environment,
    Observation,
    Session,
    StateInvalid,
    TaskInvalid,
    ToolSpec,
    Verdict,
    VerificationFailed,
)
from reference_gym.environments.conformance import ConformanceEnvironment
from reference_gym.environments.toy_text import frozen_lake, taxi

__all__ = [
    "FACTORIES",
    "EffectContext",
    "Environment",
    "Observation",
    "Session",
    "StateInvalid",
    "TaskInvalid",
    "ToolSpec",
    "Verdict",
    "VerificationFailed",
    "build",
]

FACTORIES: Mapping[str, Callable[[], Environment]] = {
    "taxi": taxi,
    "frozen_lake": frozen_lake,
}


def build(names: Iterable[str], *, conformance: bool, world_url: str | None) -> dict[str, Environment]:
    """The environments to serve.

    Args:
        names: keys of `FACTORIES`.
        conformance: whether the conformance environment is registered too.
        world_url: the only outside that it may call.

    Raises:
        KeyError: no such environment.
    """
    built: dict[str, Environment] = {name: FACTORIES[name]() for name in names}
    if conformance:
        built["conformance"] = ConformanceEnvironment("conformance", world_url)
        built["conformance-restart"] = ConformanceEnvironment("conformance-restart", world_url)
    return built
