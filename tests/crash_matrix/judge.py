# SPDX-License-Identifier: Apache-2.0
"""What must hold after every crash; each violation is one line that begins with the invariant's name."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from reference_rl import queries
from reference_rl.errors import SnapshotDamaged
from reference_rl.snapshots import Snapshot, SnapshotStore
from spec import wire
from tests.crash_matrix.bench import Bench, Kill
from tests.rl.harness import results_of

PARTS = ("live", "finished_unreleased", "failed_unreleased", "released", "retired")
"""What every admitted rollout is one of."""

Bodies = Mapping[tuple[int, int], Any]


def store_of(bench: Bench) -> SnapshotStore:
    """Return the snapshots of a run."""
    return SnapshotStore(bench.run_dir / "snapshots", "m", bench.run_dir)


def listed_turns(snapshot: Snapshot) -> dict[str, int]:
    """Return the turns that a snapshot keeps: rows `turn` and `finished` of the owner of rollouts."""
    kept: dict[str, int] = {}
    for gym in snapshot.manifest.gyms:
        for participant in gym.participants:
            if gym.included and "rollouts" in participant.owns:
                rows = snapshot.index(gym.alias, participant.name).values()
                kept |= {row.rollout_id: row.turns_done for row in rows if row.state != "restart"}
    return kept


def listed(bench: Bench, checkpoint_id: str) -> dict[str, int]:
    """Return what :func:`listed_turns` said of a snapshot when it was first asked; retention may remove it later."""
    if checkpoint_id not in bench.listed:
        bench.listed[checkpoint_id] = listed_turns(store_of(bench).read(wire.parse_checkpoint_id(checkpoint_id)))
    return bench.listed[checkpoint_id]


def note_restores(bench: Bench) -> None:
    """Remember what the restored snapshots list, while they are there."""
    for event in bench.events("restarted", "gym_recovered"):
        if any_restored(event):
            listed(bench, event["snapshot"])


def _excused(events: Sequence[Mapping[str, Any]], kill: Kill) -> set[str]:
    """Return the rollouts that failed or became uncertain by themselves after a crash."""
    later = events[kill.events :]
    excused = {event["rollout_id"] for event in later if event["event"] in ("retried", "failed")}
    return excused.union(*(event["rollouts"] for event in later if event["event"] == "restarted_in_place"))


def after_a_crash(bench: Bench) -> list[str]:
    """I5: every published snapshot is complete."""
    store, found = store_of(bench), []
    for checkpoint_id in store.ids():
        try:
            store.verify(checkpoint_id)
        except SnapshotDamaged as error:
            found.append(f"I5: published snapshot {checkpoint_id} is damaged: {error}")
    return found


def kept_turns(bench: Bench) -> int:
    """Return how many turns the last restored snapshot kept."""
    restored = [e for e in bench.events("restarted", "gym_recovered") if any_restored(e)]
    if not restored:
        return 0
    return sum(listed(bench, restored[-1]["snapshot"]).values())


def regenerated(bench: Bench) -> list[str]:
    """I2: no turn that a restored index lists was asked for again after the crash that led to that restore."""
    found, events = [], bench.all_events()
    since = 0  # kills before this one were judged with an earlier event
    for number, event in enumerate(events):
        if event["event"] not in ("restarted", "gym_recovered"):
            continue
        before = [kill for kill in bench.kills if kill.events <= number]
        fresh, since = before[since:], len(before)
        if not fresh or not any_restored(event):
            continue
        kept = listed(bench, event["snapshot"])
        excused = _excused(events, fresh[0])
        again = sorted(
            {
                (call.rollout_id, call.turn)
                for call in bench.policy.calls
                if call.asked > fresh[0].at
                and call.turn <= kept.get(call.rollout_id, 0)
                and call.rollout_id not in excused
            }
        )
        if again:
            where = ", ".join(kill.point for kill in fresh)
            found.append(f"I2: asked again after {where} although {event['snapshot']} lists them: {again}")
    return found


def any_restored(event: Mapping[str, Any]) -> bool:
    """Return whether an event reports a restore from a snapshot."""
    if event["event"] == "gym_recovered":
        return bool(event["how"] == "restored")
    return "restored" in event["gyms"].values()


def newest_was_used(bench: Bench) -> list[str]:
    """I6: a restore takes the newest snapshot with the Gym in it that was published before it."""
    found, published = [], []
    for event in bench.all_events():
        if event["event"] == "snapshot_published" and event["gyms"]:
            published.append(event["checkpoint_id"])
        elif event["event"] in ("restarted", "gym_recovered") and any_restored(event) and published:
            newest = max(published, key=wire.parse_checkpoint_id)
            used = event["snapshot"]
            # A crash between the rename and the event leaves a newer one that is published as well.
            if wire.parse_checkpoint_id(used) < wire.parse_checkpoint_id(newest):
                found.append(f"I6: {used} was restored, {newest} was published: {event.get('refused')}")
    return found


def at_the_end(bench: Bench, statuses: Mapping[str, Mapping[str, Any]], yardstick: Bodies | None) -> list[str]:
    """I1, I3, I8, I10: counts add up, each rollout trained once with the same body, every gate open, no debt left."""
    found = []
    rows = results_of(bench.run_dir)
    trained = Counter(row["rollout_id"] for row in rows)
    twice = [rollout_id for rollout_id, count in trained.items() if count > 1]
    if twice:
        found.append(f"I3: trained twice: {twice}")
    bodies = {(row["group"], row["sibling"]): row["body"] for row in rows}
    if yardstick is not None:
        missing = sorted(set(yardstick) - set(bodies))
        if missing:
            found.append(f"accounting: not trained: {missing}")
        differing = sorted(key for key, body in bodies.items() if body != yardstick.get(key))
        if differing:
            found.append(f"I8: bodies differ from the uninterrupted run: {differing}")
    found += _ledger(bench)
    for name, status in statuses.items():
        counts = status["counts"]
        parts = sum(
            counts[part] for part in ("live", "finished_unreleased", "failed_unreleased", "released", "retired")
        )
        if counts["admitted"] != parts:
            found.append(f"I1: {name} counts {counts}")
        if counts["live"] or counts["finished_unreleased"] or counts["failed_unreleased"]:
            found.append(f"accounting: {name} still holds work: {counts}")
        if status["gate"] != "open" or status["phase"] != "idle":
            found.append(f"I10: {name} is {status['phase']}, its gate {status['gate']}")
    return found


def _ledger(bench: Bench) -> list[str]:
    con = sqlite3.connect(f"{(bench.run_dir / 'ledger.sqlite').as_uri()}?mode=ro", uri=True)
    con.row_factory = sqlite3.Row
    try:
        rows = queries.rollouts(con)
        owed = queries.debt_count(con)
    finally:
        con.close()
    found = [f"accounting: {row.rollout_id} is {row.state}" for row in rows if row.state != "finished"]
    if owed:
        found.append(f"accounting: {owed} ACKs are owed at the end")
    return found
