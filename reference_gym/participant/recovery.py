# SPDX-License-Identifier: Apache-2.0
"""A participant that comes back with its incarnation: everything that its log holds is made current again.

Live rollouts are rebuilt from their last boundary, parked until ``Core.go_on``; what was open is ended as the state
machine says (CKPT-PHASE-008 to -019). Nothing is believed halfway: whatever cannot be read or rebuilt makes a new
incarnation, which starts with nothing (CKPT-ID-020 to -023, CKPT-ID-027, CKPT-ID-039).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from reference_gym.participant import failpoints
from reference_gym.participant.artifacts import MANIFEST
from reference_gym.participant.config import ParticipantConfig
from reference_gym.participant.core import Core
from reference_gym.participant.encoding import Saved, read_payload
from reference_gym.participant.fences import Tombstone
from reference_gym.participant.journal import LogJournal
from reference_gym.participant.jsontext import NotJson, decode
from reference_gym.participant.log import LogFile, Recovered, boot_id
from reference_gym.participant.log_state import Life
from reference_gym.participant.log_values import machine_of
from reference_gym.participant.machine import Machine, Step
from reference_gym.participant.phases import Phase
from reference_gym.participant.records import Record
from reference_gym.participant.result import Finished
from reference_gym.participant.state import CannotContinue, Part, Restored
from spec import wire

logger = logging.getLogger(__name__)


@runtime_checkable
class Losing(Protocol):
    """A part that remembers what ended with the process and cannot be rebuilt."""

    def lose(self, rollout: Restored) -> None:
        """Remember it as uncertain."""
        ...


@dataclass(slots=True)
class _Rebuilt:
    """What is to become current: boundaries, what they hold, results, the machine, and who cannot continue, and why."""

    records: dict[str, Record]
    saved: dict[str, Saved]
    results: dict[int, Finished]
    machine: Machine | None
    stopped: dict[str, str]


async def open_log(core: Core, journal: LogJournal, log: LogFile) -> bool:
    """Recover what the log holds, and begin to write it; return whether the incarnation is kept.

    Args:
        core: a participant to which all its parts were added, and that serves nothing yet; its journal is ``journal``.
        journal: not opened yet.
        log: claimed by this process.
    """
    life = _life(core)
    recovered = log.read(life)
    failpoints.reach("recover.read")
    rebuilt = None
    if recovered is not None:
        try:
            rebuilt = await _rebuild(core, recovered)
        except Exception as error:
            logger.exception("the boundary log cannot be rebuilt")
            log.refuse(f"what the boundary log holds cannot be rebuilt: {type(error).__name__}: {error}")
    if recovered is None or rebuilt is None:
        log.open(journal, life, None)
        journal.note("feed", id=core.feed.id)
        if core.staging is not None:
            core.staging.begin()
        return False
    failpoints.reach("recover.built")
    life = replace(life, incarnation=recovered.state.life.incarnation)
    _make_current(core, recovered, rebuilt)
    failpoints.reach("recover.current")
    log.open(journal, life, recovered)
    failpoints.reach("recover.opened")
    _end_what_was_open(core, recovered.state.machine, rebuilt)
    failpoints.reach("recover.ended")
    if core.staging is not None:
        core.staging.go_on()
    return True


def _life(core: Core) -> Life:
    return Life(
        participant=core.config.name,
        owns=core.owns,
        environments={known.name: known.state_version for known in core.config.environments},
        incarnation=core.incarnation,
        boot=boot_id(),
        synced=False,
    )


async def _rebuild(core: Core, recovered: Recovered) -> _Rebuilt:
    """Read everything, and build the parts aside; nothing that is current changes unless all of it could be built."""
    state = recovered.state
    records = {key: Record.of(entry.header, entry.pieces) for key, entry in recovered.records.items()}
    saved = {key: read_payload(b"".join(record.payload)) for key, record in records.items()}
    _require_consistent(records, saved, {part.name for part in core.parts})
    results = {}
    for key, entry in recovered.results.items():
        results[state.results[key][0]] = Finished.of(entry.header, b"".join(entry.pieces).decode(), core.clock.now())
    machine = None if state.machine is None else machine_of(state.machine)
    stopped = {**_restarts(core.config, records, saved, state.life.environments), **state.stopped}
    rebuilt = _Rebuilt(records, saved, results, machine, stopped)
    await _build_parts(core, rebuilt)
    return rebuilt


def _require_consistent(records: Mapping[str, Record], saved: Mapping[str, Saved], parts: Set[str]) -> None:
    """Judge what the log holds against itself, and against the parts that there are.

    Raises:
        ValueError: naming the first rollout on which they disagree.
    """
    for key, record in records.items():
        held = saved[key]
        if (held.rollout_id, held.attempt) != (record.rollout_id, record.attempt):
            raise ValueError(f"the boundary of {key} holds {held.rollout_id} at attempt {held.attempt}")
        if held.start is not None and held.turns_done != record.turns_done:
            raise ValueError(f"the boundary of {key} holds {held.turns_done} turns instead of {record.turns_done}")
        if missing := held.parts.keys() - parts:
            named = ", ".join(sorted(missing))
            raise ValueError(f"the boundary of {key} holds {named}: no such part was added before the log was opened")


def _restarts(
    config: ParticipantConfig, records: Mapping[str, Record], saved: Mapping[str, Saved], versions: Mapping[str, str]
) -> dict[str, str]:
    """Return the rollouts that cannot go on from their last boundary, with the reason (CKPT-PHASE-018)."""
    reasons = {}
    for key, record in records.items():
        if record.restart is not None:
            reasons[key] = record.restart
        if record.environment is None:
            continue
        known, start = config.environment(record.environment), saved[key].start
        if known is None or known.state_version != versions.get(record.environment):
            reasons[key] = "other"
        elif start is not None and config.restart_only(record.environment, start.agent):
            reasons[key] = "restart_only"
    return reasons


async def _build_parts(core: Core, rebuilt: _Rebuilt) -> None:
    while True:
        built: list[tuple[Part, Any]] = []
        try:
            for part in core.parts:
                state = await part.build(list(_for_part(rebuilt, part.name)))
                built.append((part, state))
        except CannotContinue as refusal:
            for part, state in built:
                await part.discard(state)
            rebuilt.stopped.update(refusal.reasons)
            continue
        for part, state in built:
            part.install(state)
            if isinstance(part, Losing):
                for lost in _lost(rebuilt, part.name):
                    part.lose(lost)
        return


def _for_part(rebuilt: _Rebuilt, name: str) -> Iterable[Restored]:
    for key, saved in rebuilt.saved.items():
        if key not in rebuilt.stopped and name in saved.parts:
            yield _restored(rebuilt.records[key], saved.parts[name])


def _lost(rebuilt: _Rebuilt, name: str) -> Iterable[Restored]:
    for key, saved in rebuilt.saved.items():
        if key in rebuilt.stopped and name in saved.parts:
            yield _restored(rebuilt.records[key], None)


def _restored(record: Record, data: Any) -> Restored:
    return Restored(
        rollout_id=record.rollout_id,
        attempt=record.attempt,
        saved_attempt=record.attempt,
        turns_done=record.turns_done,
        data=data,
        task_digest=record.task_digest,
        environment=record.environment,
    )


def _make_current(core: Core, recovered: Recovered, rebuilt: _Rebuilt) -> None:
    """Make everything current; the journal is not open yet, so that nothing of it is noted again."""
    state = recovered.state
    tombstones = {key: Tombstone(*stone) for key, stone in state.tombstones.items()}
    core.take_over(state.life.incarnation, state.progress, rebuilt.machine, rebuilt.records.values())
    core.fences.load(state.fences, tombstones)
    if state.feed is not None:
        core.feed.load(state.feed, state.next_number, rebuilt.results)
    if core.registry is not None:
        core.registry.recover(rebuilt.saved)


def _end_what_was_open(core: Core, value: Mapping[str, Any] | None, rebuilt: _Rebuilt) -> None:
    """Stop who cannot continue, and end the open checkpoint as the state machine says."""
    if core.registry is not None:
        for rollout_id, reason in rebuilt.stopped.items():
            core.registry.cannot_continue(rollout_id, reason)
    if rebuilt.records:
        core.progressed()  # Turns that were open are open no more.
    machine = rebuilt.machine
    if machine is None or machine.open is None or value is None:
        return
    if machine.open.ending is not None:
        core.move(Step(machine.stopped(0.0)))
        return
    manifest = None
    if machine.phase is Phase.COMMITTING and value["open"]["target"] is not None:
        opened = value["open"]
        found = _published(core.config, Path(opened["target"]), opened["run_id"], opened["checkpoint_id"])
        if found is not None:
            manifest, outcome = found
            core.machine = replace(machine, open=replace(machine.open, outcome=outcome))
    core.move(core.machine.restarted(manifest=manifest))


def _published(
    config: ParticipantConfig, target: Path, run_id: str, checkpoint_id: str
) -> tuple[dict[str, Any], Any] | None:
    """Return the manifest of a cut that was complete when the process ended, and the reply of its commit."""
    try:
        data = (target / MANIFEST).read_bytes()
        told = decode(data)
        if (told["participant"], told["run_id"], told["checkpoint_id"]) != (config.name, run_id, checkpoint_id):
            return None
        files = told["files"]
        manifest = {"name": MANIFEST, "digest": wire.bytes_digest(data), "bytes": len(data)}
        counts = {
            **told["counts"],
            "files": len(files) + 1,
            "bytes": sum(file["bytes"] for file in files) + len(data),
        }
        return manifest, {
            "captured": True,
            "durable": True,
            "manifest": manifest,
            "index": told["index"],
            "counts": counts,
        }
    except (OSError, NotJson, KeyError, TypeError):
        return None
