# SPDX-License-Identifier: Apache-2.0
"""What requests look like: small checks that are put together to one form per operation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tests.second_gym.refusals import Refusal

Check = Callable[[Any, str], None]
MOST = 9007199254740991
FAR_TURN = 2147483647


def malformed(where: str, what: str) -> NoReturn:
    """Refuse a request for its form."""
    raise Refusal("invalid_request", f"{where}: {what}")


def parse(raw: bytes) -> Any:
    """Return the JSON value of a body, of Unicode scalar values and finite numbers only."""

    def no_number(name: str) -> NoReturn:
        malformed("body", f"{name} is not JSON")

    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=no_number)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        malformed("body", f"not JSON text ({type(error).__name__})")
    return value


def integer(low: int, high: int) -> Check:
    """Return the check of an integer; `true`, `1.0` and `"1"` are none."""

    def check(value: Any, where: str) -> None:
        if type(value) is not int or not low <= value <= high:
            malformed(where, f"is not an integer from {low} to {high}")

    return check


def string(pattern: str, most: int) -> Check:
    """Return the check of a string that matches as a whole."""
    compiled = re.compile(pattern, re.ASCII | re.DOTALL)

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or len(value) > most or not compiled.fullmatch(value):
            malformed(where, "is not a string of the documented form")

    return check


def one_of(*words: str) -> Check:
    """Return the check of a word of a list."""

    def check(value: Any, where: str) -> None:
        if value not in words or not isinstance(value, str):
            malformed(where, f"is none of {', '.join(words)}")

    return check


def boolean(value: Any, where: str) -> None:
    """Check a boolean."""
    if not isinstance(value, bool):
        malformed(where, "is not a boolean")


def mapping(value: Any, where: str) -> None:
    """Check an object of any content."""
    if not isinstance(value, dict):
        malformed(where, "is not an object")


def labels(value: Any, where: str) -> None:
    """Check the labels of a start."""
    mapping(value, where)
    if len(value) > 32:
        malformed(where, "has more than 32 entries")
    for name, text in value.items():
        if not 1 <= len(name) <= 64 or not isinstance(text, str) or len(text) > 256:
            malformed(where, "holds a label that is too long or no string")


def array(item: Check, most: int) -> Check:
    """Return the check of a list."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or len(value) > most:
            malformed(where, f"is not a list of at most {most} items")
        for number, entry in enumerate(value):
            item(entry, f"{where}[{number}]")

    return check


def nullable(inner: Check) -> Check:
    """Return the check of a value that may be null."""
    return lambda value, where: None if value is None else inner(value, where)


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Return the check of an object with exactly these members."""
    every = {**required, **(optional or {})}

    def check(value: Any, where: str) -> None:
        mapping(value, where)
        for name in required:
            if name not in value:
                malformed(f"{where}.{name}", "is missing")
        for name, entry in value.items():
            if name not in every:
                malformed(f"{where}.{name[:64]}", "is unknown")
            every[name](entry, f"{where}.{name}")

    return check


def by_scheme(of_file: Check, of_http: Check) -> Check:
    """Return the check of a target or source, whose members depend on its scheme."""

    def check(value: Any, where: str) -> None:
        mapping(value, where)
        (of_http if value.get("scheme") == "http" else of_file)(value, where)

    return check


NAME_128 = string(r"[A-Za-z0-9][A-Za-z0-9._-]*", 128)
LOCATOR = string(r"[A-Za-z0-9][A-Za-z0-9._:/-]*", 128)
DIGEST = string(r"sha256:[0-9a-f]{64}", 71)
TASK_DIGEST = string(r"[\x21-\x7e]+", 128)
ATTEMPT = integer(0, FAR_TURN)
TIMEOUT = integer(0, 86400000)
LEASE = integer(1, 86400000)
CHECKPOINT_ID = string(r"[1-9][0-9]{0,14}-(0|[1-9][0-9]{0,14})", 31)
PATH = string(r"/[^\x00-\x1f\x7f]*", 4096)


def rollout_id(value: Any, where: str) -> None:
    """Check a rollout id: never one that looks like the key of a later attempt."""
    NAME_128(value, where)
    if re.search(r"-a[0-9]+\Z", value):
        malformed(where, "ends like the key of an attempt")


CONTROL = r"\x00-\x20\x7f"
BASE_URL = string(rf"https?://[^/?#@{CONTROL}]+(/[^?#{CONTROL}]*)?", 2048)  # no query, no credentials

POLICY = record(
    {
        "base_url": BASE_URL,
        "model": string(r".+", 256),
        "api": one_of("chat_completions", "responses"),
    }
)
RECEIPT = record({"rollout_id": rollout_id, "attempt": ATTEMPT, "digest": DIGEST})
FENCE = record({"rollout_id": rollout_id, "through_attempt": ATTEMPT})
START = record(
    {"rollout_id": rollout_id, "attempt": ATTEMPT, "environment": LOCATOR, "task": mapping, "task_digest": TASK_DIGEST},
    {
        "agent": LOCATOR,
        "seed": integer(0, MOST),
        "limits": record({"max_turns": integer(1, FAR_TURN), "episode_ms": integer(1, MOST)}),
        "policy": POLICY,
        "labels": labels,
    },
)
LISTED = record(
    {
        "rollout_id": rollout_id,
        "attempt": ATTEMPT,
        "next_attempt": ATTEMPT,
        "turns_done": ATTEMPT,
        "task_digest": TASK_DIGEST,
    }
)
NAMED = {"checkpoint_id": CHECKPOINT_ID, "timeout_ms": TIMEOUT}
TARGET = by_scheme(record({"scheme": one_of("file"), "path": PATH}), record({"scheme": one_of("http")}))
CUT = {"checkpoint_id": CHECKPOINT_ID, "manifest_digest": DIGEST}
SOURCE = by_scheme(record({"scheme": one_of("file"), "path": PATH, **CUT}), record({"scheme": one_of("http"), **CUT}))
FORMS: dict[str, Check] = {
    "prepare": record({**NAMED, "run_id": NAME_128, "lease_ms": LEASE}),
    "commit": record(
        {**NAMED, "target": TARGET, "wait": one_of("captured", "durable")}, {"leave_out_blocked": boolean}
    ),
    "resume": record(NAMED),
    "abort": record(NAMED),
    "renew": record({"checkpoint_id": CHECKPOINT_ID, "lease_ms": LEASE}),
    "restore": record(
        {
            **NAMED,
            "run_id": NAME_128,
            "lease_ms": LEASE,
            "source": nullable(SOURCE),
            "rollouts": array(LISTED, 1000000),
            "results": array(RECEIPT, 1000000),
            "fences": array(FENCE, 1000000),
        },
        {"policy": POLICY},
    ),
    "retire": record({"rollouts": array(FENCE, 10000), "timeout_ms": TIMEOUT}),
    "start": record({"rollouts": array(START, 10000)}, {"policy": POLICY}),
    "ack": record({"receipts": array(RECEIPT, 10000)}),
    "probe": record(
        {
            "rollout_id": rollout_id,
            "attempt": ATTEMPT,
            "turn": integer(1, FAR_TURN),
            "request_id": string(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}/[1-9][0-9]{0,9}/[1-9][0-9]{0,9}", 150),
            "tool": string(r".+", 128),
            "args": mapping,
            "effects_done": nullable(integer(0, MOST)),
        }
    ),
}


def restore_agrees_with_itself(body: Mapping[str, Any]) -> None:
    """Refuse a restore without a source that lists something, or with two different entries for one rollout."""
    for name in ("rollouts", "results"):
        seen: dict[str, object] = {}
        for entry in body[name]:
            if seen.setdefault(entry["rollout_id"], entry) != entry:
                malformed(f"body.{name}", f"has two different entries for {entry['rollout_id']}")
        if body["source"] is None and body[name]:
            malformed(f"body.{name}", "is not empty although source is null")
