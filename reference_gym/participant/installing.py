# SPDX-License-Identifier: Apache-2.0
"""The installing step of a restore: everything is built aside, in slices, and becomes current in one short step.

What takes time is done before (fences of what will be dropped, boundaries, the feed, what the log is told) or after it
(cancelling, closing and freeing what was dropped). The step itself exchanges references and merges fences: nobody on
the event loop ever sees a part of it, and ten thousand rollouts hold up nobody. The same holds for its undoing, when
nobody resumes what was installed (CKPT-RESTORE-014 to -016, CKPT-ABORT-007, -008, -012).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from reference_gym.participant import failpoints
from reference_gym.participant.feed import Feed
from reference_gym.participant.fences import Fences, Mark, hashed
from reference_gym.participant.journal import Draft
from reference_gym.participant.live import BuiltRollouts
from reference_gym.participant.reading import Source
from reference_gym.participant.records import BoundaryStore, Record
from reference_gym.participant.restoring import Plan
from reference_gym.participant.slices import Slices
from reference_gym.participant.state import Part
from spec.messages import RestoreRequest

if TYPE_CHECKING:
    from reference_gym.participant.core import Core

Parts = Sequence[tuple[Part, Any]]
"""Parts, each with a state that it has built."""


@dataclass(slots=True)
class Undo:
    """What makes a participant that nobody resumed an empty one: fences by hashed id, and parts that hold nothing.

    It is all that there is to undo while ``changes`` of the participant is what it was after the installing step.
    """

    marks: Mapping[str, Mark] = field(default_factory=dict)
    parts: Parts = ()
    changes: int = -1


@dataclass(frozen=True, slots=True)
class Built:
    """Everything that becomes current together.

    ``covered`` gives the attempts that ``fences`` has been raised for already, as of ``changes`` of the participant;
    ``draft`` is what the log is told.
    """

    rollouts: BuiltRollouts
    store: BoundaryStore
    feed: Feed
    fences: Fences
    covered: Mapping[str, int]
    kept: Mapping[str, int]
    draft: Draft
    changes: int
    undo: Undo


async def build(
    core: Core, request: RestoreRequest, plan: Plan, source: Source, rollouts: BuiltRollouts, records: Iterable[Record]
) -> Built:
    """Build everything aside but the parts; nothing that is current changes.

    Args:
        core: the participant.
        request: the restore.
        plan: what it installs.
        source: what was read.
        rollouts: built by the registry.
        records: the first boundary of everything that continues.
    """
    draft, slices = Draft(core.journal), Slices()
    kept = {finished.receipt.rollout_id: finished.receipt.attempt for finished in plan.results}
    # As of the step in which ``Fences.build`` notes the tombstones: what is released after it is among the attempts.
    changes, attempts = core.changes, core.attempts()
    fences = await core.fences.build(draft, source.tombstones, kept)
    covered: dict[str, int] = {}
    for rollout_id, attempt in attempts:
        covered[rollout_id] = max(attempt, covered.get(rollout_id, -1))
        fences.raise_to(rollout_id, attempt - (kept.get(rollout_id) == attempt))
        await slices.give_way()
    for fence in request.fences:
        fences.raise_to(fence.rollout_id, fence.through_attempt)
        await slices.give_way()
    store = core.store.aside(draft)
    for record in records:
        fences.raise_to(record.rollout_id, record.attempt - 1)
        store.put(record)
        await slices.give_way()
    now = core.clock.now()
    feed = await core.feed.build(draft, [replace(finished, at=now) for finished in plan.results])
    marks: dict[str, Mark] = {}
    held = plan.payloads.items() if core.registry is None else ((key, (b"", a)) for key, a in _attempts(rollouts, kept))
    for rollout_id, (_, attempt) in held:
        key = hashed(rollout_id)
        marks[key] = Mark.of(key, attempt, buried=core.registry is not None, kept=draft.kept)
        await slices.give_way()
    await core.fences.rise(fences)
    return Built(rollouts, store, feed, fences, covered, kept, draft, changes, Undo(marks))


def _attempts(rollouts: BuiltRollouts, kept: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    yield from ((rollout_id, entry.rollout.attempt) for rollout_id, entry in rollouts.live.items())
    yield from kept.items()


def install(core: Core, built: Built, parts: Parts) -> None:
    """Make what was built current in place of everything else. Does not await."""
    for part, state in parts:
        part.install(state)
    if core.changes != built.changes:  # A ledger goes on recording while the gate is closed.
        for rollout_id, attempt in core.store.attempts():
            if built.covered.get(rollout_id, -1) < attempt:
                core.fences.raise_to(rollout_id, attempt - (built.kept.get(rollout_id) == attempt))
    core.fences.replace(built.fences)
    core.journal.note_all(built.draft.entries)
    gone = core.store.replace(built.store)
    failpoints.reach("restore.dropped")
    if core.registry is not None:
        core.registry.install(built.rollouts, built.feed)
    core.gate.abandon_all()
    core.undo = built.undo
    core.progressed()
    core.undo.changes = core.changes
    core.remains.take(gone)


def discard(core: Core) -> None:
    """Drop and fence what a restore installed and nobody resumed. Does not await."""
    undo, core.undo = core.undo, Undo()
    recorded = core.registry is None and core.changes != undo.changes
    core.fences.discard(undo.marks or _marks(core))  # None were built by a process that has ended meanwhile.
    if recorded:  # A ledger has gone on while the gate was closed: what it loses is fenced as well.
        for rollout_id, attempt in core.store.attempts():
            core.fences.raise_to(rollout_id, attempt)
    for part, empty in undo.parts:
        part.install(empty)
    if core.parts and not undo.parts:
        for rollout_id, _ in core.attempts():
            for part in core.parts:
                part.drop(rollout_id)
    if core.registry is not None:
        core.registry.discard_installed()
    gone = core.store.clear()
    core.progressed()
    failpoints.reach("restore.discarded")
    core.remains.take(gone, undo.marks)


def _marks(core: Core) -> dict[str, Mark]:
    """Return the marks of what an earlier process installed; nobody is served yet."""
    found = {}
    for rollout_id, attempt in core.attempts():
        key = hashed(rollout_id)
        found[key] = Mark.of(key, attempt, buried=core.registry is not None, kept=core.journal.kept)
    return found
