# SPDX-License-Identifier: Apache-2.0
"""How long a checkpoint keeps the gate closed: opened after the capture, against opened after the cut is durable.

Run as ``python -m benchmarks.pause``; see ``--help``. Bounded by 15 minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.gym import Caller, Policy, running_gym


def measure(caller: Caller, snapshots: Path, number: int, wait: str) -> dict[str, float]:
    """Take one checkpoint and return its times in milliseconds."""
    id = f"1-{number}"
    target = snapshots / id
    target.mkdir()
    commit = {"checkpoint_id": id, "target": {"scheme": "file", "path": str(target)}, "timeout_ms": 30_000}
    begun = time.perf_counter()
    ready = caller.post(
        "/checkpoint/prepare", {"checkpoint_id": id, "run_id": "bench", "timeout_ms": 30_000, "lease_ms": 60_000}
    )
    if not ready["ready"]:
        raise RuntimeError(f"not ready: {ready}")
    caller.post("/checkpoint/commit", {**commit, "wait": wait})
    resumed = caller.post("/checkpoint/resume", {"checkpoint_id": id, "timeout_ms": 30_000})
    done = caller.post("/checkpoint/commit", {**commit, "wait": "durable"})
    return {
        "pause_ms": resumed["pause_ms"],
        "durable_ms": (time.perf_counter() - begun) * 1000,
        "megabytes": done["counts"]["bytes"] / 1e6,
    }


def main() -> None:
    """Print the table and write ``build/bench/pause.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kilobytes", type=float, default=2.0, help="text that the policy adds to each turn")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {"captured": [], "durable": []}
    with tempfile.TemporaryDirectory() as name, running_gym(Path(name) / "gym") as url:
        policy = Policy(options.turns, int(options.kilobytes * 1000))
        caller = Caller(url)
        caller.start(options.rollouts, options.turns, policy)
        for number in range(1, 2 * options.repeats + 1):
            wait = "captured" if number % 2 else "durable"
            rows[wait].append(measure(caller, Path(name) / "gym" / "snapshots", number, wait))
    medians = {
        wait: {key: statistics.median(row[key] for row in measured) for key in measured[0]}
        for wait, measured in rows.items()
    }
    ratio = medians["durable"]["pause_ms"] / max(medians["captured"]["pause_ms"], 0.001)
    table = Table(title=f"{options.rollouts} rollouts of {options.turns} turns, median of {options.repeats}")
    for column in ("gate opens after", "pause ms", "durable after ms", "MB"):
        table.add_column(column, justify="right")
    for wait, row in medians.items():
        table.add_row(wait, f"{row['pause_ms']:.1f}", f"{row['durable_ms']:.1f}", f"{row['megabytes']:.2f}")
    console = Console()
    console.print(table)
    console.print(f"opening the gate after the capture makes the pause {ratio:.1f} times shorter")
    out = Path("build/bench")
    out.mkdir(parents=True, exist_ok=True)
    result = {"options": vars(options), "medians": medians, "pause_ratio_durable_to_captured": ratio, "rows": rows}
    (out / "pause.json").write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
