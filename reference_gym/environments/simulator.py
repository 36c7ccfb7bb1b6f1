# SPDX-License-Identifier: Apache-2.0
"""Steps episodes of gymnasium's toy-text environments, whose whole state is data, the random generator included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from reference_gym.environments.base import StateInvalid


@dataclass(slots=True)
class EpisodeState:
    """Everything that one episode consists of; `extra` holds the instance attributes that the environment names."""

    position: int
    last_action: int | None
    elapsed: int
    reward: float
    terminated: bool
    truncated: bool
    rng: np.random.Generator
    extra: dict[str, Any] = field(default_factory=dict)


def export_rng(rng: np.random.Generator) -> dict[str, Any]:
    """The state of a PCG64 generator as JSON data (128-bit numbers as decimal strings)."""
    state = rng.bit_generator.state
    return {
        "bit_generator": state["bit_generator"],
        "state": str(state["state"]["state"]),
        "inc": str(state["state"]["inc"]),
        "has_uint32": int(state["has_uint32"]),
        "uinteger": int(state["uinteger"]),
    }


def restore_rng(data: Mapping[str, Any]) -> np.random.Generator:
    """The generator that `export_rng` saw; raises `StateInvalid`."""
    if data.get("bit_generator") != "PCG64":
        raise StateInvalid("the random generator of the saved state is not PCG64")
    try:
        bits = np.random.PCG64(0)
        bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": int(data["state"]), "inc": int(data["inc"])},
            "has_uint32": int(data["has_uint32"]),
            "uinteger": int(data["uinteger"]),
        }
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateInvalid("the saved state of the random generator is damaged") from error
    return np.random.Generator(bits)


class Simulator:
    """The one gymnasium instance of an environment; synchronous, so that no two sessions ever meet in it.

    Args:
        gymnasium_id: registered name.
        extra: names of further instance attributes that belong to an episode.
        arguments: keyword arguments for `gymnasium.make`.
    """

    def __init__(self, gymnasium_id: str, extra: tuple[str, ...], arguments: Mapping[str, Any]) -> None:
        self._env = gymnasium.make(gymnasium_id, disable_env_checker=True, **arguments)
        self._core: Any = self._env.unwrapped
        self._extra = extra
        spec = self._env.spec
        self.max_steps = (spec.max_episode_steps if spec is not None else None) or math.inf

    def reset(self, seed: int) -> EpisodeState:
        """A new episode from `seed`."""
        position, _ = self._env.reset(seed=seed)
        return EpisodeState(
            position=int(position),
            last_action=None,
            elapsed=0,
            reward=0.0,
            terminated=False,
            truncated=False,
            rng=self._core.np_random,
            extra={name: _plain(getattr(self._core, name)) for name in self._extra},
        )

    def step(self, state: EpisodeState, action: int) -> float:
        """Advance `state` by one action and return the reward of that step."""
        self._core.np_random = state.rng
        self._core.s = state.position
        self._core.lastaction = state.last_action
        for name in self._extra:
            setattr(self._core, name, state.extra[name])
        # The wrapper's own step counter is not used: the limit is kept here, where the count is state.
        position, reward, terminated, _, _ = self._core.step(action)
        state.position = int(position)
        state.last_action = action
        state.elapsed += 1
        state.reward += float(reward)
        state.terminated = bool(terminated)
        state.truncated = not state.terminated and state.elapsed >= self.max_steps
        state.extra = {name: _plain(getattr(self._core, name)) for name in self._extra}
        return float(reward)

    def decode(self, position: int) -> tuple[int, ...]:
        """The components of a position as the environment defines them."""
        return tuple(int(part) for part in self._core.decode(position))

    @property
    def positions(self) -> int:
        """How many positions there are."""
        return int(self._core.observation_space.n)

    def cell(self, row: int, column: int) -> str:
        """One letter of the map."""
        return bytes(self._core.desc[row, column]).decode("ascii")

    @property
    def columns(self) -> int:
        """The width of the map."""
        return int(self._core.ncol)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
