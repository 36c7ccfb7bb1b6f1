# SPDX-License-Identifier: Apache-2.0
"""Judges that a refused call left everything visible as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from conformance.controller import Participant
from conformance.errors import Failed


class Unchanged:
    """A context in which nothing visible of some participants may change.

    Args:
        prefix: the namespace of the rollouts that are looked at.
        participants: who is looked at.
        requirements: what is broken if something changes.
    """

    def __init__(self, prefix: str, participants: list[Participant], requirements: tuple[str, ...]) -> None:
        self._prefix = prefix
        self._requirements = requirements
        self._participants = participants
        self._before: list[Mapping[str, Any]] = []

    def _look(self) -> list[Mapping[str, Any]]:
        seen: list[Mapping[str, Any]] = []
        for participant in self._participants:
            status = {k: v for k, v in participant.status().items() if k != "lease_remaining_ms"}
            if status.get("last") is not None:
                status["last"] = {k: v for k, v in status["last"].items() if not k.endswith("_ms")}
            rows = {}
            if participant.owns("rollouts"):
                rows = {
                    key: {k: v for k, v in row.items() if k != "since_ms"}
                    for key, row in participant.rollouts().items()
                    if key.startswith(self._prefix)
                }
            seen.append({"name": participant.name, "status": status, "rollouts": rows})
        return seen

    def __enter__(self) -> Unchanged:
        self._before = self._look()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.judge()

    def judge(self) -> None:
        """Judge that nothing has changed up to now."""
        for before, after in zip(self._before, self._look(), strict=True):
            for part in ("status", "rollouts"):
                different = {
                    key: (before[part].get(key), after[part].get(key))
                    for key in {**before[part], **after[part]}
                    if before[part].get(key) != after[part].get(key)
                }
                if different:
                    shown = "; ".join(f"{k}: {show(a)} → {show(b)}" for k, (a, b) in different.items())
                    raise Failed(
                        f"a refused call leaves {before['name']} unchanged",
                        expected="the same status and rollouts before and after",
                        got=shown,
                        requirements=self._requirements,
                    )


def show(value: object) -> str:
    """Return a value as text for a failure, cut where it is long."""
    if isinstance(value, str):
        return value if len(value) < 400 else value[:400] + "…"
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) < 800 else text[:800] + "…"
