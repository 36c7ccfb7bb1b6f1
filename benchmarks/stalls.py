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
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.gym import Caller

TARGET_MS = 20.0
FEW = 20
"""One rollout of so many does not finish: what the log holds is then mostly dead, and a commit compacts it."""
TARGET_MEMORY = 2.5
PAGE_KB = os.sysconf("SC_PAGE_SIZE") / 1024


@dataclass(frozen=True, slots=True)
class Size:
    """How many rollouts of how many kilobytes."""

    rollouts: int
    kilobytes: float

    def __str__(self) -> str:
        return f"{self.rollouts:,} × {self.kilobytes:,g} KB"

    @property
    def bytes(self) -> float:
        """The live state, as far as it is payload."""
        return self.rollouts * self.kilobytes * 1000


class Memory:
    """Samples a process's resident memory from outside, in kilobytes."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/statm")
        self.peak = 0.0
        self._end = threading.Event()

    def now(self) -> float:
        """Return it as it is."""
        return int(self._path.read_text(encoding="ascii").split()[1]) * PAGE_KB

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the peak within the block."""
        self.peak = self.now()
        self._end.clear()
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            self.peak = max(self.peak, self.now())


class Laden:
    """The Gym under load, and what is asked of it."""

    def __init__(self, url: str, pid: int, directory: Path, size: Size) -> None:
        self.caller = Caller(url)
        self.url = url
        self.pid = pid
        self.size = size
        self.memory = Memory(pid)
        self.snapshots = directory / "snapshots"
        self.rows: list[dict[str, Any]] = []
        self.sequence = 0

    def ask(self, path: str, body: dict[str, Any], *refusals: int) -> Any:
        """Return the answer to a call, which may be one of these refusals."""
        reply = self.caller.http.post(path, json=body, headers=self.caller.headers)
        if reply.status_code not in (200, *refusals):
            raise RuntimeError(f"{path}: {reply.status_code} {reply.text[:500]}")
        return reply.json()

    def bench(self, **asked: Any) -> Any:
        """Use the benchmark's own way in."""
        return httpx.post(f"{self.url}/bench", json=asked, timeout=120).json()

    @contextmanager
    def row(self, name: str, after_s: float = 0.3) -> Iterator[dict[str, Any]]:
        """Measure what happens in the block and shortly after it."""
        self.bench(take=True)
        row: dict[str, Any] = {"what": name}
        with self.memory.watched():
            begun = time.perf_counter()
            yield row
            row["ms"] = (time.perf_counter() - begun) * 1000
            time.sleep(after_s if self.size.rollouts >= 1_000 else after_s / 3)
            told = self.bench(take=True)
        row |= {key: told[key] for key in ("wall_ms", "own_ms", "over")} | {"peak_mb": self.memory.peak / 1024}
        self.rows.append(row)

    def until(self, condition: Callable[[Any], bool], seconds: float = 300) -> None:
        """Wait until the Gym's own account fits."""
        end = time.monotonic() + seconds
        while not condition(self.bench()):
            if time.monotonic() > end:
                raise RuntimeError("the Gym did not come to the state that was waited for")
            time.sleep(0.05)

    # --- operations ---------------------------------------------------------------------------------------------------

    def next(self) -> str:
        """Return a fresh checkpoint id."""
        self.sequence += 1
        return f"1-{self.sequence}"

    def start(self) -> None:
        """Start all rollouts, in batches."""
        policy = {"base_url": "http://127.0.0.1:9/v1", "model": "none", "api": "chat_completions"}
        for first in range(0, self.size.rollouts, 100):
            items = [
                {
                    "rollout_id": f"r{number}",
                    "attempt": 0,
                    "environment": "box",
                    "task": {"number": number},
                    "task_digest": f"t{number}",
                    "seed": number,
                }
                for number in range(first, min(self.size.rollouts, first + 100))
            ]
            outcomes = self.ask("/rollouts", {"policy": policy, "rollouts": items})["outcomes"]
            if any(outcome["outcome"] != "started" for outcome in outcomes):
                raise RuntimeError(f"not started: {outcomes[0]}")
            self.until(partial(_reached, first))
        self.until(lambda told: told["waiting"] >= self.size.rollouts - 1)

    def prepare(self, id: str) -> None:
        """Prepare."""
        body = {"checkpoint_id": id, "run_id": "bench", "timeout_ms": 30_000, "lease_ms": 60_000}
        if not self.ask("/checkpoint/prepare", body)["ready"]:
            raise RuntimeError("not ready")

    def commit(self, id: str, wait: str = "durable") -> Any:
        """Commit."""
        target = self.snapshots / id
        target.mkdir(exist_ok=True)
        body = {"checkpoint_id": id, "target": {"scheme": "file", "path": str(target)}, "timeout_ms": 60_000}
        return self.ask("/checkpoint/commit", {**body, "wait": wait})

    def end(self, verb: str, id: str) -> Any:
        """Resume or abort."""
        return self.ask(f"/checkpoint/{verb}", {"checkpoint_id": id, "timeout_ms": 60_000})

    def restore_body(self, id: str, source: str, digest: str, attempt: int) -> dict[str, Any]:
        """Return the request of a restore that continues everything."""
        rows = [json.loads(line) for line in (self.snapshots / source / "rollouts.jsonl").read_text().splitlines()]
        return {
            "checkpoint_id": id,
            "run_id": "bench",
            "source": {
                "scheme": "file",
                "path": str(self.snapshots / source),
                "checkpoint_id": source,
                "manifest_digest": digest,
            },
            "rollouts": [
                {
                    "rollout_id": row["rollout_id"],
                    "attempt": row["attempt"],
                    "next_attempt": attempt,
                    "turns_done": row["turns_done"],
                    "task_digest": row["task_digest"],
                }
                for row in rows
                if row["state"] == "turn"
            ],
            "results": [],
            "fences": [],
            "timeout_ms": 120_000,
            "lease_ms": 60_000,
        }

    def aborted_restore(self, body: dict[str, Any], after_s: float) -> None:
        """Begin a restore and abort it after a while, from another connection."""
        thread = threading.Thread(target=lambda: self.ask("/checkpoint/restore", body, 409))
        thread.start()
        time.sleep(after_s)
        self.end("abort", body["checkpoint_id"])
        thread.join()

    def pages(self, path: str, name: str) -> int:
        """Read all pages of a list; return the number of items."""
        after, count = "", 0
        while True:
            page = self.caller.http.get(path, params={"after": after} if after else {}).json()
            count += len(page[name])
            if page.get("more") is False or page["next"] is None:
                return count
            after = page["next"]


def _reached(boundaries: int, told: Any) -> bool:
    return bool(told["boundaries"] >= boundaries)


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


@contextmanager
def running(directory: Path, size: Size, *, log: bool) -> Iterator[Laden]:
    """Run the Gym in a process of its own."""
    (directory / "snapshots").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.laden", "--directory", str(directory)]
    command += ["--kilobytes", str(size.kilobytes), *(["--log"] if log else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield Laden(json.loads(process.stdout.readline())["url"], process.pid, directory, size)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


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
