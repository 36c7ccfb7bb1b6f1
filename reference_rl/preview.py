# SPDX-License-Identifier: Apache-2.0
"""`recover --dry-run`: what a restart would do with each rollout, and why, without doing any of it.

Works on a copy of the ledger and sends nothing but GETs: results that wait in a living Gym's feed are read, into the
copy.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from reference_rl import queries, transitions
from reference_rl.adoption import plan_adoption
from reference_rl.client import make_http
from reference_rl.errors import SnapshotDamaged
from reference_rl.events import Events
from reference_rl.ledger import Ledger, open_copy
from reference_rl.living import GymReport
from reference_rl.managed import Parts, assemble
from reference_rl.recovery import REDONE, make_wish
from reference_rl.restart_point import choose_point, plan_rollback
from reference_rl.session import LEDGER
from reference_rl.settings import RunSettings
from reference_rl.snapshots import LEDGER_FILE, RL_PART, SnapshotStore


@dataclass(frozen=True)
class Prospect:
    """What would become of one rollout."""

    rollout_id: str
    how: str
    turns_kept: int
    reason: str


@dataclass(frozen=True)
class Preview:
    """What a restart would do.

    Attributes:
        rl_from: where RL would go on, e.g. ``snapshot 3-2``.
        gyms: alias → adopted, restored from which snapshot, reset or started over.
        refused: snapshots that would be passed over, and why.
        rollouts: every rollout.
    """

    rl_from: str
    gyms: dict[str, str]
    refused: tuple[str, ...]
    rollouts: tuple[Prospect, ...]


async def preview(settings: RunSettings, transport: httpx.AsyncBaseTransport | None = None) -> Preview:
    """Return what `run` would do now; changes nothing anywhere.

    Raises:
        RecoveryFailed: a Gym cannot be reached.
        Incompatible: a Gym cannot be used.
    """
    if not settings.switches.tracks_rollouts:
        return _older(settings)
    with tempfile.TemporaryDirectory() as scratch:
        ledger = _copy(settings, Path(scratch) / LEDGER)
        try:
            async with make_http(settings.client.build(), transport) as http:
                store = _store(settings)
                return await _preview(settings, assemble(settings, http, ledger, store, Events()))
        finally:
            ledger.close()


async def _preview(settings: RunSettings, parts: Parts) -> Preview:
    recovery, restorer, living, ledger = parts.recovery, parts.restorer, parts.living, parts.ledger
    away = await recovery.office.discover_all()
    point = choose_point(ledger, parts.store, trainer_survives=settings.trainer.survives)
    gyms: dict[str, str] = dict.fromkeys(away, "away")
    refused = list(point.refused)
    prospects: dict[str, Prospect] = {}
    rollback = None
    for gym in (g for g in parts.gyms if g.alias not in away):
        if recovery.adoptable(gym, point):
            gyms[gym.alias] = "adopted"
            plan = plan_adoption(ledger.read(queries.unfinished, gym.alias), await living.list_rollouts(gym))
            for row, how, turns, reason in plan.fates:
                prospects[row.rollout_id] = Prospect(row.rollout_id, how, turns, reason)
            continue
        await living.read_feed(gym)
        rollback = rollback or await plan_rollback(ledger, point, settings.recovery.salvage)
        if not settings.switches.captures_gyms:
            gyms[gym.alias] = "started over"
            continue
        report = GymReport(gym.alias, "restored")
        not_newer = point.limit
        snapshot = restorer.saved_gym(gym, not_newer, report)
        refused += report.refused
        gyms[gym.alias] = f"restored from {snapshot.checkpoint_id}" if snapshot else "reset"
        # The ledger is a copy: what a restart would write into it first is written.
        redone = await ledger.do(transitions.redo_rollouts, sorted(recovery.redone([gym], rollback)), REDONE)
        for fate in restorer.plan(gym, snapshot, make_wish(gym, rollback, redone.values())).fates:
            rollout_id = fate.row.rollout_id
            prospects[rollout_id] = Prospect(rollout_id, fate.how, fate.turns_done, fate.reason)
    rl_from = f"snapshot {point.snapshot.checkpoint_id}" if point.snapshot else point.how
    return Preview(rl_from, gyms, tuple(dict.fromkeys(refused)), tuple(_all(ledger, prospects)))


def _older(settings: RunSettings) -> Preview:
    """Return what columns 0 and 1 would do: go back to the newest snapshot's ledger; nothing is sent to anybody."""
    store, refused = _store(settings), []
    for checkpoint_id in store.ids():
        try:
            snapshot = store.verify(checkpoint_id, RL_PART)
        except SnapshotDamaged as error:
            refused.append(f"{checkpoint_id}: {error}")
            continue
        con = open_copy(snapshot.path / LEDGER_FILE)
        try:
            rows = queries.rollouts(con)
        finally:
            con.close()
        prospects = tuple(
            Prospect(row.rollout_id, "restarted", 0, "it was not finished in the snapshot")
            if row.state == "unfinished"
            else Prospect(row.rollout_id, "reused", 0, f"the snapshot calls it {row.state}")
            for row in rows
        )
        gyms = dict.fromkeys((gym.alias for gym in settings.gyms), "started over")
        return Preview(f"snapshot {checkpoint_id}", gyms, tuple(refused), prospects)
    planned = (rollout for group in settings.groups() for rollout in group.rollouts)
    started = tuple(Prospect(rollout.rollout_id, "started", 0, "it starts at turn 1") for rollout in planned)
    return Preview("clean", dict.fromkeys((g.alias for g in settings.gyms), "started over"), tuple(refused), started)


def _store(settings: RunSettings) -> SnapshotStore:
    return SnapshotStore.reading(settings.run_dir / "snapshots", settings.run_id, settings.run_dir)


def _all(ledger: Ledger, prospects: dict[str, Prospect]) -> Iterator[Prospect]:
    for row in ledger.read(queries.rollouts):
        if row.rollout_id in prospects:
            yield prospects[row.rollout_id]
        elif row.state != "unfinished":
            yield Prospect(row.rollout_id, "reused", 0, f"the ledger calls it {row.state}")
        else:
            yield Prospect(row.rollout_id, "started", 0, "it starts at turn 1")


def _copy(settings: RunSettings, path: Path) -> Ledger:
    live = settings.run_dir / LEDGER
    if live.exists():
        # Read-only: opening it as a ledger would already write to it.
        source = sqlite3.connect(f"{live.resolve().as_uri()}?mode=ro", uri=True)
        target = sqlite3.connect(path)
        try:
            source.backup(target)
        finally:
            target.close()
            source.close()
    copy = Ledger(path, settings.run_id)
    copy.call(transitions.plan, settings.groups())
    return copy
