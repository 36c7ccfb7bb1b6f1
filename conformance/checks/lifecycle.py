# SPDX-License-Identifier: Apache-2.0
"""Lifecycle: prepare, commit, resume, abort, renew, the lease, and repeats of each."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path

from conformance.case import Case
from conformance.checks.snapshots_sources import verifies
from conformance.controller import LEASE_MS, Controller, Json, Participant
from conformance.cuts import (
    committed_at,
    prepared_at,
    read_part,
    ready_at,
    restored_at,
    target_for,
)
from conformance.errors import Failed, LostReply, NotOffered
from conformance.registry import check
from conformance.script import grow, script
from conformance.wire import Fault

COMMON = ("conformance",)
CLOCK_SLACK_MS = 60


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
            _steady(first.json),
            {**_steady(commit.json), "phase": "committed"},
            "its outcome",
            "CKPT-CKID-014",
            "CKPT-CKID-018",
        )
        case.accepted(c.resume(p, open_id), "resume of last", "CKPT-CKID-015")


def _where(status: Json) -> tuple[object, ...]:
    return status["phase"], status["gate"], status["checkpoint_id"], status["captured"]


def _steady(reply: Json) -> Json:
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
        case.equal((open_id, "aborted", None, None), got, "last", "CKPT-CKID-008")


@check(
    "CKPT-LEASE-009",
    "CKPT-LEASE-005",
    "CKPT-LEASE-006",
    "CKPT-LEASE-007",
    "CKPT-LEASE-011",
    "CKPT-LEASE-012",
    "CKPT-LEASE-013",
    profile="checkpoint",
    storage=True,
    budget="default",
)
def a_lease_ends_by_itself(case: Case) -> None:
    """C26, N6: without word from the controller the gate opens: expired, or committed; polling renews nothing."""
    lease_ms = max(p.limit("min_lease_ms") for p in case.gym.participants)
    if lease_ms > case.patience.ms(10_000):
        raise NotOffered(f"the shortest lease is {lease_ms} ms")
    lower = Controller("aaa", max(1, case.controller.epoch - 1))
    knocking: dict[str, Callable[[Participant], object]] = {
        "CKPT-LEASE-005": lambda p: (lower.abort(p, f"{lower.epoch}-0"), case.controller.adopt(p)),
        "CKPT-LEASE-006": _read_everything,
        "CKPT-LEASE-007": lambda p: case.controller.retire(p, {}),
    }
    for phase, ended_as, key, knocks in (
        ("restored", "expired", "CKPT-LEASE-013", "CKPT-LEASE-006"),
        ("prepared", "expired", "CKPT-LEASE-009", "CKPT-LEASE-005"),
        ("committed", "committed", "CKPT-LEASE-012", "CKPT-LEASE-007"),
    ):
        open_id = case.controller.next_id()
        asked = {}
        for p in case.gym.participants:
            if phase == "restored":
                asked[p.name] = time.monotonic()
                case.accepted(case.controller.restore(p, open_id, None, lease_ms=lease_ms), "a reset")
            else:
                ready_at(case, p, open_id, lease_ms=lease_ms)
                asked[p.name] = time.monotonic()
                if phase == "committed":
                    target, _ = target_for(case, p, open_id)
                    case.accepted(case.controller.commit(p, open_id, target), "commit")
        case.step(f"in phase {phase} poll the status, and {KNOCKS[knocks]}")
        for p in case.gym.participants:
            _await_lease_end(case, p, lease_ms, functools.partial(knocking[knocks], p), knocks, key)
            passed = (time.monotonic() - asked[p.name]) * 1000
            got = f"{passed:.0f} of {lease_ms} ms"
            case.true(passed >= lease_ms - CLOCK_SLACK_MS, "not before its end", key, got=got)
            status = p.status()
            case.equal("open", status["gate"], "the gate is open", key, "CKPT-LEASE-011")
            last = (status["last"]["checkpoint_id"], status["last"]["ended_as"])
            case.equal((open_id, ended_as), last, "how it ended", key)


KNOCKS = {
    "CKPT-LEASE-005": "send calls that are refused: of a lower controller, and with a lower id",
    "CKPT-LEASE-006": "read everything else that can be read",
    "CKPT-LEASE-007": "send an empty retire, which names no checkpoint",
}


def _read_everything(p: Participant) -> None:
    """Send every GET; what it answers is judged elsewhere."""
    p.get_capabilities()
    if p.owns("rollouts"):
        p.get_rollouts()
        p.get_rollout("nobody")
        p.get_results()


def _await_lease_end(
    case: Case, p: Participant, lease_ms: int, knock: Callable[[], object], knocks: str, key: str
) -> None:
    """Knock until the lease has ended; if it has not in time, see whether it ends in silence, and blame accordingly."""

    def over() -> bool:
        knock()
        return bool(p.status()["phase"] == "idle")

    bound = lease_ms / 1000 / case.patience.scale + 3
    try:
        case.until(over, f"the gate of {p.name} opens when the lease ends", within_s=bound)
    except Failed as error:
        case.step("say nothing for one and a half leases")
        case.patience.pause(1.5 * lease_ms / 1000)
        error.requirements = (knocks,) if p.status()["phase"] == "idle" else (key,)
        raise


@check(
    "CKPT-RENEW-001",
    "CKPT-RENEW-003",
    "CKPT-LEASE-002",
    "CKPT-LEASE-003",
    "CKPT-LEASE-004",
    "CKPT-LEASE-016",
    "CKPT-REPEAT-011",
    "CKPT-STATUS-005",
    profile="checkpoint",
    each="participant",
)
def leases_are_clamped_and_renewed(case: Case) -> None:
    """A lease outside the limits counts as the nearer limit; renew extends it and never shortens it."""
    c, p = case.controller, case.p
    low, high = p.limit("min_lease_ms"), p.limit("max_lease_ms")
    open_id = case.controller.next_id()
    case.step("prepare with a lease of 1 ms")
    reply = ready_at(case, p, open_id, lease_ms=1)
    left = reply["lease_remaining_ms"]
    case.true(low - 2000 < left <= low and left > 1, "counts as the minimum", "CKPT-LEASE-002", got=left)
    case.step("renew with a lease of a day")
    left = case.accepted(c.renew(p, open_id, lease_ms=86_400_000), "renew", "CKPT-RENEW-001")["lease_remaining_ms"]
    case.true(high - 2000 < left <= high, "counts as the maximum", "CKPT-LEASE-003", "CKPT-RENEW-003", got=left)
    shown = p.status()["lease_remaining_ms"]
    case.true(high - 4000 < shown <= high, "status shows it", "CKPT-STATUS-005", got=shown)
    case.step("renew with a lease of 1 ms")
    left = case.accepted(c.renew(p, open_id, lease_ms=1), "renew", "CKPT-RENEW-001")["lease_remaining_ms"]
    case.true(left > low or low == high, "a renew never shortens", "CKPT-REPEAT-011", got=left)
    case.step("let 300 ms pass, prepare again with the same lease")
    case.patience.pause(0.3)
    again = ready_at(case, p, open_id, lease_ms=high)["lease_remaining_ms"]
    full = high - 250 < again <= high
    case.true(full, "the full length again", "CKPT-LEASE-004", "CKPT-LEASE-016", got=[again, high])


@check(
    "CKPT-REPEAT-002",
    "CKPT-REPEAT-004",
    "CKPT-REPEAT-007",
    "CKPT-REPEAT-013",
    "CKPT-REPEAT-003",
    "CKPT-REPEAT-006",
    profile="checkpoint",
    each="participant",
    storage=True,
    budget="quick",
)
def a_repeat_with_other_arguments_conflicts(case: Case) -> None:
    """C31, N4: the same id with another run, target or source is `argument_conflict`; a smaller time budget is not."""
    c, p = case.controller, case.p
    open_id, target, first = committed_at(case)
    other, _ = target_for(case, p, open_id + "-other")
    case.refused(c.prepare(p, open_id, run_id="other"), "argument_conflict", "another run", "CKPT-REPEAT-002")
    if other != target:
        case.refused(c.commit(p, open_id, other), "argument_conflict", "another target", "CKPT-REPEAT-004")
    left_out = c.commit(p, open_id, target, leave_out_blocked=True)
    case.refused(left_out, "argument_conflict", "another leave_out_blocked", "CKPT-REPEAT-004")
    case.accepted(c.prepare(p, open_id, timeout_ms=1, lease_ms=5000), "a smaller budget", "CKPT-REPEAT-013")
    again = case.accepted(c.commit(p, open_id, target, timeout_ms=1, wait="captured"), "a smaller budget")
    case.equal(first["manifest"], again["manifest"], "the same cut", "CKPT-REPEAT-003")
    case.accepted(c.resume(p, open_id), "resume")
    restore_id = restored_at(case)
    fence = [{"rollout_id": case.new_id(), "through_attempt": 1}]
    case.refused(c.restore(p, restore_id, None, fences=fence), "argument_conflict", "other lists", "CKPT-REPEAT-007")
    policy = case.witness.policy()
    case.refused(c.restore(p, restore_id, None, policy=policy), "argument_conflict", "a policy", "CKPT-REPEAT-007")
    case.accepted(c.restore(p, restore_id, None, timeout_ms=1, lease_ms=5000), "a smaller budget", "CKPT-REPEAT-006")


@check(
    "CKPT-REPEAT-014",
    "CKPT-REPEAT-005",
    "CKPT-PHASE-002",
    "CKPT-REPEAT-009",
    "CKPT-RESUME-006",
    profile="checkpoint",
    each="participant",
    storage=True,
    budget="default",
)
def fifty_at_once_are_one(case: Case) -> None:
    """C31: prepare, commit, resume, restore and abort, each 50 times at once: one execution, 50 equal replies."""
    c, p = case.controller, case.p
    open_id, restore_id, abort_id = c.next_id(), c.next_id(), c.next_id()
    target, _ = target_for(case, p, open_id)
    for verb, call in (
        ("prepare", lambda: c.prepare(p, open_id)),
        ("commit", lambda: c.commit(p, open_id, target)),
        ("resume", lambda: c.resume(p, open_id)),
        ("restore", lambda: c.restore(p, restore_id, None)),
        ("resume the restore", lambda: c.resume(p, restore_id)),
        ("abort", lambda: c.abort(p, abort_id)),
    ):
        case.step(f"{verb}, 50 times at once")
        replies = case.wire.together([call] * 50)
        key = {"prepare": "CKPT-PHASE-002", "commit": "CKPT-REPEAT-005", "resume": "CKPT-REPEAT-009"}.get(verb)
        ids = ("CKPT-REPEAT-014", key) if key else ("CKPT-REPEAT-014",)
        for reply in replies:
            case.accepted(reply, f"{verb} among 50", *ids)
        seen = {str(sorted(_steady(reply.json).items())) for reply in replies}
        if verb == "prepare":
            seen = {str((reply["ready"], reply["blocker_count"])) for reply in replies}
        case.equal(1, len(seen), f"different replies to {verb}: {sorted(seen)[:3]}", *ids)
        if verb == "resume the restore":
            case.equal({"restored"}, {reply["ended_as"] for reply in replies}, "it ended", "CKPT-RESUME-006")


@check(
    "CKPT-REPEAT-015",
    profile="checkpoint",
    each="participant",
    storage=True,
    budget="default",
)
def what_was_begun_is_finished_without_the_client(case: Case) -> None:
    """C33: the connection is reset 10 ms after prepare, commit and resume: each reaches its end."""
    c, p = case.controller, case.p
    open_id = c.next_id()
    target, _ = target_for(case, p, open_id)
    verbs: list[tuple[str, str, Callable[[], object]]] = [
        ("prepare", "prepared", lambda: c.prepare(p, open_id, fault=Fault.disconnect(10))),
        ("commit", "committed", lambda: c.commit(p, open_id, target, fault=Fault.disconnect(10))),
        ("resume", "idle", lambda: c.resume(p, open_id, fault=Fault.disconnect(10))),
    ]
    for verb, phase, call in verbs:
        case.step(f"{verb}, and reset the connection 10 ms later")
        with contextlib.suppress(LostReply):
            call()
        _until_phase(case, p, phase, "CKPT-REPEAT-015")
    case.equal("committed", p.status()["last"]["ended_as"], "no half state", "CKPT-REPEAT-015")


def _until_phase(case: Case, p: Participant, phase: str, *requirements: str) -> None:
    case.until(lambda: p.status()["phase"] == phase, f"{p.name} reaches {phase}", *requirements)


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
        case.true(receipt["rollout_id"] in a.results(), "the feed is served", "CKPT-FEED-012")
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
