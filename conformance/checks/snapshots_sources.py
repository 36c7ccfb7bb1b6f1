# SPDX-License-Identifier: Apache-2.0
"""Snapshots and restart: foreign sources, limits of records, ledgers, replies in the cut, uploads that break."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

from conformance.case import Case
from conformance.checks.environments_effects import probe
from conformance.controller import Json
from conformance.cuts import (
    commit_everywhere,
    plan,
    prepare_everywhere,
    read_part,
    restore_at,
    restore_cut,
    resume_everywhere,
    take_cut,
    target_for,
)
from conformance.errors import NotOffered
from conformance.registry import check
from conformance.script import add, grow, script, world
from spec import wire as names

COMMON = ("conformance",)
MAX_BLOB = 67_108_864


@check("CKPT-ERR-034", "CKPT-ERR-038", profile="checkpoint", each="participant", shared_dir=True)
def foreign_sources_are_incompatible(case: Case) -> None:
    """C41: a newer or foreign state schema, another participant's directory: `state_incompatible`."""
    p = case.p
    cut = take_cut(case)
    part = cut.parts[p.name]
    whole = part.manifest_json()
    schema = whole["state_schema"]
    for key, changed in (
        ("CKPT-ERR-034", {"state_schema": {**schema, "version": max(p.capabilities["state_schema"]["reads"]) + 1}}),
        ("CKPT-ERR-034", {"state_schema": {**schema, "id": "another-state"}}),
        ("CKPT-ERR-038", {"participant": "another-participant"}),
    ):
        case.step(f"a manifest that says {changed}")
        manifest = json.dumps({**whole, **changed}).encode()
        (part.directory / part.manifest["name"]).write_bytes(manifest)
        source = {**part.source(cut.checkpoint_id), "manifest_digest": names.bytes_digest(manifest)}
        reply = case.controller.restore(p, case.controller.next_id(), source)
        case.refused(reply, "state_incompatible", str(changed), key)
        case.equal("open", p.status()["gate"], "nothing has changed", key)


@check(
    "CKPT-COMMIT-051",
    "CKPT-COMMIT-052",
    "CKPT-COMMIT-053",
    "CKPT-DIR-022",
    profile="turn-recovery",
    features=COMMON,
    storage=True,
)
def a_record_has_a_limit(case: Case) -> None:
    """C49: a record above `max_record_bytes`: the commit names rollout and limit, or, told to, lists it as left out."""
    p = case.sessions
    limit = p.limit("max_record_bytes")
    if limit >= MAX_BLOB:
        raise NotOffered(f"max_record_bytes is {limit}, more than a blob can be")
    rollout = case.start_at(1, script(grow(limit + 1), "done"))
    open_id = case.controller.next_id()
    prepare_everywhere(case, open_id)
    target, _ = target_for(case, p, open_id)
    reply = case.controller.commit(p, open_id, target)
    case.refused(reply, "payload_too_large", "a record that is too long", "CKPT-COMMIT-051")
    named = [row["rollout_id"] for row in reply.json.get("rollouts", [])]
    case.equal([rollout.rollout_id], named, "the rollouts named", "CKPT-COMMIT-052")
    case.true("max_record_bytes" in reply["detail"], "the limit is named", "CKPT-COMMIT-053", got=reply["detail"])
    for q in case.gym.participants:
        case.accepted(case.controller.abort(q, open_id), "abort")
    open_id = case.controller.next_id()
    prepare_everywhere(case, open_id)
    done = commit_everywhere(case, open_id, leave_out_blocked=True)
    row = read_part(case, p, open_id, *done[p.name]).rows.get(rollout.rollout_id, {})
    got = (row.get("state"), row.get("reason"))
    case.equal(("restart", "record_too_large"), got, "its row", "CKPT-DIR-022")
    resume_everywhere(case, open_id)


@check("CKPT-ENV-021", "CKPT-ENV-022", profile="turn-recovery", features=COMMON, storage=True)
def a_restore_keeps_the_rows_of_the_saved_turns(case: Case) -> None:
    """A ledger owner keeps the rows of listed rollouts up to their `turns_done`, and no others."""
    p = case.gym.owner("ledger")
    if p is None or p.owns("rollouts"):
        raise NotOffered("no participant owns a ledger alone")
    rollout = case.start_at(2)
    cut = take_cut(case)
    other = case.start_at(1)
    hold = case.witness.hold(rollout.rollout_id, 3, attempt=1)
    case.release(rollout)
    case.witness.wait_completed(rollout.rollout_id, 3)
    restore_cut(case, cut, only=[rollout.rollout_id])
    hold.wait_asked()
    rows = take_cut(case).parts[p.name].rows
    kept = rows.get(rollout.rollout_id, {}).get("turns_done")
    case.equal(2, kept, "rows of the listed rollout", "CKPT-ENV-021", "CKPT-ENV-022")
    case.true(other.rollout_id not in rows, "rows of an unlisted one", "CKPT-ENV-022", got=rows.get(other.rollout_id))


@check("CKPT-EFFECT-006", profile="turn-recovery", features=COMMON, world=True, storage=True)
def recorded_replies_are_in_the_cut(case: Case) -> None:
    """An effect of the last turn is answered after the restore as it was before, and happens no second time."""
    p = case.sessions
    written = script(world("kept"), add(1), "done")
    rollout = case.start_at(1, written)
    first = probe(case, rollout, 1, "world", turn=1, args={"tag": "kept"})
    case.accepted(first, "the effect of turn 1, repeated")
    cut = take_cut(case)
    lists = plan(case, cut, only=[rollout.rollout_id])
    restore_id = case.controller.next_id()
    case.accepted(restore_at(case, p, cut, lists, restore_id), f"{p.name} restores")
    rollout.attempt = lists.next_attempts[rollout.rollout_id]
    again = probe(case, rollout, 1, "world", turn=1, args={"tag": "kept"}, within_s=3.0)
    case.accepted(again, "the same effect after the restore", "CKPT-EFFECT-006")
    case.equal(first["observation"], again["observation"], "the recorded reply", "CKPT-EFFECT-006")
    case.equal(1, len(case.world.calls("kept", rollout_id=rollout.rollout_id)), "calls outside", "CKPT-EFFECT-006")


@check("CKPT-ART-006", "CKPT-ART-010", profile="checkpoint", features=("artifacts_http",))
def a_broken_upload_leaves_nothing(case: Case) -> None:
    """A PUT that breaks off leaves nothing under its name; one above `max_artifact_bytes` is refused."""
    a = case.agent
    new_id = f"{case.controller.epoch}-78"
    path = f"{names.PREFIX}/checkpoints/{new_id}/artifacts/broken.bin"
    parts = urlsplit(a.url)
    headers = {**case.controller.headers(a), "Content-Type": "application/octet-stream", "Content-Length": "1000"}
    headers["Authorization"] = f"Bearer {case.wire.tokens.get('control', '')}"
    lines = [f"PUT {path} HTTP/1.1", f"Host: {parts.netloc}", *(f"{k}: {v}" for k, v in headers.items()), "", "half"]
    case.step("PUT half of a file and close the connection")
    with socket.create_connection((parts.hostname or "", parts.port or 80), 5) as sock:
        sock.sendall("\r\n".join(lines).encode())
    reply = case.controller.put_artifact(a, new_id, "broken.bin", b"whole")
    case.equal(204, reply.status, "nothing is held under that name", "CKPT-ART-006")
    limit = a.limit("max_artifact_bytes")
    if limit > 64 * 1024 * 1024:
        case.leave_out(f"max_artifact_bytes is {limit}", "CKPT-ART-010")
    else:
        large = case.controller.put_artifact(a, new_id, "large.bin", bytes(limit + 1))
        case.refused(large, "payload_too_large", "one byte too many", "CKPT-ART-010")


def verifies(directory: Path) -> Json | None:
    """Return the manifest of a participant directory whose files are all as it says, or None if there is no manifest.

    Raises:
        ValueError: the manifest is there and not everything fits it.
    """
    path = directory / "manifest.json"
    if not path.exists():
        return None
    manifest: Json = json.loads(path.read_bytes())
    for row in manifest["files"]:
        content = (directory / row["name"]).read_bytes()
        if (row["bytes"], row["digest"]) != (len(content), names.bytes_digest(content)):
            raise ValueError(f"{row['name']} does not fit the manifest")
    return manifest
