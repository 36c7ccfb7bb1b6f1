# SPDX-License-Identifier: Apache-2.0
"""A cut by a mark in the boundary log, against the same cut written out of memory, and what both do to the event loop.

Run as ``python -m benchmarks.log``; see ``--help``. *closed* is how long the event loop captures (the gate is closed
meanwhile), *durable* how long until the manifest is synced, *stall* the longest time for which the event loop served
nobody while the cut was written (garbage collector on). Boundaries go on at a low rate meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import spec.durable
from reference_gym.participant import ParticipantConfig
from reference_gym.participant.artifacts import Target, write_cut
from reference_gym.participant.journal import LogJournal
from reference_gym.participant.log import LogFile, boot_id, read_log
from reference_gym.participant.log_state import Life
from reference_gym.participant.records import Cut, MemoryStore, Record

CONFIG = ParticipantConfig("gym", "agent", 10)
TICK_S = 0.001
TARGET_STALL_MS = 20.0


class Loop:
    """Measures the longest time between two turns of the event loop."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        """Tick until cancelled."""
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last - TICK_S)
            last = now


class Syncs:
    """Counts what is synced."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count within the block."""
        real, self.count = os.fsync, 0

        def fsync(fd: Any) -> None:
            self.count += 1
            real(fd)

        os.fsync = fsync
        try:
            yield
        finally:
            os.fsync = real


def boundary(number: int, turns_done: int, size: int, chosen: random.Random) -> Record:
    """One boundary of about ``size`` bytes."""
    payload = b'{"rollout_id":"r%06d","x":"%s"}' % (number, chosen.randbytes(size // 2).hex().encode())
    return Record(f"r{number:06d}", 0, turns_done, None, "e", {"e": turns_done}, (payload,))


async def measure(store: MemoryStore, journal: LogJournal, target: Path, *, linked: bool) -> dict[str, float]:
    """Take one cut and return its times in milliseconds."""
    target.mkdir()  # noqa: ASYNC240 - a benchmark that waits for its own disk
    syncs, loop = Syncs(), Loop()
    watching = asyncio.create_task(loop.watch())
    await asyncio.sleep(0.05)
    begun = time.perf_counter()
    records, restarts = store.cut()
    cut = Cut(records, restarts, mark=journal.seal() if linked else None)
    closed = time.perf_counter() - begun
    with syncs.counted():
        arguments = (cut, Target(target), CONFIG, ["rollouts"], "run", "1-1", spec.durable, threading.Event())
        written = await asyncio.to_thread(write_cut, *arguments)
    durable = time.perf_counter() - begun
    await asyncio.sleep(0.05)
    watching.cancel()
    return {
        "closed_ms": closed * 1000,
        "durable_ms": durable * 1000,
        "stall_ms": loop.longest_s * 1000,
        "syncs": syncs.count,
        "megabytes": written.bytes / 1e6,
    }


async def idle_stall_ms() -> float:
    """Return how long the event loop stalls although nothing is done: what the machine itself adds."""
    loop = Loop()
    watching = asyncio.create_task(loop.watch())
    await asyncio.sleep(1.0)
    watching.cancel()
    return loop.longest_s * 1000


async def run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Fill the log, take cuts in turns, read the log back."""
    chosen = random.Random(1)
    size = int(options.kilobytes * 1000)
    log = LogFile.claim(directory / "log", sync=options.sync)
    if log is None:
        raise RuntimeError("the log is claimed already")
    journal = LogJournal()
    log.open(journal, Life("gym", ("rollouts",), {"e": "1"}, "i1", boot_id(), synced=False), None)
    store = MemoryStore(10**9, journal)
    begun = time.perf_counter()
    for number in range(options.rollouts):
        store.put(boundary(number, 1, size, chosen))
        if number % 100 == 0:
            await journal.settled()
    await journal.settled()
    filled = time.perf_counter() - begun
    waits = []
    for number in range(200):
        store.put(boundary(number, 2, size, chosen))
        waiting = time.perf_counter()
        await journal.settled()
        waits.append((time.perf_counter() - waiting) * 1000)
    rows: dict[str, list[dict[str, float]]] = {"written out": [], "linked": []}
    for repeat in range(2 * options.repeats):
        for _ in range(50):
            store.put(boundary(chosen.randrange(options.rollouts), 3 + repeat, size, chosen))
        await journal.settled()
        kind = "linked" if repeat % 2 else "written out"
        rows[kind].append(await measure(store, journal, directory / f"cut-{repeat}", linked=kind == "linked"))
    idle = await idle_stall_ms()
    await journal.close()
    begun = time.perf_counter()
    found = read_log(directory / "log")
    recovered = time.perf_counter() - begun
    if found is None or len(found.records) != options.rollouts:
        raise RuntimeError("the log does not hold every rollout")
    return {
        "rows": rows,
        "idle_stall_ms": idle,
        "boundary_wait_ms": statistics.median(waits),
        "boundaries_per_s": options.rollouts / filled,
        "recover_ms": recovered * 1000,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Print the table and write ``build/bench/log.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--kilobytes", type=float, default=16.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sync", choices=["commit", "group"], default="commit")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = asyncio.run(run(options, Path(name)))
    rows = result["rows"]
    medians = {
        kind: {key: statistics.median(row[key] for row in many) for key in many[0]} for kind, many in rows.items()
    }
    worst = {kind: max(row["stall_ms"] for row in many) for kind, many in rows.items()}
    table = Table(title=f"{options.rollouts} rollouts of {options.kilobytes} KB, median of {options.repeats}")
    for column in ("cut", "closed ms", "durable ms", "stall ms", "worst stall ms", "syncs", "MB"):
        table.add_column(column, justify="right")
    for kind, row in medians.items():
        cells = (row["closed_ms"], row["durable_ms"], row["stall_ms"], worst[kind], row["syncs"], row["megabytes"])
        table.add_row(kind, *(f"{cell:.1f}" for cell in cells))
    ratio = medians["written out"]["durable_ms"] / medians["linked"]["durable_ms"]
    console = Console()
    console.print(table)
    console.print(
        f"linking is durable {ratio:.1f} times sooner; own target: no stall above {TARGET_STALL_MS} ms "
        f"(with nothing to do: {result['idle_stall_ms']:.1f} ms on this machine now)"
    )
    console.print(
        f"one boundary waits {result['boundary_wait_ms']:.2f} ms, {result['boundaries_per_s']:.0f} boundaries/s, "
        f"recovery {result['recover_ms']:.0f} ms, peak {result['peak_rss_mb']:.0f} MB"
    )
    out = Path("build/bench")
    out.mkdir(parents=True, exist_ok=True)
    told = {"options": vars(options), **result, "medians": medians, "worst_stall_ms": worst, "durable_ratio": ratio}
    (out / "log.json").write_text(json.dumps(told, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
