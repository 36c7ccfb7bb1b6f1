# SPDX-License-Identifier: Apache-2.0
"""Snapshots and restart: what a restore builds aside, and what is left when it cannot be built, or the process dies."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from dataclasses import replace

from conformance.case import Case, Rollout
from conformance.checks.process import rediscover_quietly
from conformance.controller import Json, Participant
from conformance.cuts import Cut, Part, forged, plan, restore_at, take_cut
from conformance.errors import Lost, NotOffered
from conformance.registry import check
from conformance.script import add, grow, script
from conformance.wire import Reply

COMMON = ("conformance",)
SESSIONS = 10
THE_SEVENTH = 6
GONE = "an-environment-that-is-gone"
PARKED = script(add(1), grow(50), "done")


def seen(a: Participant) -> Json:
    """Return what a restore would change: counts, feed, and each rollout with its attempt."""
    status = a.status()
    rows = {key: row["attempt"] for key, row in a.rollouts().items()} if a.owns("rollouts") else {}
    return {"counts": status["counts"], "feed": status.get("feed"), "progress": status["progress"], "rollouts": rows}


@check(
    "CKPT-RESTORE-010",
    "CKPT-RESTORE-006",
    "CKPT-ABORT-006",
    profile="checkpoint",
    features=COMMON,
    storage=True,
    points=("restore.build",),
)
def what_a_restore_builds_is_aside(case: Case) -> None:
    """Held when everything is built: the gate is closed, and all that is current is as it was; aborted, it stays so."""
    a = case.agent
    kept, _ = case.finished()
    case.start_at(1)
    cut = take_cut(case)
    later = case.start_at(0)
    before = seen(a)
    checkpoint_id = case.controller.next_id()
    with case.failpoint("restore.build", "hold") as point:
        restoring = case.wire.background(
            functools.partial(restore_at, case, a, cut, plan(case, cut), checkpoint_id),
        )
        point.wait_reached()
        status = a.status()
        got = (status["phase"], status["gate"])
        case.equal(("restoring", "closed"), got, "while it is built", "CKPT-RESTORE-006", "CKPT-RESTORE-010")
        case.equal(before, seen(a), "what is current, when all is built", "CKPT-RESTORE-010")
        served = a.results()
        case.true(kept.rollout_id in served, "the earlier result is served", "CKPT-RESTORE-010", got=sorted(served))
        aborting = case.wire.background(functools.partial(case.controller.abort, a, checkpoint_id))
        case.until(lambda: a.status()["gate"] == "open", "the gate is open again", "CKPT-ABORT-006")
        point.release()
        case.accepted(aborting.result(), "abort")
        restoring.result()
    case.equal(before, seen(a), "as before", "CKPT-ABORT-006")
    case.release(later)
    case.body(later, "CKPT-ABORT-006")


@check(
    "CKPT-RESTORE-041",
    "CKPT-RESTORE-010",
    "CKPT-RESTORE-011",
    "CKPT-RESTORE-012",
    "CKPT-RESTORE-013",
    profile="turn-recovery",
    features=COMMON,
    storage=True,
    points=("restore.build",),
)
def a_state_that_fails_to_be_built(case: Case) -> None:
    """C63: building a state fails at each participant in turn: the restore fails whole, and nothing has changed."""
    crowd = case.start_crowd(3, 1, PARKED)
    cut = take_cut(case)
    for p in case.gym.participants:
        if not cut.parts[p.name].rows:
            continue
        before = seen(p)
        checkpoint_id = case.controller.next_id()
        with case.failpoint("restore.build", "fail") as point:
            reply = restore_at(case, p, cut, plan(case, cut), checkpoint_id)
            case.true(point.reached, "the point was reached")
        _failed_whole(case, p, reply, checkpoint_id, before)
    _all_go_on(case, crowd)


def _failed_whole(case: Case, p: Participant, reply: Reply, checkpoint_id: str, before: Json) -> None:
    """Judge a restore that failed after it was accepted."""
    case.true(not reply.ok, "the whole restore fails", "CKPT-RESTORE-041", got=reply.brief)
    case.equal(before, seen(p), "what is current", "CKPT-RESTORE-011", "CKPT-RESTORE-010")
    status = p.status()
    case.equal(("idle", "open"), (status["phase"], status["gate"]), "the gate", "CKPT-RESTORE-012")
    last = (status["last"]["checkpoint_id"], status["last"]["ended_as"])
    case.equal((checkpoint_id, "failed"), last, "how it ended, in `last`", "CKPT-RESTORE-013")


def _all_go_on(case: Case, crowd: list[Rollout]) -> None:
    """Judge that every rollout of a crowd ends as the attempt that it was."""
    case.release(*crowd)
    for rollout in crowd:
        entry = case.result(rollout, "CKPT-RESTORE-011")
        case.true("body" in entry["content"], "it succeeds", "CKPT-RESTORE-011", got=entry["content"])
        case.equal(0, entry["receipt"]["attempt"], "as the attempt that it was", "CKPT-RESTORE-011")


@check(
    "CKPT-RESTORE-041",
    "CKPT-RESTORE-010",
    "CKPT-RESTORE-011",
    "CKPT-RESTORE-012",
    "CKPT-RESTORE-013",
    profile="turn-recovery",
    features=COMMON,
    shared_dir=True,
)
def the_seventh_of_ten_cannot_be_built(case: Case) -> None:
    """C63: a cut of ten whose seventh state is nonsense, every digest right: none of the ten is installed."""
    p = case.sessions
    crowd = case.start_crowd(SESSIONS, 1, PARKED)
    cut = take_cut(case)
    whole = cut.parts[p.name]
    seventh = sorted(rollout.rollout_id for rollout in crowd)[THE_SEVENTH]
    harmed = 0
    for name, content in _nonsense(whole, seventh):
        raw = (whole.directory / name).read_bytes()
        part = forged(whole, name, content)
        before = seen(p)
        checkpoint_id = case.controller.next_id()
        case.step(f"restore at {p.name}, the state of {seventh} in {name} overwritten, all digests made anew")
        lists = plan(case, replace(cut, parts={**cut.parts, p.name: part}))
        reply = restore_at(case, p, replace(cut, parts={**cut.parts, p.name: part}), lists, checkpoint_id)
        whole = forged(part, name, raw)
        if reply.ok:
            left = {row["rollout_id"] for row in reply["restarts"]}
            case.equal(set(), left & {seventh}, "installed without it", "CKPT-RESTORE-041")
            raise NotOffered("what was overwritten is no part of the state")
        harmed += 1
        _failed_whole(case, p, reply, checkpoint_id, before)
    if not harmed:
        raise NotOffered("the state of a rollout is not found by its id")
    _all_go_on(case, crowd)


def _nonsense(part: Part, rollout_id: str) -> list[tuple[str, bytes]]:
    """Return payload files in which the bytes after each mention of a rollout are overwritten."""
    manifest = part.manifest_json()
    found = []
    for row in manifest["files"]:
        if row["name"] == manifest["index"]["name"]:
            continue
        content = (part.directory / row["name"]).read_bytes()
        spoilt = bytearray(content)
        for mention in re.finditer(re.escape(rollout_id).encode(), content):
            place = mention.end() + 1
            spoilt[place : place + 24] = b"\xff" * len(spoilt[place : place + 24])
        if spoilt != content:
            found.append((row["name"], bytes(spoilt)))
    return found


@check("CKPT-RESTORE-058", "CKPT-RESTORE-039", "CKPT-RESTORE-040", profile="turn-recovery", features=COMMON)
def a_rollout_of_a_vanished_environment(case: Case) -> None:
    """A cut whose index puts one rollout into an environment that is not here: left out by name, or refused."""
    a = case.agent
    rollout, other = case.start_crowd(2, 1, PARKED)
    cut = take_cut(case)
    part = cut.parts[a.name]
    if case.bench.target.shared_dir is None:
        raise NotOffered("no directory that both sides see was given")
    name = part.manifest_json()["index"]["name"]
    rows = [json.loads(line) for line in (part.directory / name).read_bytes().splitlines()]
    for row in rows:
        if row["rollout_id"] == rollout.rollout_id:
            row["environment"] = GONE
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    moved = Cut(cut.checkpoint_id, {**cut.parts, a.name: forged(part, name, lines)}, cut.pauses_ms)
    case.step(f"the index of {a.name} says that {rollout.rollout_id} is in {GONE}, all digests made anew")
    reply = restore_at(case, a, moved, plan(case, moved), case.controller.next_id())
    if reply.code in ("state_mismatch", "checkpoint_corrupt"):
        raise NotOffered("it finds that index and state disagree")
    if not reply.ok:
        case.refused(reply, "state_incompatible", "a rollout that it cannot continue", "CKPT-RESTORE-058")
        return
    left = [row["rollout_id"] for row in reply["restarts"]]
    case.equal([rollout.rollout_id], left, "left out by name", "CKPT-RESTORE-058", "CKPT-RESTORE-040")
    there = {key for key, row in a.rollouts().items() if row["state"] not in ("retired", "released")}
    mine = {rollout.rollout_id, other.rollout_id} & there
    case.equal({other.rollout_id}, mine, "the other one is installed", "CKPT-RESTORE-039")


@check(
    "CKPT-PHASE-012",
    "CKPT-PHASE-009",
    "CKPT-RESTORE-014",
    "CKPT-RESTORE-037",
    profile="turn-recovery",
    features=COMMON,
    storage=True,
    points=("restore.build", "restore.install"),
)
def a_kill_around_the_installation(case: Case) -> None:
    """Killed when all is built, and when all is installed: what was live goes on, or nothing of either is there."""
    a = case.agent
    for moment in ("restore.build", "restore.install"):
        case.new_controller()
        saved = case.start_at(1)
        cut = take_cut(case)
        live = case.start_at(1)
        incarnation, feed = a.capabilities["incarnation"], a.status()["feed"]
        lists = plan(case, cut, only=[saved.rollout_id])
        checkpoint_id = case.controller.next_id()
        with case.failpoint(moment, "kill") as point, contextlib.suppress(Lost):
            restore_at(case, a, cut, lists, checkpoint_id)
            point.wait_reached()
        case.release(saved, live)
        case.process.restart()
        rediscover_quietly(case)
        a = case.agent
        status = a.status()
        rows = {key: row for key, row in a.rollouts().items() if row["state"] not in ("retired", "released")}
        mine = {key: rows[key]["attempt"] for key in (saved.rollout_id, live.rollout_id) if key in rows}
        if a.capabilities["incarnation"] != incarnation:
            case.leave_out("it took a new incarnation", "CKPT-PHASE-012", "CKPT-PHASE-009")
            case.equal({}, mine, f"rollouts of a new life, killed at {moment}", "CKPT-RESTORE-014", "CKPT-RESTORE-037")
            continue
        before = {saved.rollout_id: 0, live.rollout_id: 0}
        if moment == "restore.build":
            case.equal(before, mine, "the live work is as it was before", "CKPT-PHASE-012")
            last = (status["last"]["checkpoint_id"], status["last"]["ended_as"])
            case.equal((checkpoint_id, "failed"), last, "how it ended, in `last`", "CKPT-PHASE-009")
            case.equal(feed, status["feed"], "the feed is as it was before", "CKPT-PHASE-012")
        case.true(mine in (before, {}), "all of before, or nothing", "CKPT-RESTORE-014", got=mine)
        if mine:
            case.new_controller("reborn")
            case.body(live, "CKPT-PHASE-012")
