# SPDX-License-Identifier: Apache-2.0
"""Snapshots and restart: what a cut holds, what a restore installs, and the acid test."""

from __future__ import annotations

import json
from pathlib import Path

from conformance.case import DEFAULT_SCRIPT, Case, Rollout
from conformance.checks.results import schema_faults
from conformance.controller import Json
from conformance.cuts import (
    Cut,
    Part,
    commit_everywhere,
    plan,
    prepare_everywhere,
    read_part,
    reset,
    restore_at,
    restore_cut,
    resume_everywhere,
    take_cut,
)
from conformance.registry import check
from conformance.script import add, grow, refuse, script, world
from conformance.wire import Reply
from spec import wire as names

COMMON = ("conformance",)
LONG = script(
    add(5),
    [add(-3), world("a"), refuse()],
    grow(2000),
    [world("b"), add(7)],
    [add(11), add(13), add(17)],
    add(0),
    "done",
)


def judge_kept_turns(case: Case, rollout: Rollout, kept: int, again: int = 1) -> None:
    """Judge that no turn up to `kept` was generated more than once, and later ones at most 1 + `again` times (I2)."""
    counts = case.witness.completed_by_turn(rollout.rollout_id)
    redone = {turn: n for turn, n in counts.items() if turn <= kept and n > 1}
    case.equal({}, redone, f"finished turns of {rollout.rollout_id} that were generated again", "CKPT-INV-002")
    case.true(max(counts.values()) <= 1 + again, "later turns at most once more", "CKPT-INV-002", got=dict(counts))


def interrupt(case: Case, rollout: Rollout, cut: Cut, **kwargs: object) -> None:
    """Let a rollout run past the cut, then restore it from there."""
    case.release(rollout)
    case.witness.wait_asked(rollout.rollout_id, cut.row(case, rollout.rollout_id)["turns_done"] + 2)
    restore_cut(case, cut, **kwargs)  # type: ignore[arg-type]  # keywords of restore_cut


@check(
    "CKPT-ENV-006",
    "CKPT-INV-002",
    "CKPT-RESTORE-020",
    "CKPT-RESTORE-033",
    "CKPT-RESTORE-034",
    "CKPT-RESTORE-043",
    "CKPT-RESTORE-036",
    "CKPT-ENV-028",
    "CKPT-COMMIT-004",
    profile="turn-recovery",
    features=COMMON,
    world=True,
    storage=True,
    budget=("quick", "demo"),
)
def acid_test_in_the_living_server(case: Case) -> None:
    """The acid test: interrupted after turn 2, restored into the living server and finished: the same body."""
    expected = case.baseline(LONG)
    rollout = case.start_at(2, LONG)
    cut = take_cut(case)
    case.equal(2, cut.row(case, rollout.rollout_id)["turns_done"], "the cut holds two turns", "CKPT-COMMIT-004")
    interrupt(case, rollout, cut)
    body = case.body(rollout, "CKPT-RESTORE-036")  # the saved policy: no other was given
    case.equal(expected, body, "interrupted = uninterrupted", "CKPT-ENV-006", "CKPT-ENV-028", "CKPT-RESTORE-043")
    judge_kept_turns(case, rollout, 2)
    calls = case.witness.generations(rollout.rollout_id, attempt=1)
    turns = [call.turn for call in calls]
    case.equal([3, 4, 5, 6, 7], turns, "turns of the restored attempt", "CKPT-RESTORE-033", "CKPT-RESTORE-034")


@check(
    "CKPT-ENV-006",
    "CKPT-ENV-026",
    "CKPT-INV-002",
    "CKPT-RESTORE-020",
    "CKPT-RESTORE-034",
    profile="turn-recovery",
    features=COMMON,
    world=True,
    storage=True,
    budget="quick",
)
def acid_test_through_two_cycles(case: Case) -> None:
    """C46: cut, restore, cut again later, restore: both parts are there, the same body, no finished turn redone."""
    expected = case.baseline(LONG)
    rollout = case.start_at(1, LONG)
    first = take_cut(case)
    hold = case.witness.hold(rollout.rollout_id, 4, attempt=1)
    interrupt(case, rollout, first)
    hold.wait_asked()
    second = take_cut(case)
    row = second.row(case, rollout.rollout_id)
    case.equal((1, 3), (row["attempt"], row["turns_done"]), "the second cut", "CKPT-RESTORE-020")
    hold.release()
    case.witness.wait_asked(rollout.rollout_id, 5)
    restore_cut(case, second)
    case.equal(expected, case.body(rollout), "interrupted twice = uninterrupted", "CKPT-ENV-006", "CKPT-ENV-026")
    judge_kept_turns(case, rollout, 1, again=2)
    case.equal(2, rollout.attempt, "it went on as attempt 2", "CKPT-RESTORE-034")


@check(
    "CKPT-ENV-006",
    "CKPT-ENV-027",
    "CKPT-RESTORE-044",
    "CKPT-INV-002",
    "CKPT-COMMIT-043",
    profile="turn-recovery",
    features=COMMON,
    world=True,
    storage=True,
)
def acid_test_twice_from_one_snapshot(case: Case) -> None:
    """N15: a second crash before the next snapshot: the same cut is restored again, still no finished turn redone."""
    expected = case.baseline(LONG)
    rollout = case.start_at(3, LONG)
    cut = take_cut(case)
    hold = case.witness.hold(rollout.rollout_id, 6, attempt=1)
    part = cut.parts[case.agent.name]
    interrupt(case, rollout, cut)
    hold.wait_asked()
    for row in part.manifest_json()["files"]:
        content = (part.directory / row["name"]).read_bytes()
        case.equal(row["digest"], names.bytes_digest(content), f"{row['name']} is untouched", "CKPT-COMMIT-043")
    restore_cut(case, cut)
    hold.release()
    body = case.body(rollout, "CKPT-RESTORE-044")
    case.equal(expected, body, "restored twice = uninterrupted", "CKPT-ENV-006", "CKPT-ENV-027")
    judge_kept_turns(case, rollout, 3, again=2)


@check(
    "CKPT-RESTORE-035",
    "CKPT-ENV-006",
    profile="turn-recovery",
    features=COMMON,
    world=True,
    storage=True,
    budget=("quick", "demo"),
)
def a_restore_moves_to_another_policy(case: Case) -> None:
    """N3: restored with another policy address: the rollouts call the new one, never the old."""
    expected = case.baseline()
    rollout = case.start_at(1)
    cut = take_cut(case)
    address = f"{case.prefix}new"
    restore_cut(case, cut, policy=case.witness.policy(address))
    asked = len(case.witness.generations(rollout.rollout_id, address="main"))
    case.release(rollout)
    case.equal(expected, case.body(rollout), "the same body", "CKPT-ENV-006")
    old = len(case.witness.generations(rollout.rollout_id, address="main"))
    case.equal(asked, old, "calls to the old address after the restore", "CKPT-RESTORE-035")
    case.true(case.witness.generations(rollout.rollout_id, address=address), "the new one", "CKPT-RESTORE-035")


@check("CKPT-ROLL-033", "CKPT-ROLL-020", features=COMMON, budget="quick")
def a_repeated_start_moves_to_another_policy(case: Case) -> None:
    """N18: the start of a live rollout is repeated with another policy: its next call goes there."""
    rollout = case.start_at(1)
    address = f"{case.prefix}moved"
    outcome = case.outcome(rollout.item, policy=case.witness.policy(address))
    case.equal("already_started", outcome["outcome"], "the repeat", "CKPT-ROLL-020")
    case.release(rollout)
    case.body(rollout, "CKPT-ROLL-033")
    turns = [call.conversation_turn for call in case.witness.generations(rollout.rollout_id, address=address)]
    case.equal([3, 4], turns, "turns asked at the new address", "CKPT-ROLL-033")


@check(
    "CKPT-ENV-006", "CKPT-COMMIT-005", "CKPT-INV-002", profile="checkpoint", features=COMMON, world=True, storage=True
)
def a_turn_that_was_open_is_in_the_cut_whole(case: Case) -> None:
    """N1: the gate closes during the first of three effects; cut, restore: equal to the uninterrupted run."""
    written = script(add(1), [world("one"), add(2), world("two")], add(3), "done")
    expected = case.baseline(written)
    rollout_id = case.new_id()
    with case.world.hold("one", rollout_id=rollout_id) as effect:
        rollout = case.start(written, rollout_id=rollout_id)
        effect.wait_begun()
        checkpoint_id = case.controller.next_id()
        case.accepted(case.controller.prepare(case.agent, checkpoint_id, timeout_ms=1), "prepare")
    cut = take_cut(case, checkpoint_id=checkpoint_id)
    case.equal(2, cut.row(case, rollout_id)["turns_done"], "the whole turn is in the cut", "CKPT-COMMIT-005")
    case.witness.wait_asked(rollout_id, 3)
    if not case.continues:
        case.leave_out("no rollout continues without turn-recovery", "CKPT-ENV-006", "CKPT-INV-002")
        return
    restore_cut(case, cut)
    case.equal(expected, case.body(rollout), "interrupted = uninterrupted", "CKPT-ENV-006")
    case.equal(1, case.world.happened("one", rollout_id=rollout_id), "the effect happened once", "CKPT-INV-002")


@check(
    "CKPT-DIR-003",
    "CKPT-DIR-004",
    "CKPT-DIR-005",
    "CKPT-DIR-006",
    "CKPT-DIR-007",
    "CKPT-DIR-008",
    "CKPT-DIR-009",
    "CKPT-DIR-010",
    "CKPT-DIR-011",
    "CKPT-DIR-013",
    "CKPT-DIR-014",
    "CKPT-DIR-015",
    "CKPT-DIR-017",
    "CKPT-COMMIT-004",
    "CKPT-COMMIT-016",
    "CKPT-COMMIT-017",
    "CKPT-COMMIT-018",
    "CKPT-COMMIT-020",
    "CKPT-COMMIT-021",
    "CKPT-COMMIT-022",
    "CKPT-DIR-024",
    "CKPT-DIR-025",
    "CKPT-DIR-026",
    "CKPT-DIR-027",
    "CKPT-DIR-028",
    "CKPT-DIR-029",
    "CKPT-DIR-031",
    "CKPT-DIR-032",
    "CKPT-DIR-035",
    "CKPT-CONF-049",
    "CKPT-FEED-017",
    "CKPT-RESTORE-052",
    profile="checkpoint",
    features=COMMON,
    storage=True,
    budget=("quick", "demo"),
)
def a_participant_directory_is_what_it_says(case: Case) -> None:
    """C02, C08: manifest and index name every file, rollout, turn, effect and unreleased result, and nothing else."""
    reset(case)
    live = [case.start_at(n, script([add(1), refuse()], add(2), "done")) for n in (1, 2)]
    done, entry = case.finished()
    checkpoint_id = case.controller.next_id()
    prepare_everywhere(case, checkpoint_id)
    done_by = commit_everywhere(case, checkpoint_id)
    replies = {name: reply for name, (_, _, reply) in done_by.items()}
    parts = {p.name: read_part(case, p, checkpoint_id, *done_by[p.name]) for p in case.gym.participants}
    cut = Cut(checkpoint_id, parts, {})
    resume_everywhere(case, checkpoint_id)
    for p in case.gym.participants:
        part = cut.parts[p.name]
        manifest = part.manifest_json()
        case.equal([], schema_faults(case, "participant-manifest", manifest), "what does not fit", "CKPT-DIR-035")
        case.equal("conformance", manifest["run_id"], "the run of prepare", "CKPT-DIR-005")
        case.equal(checkpoint_id, manifest["checkpoint_id"], "the checkpoint", "CKPT-DIR-026")
        case.equal(p.name, manifest["participant"], "the participant", "CKPT-DIR-027")
        state = {key: p.capabilities["state_schema"][key] for key in ("id", "version")}
        case.equal(state, manifest["state_schema"], "its state schema", "CKPT-DIR-028")
        _counts_are_as_named(case, replies[p.name], part)
        _files_are_as_named(case, part.directory, manifest, part.manifest["name"])
        ids = list(part.rows)
        case.equal(sorted(ids, key=str.encode), ids, "the index is sorted by bytes", "CKPT-DIR-008")
    rows = cut.parts[case.agent.name].rows
    case.equal({r.rollout_id for r in [*live, done]}, set(rows), "live and unreleased rollouts", "CKPT-DIR-009")
    turns = "turn" if "turn-recovery" in case.gym.profiles else "restart"
    if turns == "restart":
        case.leave_out("no rollout continues without turn-recovery", "CKPT-DIR-029")
    for n, rollout in enumerate(live, 1):
        row = rows[rollout.rollout_id]
        item = rollout.item
        case.equal(turns, row["state"], "a live row", "CKPT-DIR-029")
        case.equal(n, row["turns_done"], "its boundaries", "CKPT-DIR-013")
        case.equal(item["task_digest"], row["task_digest"], "its task", "CKPT-DIR-017")
        case.equal(item["environment"], row["environment"], "its environment", "CKPT-DIR-031")
        case.equal(rollout.attempt, row["attempt"], "its attempt", "CKPT-DIR-032")
        effects = {"conformance": n + 1}
        case.equal(effects, row["effects"], "its effects, the refused one too", "CKPT-DIR-014", "CKPT-CONF-049")
        sessions = cut.parts[case.sessions.name].rows[rollout.rollout_id]
        case.equal(n, sessions["turns_done"], "the sessions agree", "CKPT-RESTORE-052")
        case.equal(row["effects"], sessions["effects"], "on the effects too", "CKPT-DIR-014", "CKPT-DIR-010")
    finished = rows[done.rollout_id]
    case.equal("finished", finished["state"], "the unreleased result", "CKPT-DIR-011", "CKPT-FEED-017")
    case.equal(entry["receipt"], finished.get("receipt"), "its receipt", "CKPT-DIR-015")


def _counts_are_as_named(case: Case, reply: Reply, part: Part) -> None:
    """Judge what a durable commit says against the directory."""
    raw = (part.directory / reply["manifest"]["name"]).read_bytes()
    told = {"name": reply["manifest"]["name"], "digest": names.bytes_digest(raw), "bytes": len(raw)}
    case.equal(told, reply["manifest"], "the manifest", "CKPT-COMMIT-017", "CKPT-COMMIT-016")
    index = (part.directory / reply["index"]["name"]).read_bytes()
    told = {"name": reply["index"]["name"], "digest": names.bytes_digest(index), "records": len(part.rows)}
    case.equal(told, reply["index"], "the index", "CKPT-COMMIT-018")
    sizes = [path.stat().st_size for path in part.directory.iterdir()]
    case.equal(len(sizes), reply["counts"]["files"], "counts.files", "CKPT-COMMIT-021")
    case.equal(sum(sizes), reply["counts"]["bytes"], "counts.bytes", "CKPT-COMMIT-022")
    states = [row["state"] for row in part.rows.values()]
    case.equal(states.count("turn"), reply["counts"]["turn"], "counts.turn", "CKPT-COMMIT-020")


def _files_are_as_named(case: Case, directory: Path, manifest: Json, manifest_name: str) -> None:
    named = {row["name"]: row for row in manifest["files"]}
    there = {path.name: path for path in directory.iterdir()}
    case.equal(set(named), set(there) - {manifest_name}, "the files that are there", "CKPT-DIR-003", "CKPT-DIR-006")
    for name, row in named.items():
        content = there[name].read_bytes()
        case.equal(row["bytes"], len(content), f"the size of {name}", "CKPT-DIR-024")
        case.equal(row["digest"], names.bytes_digest(content), f"the digest of {name}", "CKPT-DIR-025")
    index = named[manifest["index"]["name"]]
    lines = there[index["name"]].read_bytes().splitlines()
    case.equal(index["records"], len(lines), "records of the index", "CKPT-DIR-004")
    case.equal("rollouts.jsonl", index["name"], "the name of the index", "CKPT-DIR-007")
    for line in lines:
        case.equal([], schema_faults(case, "index-record", json.loads(line)), "a line of the index", "CKPT-DIR-007")


@check("CKPT-SEC-014", profile="checkpoint", each="participant", shared_dir=True, budget="quick")
def snapshot_files_are_private(case: Case) -> None:
    """The files of a participant directory have the mode 0600."""
    cut = take_cut(case)
    for path in cut.parts[case.p.name].directory.iterdir():
        case.equal("0o600", oct(path.stat().st_mode & 0o777), f"the mode of {path.name}", "CKPT-SEC-014")


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
    case.true(page["feed"] != feed, "a new feed", "CKPT-FEED-004", got=feed)
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
    for key, attempt in ((later.rollout_id, later.attempt), (never, 6)):
        outcome = case.outcome(case.item(key, attempt=attempt))
        case.equal("stale_attempt", outcome["outcome"], f"{key} is fenced", "CKPT-RESTORE-016", "CKPT-RESTORE-030")


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
        case.true(reply.json.get("rollouts"), "the problem names rollouts", "CKPT-ERR-020", got=reply.brief)
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
    case.equal((checkpoint_id, "failed"), last, "last", "CKPT-RESTORE-013")
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
    case.equal(0, case.agent.status()["counts"]["live"], "nothing is left", "CKPT-ABORT-007")
    if attempt is not None:
        outcome = case.outcome({**rollout.item, "attempt": attempt})
        case.equal("stale_attempt", outcome["outcome"], "the restored attempt is fenced", "CKPT-ABORT-008")
    case.equal("stale_attempt", case.outcome(done.item)["outcome"], "a discarded result's too", "CKPT-ABORT-012")


@check(
    "CKPT-RETIRE-018",
    "CKPT-RETIRE-017",
    "CKPT-COMMIT-013",
    profile="checkpoint",
    features=COMMON,
    storage=True,
    budget="quick",
)
def a_retired_attempt_is_not_in_the_cut(case: Case) -> None:
    """Retired before the capture: not in the cut. Retired after it: the cut is as it was."""
    before, after = case.start_at(1), case.start_at(1)
    case.controller.retire(case.agent, {before.rollout_id: 0})
    case.until_state(before, "retired")
    open_id = case.controller.next_id()
    prepare_everywhere(case, open_id)
    done_by = commit_everywhere(case, open_id)
    for p in case.gym.participants:
        case.controller.retire(p, {after.rollout_id: 0})
    parts = {p.name: read_part(case, p, open_id, *done_by[p.name]) for p in case.gym.participants}
    cut = Cut(open_id, parts, {})
    resume_everywhere(case, open_id)
    rows = cut.parts[case.agent.name].rows
    case.true(before.rollout_id not in rows, "retired before", "CKPT-RETIRE-018", got=rows.get(before.rollout_id))
    state = "turn" if case.continues else "restart"
    case.equal(state, rows[after.rollout_id]["state"], "retired after", "CKPT-COMMIT-013")
    if not case.continues:
        case.leave_out("no rollout continues without turn-recovery", "CKPT-RETIRE-017")
        return
    lists = plan(case, cut, only=[after.rollout_id])
    reply = restore_at(case, case.agent, cut, lists, case.controller.next_id())
    case.accepted(reply, "a restore continues it as a higher attempt")
    listed = case.agent.rollouts().get(after.rollout_id, {})
    case.equal(1, listed.get("attempt"), "the retired attempt does not come back", "CKPT-RETIRE-017")


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
    case.true(case.agent.get_results()["feed"] != feed, "a new feed", "CKPT-FEED-004")
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
    case.true(len(rows) >= len(rollouts), "all were listed")


@check(
    "CKPT-GATE-017",
    profile="turn-recovery",
    features=COMMON,
    storage=True,
)
def budgets_stop_between_cut_and_restore(case: Case) -> None:
    """C28: time between the cut and the resume of its restore does not count against a rollout's budget."""
    rollout = case.start_at(1, episode_ms=1500)
    cut = take_cut(case)
    case.step("2 s pass before the cut is restored")
    case.patience.pause(2.0)
    restore_cut(case, cut)
    case.release(rollout)
    case.body(rollout, "CKPT-GATE-017")


@check(
    "CKPT-ART-001",
    "CKPT-ART-002",
    "CKPT-ART-003",
    "CKPT-ART-004",
    "CKPT-ART-005",
    "CKPT-ART-007",
    "CKPT-ART-008",
    "CKPT-ART-009",
    "CKPT-ART-011",
    "CKPT-ART-013",
    "CKPT-ART-014",
    profile="checkpoint",
    features=("conformance", "artifacts_http"),
    budget="default",
)
def artifacts_travel_by_http(case: Case) -> None:
    """A cut with target http is fetched byte by byte, uploaded elsewhere under its id, and restored from there."""
    a = case.agent
    first_id = open_id = case.controller.next_id()
    prepare_everywhere(case, open_id)
    reply = case.accepted(case.controller.commit(a, open_id, {"scheme": "http"}), "commit to http")
    name = reply["manifest"]["name"]
    manifest = case.accepted(a.get_artifact(open_id, name), "the manifest", "CKPT-ART-001").content
    case.equal(reply["manifest"]["digest"], names.bytes_digest(manifest), "its exact bytes", "CKPT-ART-001")
    files = {}
    for row in json.loads(manifest)["files"]:
        files[row["name"]] = case.accepted(a.get_artifact(open_id, row["name"]), "a file", "CKPT-ART-001").content
        case.equal(row["digest"], names.bytes_digest(files[row["name"]]), "its exact bytes", "CKPT-ART-001")
    for p in case.gym.participants:
        case.controller.abort(p, open_id) if p is not a else case.controller.resume(a, open_id)
    case.accepted(a.get_artifact(open_id, name), "fetchable after resume", "CKPT-ART-002")
    case.refused(a.get_artifact(open_id, "no-such-file"), "not_found", "an unknown file", "CKPT-ART-004")
    new_id = f"{case.controller.epoch}-77"
    for _ in range(2):
        reply = case.controller.put_artifact(a, new_id, "x.bin", b"1")
        case.equal((204, b""), (reply.status, reply.content), "PUT, twice", "CKPT-ART-007", "CKPT-ART-014")
    other = case.controller.put_artifact(a, new_id, "x.bin", b"2")
    case.refused(other, "argument_conflict", "other bytes under the name", "CKPT-ART-008")
    low = case.controller.put_artifact(a, "1-1", "x.bin", b"1")
    case.equal(204, low.status, "a low checkpoint id", "CKPT-ART-003")
    url = f"{a.url}{names.PREFIX}/checkpoints/{new_id}/artifacts/"
    for name in ("..", "a%2Fb", ".hidden%00"):
        headers = {**case.controller.headers(a), "Content-Type": "application/octet-stream"}
        reply = case.wire.raw("PUT", url + name, headers=headers, content=b"1")
        known = reply.code in ("invalid_request", "not_found")
        case.true(known, f"the name {name}", "CKPT-ART-013", got=reply.brief)
    open_id = case.controller.next_id()
    case.accepted(case.controller.prepare(a, open_id), "prepare")
    closed = case.controller.put_artifact(a, new_id, "y.bin", b"1")
    case.refused(closed, "invalid_phase", "PUT while prepared", "CKPT-ART-005")
    case.controller.abort(a, open_id)
    _restore_by_http(case, {**files, "manifest.json": manifest}, first_id)


def _restore_by_http(case: Case, files: dict[str, bytes], checkpoint_id: str) -> None:
    """Upload a cut under its own id, fail a restore of another one, and restore it with the scheme http."""
    a = case.agent
    for name, content in files.items():
        case.controller.put_artifact(a, checkpoint_id, name, content)
    source = {"scheme": "http", "checkpoint_id": checkpoint_id}
    digest = names.bytes_digest(files["manifest.json"])
    reply = case.controller.restore(a, case.controller.next_id(), {**source, "manifest_digest": digest})
    case.accepted(reply, "a restore from uploaded files", "CKPT-ART-011", "CKPT-ART-009")


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
            case.equal((checkpoint_id, "failed"), got, "last", "CKPT-RESTORE-013")
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
