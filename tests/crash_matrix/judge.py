# SPDX-License-Identifier: Apache-2.0
"""What must hold after every crash; each violation is one line that begins with the invariant's name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from reference_rl import queries
from reference_rl.errors import SnapshotDamaged
from reference_rl.snapshots import Snapshot, SnapshotStore
from spec import wire
from tests.crash_matrix.bench import BOUND_S, Bench, Kill
from tests.crash_matrix.cells import ONE
from tests.rl.harness import results_of, until

PARTS = ("live", "finished_unreleased", "failed_unreleased", "released", "retired")
"""What every admitted rollout is one of."""

RECOVERED = ("restarted", "gym_recovered")
ENDS = ("finished", "failed", "released", "retired")
LOOKS = 10
"""How often a participant with a closed gate is looked at."""

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
    for event in bench.events(*RECOVERED):
        if any_restored(event):
            listed(bench, event["snapshot"])


def excused(bench: Bench) -> set[str]:
    """Return the rollouts that failed or became uncertain by themselves after the first crash."""
    return _excused(bench.all_events(), bench.kills[0]) if bench.kills else set()


def recoveries(bench: Bench) -> list[str]:
    """Return what each recovery did."""
    return [how for how, _ in _hows(bench)]


def nothing_saved(fresh: Sequence[Kill]) -> bool:
    """Return whether the crashes that led to a recovery came before the first snapshot was published."""
    return bool(fresh) and not any(kill.newest for kill in fresh)


def _hows(bench: Bench) -> list[tuple[str, list[Kill]]]:
    """Return what each recovery did with each Gym, and the crashes that led to it."""
    found = []
    for event, fresh in _recoveries(bench):
        found += [(how, fresh) for how in ([event["how"]] if "how" in event else event["gyms"].values())]
    return found


def _recoveries(bench: Bench) -> list[tuple[Mapping[str, Any], list[Kill]]]:
    """Return each recovery with the crashes that led to it."""
    found, since = [], 0  # kills before this one were judged with an earlier event
    for number, event in enumerate(bench.all_events()):
        if event["event"] in RECOVERED:
            before = [kill for kill in bench.kills if kill.events <= number and kill.missed]
            found.append((event, before[since:]))
            since = len(before)
    return found


def _excused(events: Sequence[Mapping[str, Any]], kill: Kill) -> set[str]:
    """Return the rollouts that failed or became uncertain by themselves after a crash."""
    later = events[kill.events :]
    excused = {event["rollout_id"] for event in later if event["event"] in ("retried", "failed")}
    return excused.union(*(event["rollouts"] for event in later if event["event"] == "restarted_in_place"))


def published(bench: Bench) -> list[str]:
    """I5: every published snapshot is complete, by RL's own reader and by a look at its bytes."""
    store, found = store_of(bench), []
    for checkpoint_id in store.ids():
        try:
            store.verify(checkpoint_id)
        except SnapshotDamaged as error:
            found.append(f"I5: published snapshot {checkpoint_id} is damaged: {error}")
        found += _bytes(bench.run_dir / "snapshots" / str(checkpoint_id))
    return found


def _bytes(directory: Path) -> list[str]:
    """Compare the files of a snapshot with its manifest, with nothing but JSON and SHA-256."""
    found = []
    for entry in json.loads((directory / "manifest.json").read_bytes())["files"]:
        path = directory / entry["path"]
        data = path.read_bytes() if path.is_file() else b""
        if (len(data), f"sha256:{hashlib.sha256(data).hexdigest()}") != (entry["bytes"], entry["digest"]):
            found.append(f"I5: {directory.name} does not hold the {entry['path']} that its manifest names")
    return found


async def while_closed(bench: Bench, answer: Callable[[], Awaitable[None]]) -> list[str]:
    """I9: with every gate closed, the answer to an open policy call opens no turn and ends none.

    Args:
        bench: RL sleeps, so that nobody ACKs, retires or resumes.
        answer: lets the policy answer a call that waits.
    """
    owners = [role for role in bench.roles if role != "model"]
    before = {role: await _changing(bench, role) for role in owners}
    open_calls = [call for call in bench.policy.calls if call.answered is None]
    await answer()
    await until(lambda: any(call.answered is not None for call in open_calls), "the policy answers", BOUND_S)
    for _ in range(LOOKS):
        for role in owners:
            after = await _changing(bench, role)
            closed = (await bench.ask(role, "checkpoint"))["gate"] == "closed"
            if closed and after != before[role]:  # an open gate: its lease ended, this machine is slow
                return [f"I9: {role} changed while its gate was closed: {before[role]}, then {after}"]
    return []


async def _changing(bench: Bench, role: str) -> list[Any]:
    """Return what a closed gate holds still."""
    status = await bench.ask(role, "checkpoint")
    rows = (await bench.ask(role, "rollouts"))["rollouts"] if role in ("agent", ONE) else []
    turns = [
        (row["rollout_id"], row["attempt"], row.get("turns_done"), row.get("open_turn"), row["state"] in ENDS)
        for row in rows
    ]
    return [status["counts"], turns, *([status["progress"]] if role != ONE else [])]


def kept_turns(bench: Bench) -> int:
    """Return how many turns the last restored snapshot kept."""
    restored = [e for e in bench.events(*RECOVERED) if any_restored(e)]
    if not restored:
        return 0
    return sum(listed(bench, restored[-1]["snapshot"]).values())


def regenerated(bench: Bench) -> list[str]:
    """I2: no turn that a restored index lists was asked for again after the crash that led to that restore."""
    found = []
    for event, fresh, free in _restores(bench):
        kept = listed(bench, event["snapshot"])
        again = sorted(
            {
                (call.rollout_id, call.turn)
                for call in bench.policy.calls
                if call.asked > fresh[0].at
                and call.turn <= kept.get(call.rollout_id, 0)
                and call.rollout_id not in free
            }
        )
        if again:
            where = ", ".join(kill.point for kill in fresh)
            found.append(f"I2: asked again after {where} although {event['snapshot']} lists them: {again}")
    return found


def _restores(bench: Bench) -> list[tuple[Mapping[str, Any], list[Kill], set[str]]]:
    """Return each restore from a snapshot with the crashes that led to it, and who may begin again all the same."""
    events = bench.all_events()
    return [
        (event, fresh, _excused(events, fresh[0]))
        for event, fresh in _recoveries(bench)
        if fresh and any_restored(event)
    ]


def _unreported(kill: Kill) -> bool:
    """Return whether RL died in a restart that may have restored the Gym: nobody is left to say so."""
    return kill.point.startswith("restart.") and bool({"rl", "all"} & set(kill.victims)) and bool(kill.newest)


def gone_back(bench: Bench) -> list[str]:
    """I2, by the policy's log alone: a finished turn is asked for again only where a restore went back behind it.

    A turn is finished when the next one was asked for. Without a crash, or when the Gym was adopted, nothing of it is
    ever asked for again.
    """
    restores = [(fresh[0].at, listed(bench, event["snapshot"])) for event, fresh, _ in _restores(bench)]
    restores += [(fresh[0].at, {}) for how, fresh in _hows(bench) if how == "reset" and nothing_saved(fresh)]
    for before, kill in pairwise([bench.kills[0], *bench.kills] if bench.kills else []):
        if _unreported(kill):
            restores.append((before.at, listed(bench, kill.newest)))
    free = excused(bench)
    highest: dict[str, int] = {}
    found = []
    for call in bench.policy.calls:
        if call.turn < highest.get(call.rollout_id, 0) and call.rollout_id not in free:
            lawful = (call.asked > since and call.turn > kept.get(call.rollout_id, 0) for since, kept in restores)
            if not any(lawful):
                found.append(f"I2: turn {call.turn} of {call.rollout_id} was finished, and is asked for again")
        highest[call.rollout_id] = max(highest.get(call.rollout_id, 0), call.turn)
    return found


def nothing_thrown_away(bench: Bench, *, must_adopt: bool) -> list[str]:
    """I6, C25: a Gym that lost its state is restored, never reset; one that kept all of it is not even restored.

    Before the first snapshot there is nothing from which it could be restored.
    """
    hows = recoveries(bench)
    found = [
        f"I6: a Gym was {how} although a snapshot holds it"
        for how, fresh in _hows(bench)
        if how not in ("adopted", "restored") and not (how == "reset" and nothing_saved(fresh))
    ]
    if must_adopt and "restored" in hows:
        found.append(f"C25: nothing of the Gym's disk was lost, and yet it was restored: {hows}")
    return found


def consumed_twice(bench: Bench) -> list[str]:
    """I3: the trainer takes a rollout once, unless it went back to a snapshot in between."""
    found, taken = [], set()
    for event in bench.events("trained", "rolled_back"):
        if event["event"] == "rolled_back":
            taken.clear()
        for rollout_id in event.get("rollouts", ()):
            if rollout_id in taken:
                found.append(f"I3: the trainer took {rollout_id} twice")
            taken.add(rollout_id)
    return found


def any_restored(event: Mapping[str, Any]) -> bool:
    """Return whether an event reports a restore from a snapshot."""
    if event["event"] == "gym_recovered":
        return bool(event["how"] == "restored")
    return "restored" in event["gyms"].values()


def newest_was_used(bench: Bench) -> list[str]:
    """I6: a restore takes the newest snapshot with the Gym in it that was published before it."""
    found, ready = [], []
    for event in bench.all_events():
        if event["event"] == "snapshot_published" and event["gyms"]:
            ready.append(event["checkpoint_id"])
        elif event["event"] in RECOVERED and any_restored(event) and ready:
            newest = max(ready, key=wire.parse_checkpoint_id)
            used = event["snapshot"]
            # A crash between the rename and the event leaves a newer one that is published as well.
            if wire.parse_checkpoint_id(used) < wire.parse_checkpoint_id(newest):
                found.append(f"I6: {used} was restored, {newest} was published: {event.get('refused')}")
    return found


def of_the_run(
    bench: Bench, statuses: Mapping[str, Mapping[str, Any]], yardstick: Bodies | None, *, must_adopt: bool = False
) -> list[str]:
    """Return everything that a run that is done has violated; ``must_adopt``: no restore was called for."""
    found = regenerated(bench) + gone_back(bench) + newest_was_used(bench)
    found += nothing_thrown_away(bench, must_adopt=must_adopt) + published(bench) + consumed_twice(bench)
    found += [text for seen in bench.seen for text in _sum(f"{seen.role} {seen.when}", seen.status)]
    return found + at_the_end(bench, statuses, yardstick)


def _sum(name: str, status: Mapping[str, Any]) -> list[str]:
    counts = status["counts"]
    return [] if counts["admitted"] == sum(counts[part] for part in PARTS) else [f"I1: {name} counts {counts}"]


async def of_the_stale(bench: Bench) -> list[str]:
    """I4: a stale controller, a stale incarnation and a stale attempt are refused, and change nothing."""
    found = []
    before = await bench.statuses()
    async with bench.http() as http:

        async def call(role: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
            status = before[role]
            pair = status["controller"]
            own = {"Id": pair["id"], "Epoch": str(pair["epoch"])}
            stamps = {f"Gym-Controller-{name}": headers.get(name, value) for name, value in own.items()}
            stamps["Gym-Expect-Incarnation"] = headers.get("Incarnation") or await _incarnation(bench, http, role)
            url = f"{bench.urls()[role]}/gym-checkpoint/v1/{path}"
            async with http.post(url, json=body, headers=stamps) as reply:
                return reply.status, await reply.json()

        told = {role: status for role, status in before.items() if status["controller"] is not None}
        for role, status in told.items():
            epoch = status["controller"]["epoch"]
            abort = {"checkpoint_id": f"{epoch}-999999", "timeout_ms": 1000}
            got = await call(role, "checkpoint/abort", abort, Id="0")
            if (got[0], got[1].get("code")) != (409, "stale_controller"):
                found.append(f"I4: {role} answered a lower controller {got}")
            got = await call(role, "checkpoint/abort", abort, Incarnation="0")
            if (got[0], got[1].get("code")) != (409, "stale_incarnation"):
                found.append(f"I4: {role} answered a call for another incarnation {got}")
        owner = "agent" if "agent" in before else ONE
        policy = {"base_url": bench.policy.url, "model": "m", "api": "chat_completions"}
        for start in await _stale_starts(bench, owner) if owner in told else ():
            got = await call(owner, "rollouts", {"policy": policy, "rollouts": [start]})
            outcome = got[1]["outcomes"][0]["outcome"] if got[0] == 200 else got
            if outcome != "stale_attempt":
                found.append(f"I4: {owner} answered {start} with {outcome}")
    if before != await bench.statuses():
        found.append("I4: stale calls changed something")
    return found


async def _stale_starts(bench: Bench, owner: str) -> list[dict[str, Any]]:
    """Return a start call for every attempt that a rollout has behind it, as the owner of rollouts knows it.

    What was released before the snapshot from which a Gym without a memory came back is nothing that it could know.
    """
    with contextlib.closing(_ledger_of(bench)) as con:
        rows = queries.rollouts(con)
    names = ("rollout_id", "environment", "task_digest")
    starts = []
    for row in rows:
        known = await bench.ask(owner, f"rollouts/{row.rollout_id}")  # what ended long ago is not listed any more
        start = {name: getattr(row, name) for name in names} | {"task": dict(row.task)}
        starts += [start | {"attempt": attempt} for attempt in range(known.get("attempt", 0))]
    return starts


async def _incarnation(bench: Bench, http: aiohttp.ClientSession, role: str) -> str:
    async with http.get(f"{bench.urls()[role]}/gym-checkpoint/v1/checkpoint") as reply:
        return reply.headers["Gym-Incarnation"]


def at_the_end(bench: Bench, statuses: Mapping[str, Mapping[str, Any]], yardstick: Bodies | None) -> list[str]:
    """I1, I3, I8, I10: counts add up, each rollout trained once with the same body, every gate open, no debt left."""
    found = []
    rows = results_of(bench.run_dir)
    trained = Counter(row["rollout_id"] for row in rows)
    twice = [rollout_id for rollout_id, count in trained.items() if count > 1]
    if twice:
        found.append(f"I3: trained twice: {twice}")
    bodies = {(row["group"], row["sibling"]): row["body"] for row in rows}
    tasks = bench.tasks
    wanted = {(group, sibling) for group in range(tasks["groups"]) for sibling in range(tasks["siblings"])}
    if wanted != set(bodies):
        found.append(f"accounting: not trained: {sorted(wanted - set(bodies))}, not asked for: {set(bodies) - wanted}")
    if yardstick is not None:
        differing = sorted(key for key, body in bodies.items() if body != yardstick.get(key))
        if differing:
            found.append(f"I8: bodies differ from the uninterrupted run: {differing}")
    found += _ledger(bench)
    for name, status in statuses.items():
        counts = status["counts"]
        found += _sum(name, status)
        if counts["live"] or counts["finished_unreleased"] or counts["failed_unreleased"]:
            found.append(f"accounting: {name} still holds work: {counts}")
        if status["gate"] != "open" or status["phase"] != "idle":
            found.append(f"I10: {name} is {status['phase']}, its gate {status['gate']}")
    return found


def _ledger(bench: Bench) -> list[str]:
    with contextlib.closing(_ledger_of(bench)) as con:
        rows = queries.rollouts(con)
        owed = queries.debt_count(con)
    found = [f"accounting: {row.rollout_id} is {row.state}" for row in rows if row.state != "finished"]
    if owed:
        found.append(f"accounting: {owed} ACKs are owed at the end")
    return found


def _ledger_of(bench: Bench) -> sqlite3.Connection:
    con = sqlite3.connect(f"{(bench.run_dir / 'ledger.sqlite').as_uri()}?mode=ro", uri=True)
    con.row_factory = sqlite3.Row
    return con
