# SPDX-License-Identifier: Apache-2.0
"""Lifecycle: a snapshot from prepare to resume, abort in every phase, and what goes on in each."""

from __future__ import annotations

import functools
import time
from pathlib import Path

from conformance.case import Case
from conformance.checks.snapshots_sources import verifies
from conformance.controller import LEASE_MS, Json, Participant
from conformance.cuts import (
    committed_at,
    prepared_at,
    read_part,
    ready_at,
    restored_at,
    target_for,
)
from conformance.registry import check
from conformance.script import grow, script

COMMON = ("conformance",)


@check(
    "CKPT-PREP-001",
    "CKPT-PREP-003",
    "CKPT-PREP-004",
    "CKPT-PREP-007",
    "CKPT-PREP-013",
    "CKPT-PREP-016",
    "CKPT-COMMIT-001",
    "CKPT-COMMIT-011",
    "CKPT-COMMIT-015",
    "CKPT-COMMIT-024",
    "CKPT-RESUME-001",
    "CKPT-RESUME-005",
    "CKPT-RESUME-008",
    "CKPT-RESUME-009",
    "CKPT-COMMIT-023",
    "CKPT-CKID-009",
    "CKPT-CKID-018",
    "CKPT-PHASE-003",
    "CKPT-PHASE-016",
    "CKPT-SEC-024",
    "CKPT-STATUS-003",
    "CKPT-STATUS-008",
    "CKPT-STATUS-010",
    "CKPT-CKID-007",
    "CKPT-CKID-014",
    "CKPT-CKID-015",
    "CKPT-LEASE-001",
    profile="checkpoint",
    each="participant",
    storage=True,
    budget=("quick", "demo"),
)
def a_snapshot_from_prepare_to_resume(case: Case) -> None:
    """Prepare closes the gate, commit makes the cut durable, resume opens the gate; each status agrees."""
    c, p = case.controller, case.p
    progress = p.status()["progress"]
    begun = time.monotonic()
    open_id = prepared_at(case)
    status = p.status()
    case.equal(("prepared", "closed", open_id, False), _where(status), "prepared", "CKPT-PREP-001", "CKPT-STATUS-010")
    case.equal(open_id, status["checkpoint_id"], "the open id", "CKPT-STATUS-003")
    case.equal(False, status["draining"], "draining, while the gate is closed", "CKPT-SEC-024")
    again = case.accepted(c.prepare(p, open_id), "prepare again", "CKPT-PREP-003")
    said = (again["phase"], again["ready"], again["blocker_count"], again["progress"])
    keys = ("CKPT-PHASE-016", "CKPT-PREP-004", "CKPT-PREP-007", "CKPT-PREP-013")
    case.equal(("prepared", True, 0, progress), said, "what prepare says", *keys)
    left = again["lease_remaining_ms"]
    case.true(LEASE_MS - 3000 < left <= LEASE_MS, "the lease that is left", "CKPT-PREP-016", got=left)
    case.true(status["lease_remaining_ms"], "a lease runs", "CKPT-LEASE-001", got=status["lease_remaining_ms"])
    case.accepted(c.renew(p, open_id, lease_ms=LEASE_MS), "renew")
    case.equal(progress, p.status()["progress"], "progress after a renew", "CKPT-STATUS-008")
    target, _ = target_for(case, p, open_id)
    case.step(f"commit {open_id}, wait: durable")
    first = case.accepted(c.commit(p, open_id, target), "commit is accepted in prepared", "CKPT-COMMIT-001")
    got = (first["phase"], first["captured"], first["durable"])
    case.equal(("committed", True, True), got, "durable, the gate closed", "CKPT-COMMIT-015", "CKPT-COMMIT-024")
    repeat = case.accepted(c.commit(p, open_id, target), "commit again", "CKPT-COMMIT-011")
    case.equal((True, True), (repeat["captured"], repeat["durable"]), "captured from then on", "CKPT-COMMIT-011")
    case.equal(("committed", "closed", open_id, True), _where(p.status()), "committed", "CKPT-STATUS-010")
    again = case.accepted(c.prepare(p, open_id), "prepare of a committed id replies", "CKPT-PHASE-003")
    case.equal((True, "committed"), (again["ready"], again["phase"]), "ready in a later phase", "CKPT-PREP-004")
    case.equal("committed", p.status()["phase"], "a reply changes nothing", "CKPT-PHASE-003")
    case.step(f"resume {open_id}")
    resumed = case.accepted(c.resume(p, open_id), "resume is accepted in committed", "CKPT-RESUME-001")
    ended = (resumed["phase"], resumed["ended_as"])
    case.equal(("idle", "committed"), ended, "it ended", "CKPT-RESUME-005", "CKPT-RESUME-009")
    passed = (time.monotonic() - begun) * 1000
    paused = [first["pause_ms"], resumed["pause_ms"], (p.status()["last"] or {}).get("pause_ms")]
    status = p.status()
    case.equal(("idle", "open", None, None), _where(status), "the gate is open after a resume", "CKPT-RESUME-001")
    told = f"commit {paused[0]}, resume {paused[1]}, `last` {paused[2]}; {passed:.0f} ms since prepare"
    what = "pause_ms grows from commit to resume, is no longer than the time since prepare, and stays so in `last`"
    grows = 0 <= paused[0] <= paused[1] <= passed + 1 and paused[1] == paused[2]
    case.true(grows, what, "CKPT-RESUME-008", "CKPT-COMMIT-023", "CKPT-CKID-009", got=told)
    case.equal(progress, status["progress"], "progress does not count the snapshot", "CKPT-STATUS-008")
    last = (status["last"]["checkpoint_id"], status["last"]["ended_as"], status["last"]["manifest"])
    case.equal((open_id, "committed", first["manifest"]), last, "last holds the manifest", "CKPT-CKID-007")
    with case.unchanged():
        commit = case.accepted(c.commit(p, open_id, target), "commit of last", "CKPT-CKID-014")
        case.equal(
            steady(first.json),
            {**steady(commit.json), "phase": "committed"},
            "its outcome",
            "CKPT-CKID-014",
            "CKPT-CKID-018",
        )
        case.accepted(c.resume(p, open_id), "resume of last", "CKPT-CKID-015")
    case.accepted(c.abort(p, prepared_at(case)), "abort")
    case.equal(progress, p.status()["progress"], "progress after an abort of a prepared one", "CKPT-STATUS-008")


def _where(status: Json) -> tuple[object, ...]:
    return status["phase"], status["gate"], status["checkpoint_id"], status["captured"]


def steady(reply: Json) -> Json:
    """Return a reply without its times, which may differ from one of a call to that of its repeat."""
    return {key: value for key, value in reply.items() if not key.endswith("_ms")}


@check(
    "CKPT-ABORT-001",
    "CKPT-ABORT-004",
    "CKPT-ABORT-009",
    "CKPT-ABORT-011",
    "CKPT-ABORT-013",
    "CKPT-CKID-008",
    "CKPT-REPEAT-010",
    profile="checkpoint",
    each="participant",
    storage=True,
    budget="quick",
)
def abort_opens_the_gate_in_every_phase(case: Case) -> None:
    """C22: abort of a prepared, committed or restored checkpoint, twice at once: idle, open, ended as aborted."""
    c, p = case.controller, case.p
    for phase in ("prepared", "committed", "restored"):
        if phase == "committed":
            open_id, _, _ = committed_at(case)
        else:
            open_id = prepared_at(case) if phase == "prepared" else restored_at(case)
        case.step(f"abort {open_id} in phase {phase}, twice at the same time")
        replies = case.wire.together([functools.partial(c.abort, p, open_id)] * 2)
        for reply in replies:
            case.accepted(reply, f"abort in phase {phase}", "CKPT-ABORT-009")
            key = "CKPT-ABORT-013" if phase == "restored" else "CKPT-ABORT-004"
            case.equal("aborted", reply["ended_as"], f"it ended, from {phase}", key, "CKPT-REPEAT-010")
            case.equal(p.status()["last"]["pause_ms"], reply["pause_ms"], "the pause", "CKPT-ABORT-011")
        status = p.status()
        case.equal(("idle", "open", None, None), _where(status), f"open after {phase}", "CKPT-ABORT-001")
        last = status["last"]
        got = (last["checkpoint_id"], last["ended_as"], last["manifest"], last["error_code"])
        case.equal((open_id, "aborted", None, None), got, "how it ended, in `last`", "CKPT-CKID-008")


def _reads_are_answered(case: Case, p: Participant, phase: str, rollout_id: str | None = None) -> None:
    """Judge that capabilities, listing and, if there is one, a single rollout can be read in this phase."""
    reads = {"capabilities": p.get_capabilities(), "listing": p.get_rollouts()}
    if rollout_id is not None:
        reads["rollout"] = p.get_rollout(rollout_id)
    for what, reply in reads.items():
        case.accepted(reply, f"GET of the {what} while {phase}", "CKPT-PHASE-007")


@check(
    "CKPT-ACK-013",
    "CKPT-FEED-012",
    "CKPT-RETIRE-014",
    "CKPT-PHASE-007",
    "CKPT-COMMIT-012",
    "CKPT-RETIRE-016",
    "CKPT-RETIRE-015",
    "CKPT-RETIRE-001",
    "CKPT-RETIRE-018",
    "CKPT-COMMIT-013",
    "CKPT-COMMIT-048",
    profile="checkpoint",
    features=COMMON,
    world=True,
    storage=True,
)
def acks_and_retire_work_in_every_phase(case: Case) -> None:
    """The feed is served, ACKs are carried out and retire is accepted while prepared, committed and restored."""
    a = case.agent
    finished = [case.finished(script("done"))[1]["receipt"] for _ in range(2)]
    case.world.fail(kind="verify", rollout_id=(failing := case.new_id("failing")))
    case.failure(case.start(script("done"), rollout_id=failing, verify_in_world=True))
    live = [case.start_at(1) for _ in range(2)]
    gone = list(live)
    open_id = prepared_at(case, a)
    for phase in ("prepared", "committed"):
        case.equal(phase, a.status()["phase"], "the phase", "CKPT-PHASE-007")
        receipt, rollout = finished.pop(), live.pop()
        _reads_are_answered(case, a, phase, rollout.rollout_id)
        served, wanted = sorted(a.results()), receipt["rollout_id"]
        case.true(wanted in served, f"the feed serves {wanted} while {phase}", "CKPT-FEED-012", got=served)
        case.equal(["released"], case.ack(receipt), f"an ACK while {phase}", "CKPT-ACK-013")
        through = {rollout.rollout_id: rollout.attempt}
        case.accepted(case.controller.retire(a, through), f"a retire while {phase}", "CKPT-RETIRE-014")
        fenced = case.outcome(rollout.item)["outcome"]
        case.equal("stale_attempt", fenced, f"its fence while {phase}", "CKPT-RETIRE-001", "CKPT-RETIRE-014")
        if phase == "prepared":
            ready_at(case, a, open_id)  # CKPT-RETIRE-016: a retired rollout does not keep it from being ready
            target, directory = target_for(case, a, open_id)
            first = case.accepted(case.controller.commit(a, open_id, target), "commit", "CKPT-RETIRE-016")
    rows = read_part(case, a, open_id, target, directory, first).rows
    case.equal("finished", rows[receipt["rollout_id"]]["state"], "ACKed after the capture", "CKPT-COMMIT-012")
    held = [rollout.rollout_id in rows for rollout in gone]
    case.equal([True, False], held, "retired after and before the capture", "CKPT-RETIRE-018", "CKPT-COMMIT-013")
    states = [row["state"] for row in rows.values()]
    case.equal(states.count("finished"), first["counts"]["finished"], "counts.finished", "CKPT-COMMIT-048")
    case.accepted(case.controller.resume(a, open_id), "resume")
    for rollout in gone:
        case.until_state(rollout, "retired", requirements=("CKPT-RETIRE-015",))
    restore_id = restored_at(case, a)
    _reads_are_answered(case, a, "restored")
    case.accepted(a.get_results(), "the feed while restored", "CKPT-FEED-012")
    case.equal(["unknown"], case.ack(receipt), "an ACK while restored, of what the reset has dropped", "CKPT-ACK-013")
    fenced = case.controller.retire(a, {case.new_id(): 0})
    case.accepted(fenced, "a retire while restored", "CKPT-RETIRE-014")
    case.accepted(case.controller.resume(a, restore_id), "resume")


@check("CKPT-COMMIT-042", "CKPT-COMMIT-043", profile="checkpoint", each="participant", shared_dir=True)
def the_cut_of_an_aborted_checkpoint_is_whole_or_gone(case: Case) -> None:
    """A committed checkpoint is aborted: its manifest is gone, or it stays and names what is there whole."""
    open_id, target, _ = committed_at(case)
    directory = Path(target["path"])
    case.true(verifies(directory), "there was a whole cut", "CKPT-COMMIT-042", got="none")
    case.accepted(case.controller.abort(case.p, open_id), "abort")
    try:
        verifies(directory)
    except (ValueError, OSError) as error:
        case.true(False, "the manifest that stayed is whole", "CKPT-COMMIT-042", "CKPT-COMMIT-043", got=str(error))


@check("CKPT-ABORT-002", "CKPT-ABORT-005", "CKPT-COMMIT-041", profile="checkpoint", features=COMMON, shared_dir=True)
def abort_during_a_commit_leaves_no_late_manifest(case: Case) -> None:
    """C22: abort while a commit is writing returns in bounded time; nothing is written after its answer."""
    p = case.sessions
    rollout = case.start_at(1, script(grow(8_000_000), "done"))
    open_id = prepared_at(case, p)
    target, directory = target_for(case, p, open_id)
    case.step("commit in the background and abort at once")
    writing = case.wire.background(lambda: case.controller.commit(p, open_id, target))
    case.until(lambda: p.status()["phase"] != "prepared", "the commit has begun")
    reply = case.accepted(case.controller.abort(p, open_id), "abort", "CKPT-ABORT-002")
    writing.result()
    before = sorted((path.name, path.stat().st_size) for path in directory.iterdir())
    same = lambda: before == sorted((q.name, q.stat().st_size) for q in directory.iterdir())  # noqa: E731 - as above
    case.stays(same, "nothing is written after abort was answered", "CKPT-COMMIT-041")
    case.equal("idle", p.status()["phase"], "it is over", "CKPT-ABORT-002")
    case.equal("aborted", reply["ended_as"], "and can never publish", "CKPT-ABORT-005")
    case.refused(case.controller.commit(p, open_id, target), "stale_checkpoint", "the cut is gone", "CKPT-ABORT-005")
    case.release(rollout)
