# SPDX-License-Identifier: Apache-2.0
"""What the events of a process add up to: counts by outcome and reason, the times of the last snapshot. Pure.

A name may carry labels, ``ckpt_outcomes{outcome="retried",reason="session_lost"}``: from a fixed set of words and the
names of Gyms and participants, never from a rollout's id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

KINDS: Final = frozenset(
    {
        *("session_lost", "policy_unavailable", "verification_failed", "episode_timeout"),
        *("result_too_large", "result_not_representable"),
    }
)
"""Kinds of failure that have a label of their own; a Gym's own kinds are counted as `other`."""

_ENDED: Final = {"finished": "", "failed": "kind", "retried": "kind", "surplus": "", "refused": ""}
_SAVED: Final = ("continued", "kept")


class Tally:
    """Takes every event of a process and gives the metrics that follow from them.

    Requirements: CKPT-SEC-027.
    """

    def __init__(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._snapshots: Counter[str] = Counter()
        self._last: dict[str, float] = {}
        self._saved: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()

    def take(self, event: Mapping[str, Any]) -> None:
        """Count one event."""
        name = event["event"]
        if name in _ENDED:
            kind = event.get("reason") if _ENDED[name] else None
            reason = {} if kind is None else {"reason": kind if kind in KINDS else "other"}
            self._outcomes[label("ckpt_outcomes", outcome=name, **reason)] += 1
        elif name == "snapshot_published":
            self._published(event)
        elif name == "snapshot_skipped":
            self._snapshots["ckpt_snapshots_skipped"] += 1
        elif name == "snapshot_failed" and "step" in event:
            where = {"participant": event["participant"]} if event.get("participant") else {}
            reason = {"reason": event["code"]} if event.get("code") else {}
            self._snapshots[label("ckpt_snapshot_failures", step=event["step"], **where, **reason)] += 1
        elif name in ("restarted", "gym_recovered"):
            for fate in event["rollouts"]:
                self._saved["ckpt_turns_saved"] += fate["turns_done"] if fate["how"] in _SAVED else 0
                self._saved[label("ckpt_rollouts_recovered", how=fate["how"].replace(" ", "_"))] += 1
        elif name == "trained":
            self._rows["ckpt_token_rows_trained"] += event.get("rows", 0)
        elif name == "rows_missing":
            self._rows["ckpt_token_rows_missing"] += len(event["turns"])
        elif name == "rolled_back":
            self._saved["ckpt_results_salvaged"] += event["salvaged"]
            self._saved["ckpt_results_dropped"] += len(event["dropped"])

    def _published(self, event: Mapping[str, Any]) -> None:
        self._last.clear()
        for participant, times in event.get("participants", {}).items():
            for phase, value in times["pause_ms"].items():
                self._last[label("ckpt_pause_ms", participant=participant, phase=phase)] = value
            for name in ("park_wait_ms", "capture_ms", "write_ms", "bytes"):
                self._last[label(f"ckpt_{name}", participant=participant)] = times[name]

    def rollouts(self) -> dict[str, float]:
        """Return how rollouts ended, and what restarts saved, since this process began."""
        saved = {"ckpt_turns_saved": 0.0, "ckpt_results_salvaged": 0.0, "ckpt_results_dropped": 0.0}
        return {**_sorted(self._outcomes), **saved, **_sorted(self._saved)}

    def snapshots(self) -> dict[str, float]:
        """Return failures by step and reason, and times and sizes of the last published snapshot."""
        return {"ckpt_snapshots_skipped": 0.0, **_sorted(self._snapshots), **_sorted(self._last)}

    def rows(self) -> dict[str, float]:
        """Return how many token rows were trained from, and how many were not there."""
        return {"ckpt_token_rows_trained": 0.0, "ckpt_token_rows_missing": 0.0, **self._rows}


def label(name: str, **labels: str) -> str:
    """Return a metric's name with its labels, in the form that Prometheus reads."""
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def _sorted(values: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(values.items()))
