# SPDX-License-Identifier: Apache-2.0
"""How long the event loop of a Gym with large state serves nobody, operation by operation, and what memory that takes.

Run as ``python -m benchmarks.stalls``; see ``--help``. The Gym is a process of its own, the garbage collector on,
boundaries going on at a low rate. *stall* is the longest time for which its event loop served nobody, on the clock;
*own* is what of it is the Gym's: without the time for which its loop was ready to run and the machine ran others, and
at most what the process was busy. The rows *nothing* are the control: what is there when nothing is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.laden_calls import Laden, Size, running

TARGET_MS = 20.0
FEW = 20
"""One rollout of so many does not finish: what the log holds is then mostly dead, and a commit compacts it."""
TARGET_MEMORY = 2.5


def story(gym: Laden) -> dict[str, Any]:
    """Take the Gym through every operation; return what was found beside the rows."""
    size = gym.size
    empty = gym.memory.now() / 1024
    with gym.row("nothing, empty", 3.0):
        pass
    with gym.row("start, 100 a call"):
        gym.start()
    with gym.row("nothing, all live", 3.0):
        pass
    resting = gym.memory.now() / 1024
    with gym.row("boundaries", 3.0):
        pass
    with gym.row("status, 50 times"):
        for _ in range(50):
            gym.caller.http.get("/checkpoint").raise_for_status()
    with gym.row("GET /rollouts, all pages"):
        gym.pages("/rollouts", "rollouts")
    digests = {}
    for kind in ("first", "second"):
        id = gym.next()
        with gym.row(f"prepare ({kind})"):
            gym.prepare(id)
        with gym.row(f"commit, {kind}: captured"):
            gym.commit(id, "captured")
        with gym.row(f"commit, {kind}: resumed, durable"):
            gym.end("resume", id)
            digests[id] = gym.commit(id)["manifest"]["digest"]
    id = gym.next()
    with gym.row("prepare, abort"):
        gym.prepare(id)
        gym.end("abort", id)
    id = gym.next()
    gym.prepare(id)
    with gym.row("abort while committing", 2.0):
        gym.commit(id, "captured")
        gym.end("abort", id)
    source, digest = list(digests.items())[-1]
    body = gym.restore_body(gym.next(), source, digest, 1)
    with gym.row("restore, then abort", 4.0):
        gym.ask("/checkpoint/restore", body)
        gym.end("abort", body["checkpoint_id"])
    body = gym.restore_body(gym.next(), source, digest, 2)
    with gym.row("restore into an emptied Gym", 3.0) as first:
        gym.ask("/checkpoint/restore", body)
    with gym.row("resume of the restore", 4.0):
        gym.end("resume", body["checkpoint_id"])
        gym.until(lambda told: told["waiting"] >= size.rollouts - 1)
    for after_s in (0.05, first["ms"] / 3000, first["ms"] / 1500):
        body = gym.restore_body(gym.next(), source, digest, 3)
        with gym.row(f"abort {after_s * 1000:.0f} ms into a restore", 2.0):
            gym.aborted_restore(body, after_s)
    body = gym.restore_body(gym.next(), source, digest, 1_000)
    with gym.row("restore into the busy Gym", 5.0):
        gym.ask("/checkpoint/restore", body)
    gym.end("resume", body["checkpoint_id"])
    gym.until(lambda told: told["waiting"] >= size.rollouts - 1)
    left = size.rollouts // FEW
    with gym.row("most of them finish", 1.0):
        gym.bench(finish=size.rollouts - left)
        gym.until(lambda told: told["waiting"] <= left + 1)
    with gym.row("GET /results, all pages"):
        gym.pages("/results", "results")
    with gym.row("few live: commits, log compacted", 1.0):
        for _ in range(2):  # One of them is a full copy, which ends no segment.
            id = gym.next()
            gym.prepare(id)
            gym.commit(id)
            gym.end("resume", id)
    with gym.row("retire everything", 3.0):
        for first_of in range(0, size.rollouts, 1_000):
            fences = [
                {"rollout_id": f"r{number}", "through_attempt": 2_000}
                for number in range(first_of, min(size.rollouts, first_of + 1_000))
            ]
            gym.ask("/retire", {"rollouts": fences, "timeout_ms": 30_000})
    return {"empty_mb": empty, "resting_mb": resting}


def recovery(directory: Path, size: Size) -> list[dict[str, Any]]:
    """Kill a Gym that holds everything, and start it again; return the rows of the second life.

    Nobody is served until it listens; then all rollouts go on.
    """
    with running(directory, size, log=True) as gym:
        gym.start()
        os.kill(gym.pid, signal.SIGKILL)
    begun = time.perf_counter()
    with running(directory, size, log=True) as gym:
        up = {
            "what": "SIGKILL: up again",
            "ms": (time.perf_counter() - begun) * 1000,
            "peak_mb": gym.memory.now() / 1024,
        }
        with gym.row("SIGKILL: all of them go on", 3.0):
            gym.bench(go_on=True)
            gym.until(lambda told: told["waiting"] >= size.rollouts - 1)
        return [{**up, "wall_ms": 0.0, "own_ms": 0.0, "over": 0}, *gym.rows]


def measure(size: Size, *, log: bool) -> dict[str, Any]:
    """Run the story once."""
    with tempfile.TemporaryDirectory() as name:
        with running(Path(name) / "gym", size, log=log) as gym:
            found = story(gym)
        rows = gym.rows + (recovery(Path(name) / "killed", size) if log else [])
        return {"size": str(size), "store": "log" if log else "memory", "rows": rows, **found}


def show(console: Console, run: dict[str, Any], size: Size) -> dict[str, Any]:
    """Print one run; return what it comes to."""
    table = Table(title=f"{run['size']}, {run['store']}")
    for column in ("what", "ms", "stall ms", "own ms", "× control", "peak MB"):
        table.add_column(column, justify="left" if column == "what" else "right")
    control = max(0.1, *(row["own_ms"] for row in run["rows"] if row["what"].startswith("nothing")))
    for row in run["rows"]:
        over = row["own_ms"] > TARGET_MS
        cells = (row["ms"], row["wall_ms"], row["own_ms"], row["own_ms"] / control, row["peak_mb"])
        table.add_row(row["what"], *(f"{cell:.1f}" for cell in cells), style="bold" if over else None)
    console.print(table)
    writing = max(row["peak_mb"] for row in run["rows"] if row["what"].startswith("commit"))
    restoring = max(row["peak_mb"] for row in run["rows"] if row["what"].startswith("restore"))
    live, grown = run["resting_mb"] - run["empty_mb"], writing - run["resting_mb"]
    payload = size.bytes / 2**20
    worst = max((row for row in run["rows"] if not row["what"].startswith("nothing")), key=lambda row: row["own_ms"])
    told = {
        "worst_own_ms": worst["own_ms"],
        "worst_wall_ms": max(row["wall_ms"] for row in run["rows"]),
        "control_own_ms": control,
        "payload_mb": payload,
        "live_mb": live,
        "commit_peak_over_live": (writing - run["empty_mb"]) / live,
        "commit_growth_over_payload": grown / payload,
        "restore_peak_over_live": (restoring - run["empty_mb"]) / live,
    }
    console.print(
        f"worst own stall {worst['own_ms']:.1f} ms ({worst['what']}), control {control:.1f} ms, target {TARGET_MS} ms\n"
        f"payload {payload:.0f} MB, live {live:.0f} MB; while a commit writes the peak is "
        f"{told['commit_peak_over_live']:.2f} × live (target {TARGET_MEMORY}), it grows by "
        f"{told['commit_growth_over_payload']:.2f} × payload; in a restore {told['restore_peak_over_live']:.2f} × live"
    )
    return told


def main() -> None:
    """Print the tables and write ``build/bench/stalls.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", action="append", help="ROLLOUTSxKILOBYTES, e.g. 10000x16; may be given again")
    parser.add_argument("--store", choices=["memory", "log"], action="append")
    options = parser.parse_args()
    sizes = [Size(int(n), float(kb)) for n, _, kb in (text.partition("x") for text in options.size or [])]
    sizes = sizes or [Size(10_000, 16), Size(200, 1_000), Size(1, 64_000)]
    console = Console(width=120)
    runs = []
    for size in sizes:
        for store in options.store or ["memory", "log"]:
            run = measure(size, log=store == "log")
            runs.append({**run, **show(console, run, size)})
    out = Path("build/bench")
    out.mkdir(parents=True, exist_ok=True)
    (out / "stalls.json").write_text(json.dumps({"runs": runs}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
