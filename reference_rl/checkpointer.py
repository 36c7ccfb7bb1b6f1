# SPDX-License-Identifier: Apache-2.0
"""Taking snapshots: the sequence, and what a failure of it means.

A snapshot that fails before its publication is aborted everywhere, counted, and forgotten: the one before stays in
use and the run goes on. Only a supersession or a violated invariant leaves this module as anything else than
:class:`SnapshotFailed`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal

from reference_rl import failpoints
from reference_rl.capture import Capture, CaptureLimits
from reference_rl.columns import Switches
from reference_rl.control import Tenure, best_effort
from reference_rl.dataplane import DataPlane
from reference_rl.deployment import Deployment
from reference_rl.errors import GymError, InvariantViolated, RlError, SnapshotExists, SnapshotFailed, Superseded
from reference_rl.events import Events
from reference_rl.ledger import Ledger
from reference_rl.settings import SnapshotSettings
from reference_rl.snapshots import Draft, Snapshot, SnapshotStore
from reference_rl.writer import SnapshotWriter

SETTLE_S = 1.0
"""How long owed ACKs may delay a snapshot, in seconds."""


@dataclass(frozen=True)
class Report:
    """What became of one snapshot."""

    outcome: Literal["published", "skipped", "failed"]
    checkpoint_id: str | None = None
    reason: str = ""
    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class Basis:
    """What a snapshot was taken of: while it is the same, nothing is worth saving."""

    revision: int
    participants: Mapping[tuple[str, str], tuple[str, int]]


@dataclass
class Health:
    """How snapshots fare.

    Attributes:
        consecutive: failures since the last publication.
        failed: failures in all.
        resume_failures: gates that could not be opened in the sequence; these spoil no snapshot.
        reduced: whether the run continues in column 2 until a full snapshot succeeds.
        last_success: when the last full snapshot was published, on the monotonic clock.
    """

    consecutive: int = 0
    failed: int = 0
    resume_failures: int = 0
    reduced: bool = False
    last_success: float | None = None
    not_before: float = 0.0
    errors: list[str] = field(default_factory=list)


class Checkpointer:
    """Takes the snapshots of a run.

    Args:
        tenure: claim, ids and lock of this controller.
        gyms: the Gyms of the run; with a column that does not capture Gyms they are left alone.
        ledger: the run's ledger.
        store: where snapshots are published.
        plane: the data plane.
        settings: limits, how many to keep, when to fall back.
        switches: what the column turns on.
        events: where what happened is written.
        settle_acks: settles owed ACKs, best effort.
        snapshot_dirs: alias → the path under which that Gym sees the directory of the store.

    Requirements: CKPT-SNAP-001…007, CKPT-DUTY-001…011, CKPT-DUTY-025, CKPT-DUTY-027.
    """

    def __init__(
        self,
        tenure: Tenure,
        gyms: Sequence[Deployment],
        ledger: Ledger,
        store: SnapshotStore,
        plane: DataPlane,
        settings: SnapshotSettings,
        switches: Switches,
        events: Events,
        *,
        settle_acks: Callable[[], Awaitable[object]] | None = None,
        snapshot_dirs: Mapping[str, str] | None = None,
    ) -> None:
        self.health = Health()
        self.lost_gym: Callable[[str], None] = lambda alias: None
        self._tenure = tenure
        self._gyms = gyms
        self._ledger = ledger
        self._store = store
        self._plane = plane
        self._settings = settings
        self._switches = switches
        self._events = events
        self._settle_acks = settle_acks
        self._snapshot_dirs = dict(snapshot_dirs or {})
        self._basis: Basis | None = None

    def snapshot(self) -> SnapshotContext:
        """Return ``async with``: the cut is captured and the gates are open inside, it is published at the end.

        Entering raises :class:`SnapshotFailed` when nothing could be captured; an exception inside, or a failure at
        the end, aborts everywhere. Use :meth:`take` where a failure shall not be an exception.
        """
        return SnapshotContext(self)

    async def take(self, *, only_if_moved: bool = True) -> Report:
        """Take one snapshot if there is anything to save; report how it went.

        Raises:
            Superseded: a higher controller has taken over.
            InvariantViolated: the evidence must be looked at.
        """
        if only_if_moved and not await self._moved():
            self._events.emit("snapshot_skipped", reason="nothing has changed since the last one")
            return Report("skipped", reason="nothing has changed")
        try:
            async with self.snapshot() as cut:
                pass
        except SnapshotFailed as error:
            if self.health.reduced:
                await self._take_reduced()
            return Report("failed", cut_id(error), str(error))
        return Report("published", str(cut.checkpoint_id), snapshot=cut.published)

    async def _moved(self) -> bool:
        if self._basis is None or self._ledger.revision() != self._basis.revision:
            return True
        if not self._switches.captures_gyms:
            return False
        for gym in self._gyms:
            for participant in gym.participants:
                try:
                    status = await participant.client.status()
                except Superseded:
                    raise
                except RlError:
                    return True
                now = (participant.client.seen_incarnation or participant.incarnation, status.progress)
                if self._basis.participants.get((gym.alias, participant.name)) != now:
                    return True
        return False

    # --- the sequence, called by the context ------------------------------------------------------------------

    async def begin(self, *, reduced: bool = False) -> OpenSnapshot:
        """Run the sequence up to open gates and a captured ledger.

        Raises:
            SnapshotFailed: everything was aborted and the draft is gone.
        """
        await self._tenure.lock.acquire()
        checkpoint_id = self._tenure.next_id()
        cut = OpenSnapshot(checkpoint_id, started=time.monotonic())
        capturing = self._switches.captures_gyms and not reduced
        try:
            self._tenure.check()
            if self._settle_acks is not None:
                await best_effort(_awaited(self._settle_acks()), SETTLE_S)
            cut.draft = await asyncio.to_thread(self._store.begin, checkpoint_id)
            failpoints.hit("snapshot.begun")
            limits = CaptureLimits.of(self._settings)
            cut.capture = Capture(
                checkpoint_id,
                self._gyms if capturing else (),
                self._ledger,
                cut.draft,
                limits,
                self._events,
                run_id=self._store.run_id,
                visible_as=self._snapshot_dirs,
            )
            await cut.capture.capture()
            await self._plane.pin(cut.pin)
            self.health.resume_failures += await cut.capture.resume()
            cut.writer = SnapshotWriter(cut.draft, self._ledger, self._plane, self._store)
            await cut.writer.capture_ledger()
            failpoints.hit("snapshot.ledger_copied")
        except BaseException as error:
            await self._give_up(cut, error)
            raise self._classified(error, cut) from error
        return cut

    async def finish(self, cut: OpenSnapshot) -> None:
        """Wait until every cut is durable, cross-check, publish, retire old snapshots.

        Raises:
            SnapshotFailed: nothing was published.
        """
        try:
            capture, writer = cut.parts()
            cuts = await capture.wait_durable()
            failpoints.hit("snapshot.durable")
            self._tenure.check()
            manifest = await writer.assemble(cuts, self._gyms if self._switches.captures_gyms else ())
            failpoints.hit("snapshot.assembled")
            self._tenure.check()
            cut.published = await asyncio.to_thread(writer.publish, manifest)
        except BaseException as error:
            await self._give_up(cut, error)
            raise self._classified(error, cut) from error
        await self._published(cut)

    async def fail(self, cut: OpenSnapshot, error: BaseException) -> None:
        """Abort everywhere: something between :meth:`begin` and :meth:`finish` failed."""
        await self._give_up(cut, error)

    async def _published(self, cut: OpenSnapshot) -> None:
        capture, writer = cut.parts()
        self._tenure.lock.release()
        await self._plane.unpin(cut.pin)
        if capture.gyms or not self._switches.captures_gyms:
            back = self.health.reduced
            self.health = replace(
                self.health, consecutive=0, reduced=False, last_success=time.monotonic(), not_before=0.0
            )
            if back:
                self._events.emit("snapshot_mode", mode="full", reason="a full snapshot was published")
        if not capture.left_out_rollouts and not capture.left_out:
            self._basis = Basis(writer.revision, dict(capture.progress))
        self._events.emit(
            "snapshot_published",
            checkpoint_id=str(cut.checkpoint_id),
            total_ms=round((time.monotonic() - cut.started) * 1000),
            **capture.metrics(),
            **writer.metrics(),
        )
        await asyncio.to_thread(self._clean_up)

    def _clean_up(self) -> None:
        aliases = [gym.alias for gym in self._gyms] if self._switches.captures_gyms else []
        gone = self._store.retain(self._settings.keep, aliases)
        failpoints.hit("snapshot.retained")
        if gone:
            self._events.emit("snapshots_retired", checkpoint_ids=[str(i) for i in gone])

    async def _take_reduced(self) -> None:
        """Save what the RL side has: column 2 goes on while the Gyms cannot be saved."""
        try:
            cut = await self.begin(reduced=True)
            await self.finish(cut)
        except SnapshotFailed as error:
            self._events.emit("snapshot_failed", mode="reduced", reason=str(error))

    async def _give_up(self, cut: OpenSnapshot, error: BaseException) -> None:
        try:
            # A superseded controller has nothing to abort: its checkpoint ended when the higher one was adopted.
            if cut.capture is not None and not isinstance(error, Superseded):
                await asyncio.shield(cut.capture.abort())
            if cut.draft is not None:
                await asyncio.to_thread(self._store.discard, cut.draft)
            await self._plane.unpin(cut.pin)
        finally:
            if self._tenure.lock.locked():
                self._tenure.lock.release()
        if isinstance(error, (Superseded, InvariantViolated)) or not isinstance(error, Exception):
            return
        if (
            cut.capture is not None
            and not cut.capture.gyms
            and self._switches.captures_gyms
            and not cut.capture.left_out
        ):
            return  # a reduced snapshot has no say in how full ones fare
        self._count_failure(cut, error)

    def _count_failure(self, cut: OpenSnapshot, error: Exception) -> None:
        health = self.health
        health.consecutive += 1
        health.failed += 1
        health.errors = [*health.errors[-9:], str(error)]
        backoff = self._settings.backoff_s * 2 ** min(health.consecutive - 1, 6)
        health.not_before = time.monotonic() + backoff
        self._events.emit(
            "snapshot_failed",
            checkpoint_id=str(cut.checkpoint_id),
            reason=str(error),
            step=getattr(error, "step", type(error).__name__),
            participant=getattr(error, "participant", None),
            code=_code(error),
            consecutive=health.consecutive,
        )
        if health.consecutive >= self._settings.failures_before_fallback and not health.reduced:
            health.reduced = True
            self._events.emit(
                "snapshot_mode",
                mode="column 2",
                reason=f"{health.consecutive} snapshots failed in a row, the last one: {error}",
            )
        for alias in cut.capture.gone if cut.capture is not None else ():
            self.lost_gym(alias)

    def _classified(self, error: BaseException, cut: OpenSnapshot) -> BaseException:
        if isinstance(error, (Superseded, InvariantViolated)) or not isinstance(error, Exception):
            return error
        if isinstance(error, SnapshotFailed):
            failed = error
        elif isinstance(error, (RlError, OSError)):
            step = "publish" if isinstance(error, SnapshotExists) else "write"
            failed = SnapshotFailed(step, str(error), getattr(error, "participant", None))
        else:
            return error
        failed.checkpoint_id = str(cut.checkpoint_id)
        return failed


@dataclass
class OpenSnapshot:
    """A snapshot between its capture and its publication."""

    checkpoint_id: Any
    started: float
    draft: Draft | None = None
    capture: Capture | None = None
    writer: SnapshotWriter | None = None
    published: Snapshot | None = None

    @property
    def pin(self) -> str:
        """Return the name under which the data plane holds its rows."""
        return f"snapshot {self.checkpoint_id}"

    def parts(self) -> tuple[Capture, SnapshotWriter]:
        """Return capture and writer of a snapshot that was begun."""
        assert self.capture is not None
        assert self.writer is not None
        return self.capture, self.writer

    async def write(self, name: str, data: bytes) -> None:
        """Add a file of the caller's own, e.g. ``trainer/state.bin``, to the snapshot."""
        assert self.draft is not None
        await asyncio.to_thread(self.draft.write, name, data)


class SnapshotContext:
    """``async with checkpointer.snapshot() as cut``."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self._cut: OpenSnapshot | None = None

    async def __aenter__(self) -> OpenSnapshot:
        self._cut = await self._checkpointer.begin()
        return self._cut

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._cut is not None
        if error is not None:
            await self._checkpointer.fail(self._cut, error)
        else:
            await self._checkpointer.finish(self._cut)


def cut_id(error: SnapshotFailed) -> str | None:
    """Return the checkpoint id of a failed snapshot."""
    return error.checkpoint_id


def _code(error: BaseException | None) -> str | None:
    """Return the error code of the refusal that an error was made from, or the name of what it was."""
    while error is not None:
        if isinstance(error, GymError):
            return error.code or type(error).__name__
        error = error.__cause__
    return None


async def _awaited(work: Awaitable[object]) -> object:
    return await work


__all__ = ["Checkpointer", "Health", "OpenSnapshot", "Report", "SnapshotContext"]
