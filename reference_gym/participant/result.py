# SPDX-License-Identifier: Apache-2.0
"""The text of a result: built once when a rollout ends, kept as a string, never parsed again.

A result that cannot be written exactly, does not fit its schema or is too long becomes a failure that says so; the feed
never meets it (CKPT-RESULT-012, CKPT-RESULT-013, CKPT-RESULT-016).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema_rs

import spec
from reference_gym.participant.jsontext import NotJson, NotRepresentable, encode
from reference_gym.participant.rollout import Rollout
from reference_gym.participant.state import RolloutFailure, Success
from spec import wire


@dataclass(frozen=True, slots=True)
class Receipt:
    """Names one finished result exactly."""

    rollout_id: str
    attempt: int
    digest: str

    def as_json(self) -> dict[str, Any]:
        """Return it as in the schema ``receipt``."""
        return {"rollout_id": self.rollout_id, "attempt": self.attempt, "digest": self.digest}


@dataclass(frozen=True, slots=True)
class Finished:
    """One unreleased result: the receipt, the text, and what the participant itself must know of it.

    ``at`` is when it finished (or was installed), in the participant's monotonic seconds.
    """

    receipt: Receipt
    text: str
    success: bool
    terminal: bool
    environment: str
    task_digest: str
    turns_done: int
    effects: int = 0
    policy_version: int | None = None
    data_refs: tuple[Any, ...] = ()
    at: float = 0.0

    def as_header(self) -> dict[str, Any]:
        """Return everything but the text and the time, as files of this program keep it."""
        return {
            "receipt": self.receipt.as_json(),
            "success": self.success,
            "terminal": self.terminal,
            "environment": self.environment,
            "task_digest": self.task_digest,
            "turns_done": self.turns_done,
            "effects": self.effects,
            "policy_version": self.policy_version,
            "data_refs": list(self.data_refs),
        }

    @classmethod
    def of(cls, header: Mapping[str, Any], text: str, at: float = 0.0) -> Finished:
        """Return the result that ``as_header`` described.

        Raises:
            NotJson: the text does not have the digest of the receipt.
        """
        receipt = Receipt(**header["receipt"])
        if wire.result_digest(text) != receipt.digest:
            raise NotJson(f"the result of {receipt.rollout_id} does not have the digest of its receipt")
        return cls(
            receipt=receipt,
            text=text,
            success=header["success"],
            terminal=header["terminal"],
            environment=header["environment"],
            task_digest=header["task_digest"],
            turns_done=header["turns_done"],
            effects=header["effects"],
            policy_version=header["policy_version"],
            data_refs=tuple(header["data_refs"]),
            at=at,
        )


def conclude(rollout: Rollout, outcome: Success | RolloutFailure, max_bytes: int, at: float) -> Finished:
    """Return the result of a rollout that ends now.

    Args:
        rollout: the rollout, at its last boundary.
        outcome: how it ended.
        max_bytes: the longest result text, in bytes of UTF-8.
        at: monotonic seconds.
    """
    try:
        text = _text(rollout, outcome, _info(rollout))
        if len(text) > max_bytes:
            reason = f"the result has {len(text)} bytes, more than max_result_bytes {max_bytes}"
            outcome = RolloutFailure("result_too_large", reason, terminal=True)
            text = _text(rollout, outcome, _bare_info(rollout))
    except NotRepresentable as error:
        outcome = RolloutFailure("result_not_representable", _printable(str(error)), terminal=True)
        text = _text(rollout, outcome, _bare_info(rollout))
    return Finished(
        receipt=Receipt(rollout.rollout_id, rollout.attempt, wire.bytes_digest(text)),
        text=text.decode(),
        success=isinstance(outcome, Success),
        terminal=isinstance(outcome, Success) or outcome.terminal,
        environment=rollout.start.environment,
        task_digest=rollout.start.task_digest,
        turns_done=rollout.turns_done,
        effects=rollout.effects,
        policy_version=max(rollout.policy_versions, default=None),
        data_refs=tuple(rollout.data_refs),
        at=at,
    )


def _text(rollout: Rollout, outcome: Success | RolloutFailure, info: dict[str, Any]) -> bytes:
    content: dict[str, Any] = {
        "rollout_id": rollout.rollout_id,
        "environment": rollout.start.environment,
        "task_digest": rollout.start.task_digest,
    }
    if isinstance(outcome, Success):
        content["body"] = _body(outcome, rollout.turns_done)
    else:
        content["failure"] = _failure(outcome, rollout.turns_done)
    content["info"] = info
    text = encode(content)
    try:
        validator("result").validate(content)
    except jsonschema_rs.ValidationError as error:
        raise NotRepresentable(f"at {'/'.join(map(str, error.instance_path))}: {error.message}") from error
    return text


def _body(success: Success, turns: int) -> dict[str, Any]:
    if isinstance(success.reward, float) and not math.isfinite(success.reward):
        raise NotRepresentable(f"the reward is {success.reward}")
    body: dict[str, Any] = {
        "outcome": success.outcome,
        "reward": success.reward,
        "turns": turns,
        "messages": list(success.messages),
    }
    if success.final is not None:
        body["final"] = success.final
    return body


def _failure(failure: RolloutFailure, turns: int) -> dict[str, Any]:
    told: dict[str, Any] = {
        "kind": failure.kind,
        "reason": _printable(failure.reason),
        "terminal": failure.terminal,
        "turns": turns,
    }
    if failure.stage is not None:
        told["stage"] = failure.stage
    return told


def _info(rollout: Rollout) -> dict[str, Any]:
    info: dict[str, Any] = {
        "attempt": rollout.attempt,
        "policy_versions": list(rollout.policy_versions),
        "data_refs": list(rollout.data_refs),
    }
    if rollout.usage:
        info["usage"] = dict(rollout.usage)
    if rollout.start.labels is not None:
        info["labels"] = dict(rollout.start.labels)
    return info


def _bare_info(rollout: Rollout) -> dict[str, Any]:
    """Return an info that nothing of the author's can make impossible to represent."""
    bare: dict[str, Any] = {"attempt": rollout.attempt, "policy_versions": [], "data_refs": []}
    if rollout.start.labels is not None:
        bare["labels"] = dict(rollout.start.labels)
    return bare


def _printable(text: str) -> str:
    """Return a reason that has a UTF-8 form and a bounded length."""
    return text.encode("utf-8", "replace").decode()[:2000]


@cache
def validator(name: str) -> jsonschema_rs.Validator:
    """Return the compiled schema of one message; the first one takes a tenth of a second, for it reads them all.

    Args:
        name: the stem of its file, e.g. ``prepare-request``.
    """
    return jsonschema_rs.validator_for(dict(spec.load("1.0").schemas[name]), registry=_registry())


@cache
def _registry() -> jsonschema_rs.Registry:
    schemas = spec.load("1.0").schemas.values()
    return jsonschema_rs.Registry([(str(schema["$id"]), dict(schema)) for schema in schemas])
