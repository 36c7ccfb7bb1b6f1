# SPDX-License-Identifier: Apache-2.0
"""`metrics.json`: what a run can be watched by. Names exist only for what is switched on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from reference_rl import queries
from reference_rl.columns import Switches
from reference_rl.events import Events
from reference_rl.ledger import Ledger
from spec import durable

if TYPE_CHECKING:
    from reference_rl.checkpointer import Health

FILE = "metrics.json"


def collect(switches: Switches, ledger: Ledger, events: Events, health: Health | None) -> dict[str, float]:
    """Return every metric by name; with column 0 those of a client that never heard of the protocol.

    Args:
        switches: what the column turns on.
        ledger: the run's ledger.
        events: its counters.
        health: how snapshots fare.

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
            "ckpt_results_surplus": len(ledger.read(queries.surplus)),
            "ckpt_attempts_reserved": len(ledger.read(queries.attempts)),
            "ckpt_pages_discarded": events.counters["page_discarded"],
            "ckpt_gyms_recovered": events.counters["gym_recovered"],
        }
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
        }
    return metrics


def write(run_dir: Path, metrics: dict[str, float]) -> None:
    """Publish the metrics of a run whole."""
    durable.publish_file(run_dir / FILE, json.dumps(metrics, indent=1, sort_keys=True).encode() + b"\n")
