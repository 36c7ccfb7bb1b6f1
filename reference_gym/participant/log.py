# SPDX-License-Identifier: Apache-2.0
"""Opening a boundary log: what an earlier life has left is read, and judged before anybody believes it.

``read_log`` returns everything that was acknowledged, or raises ``LogDamaged`` with a name. ``disbelief`` is the check
that decides between keeping the incarnation and taking a new one: it returns the first reason against keeping it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from reference_gym.participant.journal import LogJournal
from reference_gym.participant.log_end import END_FILES, End, read_ends, touched
from reference_gym.participant.log_format import (
    TEMPORARY,
    Before,
    Entry,
    LogDamaged,
    read_entry,
    read_frames,
    segment_name,
    segments,
)
from reference_gym.participant.log_state import Life, LogState
from reference_gym.participant.log_writer import SEGMENT_BYTES, LogWriter, Segment, lock

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a log holds: the state, and every boundary and result that lives, as it was written.

    ``newest`` is the segment with which it ends, ``end`` the offset after the last frame there; ``acknowledged`` is the
    end of what somebody was told, ``touched`` says what shows that somebody else has written it since.
    """

    state: LogState
    records: dict[str, Entry]
    results: dict[str, Entry]
    newest: int
    end: int
    acknowledged: End
    touched: str | None


def read_log(directory: Path) -> Recovered | None:
    """Return what a log holds, or None if there is none; a segment whose base was just complete gets its name.

    Raises:
        LogDamaged: naming the segment and what is wrong with it.
    """
    numbers = segments(directory) if directory.is_dir() else []
    if not numbers:
        return None
    newest = numbers[-1]
    state, end, before = _replay(directory, newest)
    if state.ended:
        newest += 1
        following = directory / segment_name(newest)
        if not following.with_suffix(TEMPORARY).exists():
            raise LogDamaged(f"{following.name} is missing: {segment_name(newest - 1)} says that it follows")
        following.with_suffix(TEMPORARY).rename(following)
        state, end, before = _replay(directory, newest)
    acknowledged, older = read_ends(directory)
    if (newest, end) < (acknowledged.segment, acknowledged.offset):
        told = f"{segment_name(acknowledged.segment)} up to byte {acknowledged.offset} was acknowledged"
        raise LogDamaged(f"{segment_name(newest)} ends at byte {end}, and {told}")
    records = {key: _live(directory, state, key) for key in state.records}
    results = {key: read_entry(directory, place) for key, (_, place) in state.results.items()}
    foreign = touched(acknowledged, older, before)
    return Recovered(state, records, results, newest, end, acknowledged, foreign)


def _replay(directory: Path, number: int) -> tuple[LogState, int, Before]:
    """Return what a segment says, the offset after its last frame, and the acknowledged end which that names."""
    path = directory / segment_name(number)
    state: LogState | None = None
    end, before = 0, Before(0, 0)
    for found in read_frames(path, number):
        end, before = found.after, found.before
        if state is None:
            state = LogState.of([entry for entry, _ in found.entries], path.name)
            continue
        for entry, place in found.entries:
            state.apply(entry, place)
    if state is None:
        raise LogDamaged(f"{path.name} ends within its base")
    return state, end, before


def _live(directory: Path, state: LogState, rollout_id: str) -> Entry:
    entry = read_entry(directory, state.records[rollout_id])
    if entry.op != "put" or entry.header["rollout_id"] != rollout_id:
        raise LogDamaged(f"{segment_name(state.records[rollout_id].segment)} has no boundary of {rollout_id}")
    return entry


def disbelief(recovered: Recovered, life: Life, directory: Path) -> str | None:
    """Return why the incarnation of a log must not, or is better not kept; None if nothing speaks against it.

    Args:
        recovered: what the log holds.
        life: of the process that starts now.
        directory: of the log.
    """
    earlier = recovered.state.life
    if (earlier.participant, earlier.owns) != (life.participant, life.owns):
        return f"the log is of participant {earlier.participant}, which owned {', '.join(earlier.owns)}"
    if earlier.inode != (directory / segment_name(recovered.newest)).stat().st_ino:
        return "the log is a copy: the participant may have gone on since it was made"
    if earlier.boot is None or earlier.boot != life.boot:
        if not earlier.synced:
            return "the machine has been started anew, and not every boundary was synced"
        # What the machine had not written yet is gone, the newest times of files among it.
    elif recovered.touched is not None:
        return f"an older copy may have been put in place of the log, for somebody has changed it: {recovered.touched}"
    if recovered.state.begun:
        rollout_id, (request_id, *_) = next(iter(recovered.state.begun.items()))
        return f"effect {request_id} of {rollout_id} has begun and is not recorded"
    return None


def boot_id() -> str | None:
    """Return the name of this life of the machine, or None where there is none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class LogFile:
    """The log of one participant in its directory, claimed by this process.

    ``sync`` is ``commit`` (what is written survives the process, and the machine from a commit on) or ``group`` (every
    group of boundaries is synced before anybody is told of it).
    """

    directory: Path
    synced: bool
    segment_bytes: int = SEGMENT_BYTES

    @classmethod
    def claim(cls, directory: Path, *, sync: str = "commit", segment_bytes: int = SEGMENT_BYTES) -> LogFile | None:
        """Return the log, or None if another process has it."""
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        if lock(directory) is None:
            return None
        return cls(directory, sync == "group", segment_bytes)

    def read(self, life: Life) -> Recovered | None:
        """Return what an earlier life left if its incarnation is kept; otherwise nothing of it stays in the way."""
        try:
            recovered = read_log(self.directory)
            reason = None if recovered is None else disbelief(recovered, life, self.directory)
        except LogDamaged as damage:
            recovered, reason = None, f"the boundary log is damaged: {damage}"
        if reason is not None:
            self.refuse(reason)
            return None
        return recovered

    def refuse(self, reason: str) -> None:
        """Set aside what an earlier life left, so that it is never read again; one such log is kept, with the reason.

        Args:
            reason: why a new incarnation begins.
        """
        logger.error("a new incarnation: %s; the earlier log is kept in %s", reason, self._refused.name)
        self._refused.mkdir(mode=0o700, exist_ok=True)
        for path in self._refused.iterdir():
            path.unlink()
        (self._refused / "reason.txt").write_text(f"{reason}\n", encoding="utf-8")
        # The newest one last: an older one by itself says that its successor is missing.
        for number in segments(self.directory):
            path = self.directory / segment_name(number)
            path.rename(self._refused / path.name)
        for name in END_FILES:
            with suppress(FileNotFoundError):
                (self.directory / name).rename(self._refused / name)

    def open(self, journal: LogJournal, life: Life, recovered: Recovered | None) -> None:
        """Begin to write, in a segment of its own."""
        life = replace(life, synced=self.synced)
        if recovered is None:
            state, previous, kept = LogState(life), None, {}
        else:
            state, previous = recovered.state, (recovered.newest, recovered.end, recovered.acknowledged)
            state.life = life
            kept = {number: self._segment(number) for number in segments(self.directory)}
        make = partial(LogWriter, self.directory, previous=previous, kept=kept, segment_bytes=self.segment_bytes)
        journal.open(make, state)

    def _segment(self, number: int) -> Segment:
        path = self.directory / segment_name(number)
        return Segment(number, path, path.stat().st_size)

    @property
    def _refused(self) -> Path:
        return self.directory / "refused"


__all__ = ["LogDamaged", "LogFile", "Recovered", "boot_id", "disbelief", "read_log"]
