# SPDX-License-Identifier: Apache-2.0
"""What is asked of a laden Gym from outside, and what each of these calls costs it: one row per block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gym import Caller

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
        self.caller.start_in_batches(
            self.size.rollouts,
            100,
            "http://127.0.0.1:9/v1",
            lambda number: {"environment": "box", "task": {"number": number}, "seed": number},
            lambda first: self.until(partial(_reached, first)),
        )
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
