# SPDX-License-Identifier: Apache-2.0
"""The environments of the reference Gym, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from reference_gym.catalogue import TOY_TEXT
from reference_gym.environments.base import (
    EffectContext,
    Environment,
    Observation,
    Session,
    StateInvalid,
    TaskInvalid,
    Verdict,
    VerificationFailed,
)
from reference_gym.environments.conformance import ConformanceEnvironment
from reference_gym.participant.conformance import Conformance
from reference_gym.participant.policy_call import ToolSpec

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


def _toy_text(name: str) -> Environment:
    # gymnasium takes long to import, and only who steps through its environments needs it.
    from reference_gym.environments import toy_text

    factory: Callable[[], Environment] = getattr(toy_text, name)
    return factory()


FACTORIES: Mapping[str, Callable[[], Environment]] = {name: partial(_toy_text, name) for name in TOY_TEXT}


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
        module = Conformance(world_url)
        built["conformance"] = ConformanceEnvironment("conformance", module)
        built["conformance-restart"] = ConformanceEnvironment("conformance-restart", module)
    return built
