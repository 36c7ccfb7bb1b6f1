# SPDX-License-Identifier: Apache-2.0
"""`metrics.json`: what a run can be watched by. Names exist only for what is switched on.

Counts that the ledger can give are of the whole run (`rollouts_…`, `samples_trained`, `ckpt_acks_owed`,
`ckpt_attempts…`, `ckpt_results_surplus`); the others are of this process. Times are in milliseconds where the
name says so.

    ckpt_attempts, ckpt_attempts_reserved{origin}    attempts in all; next ones, by what made them necessary
    ckpt_outcomes{outcome,reason}                    of rollouts: finished, failed, retried, surplus, refused
    ckpt_rollouts_recovered{how}, ckpt_turns_saved   what restarts did with rollouts; turns not generated again
    ckpt_results_salvaged, ckpt_results_dropped      results newer than the cut that a rollback kept, and did not
    ckpt_snapshots_published, _skipped, _failed, ckpt_snapshot_failures{step,participant,reason}
    ckpt_pause_ms{participant,phase}                 of the last snapshot: prepare, commit, resume; `gate` is all
    ckpt_park_wait_ms, ckpt_capture_ms, ckpt_write_ms, ckpt_bytes {participant}     of the last snapshot
    ckpt_seconds_since_last_success                  -1 before the first full snapshot of this process
    ckpt_token_rows_trained, ckpt_token_rows_missing with the policy gateway
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reference_rl import queries
from reference_rl.columns import Switches
from reference_rl.events import Events
from reference_rl.ledger import Ledger
from reference_rl.tally import label
from spec import durable

if TYPE_CHECKING:
    from reference_rl.checkpointer import Health

FILE = "metrics.json"


def collect(
    switches: Switches, ledger: Ledger, events: Events, health: Health | None, *, keeps_rows: bool = False
) -> dict[str, float]:
    """Return every metric by name; with column 0 those of a client that never heard of the protocol.

    Args:
        switches: what the column turns on.
        ledger: the run's ledger.
        events: its counters.
        health: how snapshots fare.
        keeps_rows: token rows are kept by the policy gateway.

    Requirements: CKPT-DISC-032, CKPT-DUTY-029.
    """
    counts = ledger.read(queries.counts)
    metrics: dict[str, float] = {
        "rollouts_unfinished": counts["unfinished"],
        "rollouts_finished": counts["finished"],
        "rollouts_failed": counts["failed"],
        "samples_trained": counts["trained"],
    }
    if switches.tracks_rollouts:
        metrics |= {
            "ckpt_acks_owed": ledger.read(queries.debt_count),
            "ckpt_results_surplus": ledger.read(queries.surplus_count),
            "ckpt_attempts": ledger.read(queries.attempt_count),
            **ledger.read(_attempts_by_origin),
            **events.tally.rollouts(),
            "ckpt_pages_discarded": events.counters["page_discarded"],
            "ckpt_gyms_recovered": events.counters["gym_recovered"],
        }
    if switches.tracks_rollouts and keeps_rows:
        metrics |= events.tally.rows()
    if switches.captures_gyms and health is not None:
        since = time.monotonic() - health.last_success if health.last_success is not None else -1.0
        metrics |= {
            "ckpt_snapshots_published": events.counters["snapshot_published"],
            "ckpt_snapshots_failed": health.failed,
            "ckpt_snapshots_failed_in_a_row": health.consecutive,
            "ckpt_resumes_failed": health.resume_failures,
            "ckpt_gyms_left_out": events.counters["gym_left_out"],
            "ckpt_fallen_back_to_column_2": int(health.reduced),
            "ckpt_seconds_since_last_success": since,
            **events.tally.snapshots(),
        }
    return metrics


_ORIGINS: Final = ("restore", "reset", "retry", "adopt", "restart", "started")


def _attempts_by_origin(con: sqlite3.Connection) -> dict[str, float]:
    found: Counter[str] = Counter()
    for origin, count in queries.attempt_origins(con).items():
        word = next((word for word in _ORIGINS if origin.startswith(word)), "other")
        found[label("ckpt_attempts_reserved", origin="reset" if word == "started" else word)] += count
    return {"ckpt_attempts_reserved": float(sum(found.values())), **dict(sorted(found.items()))}


def write(run_dir: Path, metrics: dict[str, float]) -> None:
    """Publish the metrics of a run whole."""
    durable.publish_file(run_dir / FILE, json.dumps(metrics, indent=1, sort_keys=True).encode() + b"\n")
