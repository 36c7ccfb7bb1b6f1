# SPDX-License-Identifier: Apache-2.0
"""Snapshots and restart: what a restore installs, what it refuses, and what it leaves alone."""

from __future__ import annotations

from conformance.case import DEFAULT_SCRIPT, Case, Rollout
from conformance.controller import Json
from conformance.cuts import (
    plan,
    reset,
    restore_at,
    restore_cut,
    resume_everywhere,
    take_cut,
)
from conformance.registry import check
from conformance.script import script
from conformance.wire import Reply
from spec import wire as names

COMMON = ("conformance",)


@check(
    "CKPT-FEED-016",
    "CKPT-RESTORE-021",
    "CKPT-RESTORE-023",
    "CKPT-RESTORE-022",
    "CKPT-RESTORE-042",
    "CKPT-RESTORE-038",
    "CKPT-RESTORE-039",
    "CKPT-RESTORE-040",
    "CKPT-RESTORE-054",
    "CKPT-FEED-004",
    "CKPT-FEED-006",
    "CKPT-STATUS-024",
    "CKPT-RESTORE-015",
    "CKPT-RESTORE-016",
    "CKPT-RESTORE-030",
    profile="checkpoint",
    features=COMMON,
    storage=True,
    budget=("quick", "demo"),
)
def a_restore_installs_exactly_its_lists(case: Case) -> None:
    """N2, N19: listed results come back with their receipts under a new feed; what is unlisted is gone and fenced."""
    reset(case)
    kept, left = case.finished()[1], case.finished()[1]
    live = case.start_at(1)
    cut = take_cut(case)
    later = case.start_at(1)
    feed = case.agent.get_results()["feed"]
    cursor = case.agent.get_results()["next"]
    lists = plan(case, cut, only=[live.rollout_id], keep=[kept["receipt"]["rollout_id"]])
    lists.fences.append({"rollout_id": later.rollout_id, "through_attempt": later.attempt})
    lists.fences.append({"rollout_id": (never := case.new_id("never")), "through_attempt": 6})
    checkpoint_id = case.controller.next_id()
    for p in case.gym.descending:
        reply = case.accepted(restore_at(case, p, cut, lists, checkpoint_id), f"{p.name} restores")
        rows, results = len(lists.rollouts[p.name]), int(p.owns("rollouts"))
        restarts = {row["rollout_id"] for row in reply["restarts"]}
        case.equal(
            rows, reply["restored_count"] + len(restarts), "made current", "CKPT-RESTORE-038", "CKPT-RESTORE-039"
        )
        strangers = restarts - {row["rollout_id"] for row in lists.rollouts[p.name]}
        case.equal(set(), strangers, "restarts that were not listed", "CKPT-RESTORE-040")
        case.equal(results, reply["results_count"], "the results kept", "CKPT-RESTORE-042")
    resume_everywhere(case, checkpoint_id)
    page = case.agent.get_results(after=cursor)
    now = page["feed"]
    case.true(
        now != feed, f"the feed is another one than {feed}, which it was before the restore", "CKPT-FEED-004", got=now
    )
    served = {row["receipt"]["rollout_id"]: row["receipt"] for row in page["results"]}
    wanted = {kept["receipt"]["rollout_id"]: kept["receipt"]}
    case.equal(wanted, served, "what is served", "CKPT-FEED-016", "CKPT-RESTORE-023", "CKPT-RESTORE-021")
    whole = {row["receipt"]["rollout_id"] for row in case.agent.get_results()["results"]}
    case.equal(whole, set(served), "the cursor of the old feed counts as none", "CKPT-FEED-006")
    again = case.outcome(case.item(kept["receipt"]["rollout_id"]))
    case.equal("already_finished", again["outcome"], "a start of the kept one", "CKPT-RESTORE-054")
    counts = case.agent.status()["counts"]
    got = (counts["admitted"], counts["live"], counts["finished_unreleased"])
    alive = len(lists.rollouts[case.agent.name])
    case.equal((1 + alive, alive, 1), got, "counts start from what was installed", "CKPT-STATUS-024")
    gone = left["receipt"]["rollout_id"]
    listing = case.agent.rollouts()
    unlisted = {key for key in (gone, later.rollout_id) if listing.get(key, {}).get("state") in ("running", "finished")}
    case.equal(set(), unlisted, "unlisted work", "CKPT-RESTORE-022", "CKPT-RESTORE-015")
    for key, attempt, what in ((later.rollout_id, later.attempt, "CKPT-RESTORE-016"), (never, 6, "CKPT-RESTORE-030")):
        outcome = case.outcome(case.item(key, attempt=attempt))
        case.equal("stale_attempt", outcome["outcome"], f"{key} is fenced", what)


@check(
    "CKPT-RESTORE-024",
    "CKPT-RESTORE-025",
    "CKPT-RESTORE-026",
    "CKPT-RESTORE-027",
    "CKPT-RESTORE-028",
    "CKPT-RESTORE-004",
    "CKPT-RESTORE-003",
    "CKPT-RESTORE-011",
    "CKPT-RESTORE-012",
    "CKPT-RESTORE-013",
    "CKPT-ERR-020",
    "CKPT-ERR-035",
    "CKPT-RESTORE-055",
    "CKPT-RESTORE-056",
    profile="turn-recovery",
    features=COMMON,
    storage=True,
)
def a_restore_that_disagrees_with_its_source_is_refused(case: Case) -> None:
    """C15, C63: another task, attempt, turn count, receipt or digest: refused by name, nothing is installed."""
    rollout, other = case.start_at(1), case.start_at(1)
    cut = take_cut(case)
    a = case.agent
    part = cut.parts[a.name]
    row = part.rows[rollout.rollout_id]
    foreign = {"rollout_id": case.new_id(), "attempt": 0, "digest": names.result_digest("{}")}

    def listed(**changed: object) -> list[Json]:
        item = {key: row[key] for key in ("rollout_id", "attempt", "turns_done", "task_digest")}
        return [{**item, "next_attempt": case.next_attempt(rollout.rollout_id), **changed}]

    cases: list[tuple[str, str, Json]] = [
        ("CKPT-RESTORE-028", "another task_digest", {"rollouts": listed(task_digest="sha256:other")}),
        ("CKPT-RESTORE-027", "another turns_done", {"rollouts": listed(turns_done=0)}),
        ("CKPT-RESTORE-026", "another attempt", {"rollouts": listed(attempt=5, next_attempt=6)}),
        ("CKPT-RESTORE-024", "an unknown rollout", {"rollouts": listed(rollout_id=case.new_id())}),
        ("CKPT-RESTORE-025", "an unknown receipt", {"results": [foreign]}),
    ]
    for key, what, lists in cases:
        checkpoint_id = case.controller.next_id()
        case.step(f"restore with {what}")
        before = a.get_results()["feed"]
        reply = case.controller.restore(a, checkpoint_id, part.source(cut.checkpoint_id), **lists)
        case.refused(reply, "state_mismatch", what, key)
        named = [row["rollout_id"] for row in reply.json.get("rollouts", [])]
        listed_ids = [row["rollout_id"] for row in (*lists.get("rollouts", []), *lists.get("results", []))]
        case.equal(listed_ids, named, "the rollouts that the problem names", "CKPT-ERR-020")
        _as_before(case, checkpoint_id, before, [rollout, other])
    source = {**part.source(cut.checkpoint_id), "checkpoint_id": f"{case.controller.epoch}-999"}
    reply = case.controller.restore(a, case.controller.next_id(), source)
    case.refused(reply, "state_mismatch", "a manifest of another checkpoint", "CKPT-RESTORE-004")
    source = {**part.source(cut.checkpoint_id), "manifest_digest": names.bytes_digest(b"other")}
    reply = case.controller.restore(a, case.controller.next_id(), source)
    case.refused(reply, "checkpoint_corrupt", "another manifest digest", "CKPT-RESTORE-003")
    source = part.source(cut.checkpoint_id)
    reply = case.controller.restore(a, case.controller.next_id(), source, run_id="another-run")
    case.refused(reply, "state_incompatible", "another run", "CKPT-ERR-035")
    twice = [*listed(), *listed()]
    reply = case.controller.restore(a, case.controller.next_id(), source, rollouts=twice)
    case.refused(reply, "invalid_request", "one rollout with two entries", "CKPT-RESTORE-056")
    same = listed(attempt=9, next_attempt=9)
    reply = case.controller.restore(a, case.controller.next_id(), source, rollouts=same)
    case.refused(reply, "stale_attempt", "a next_attempt that is not above the attempt", "CKPT-RESTORE-055")
    for found in (rollout, other):
        case.release(found)
        case.body(found, "CKPT-RESTORE-011")


def _as_before(case: Case, checkpoint_id: str, feed: str, rollouts: list[Rollout]) -> None:
    status = case.agent.status()
    got = (status["phase"], status["gate"], status["feed"])
    case.equal(("idle", "open", feed), got, "as before", "CKPT-RESTORE-012", "CKPT-RESTORE-011")
    last = (status["last"]["checkpoint_id"], status["last"]["ended_as"])
    case.equal((checkpoint_id, "failed"), last, "how it ended, in `last`", "CKPT-RESTORE-013")
    for rollout in rollouts:
        row = case.row(rollout)
        case.equal((rollout.attempt, 1), (row["attempt"], row["turns_done"]), "still there", "CKPT-RESTORE-011")


@check(
    "CKPT-RESTORE-002",
    "CKPT-ERR-032",
    "CKPT-ERR-033",
    "CKPT-RESTORE-005",
    "CKPT-RESTORE-011",
    "CKPT-DIR-020",
    profile="checkpoint",
    features=COMMON,
    shared_dir=True,
    budget="default",
)
def damaged_files_are_refused_by_name(case: Case) -> None:
    """C41: a byte flipped, cut or added: `checkpoint_corrupt` names the file, nothing is changed."""
    case.start_at(1)
    case.finished()
    cut = take_cut(case)
    a = case.agent
    part = cut.parts[a.name]
    for row in part.manifest_json()["files"]:
        path = part.directory / row["name"]
        whole = path.read_bytes()
        for what, damaged in (
            ("one byte flipped", bytes([whole[0] ^ 1]) + whole[1:] if whole else b"x"),
            ("cut short", whole[:-1] if whole else b"y"),
            ("a newline more", whole + b"\n"),
        ):
            path.unlink()
            path.write_bytes(damaged)
            case.step(f"{row['name']}: {what}")
            lists = plan(case, cut)
            reply = restore_at(case, a, cut, lists, case.controller.next_id())
            case.refused(reply, "checkpoint_corrupt", f"{row['name']}: {what}", "CKPT-ERR-032", "CKPT-RESTORE-002")
            case.true(row["name"] in reply["detail"], "the file is named", "CKPT-ERR-033", got=reply["detail"])
            case.equal("open", a.status()["gate"], "nothing is changed", "CKPT-RESTORE-005", "CKPT-RESTORE-011")
        path.unlink()
        path.symlink_to("/dev/null")
        reply = restore_at(case, a, cut, plan(case, cut), case.controller.next_id())
        case.refused(reply, "checkpoint_corrupt", f"{row['name']} is a link", "CKPT-DIR-020")
        path.unlink()
        path.write_bytes(whole)


@check(
    "CKPT-RESTORE-029",
    "CKPT-RESTORE-053",
    "CKPT-RESTORE-057",
    "CKPT-ERR-019",
    "CKPT-RESTORE-011",
    profile="turn-recovery",
    features=COMMON,
    storage=True,
)
def a_restore_takes_a_higher_attempt(case: Case) -> None:
    """A `next_attempt` that is not above fence and living attempt is `stale_attempt`; nothing is installed."""
    rollout = case.start_at(1)
    cut = take_cut(case)
    a = case.agent
    part = cut.parts[a.name]
    row = part.rows[rollout.rollout_id]
    item = {key: row[key] for key in ("rollout_id", "attempt", "turns_done", "task_digest")}
    source = part.source(cut.checkpoint_id)
    same = case.controller.restore(a, case.controller.next_id(), source, rollouts=[{**item, "next_attempt": 0}])
    case.refused(same, "stale_attempt", "the living attempt", "CKPT-RESTORE-053")
    case.controller.retire(a, {rollout.rollout_id: 4})
    fenced = case.controller.restore(a, case.controller.next_id(), source, rollouts=[{**item, "next_attempt": 4}])
    case.refused(fenced, "stale_attempt", "a fenced attempt", "CKPT-RESTORE-029")
    named = {found["rollout_id"]: found.get("through_attempt") for found in fenced.json.get("rollouts", [])}
    case.equal({rollout.rollout_id: 4}, named, "rollouts and their fences", "CKPT-ERR-019")
    with case.unchanged("CKPT-RESTORE-057", at=[a]):
        bad = case.controller.restore(a, case.controller.next_id(), source, rollouts=[{**item, "next_attempt": 3}])
        case.refused(bad, "stale_attempt", "a fence that already stands", "CKPT-RESTORE-057")
    case.equal("retired", case.row(rollout)["state"], "nothing was installed", "CKPT-RESTORE-011")


@check(
    "CKPT-ABORT-007",
    "CKPT-ABORT-008",
    "CKPT-RESTORE-032",
    "CKPT-RESTORE-019",
    "CKPT-RESTORE-059",
    "CKPT-ABORT-012",
    "CKPT-STATUS-021",
    "CKPT-ID-024",
    "CKPT-ID-025",
    profile="checkpoint",
    features=COMMON,
    storage=True,
    budget="quick",
)
def an_aborted_restore_leaves_nothing_and_fences(case: Case) -> None:
    """N12, N16: in `restored` nothing runs; abort discards what was installed and fences its attempts."""
    rollout = case.start_at(1)
    done, _ = case.finished(script("done"))
    cut = take_cut(case)
    incarnations = [p.capabilities["incarnation"] for p in case.gym.participants]
    case.release(rollout)
    restored = restore_cut(case, cut, resume=False)
    counted = case.agent.status()["counts"]
    attempt = restored.next_attempts.get(rollout.rollout_id)
    if attempt is None:
        left = ("CKPT-RESTORE-032", "CKPT-RESTORE-059", "CKPT-ABORT-008")
        case.leave_out("no rollout continues without turn-recovery", *left)
    quiet = lambda: not case.witness.asked(rollout.rollout_id, attempt=attempt)  # noqa: E731 - a named condition
    if attempt is not None:
        case.stays(quiet, "nothing is continued before resume", "CKPT-RESTORE-032")
    status = case.agent.status()
    open_id = status["checkpoint_id"]
    case.equal(("restored", "closed"), (status["phase"], status["gate"]), "parked", "CKPT-RESTORE-019")
    if attempt is not None:
        old = case.outcome(rollout.item)
        case.equal("stale_attempt", old["outcome"], "the saved attempt is fenced", "CKPT-RESTORE-059")
    for p in case.gym.participants:
        reply = case.accepted(case.controller.abort(p, open_id), "abort of a restored checkpoint", "CKPT-ABORT-007")
        case.equal("aborted", reply["ended_as"], "it ended", "CKPT-ABORT-007")
    now = [p.get_capabilities()["incarnation"] for p in case.gym.participants]
    case.equal(incarnations, now, "the incarnations", "CKPT-ID-025", "CKPT-ID-024")
    counts = case.agent.status()["counts"]
    case.equal(0, counts["live"], "nothing is left", "CKPT-ABORT-007")
    discarded = counted["live"] + counted["finished_unreleased"] + counted["failed_unreleased"]
    case.equal(discarded, counts["retired"] - counted["retired"], "what was discarded is retired", "CKPT-STATUS-021")
    if attempt is not None:
        outcome = case.outcome({**rollout.item, "attempt": attempt})
        case.equal("stale_attempt", outcome["outcome"], "the restored attempt is fenced", "CKPT-ABORT-008")
    case.equal("stale_attempt", case.outcome(done.item)["outcome"], "a discarded result's too", "CKPT-ABORT-012")


@check(
    "CKPT-RESTORE-031",
    "CKPT-FENCE-010",
    "CKPT-FENCE-011",
    "CKPT-STATUS-024",
    "CKPT-FEED-004",
    "CKPT-CKID-016",
    "CKPT-CKID-017",
    "CKPT-CKID-029",
    profile="checkpoint",
    features=COMMON,
    budget=("quick", "demo"),
)
def a_reset_leaves_fences_alone(case: Case) -> None:
    """N17: `source: null` leaves no rollout, result or tombstone; what was released is fenced, and may run again."""
    released, entry = case.finished()
    case.ack(entry["receipt"])
    live = case.start_at(1)
    feed = case.agent.get_results()["feed"]
    restore_id = case.controller.next_id()
    for p in case.gym.descending:
        case.accepted(case.controller.restore(p, restore_id, None), "a fresh id", "CKPT-CKID-029")
    resume_everywhere(case, restore_id)
    reply = case.accepted(case.controller.restore(case.agent, restore_id, None), "restore of last", "CKPT-CKID-016")
    case.equal((0, 0), (reply["restored_count"], reply["results_count"]), "its outcome", "CKPT-CKID-016")
    reply = case.accepted(case.controller.resume(case.agent, restore_id), "resume of last", "CKPT-CKID-017")
    case.equal("restored", reply["ended_as"], "its outcome", "CKPT-CKID-017")
    counts = case.agent.status()["counts"]
    case.equal({0}, set(counts.values()), "every count", "CKPT-RESTORE-031", "CKPT-STATUS-024")
    now = case.agent.get_results()["feed"]
    case.true(
        now != feed, f"the feed is another one than {feed}, which it was before the restore", "CKPT-FEED-004", got=now
    )
    for rollout in (released, live):
        same = case.outcome(rollout.item)
        case.equal("stale_attempt", same["outcome"], "the old attempt is fenced", "CKPT-FENCE-011")
        case.witness.script(rollout.rollout_id, DEFAULT_SCRIPT)
        again = case.start(rollout_id=rollout.rollout_id, attempt=1)
        case.release(live)
        case.body(again, "CKPT-FENCE-010")


@check(
    "CKPT-REPEAT-008",
    "CKPT-REPEAT-006",
    "CKPT-REPEAT-007",
    profile="turn-recovery",
    features=COMMON,
    storage=True,
)
def lists_of_a_restore_are_sets(case: Case) -> None:
    """A repeated restore whose lists are shuffled joins the first; one without a member is `argument_conflict`."""
    rollouts = [case.start_at(1) for _ in range(3)]
    cut = take_cut(case)
    a = case.agent
    lists = plan(case, cut)
    rows = lists.rollouts[a.name]
    checkpoint_id = case.controller.next_id()
    first = case.accepted(restore_at(case, a, cut, lists, checkpoint_id), "restore")
    source = cut.parts[a.name].source(cut.checkpoint_id)

    def again(chosen: list[Json]) -> Reply:
        return case.controller.restore(
            a, checkpoint_id, source, rollouts=chosen, results=lists.results, fences=lists.fences
        )

    reply = again(rows[::-1])
    case.accepted(reply, "shuffled", "CKPT-REPEAT-008")
    case.equal(first["restored_count"], reply["restored_count"], "the same reply", "CKPT-REPEAT-006")
    case.refused(again(rows[1:]), "argument_conflict", "one fewer", "CKPT-REPEAT-007")
    case.true(len(rows) >= len(rollouts), f"the index has all {len(rollouts)} rollouts", got=len(rows))


@check(
    "CKPT-RESTORE-003",
    "CKPT-RESTORE-004",
    "CKPT-RESTORE-011",
    "CKPT-RESTORE-013",
    "CKPT-RESTORE-024",
    "CKPT-RESTORE-025",
    "CKPT-RESTORE-043",
    "CKPT-RESTORE-044",
    "CKPT-RESTORE-056",
    "CKPT-COMMIT-043",
    "CKPT-ERR-020",
    "CKPT-ERR-035",
    "CKPT-REPEAT-008",
    profile="checkpoint",
    features=COMMON,
    storage=True,
)
def results_are_restored_from_what_holds_them(case: Case) -> None:
    """Results alone: a source that disagrees is refused; lists are sets; the cut is untouched, and used twice."""
    done = [case.finished(script("done"))[1]["receipt"] for _ in range(3)]
    cut = take_cut(case)
    a, c = case.agent, case.controller
    part = cut.parts[a.name]
    source = part.source(cut.checkpoint_id)
    other = {**done[0], "digest": names.result_digest("{}")}
    stranger = {"rollout_id": case.new_id(), "attempt": 0, "next_attempt": 1, "turns_done": 0, "task_digest": "x"}
    feed = a.get_results()["feed"]
    for key, code, what, changed in (
        ("CKPT-RESTORE-025", "state_mismatch", "another digest", {"results": [other]}),
        ("CKPT-RESTORE-024", "state_mismatch", "an unknown rollout", {"rollouts": [stranger]}),
        ("CKPT-RESTORE-056", "invalid_request", "two receipts of one rollout", {"results": [done[0], other]}),
        ("CKPT-ERR-035", "state_incompatible", "another run", {"run_id": "another-run"}),
    ):
        checkpoint_id = c.next_id()
        reply = c.restore(a, checkpoint_id, source, **changed)
        case.refused(reply, code, what, key)
        if code == "state_mismatch":
            case.true(reply.json.get("rollouts"), "the problem names rollouts", "CKPT-ERR-020", got=reply.brief)
            last = a.status()["last"]
            got = (last["checkpoint_id"], last["ended_as"])
            case.equal((checkpoint_id, "failed"), got, "how it ended, in `last`", "CKPT-RESTORE-013")
    wrong = {**source, "checkpoint_id": f"{c.epoch}-999"}
    case.refused(c.restore(a, c.next_id(), wrong), "state_mismatch", "another checkpoint", "CKPT-RESTORE-004")
    wrong = {**source, "manifest_digest": names.bytes_digest(b"other")}
    case.refused(c.restore(a, c.next_id(), wrong), "checkpoint_corrupt", "another digest", "CKPT-RESTORE-003")
    case.equal(feed, a.get_results()["feed"], "nothing was installed", "CKPT-RESTORE-011")
    for _ in range(2):
        restore_id = c.next_id()
        case.accepted(c.restore(a, restore_id, source, results=done), "restore", "CKPT-RESTORE-043", "CKPT-RESTORE-044")
        case.accepted(c.restore(a, restore_id, source, results=done[::-1]), "the list shuffled", "CKPT-REPEAT-008")
        case.accepted(c.resume(a, restore_id), "resume")
        served = set(a.results())
        case.true({r["rollout_id"] for r in done} <= served, "served again", "CKPT-RESTORE-044", got=sorted(served))
        for row in part.manifest_json()["files"]:
            content = (part.directory / row["name"]).read_bytes()
            case.equal(row["digest"], names.bytes_digest(content), f"{row['name']} is untouched", "CKPT-COMMIT-043")
