# SPDX-License-Identifier: Apache-2.0
"""Snapshots and restart: what a participant writes for a cut, in a directory and over http."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from conformance.case import Case
from conformance.checks.results_feed import schema_faults
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
    resume_everywhere,
    take_cut,
)
from conformance.registry import check
from conformance.script import add, refuse, script
from conformance.wire import Reply
from spec import wire as names

COMMON = ("conformance",)


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
    "CKPT-COMMIT-001",
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
    ids = (case.new_id("s"), case.new_id("Z"))  # In the order of their bytes the second comes first.
    live = [case.start_at(n, script([add(1), refuse()], add(2), "done"), rollout_id=ids[n - 1]) for n in (1, 2)]
    done, entry = case.finished()
    gone = case.start_at(1)
    for p in case.gym.participants:
        retired = case.accepted(case.controller.retire(p, {gone.rollout_id: gone.attempt}), "retire")
        case.equal("retired", retired["outcomes"][0]["outcome"], f"what {p.name} says of a retired rollout")
    case.release(gone)
    checkpoint_id = case.controller.next_id()
    run_id = f"run.{case.prefix}a"
    prepare_everywhere(case, checkpoint_id, run_id=run_id)
    done_by = commit_everywhere(case, checkpoint_id)
    replies = {name: reply for name, (_, _, reply) in done_by.items()}
    parts = {p.name: read_part(case, p, checkpoint_id, *done_by[p.name]) for p in case.gym.participants}
    cut = Cut(checkpoint_id, parts, {})
    resume_everywhere(case, checkpoint_id)
    for p in case.gym.participants:
        part = cut.parts[p.name]
        manifest = part.manifest_json()
        case.equal([], schema_faults(case, "participant-manifest", manifest), "what does not fit", "CKPT-DIR-035")
        case.equal(run_id, manifest["run_id"], "the run_id that this prepare gave", "CKPT-DIR-005")
        case.equal(checkpoint_id, manifest["checkpoint_id"], "the checkpoint", "CKPT-DIR-026")
        case.equal(p.name, manifest["participant"], "the participant", "CKPT-DIR-027")
        state = {key: p.capabilities["state_schema"][key] for key in ("id", "version")}
        case.equal(state, manifest["state_schema"], "its state schema", "CKPT-DIR-028")
        _counts_are_as_named(case, replies[p.name], part)
        _files_are_as_named(case, part.directory, manifest, part.manifest["name"])
        key = "CKPT-DIR-009" if p.owns("rollouts") else "CKPT-DIR-010"
        case.true(gone.rollout_id not in part.rows, f"{p.name} lists nothing of the retired rollout", key, got="a row")
        order = list(part.rows)
        case.equal(sorted(order, key=str.encode), order, "the index is sorted by bytes", "CKPT-DIR-008")
    rows = cut.parts[case.agent.name].rows
    held = {r.rollout_id for r in [*live, done]}
    case.equal(held, set(rows), "live and unreleased rollouts", "CKPT-DIR-009", "CKPT-COMMIT-001")
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
    case.next_attempt(after.rollout_id)
    for p in case.gym.participants:
        case.controller.retire(p, {after.rollout_id: 1})
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
    fenced = replace(
        lists, rollouts={name: [{**row, "next_attempt": 1} for row in rows] for name, rows in lists.rollouts.items()}
    )
    reply = restore_at(case, case.agent, cut, fenced, case.controller.next_id())
    case.refused(reply, "stale_attempt", "a restore as an attempt that was retired after the cut", "CKPT-RETIRE-017")
    reply = restore_at(case, case.agent, cut, lists, case.controller.next_id())
    case.accepted(reply, "a restore continues it as a higher attempt")
    listed = case.agent.rollouts().get(after.rollout_id, {})
    case.equal(2, listed.get("attempt"), "the retired attempt does not come back", "CKPT-RETIRE-017")


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
