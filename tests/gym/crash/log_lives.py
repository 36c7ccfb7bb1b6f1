# SPDX-License-Identifier: Apache-2.0
"""Lives of a boundary log alone, each ended by SIGKILL: ``python -m tests.gym.crash.log_lives DIRECTORY``.

A life opens the log that the one before it has left, judges it as a Gym does, and writes. It ends at a random instant
(``--kills``), or by itself at one system call of the log: before it, after the system has noted the file's time and
not one byte, after half of the bytes, or after it (``walk``: each call in turn; ``--steps``: drawn). A log that is not
believed although nobody else has touched it, or that lacks what somebody was told, is a fault. One line per fault.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from reference_gym.participant.log import LogFile, boot_id
from reference_gym.participant.log_format import Entry
from reference_gym.participant.log_state import Life, LogState
from reference_gym.participant.log_writer import LogWriter

LIFE = Life("gym", ("rollouts",), {"e": "1"}, "i1", boot_id(), synced=False)
SEGMENT_BYTES = 12_000
HOW = ("before", "time", "half", "after")
BATCHES = 9
"""How many a life writes that ends by itself; each sixth is followed by a cut."""
REFUSED, LOST, WHOLE = 3, 4, 0


@dataclass
class Toll:
    """What came of it: lives, batches that somebody was told of, faults."""

    lives: int = 0
    told: int = 0
    faults: list[str] = field(default_factory=list)


class _Notes:
    """Stands where a Gym has its journal: says each batch aloud once it is acknowledged."""

    def __init__(self, aloud: int) -> None:
        self._aloud = aloud
        self.acknowledged = threading.Semaphore(0)

    def open(self, make: Callable[..., LogWriter], state: LogState) -> None:
        self.writer = make(state, told=self._told, lost=lambda: os._exit(LOST))

    def _told(self, number: int) -> None:
        os.write(self._aloud, struct.pack("<Q", number))
        self.acknowledged.release()


def _live(directory: Path, known: int, aloud: int, batches: int) -> NoReturn:
    """Be one life."""
    logging.disable(logging.CRITICAL)
    file = LogFile.claim(directory, segment_bytes=SEGMENT_BYTES)
    assert file is not None
    recovered = file.read(LIFE)
    if recovered is None and known:
        os._exit(REFUSED)
    if recovered is not None and recovered.state.progress < known:
        os._exit(LOST)
    notes = _Notes(aloud)
    file.open(notes, LIFE, recovered)  # type: ignore[arg-type]  # All of a journal that is needed here.
    for number in range(known + 1, known + 1 + batches):
        put = Entry({"op": "put", "rollout_id": f"r{number % 5}", "turns_done": number}, (bytes(number % 3 * 2_000),))
        notes.writer.append(number, [put, Entry({"op": "progress", "n": number})])
        if number % 6 == 0:
            notes.writer.seal()
        notes.acknowledged.acquire()
    notes.writer.close()
    os._exit(WHOLE)


def _end_at(step: int, how: str) -> None:
    """Let this process end at a system call of the log."""
    steps = count(1)

    def ends(real: Callable[..., Any], time_only: Callable[..., Any], half: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if next(steps) != step:
                return real(*arguments)
            {"before": lambda *_: None, "time": time_only, "half": half, "after": real}[how](*arguments)
            return os.kill(os.getpid(), signal.SIGKILL)

        return call

    def note_time(descriptor: int, *_: Any) -> None:
        os.fchmod(descriptor, 0o600)

    def write_half(descriptor: int, pieces: list[bytes]) -> None:
        whole = b"".join(pieces)
        os.write(descriptor, whole[: len(whole) // 2])

    os.writev = ends(os.writev, note_time, write_half)
    os.pwrite = ends(os.pwrite, note_time, note_time)
    os.ftruncate = ends(os.ftruncate, note_time, note_time)
    rename = Path.rename
    Path.rename = ends(rename, lambda *_: None, lambda *_: None)  # type: ignore[method-assign]  # It is a step too.


def _one(
    toll: Toll, directory: Path, known: int, where: str, be: Callable[[int], NoReturn], kill_s: float | None = None
) -> int:
    """Have one life, which is killed after some seconds unless it ends itself; what is known after it."""
    hears, aloud = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            be(aloud)
        finally:
            os._exit(1)
    os.close(aloud)
    if kill_s is not None:
        time.sleep(kill_s)
        os.kill(pid, signal.SIGKILL)
    said = b"".join(iter(lambda: os.read(hears, 65_536), b""))
    os.close(hears)
    _, status = os.waitpid(pid, 0)
    toll.lives += 1
    toll.told += len(said) // 8
    if os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == WHOLE:
        return struct.unpack("<Q", said[-8:])[0] if said else known
    reason = directory / "refused" / "reason.txt"
    told = reason.read_text().strip() if reason.exists() else "no log"
    toll.faults.append(f"{where}: {told if os.WEXITSTATUS(status) == REFUSED else 'something is lost'}")
    directory.rename(directory.with_name(f"{directory.name}-fault-{len(toll.faults)}"))
    return 0


def kill(toll: Toll, directory: Path, kills: int, seed: int) -> None:
    """End lives at random instants, many of them while they begin."""
    chosen, known = random.Random(seed), 0
    for number in range(kills):
        kill_s = chosen.uniform(0.0, chosen.choice((0.004, 0.02)))
        be = _life(directory, known, 10**9)
        known = _one(toll, directory, known, f"kill {number}", be, kill_s)


def step(toll: Toll, directory: Path, steps: Iterator[tuple[int, str]]) -> None:
    """End lives at system calls, each life going on with what the one before it has left."""
    known = 0
    for at, how in steps:
        known = _one(toll, directory, known, f"{how} call {at}", _life(directory, known, BATCHES, (at, how)))
    _one(toll, directory, known, "the last one", _life(directory, known, BATCHES))


def _life(directory: Path, known: int, batches: int, end: tuple[int, str] | None = None) -> Callable[[int], NoReturn]:
    def be(aloud: int) -> NoReturn:
        if end is not None:
            _end_at(*end)
        _live(directory, known, aloud, batches)

    return be


def walk(calls: int) -> Iterator[tuple[int, str]]:
    """Return each of the first calls of a life, in each way."""
    return ((at, how) for at in range(1, calls + 1) for how in HOW)


def drawn(steps: int, calls: int, seed: int) -> Iterator[tuple[int, str]]:
    """Return calls and ways at random; half of them are among those of a recovery."""
    chosen = random.Random(seed)
    return ((chosen.randint(1, chosen.choice((6, calls))), chosen.choice(HOW)) for _ in range(steps))


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="does not exist yet")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=30, help="how many calls of a life are walked, and drawn from")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    toll = Toll()
    options.directory.mkdir()
    step(toll, options.directory / "walk", walk(options.calls))
    step(toll, options.directory / "steps", drawn(options.steps, options.calls, options.seed))
    kill(toll, options.directory / "kills", options.kills, options.seed)
    print(*toll.faults, f"{toll.lives} lives, {toll.told} batches told, {len(toll.faults)} faults", sep="\n")  # noqa: T201
    return 1 if toll.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
