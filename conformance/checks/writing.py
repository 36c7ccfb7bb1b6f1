# SPDX-License-Identifier: Apache-2.0
"""A cut while it is being written: what comes last, what can leak into it, and what a failed writing keeps."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

from conformance.case import Case, Rollout
from conformance.cuts import (
    Cut,
    commit_everywhere,
    plan,
    prepare_everywhere,
    prepared_at,
    read_part,
    restore_at,
    restore_cut,
    resume_everywhere,
    target_for,
)
from conformance.errors import NotOffered
from conformance.registry import check
from conformance.script import add, grow, script
from conformance.wire import Reply
from spec import wire as names

COMMON = ("conformance",)
MANIFEST = "manifest.json"
LOOK_S = 0.001
BIG = 24_000_000
"""Bytes of a state that no Gym writes and syncs in no time, where its records may be as large as that."""


def big(case: Case) -> Rollout:
    """Start a rollout whose state takes a while to write; its id sorts before those that are made after it."""
    return case.start_at(1, script(grow(min(BIG, case.gym.limit("max_record_bytes") // 2)), "done"))


@check("CKPT-DIR-001", "CKPT-COMMIT-016", profile="checkpoint", features=COMMON, shared_dir=True)
def the_manifest_comes_last(case: Case) -> None:
    """As soon as a manifest is there, every file that it names is there whole."""
    p = case.sessions
    slow = big(case)
    open_id = prepared_at(case, p)
    target, directory = target_for(case, p, open_id)
    case.step("commit a large state, and look at the target all the while")
    writing = case.wire.background(lambda: case.controller.commit(p, open_id, target))
    while not ((directory / MANIFEST).exists() or writing.done()):
        case.patience.pause(LOOK_S)  # Bounded by the commit; what is looked for may last for a moment only.
    case.equal([], missing(directory), "the manifest names nothing that is not there whole", "CKPT-DIR-001")
    case.accepted(writing.result(), "the commit is accepted", "CKPT-COMMIT-016")
    case.release(slow)


def missing(directory: Path) -> list[str]:
    """Return what the manifest of a directory names and what is not there in its size; nothing without a manifest."""
    try:
        named = json.loads((directory / MANIFEST).read_bytes())["files"]
    except FileNotFoundError:
        return []
    sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
    return [file["name"] for file in named if sizes.get(file["name"]) != file["bytes"]]


@check(
    "CKPT-COMMIT-002",
    "CKPT-COMMIT-013",
    "CKPT-COMMIT-014",
    "CKPT-COMMIT-025",
    "CKPT-DIR-013",
    "CKPT-RESTORE-020",
    profile="turn-recovery",
    features=COMMON,
    storage=True,
)
def a_cut_is_that_of_its_instant(case: Case) -> None:
    """Turns and retires between the capture and the end of its writing do not get into the cut."""
    slow = big(case)
    going = case.start_at(1, script(add(1), add(2), add(3), "done"))
    retired = case.start_at(1)
    open_id = case.controller.next_id()
    prepare_everywhere(case, open_id)
    begun = commit_everywhere(case, open_id, wait="captured")
    resume_everywhere(case, open_id)
    case.step("go on while the cut is written: two turns of one rollout, and another is retired")
    hold = case.witness.hold(going.rollout_id, 4)
    case.release(going)
    for p in case.gym.participants:
        case.accepted(case.controller.retire(p, {retired.rollout_id: 0}), "a retire is accepted")
    hold.wait_asked()
    parts = {}
    for p in case.gym.participants:
        target, directory, _ = begun[p.name]
        reply = case.accepted(case.controller.commit(p, open_id, target), "the cut gets durable", "CKPT-COMMIT-013")
        parts[p.name] = read_part(case, p, open_id, target, directory, reply)
    cut = Cut(open_id, parts, {})
    case.equal("turn", cut.row(case, retired.rollout_id)["state"], "what was retired later is in it", "CKPT-COMMIT-013")
    case.equal(1, cut.row(case, going.rollout_id)["turns_done"], "a later turn is not in it", "CKPT-DIR-013")
    hold.release()
    case.release(slow)
    restore_cut(case, cut, only={going.rollout_id}, resume=False)
    row = case.row(going)
    case.equal(1, row["turns_done"], "neither is it in what is restored from it", "CKPT-COMMIT-002", "CKPT-RESTORE-020")
    case.new_controller()


@check(
    "CKPT-COMMIT-012",
    "CKPT-FEED-017",
    "CKPT-COMMIT-002",
    profile="checkpoint",
    features=COMMON,
    storage=True,
)
def an_ack_while_it_is_written_leaves_the_cut_alone(case: Case) -> None:
    """A result is acknowledged between the capture and the end of its writing: it is in the cut and comes back."""
    slow = big(case)
    done, entry = case.finished(script("done"))
    open_id = case.controller.next_id()
    prepare_everywhere(case, open_id)
    begun = commit_everywhere(case, open_id, wait="captured")
    case.equal(["released"], case.ack(entry["receipt"]), "the ACK while the cut is written")
    parts = {}
    for p in case.gym.participants:
        target, directory, _ = begun[p.name]
        reply = case.accepted(case.controller.commit(p, open_id, target), "the cut gets durable", "CKPT-COMMIT-012")
        parts[p.name] = read_part(case, p, open_id, target, directory, reply)
    cut = Cut(open_id, parts, {})
    case.equal("finished", cut.row(case, done.rollout_id)["state"], "the result is in the index", "CKPT-COMMIT-012")
    resume_everywhere(case, open_id)
    case.release(slow)
    lists = plan(case, cut, only=set(), keep={done.rollout_id})
    reply = restore_at(case, case.agent, cut, lists, case.controller.next_id())
    case.accepted(reply, "the result is in the cut", "CKPT-COMMIT-012", "CKPT-FEED-017", "CKPT-COMMIT-002")
    kept = case.result(done, "CKPT-COMMIT-012", "CKPT-FEED-017")
    text = names.bytes_digest(kept["result"].encode())
    case.equal(entry["receipt"]["digest"], text, "the digest of its text", "CKPT-RESULT-002")
    case.new_controller()
    restore_cut(case, cut, only=set(), keep=set())
    again = case.outcome({**done.item, "attempt": case.next_attempt(done.rollout_id)})["outcome"]
    case.equal("started", again, "what was not yet released at the capture", "CKPT-COMMIT-012", "CKPT-COMMIT-002")


@check(
    "CKPT-COMMIT-027",
    "CKPT-COMMIT-026",
    "CKPT-COMMIT-029",
    "CKPT-REPEAT-005",
    "CKPT-REPEAT-018",
    "CKPT-COMMIT-013",
    profile="checkpoint",
    features=COMMON,
    shared_dir=True,
)
def a_failed_writing_keeps_its_capture(case: Case) -> None:
    """N20: the writing fails; the commit repeated writes the same cut, with what was retired meanwhile."""
    p = case.sessions
    slow, retired = big(case), case.start_at(1)
    open_id = prepared_at(case, p)
    target, directory = target_for(case, p, open_id)
    failed = made_to_fail(case, directory, case.wire.background(lambda: case.controller.commit(p, open_id, target)))
    case.true(failed.status >= 400, "who waits gets the error", "CKPT-COMMIT-029", got=failed.brief)
    status = p.status()
    case.equal("prepared", status["phase"], "a failed writing leads back to prepared", "CKPT-COMMIT-026")
    case.equal(True, status["captured"], "with the capture", "CKPT-COMMIT-027")
    case.step(f"retire {retired.rollout_id}, make the target writable, commit again")
    case.accepted(case.controller.retire(p, {retired.rollout_id: 0}), "a retire is accepted")
    (directory / MANIFEST).rmdir()
    again = case.accepted(case.controller.commit(p, open_id, target), "the repeat is accepted", "CKPT-REPEAT-018")
    part = read_part(case, p, open_id, target, directory, again)
    what = f"the repeated commit writes the first capture, with {retired.rollout_id}, which was retired since"
    case.true(retired.rollout_id in part.rows, what, "CKPT-COMMIT-027", "CKPT-REPEAT-005", got=sorted(part.rows))
    case.release(slow)


def made_to_fail(case: Case, directory: Path, writing: Future[Reply]) -> Reply:
    """Put a directory where the manifest must appear while a cut is written, and return the commit's reply.

    Raises:
        NotOffered: the writing was over before, or came to a good end all the same.
    """
    case.step("put a directory in the place of the manifest while the cut is written")
    case.until(lambda: any(directory.iterdir()) or writing.done(), "the writing has begun")
    try:
        (directory / MANIFEST).mkdir()
    except FileExistsError:
        raise NotOffered("the cut was written before its writing could be made to fail") from None
    reply = writing.result()
    if reply.ok:
        raise NotOffered("the writing could not be made to fail")
    return reply
