# SPDX-License-Identifier: Apache-2.0
"""The conformance environment: its tasks, its tools and the state of a session."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from tests.second_gym.calls import post_to_world

ENVIRONMENTS = ("conformance", "conformance-restart")
TOOLS: dict[str, dict[str, dict[str, Any]]] = {
    "add": {"n": {"type": "integer", "minimum": -1000000, "maximum": 1000000}},
    "world": {"tag": {"type": "string", "maxLength": 64}},
    "grow": {"bytes": {"type": "integer", "minimum": 0, "maximum": 67108864}},
    "refuse": {},
}
BYTES = bytes(range(251))


def task_fits(task: dict[str, Any], world_url: str | None) -> bool:
    """Return whether a task is one of the conformance environment."""
    return (
        task.keys() == {"seed", "world_url", "verify_in_world"}
        and type(task["seed"]) is int
        and 0 <= task["seed"] <= 4294967295
        and (task["world_url"] is None or (isinstance(task["world_url"], str) and task["world_url"] == world_url))
        and isinstance(task["verify_in_world"], bool)
    )


@dataclass(frozen=True)
class Effect:
    """One effect on its way from the agent, or from the probe, to the environment.

    Args:
        arguments: the JSON value of the arguments, or anything else for text that is not JSON.
        effects_done: what the caller has recorded; None is not compared.
    """

    rollout_id: str
    attempt: int
    turn: int
    request_id: str
    tool: str
    arguments: object
    effects_done: int | None

    @property
    def content(self) -> str:
        """What a repeat is compared by."""
        return json.dumps([self.tool, self.arguments], sort_keys=True)


@dataclass(eq=False)
class Session:
    """The environment's half of a rollout: its state, and the effects that it has recorded.

    Args:
        rng: the seed of the task at first.
        world_url: where its world is.
    """

    rng: int
    world_url: str | None
    counter: int = 0
    effects: int = 0
    blob: bytearray = field(default_factory=bytearray)
    recorded_count: int = 0
    recorded_turn: int = 0
    replies: dict[str, tuple[str, str]] = field(default_factory=dict)
    running: tuple[str, str] | None = None
    uncertain: bool = False

    def known(self, request_id: str) -> tuple[str | None, str | None]:
        """Return what an effect was sent with, and its reply if it has ended."""
        if request_id in self.replies:
            return self.replies[request_id]
        if self.running is not None and self.running[0] == request_id:
            return self.running[1], None
        return None, None

    def apply(self, effect: Effect) -> str:
        """Carry out one effect and return the observation; whatever it raises leaves the session uncertain."""
        if effect.tool == "refuse" and effect.arguments == {}:
            return _text(error="refused")
        value = _the_argument(effect)
        if value is None:
            return _text(error="invalid")
        if effect.tool == "grow":
            start = len(self.blob) % 251
            self.blob += (BYTES * ((start + value) // 251 + 1))[start : start + value]
            self.effects += 1
            return _text(blob_sha256=self.blob_digest, counter=self.counter, effects=self.effects)
        if effect.tool == "world":
            value = self._ask_the_world(effect, value)
            shown = {"value": value}
        else:
            self.rng = (1664525 * self.rng + 1013904223) % 2**32
            shown = {"draw": self.rng >> 16}
            value += shown["draw"]
        self.counter = (self.counter + value) % 2**31
        self.effects += 1
        return _text(counter=self.counter, effects=self.effects, **shown)

    def _ask_the_world(self, effect: Effect, tag: str) -> int:
        if self.world_url is None:
            raise ValueError("this task has no world")
        asked = {
            "tag": tag,
            "rollout_id": effect.rollout_id,
            "attempt": effect.attempt,
            "turn": effect.turn,
            "request_id": effect.request_id,
        }
        answer = post_to_world(f"{self.world_url}/effects", asked)
        value = answer["value"] if isinstance(answer, dict) else None
        if type(value) is not int or not -1000000 <= value <= 1000000:
            raise ValueError("the world answered no value")
        return value

    @property
    def blob_digest(self) -> str:
        """The SHA-256 of the blob."""
        return hashlib.sha256(self.blob).hexdigest()

    @property
    def final(self) -> dict[str, object]:
        """What the result shows of it."""
        return {
            "blob_bytes": len(self.blob),
            "blob_sha256": self.blob_digest,
            "counter": self.counter,
            "effects": self.effects,
            "rng": self.rng,
        }


def _text(**shown: object) -> str:
    return json.dumps(shown, sort_keys=True, separators=(",", ":"))


def _the_argument(effect: Effect) -> Any:
    """Return the one argument of `add`, `world` or `grow`, None where the arguments do not fit."""
    form = TOOLS.get(effect.tool)
    if not form or not isinstance(effect.arguments, dict) or effect.arguments.keys() != form.keys():
        return None
    (name, bounds), *_ = form.items()
    value = effect.arguments[name]
    if bounds["type"] == "string":
        return value if isinstance(value, str) and len(value) <= bounds["maxLength"] else None
    fits = type(value) is int and bounds["minimum"] <= value <= bounds["maximum"]
    return value if fits else None
