# SPDX-License-Identifier: Apache-2.0
"""Level 2: a writing that is held: what abort, lease, time limit and lack of space do to it."""

from __future__ import annotations

import functools
from pathlib import Path

from conformance.case import Case
from conformance.checks.identity import calls_of
from conformance.controller import Json, Participant
from conformance.cuts import admits, prepared_at, target_for
from conformance.errors import NotOffered
from conformance.failpoints import Armed
from conformance.registry import check

COMMON = ("conformance",)
MANIFEST = "manifest.json"
SHORT_MS = 100
LONG_LEASE_MS, LONG_WRITE_MS = 2_000, 5_000
"""What a check waits for at most: a participant with longer limits is not asked."""


def begun(case: Case, p: Participant, point: Armed, **kwargs: object) -> tuple[str, Json, Path]:
    """Prepare and commit a cut whose writing is held; return its id, its target and the directory."""
    open_id = prepared_at(case, p, **kwargs)
    target, directory = target_for(case, p, open_id)
    case.step(f"commit {open_id} at {p.name}, wait: captured")
    reply = case.accepted(case.controller.commit(p, open_id, target, wait="captured"), "commit is accepted")
    point.wait_reached()
    got = (reply["phase"], reply["captured"], reply["durable"])
    case.equal(("committing", True, False), got, "what commit says while the writer is held", "CKPT-PHASE-016")
    return open_id, target, directory


def over(case: Case, p: Participant, *requirements: str, within_s: float = 10.0) -> Json:
    """Wait until nothing is open any more, and return `last`."""
    case.until(lambda: p.status()["phase"] == "idle", f"{p.name} is idle", *requirements, within_s=within_s)
    return dict(p.status()["last"])


@check(
    "CKPT-ABORT-003",
    "CKPT-ABORT-002",
    "CKPT-ABORT-005",
    "CKPT-COMMIT-041",
    "CKPT-PHASE-006",
    "CKPT-PHASE-016",
    "CKPT-TIME-006",
    "CKPT-TIME-009",
    "CKPT-TIME-013",
    profile="checkpoint",
    each="participant",
    shared_dir=True,
    points=("commit.write",),
)
def an_abort_ends_with_the_writer(case: Case) -> None:
    """C22: aborted while a writer is held: the gate opens at once; it ends, for good, when the writer stops."""
    c, p = case.controller, case.p
    with case.failpoint("commit.write", "hold") as point:
        open_id, _, directory = begun(case, p, point)
        case.step("abort it with a short limit while the writer is held")
        reply = case.refused(c.abort(p, open_id, timeout_ms=SHORT_MS), "deadline_exceeded", "abort", "CKPT-TIME-006")
        case.equal(True, reply.json.get("continues"), "the work goes on", "CKPT-TIME-013")
        status = p.status()
        case.equal("open", status["gate"], "the gate, before the writer has stopped", "CKPT-ABORT-002")
        admits(case, p, "before the writer has stopped", "CKPT-ABORT-002")
        got = (status["phase"], status["checkpoint_id"])
        case.equal(("committing", open_id), got, "it has not ended: the writer is held", "CKPT-ABORT-003")
        for verb, called in calls_of(case, c, open_id).items():
            case.refused(called, "stale_checkpoint", f"{verb} of the aborted id", "CKPT-PHASE-006")
        waiting = case.wire.background(functools.partial(c.abort, p, open_id))
        case.stays(lambda: not waiting.done(), "the abort, repeated, joins", "CKPT-TIME-009", for_s=0.1)
        point.release()
        case.equal("aborted", case.accepted(waiting.result(), "abort")["ended_as"], "it ended", "CKPT-TIME-009")
        there = _listing(directory)
    last = over(case, p, "CKPT-ABORT-003")
    case.equal(
        (open_id, "aborted"), (last["checkpoint_id"], last["ended_as"]), "how it ended, in `last`", "CKPT-ABORT-003"
    )
    case.equal(None, last["manifest"], "no cut is reported", "CKPT-ABORT-005")
    same = lambda: there == _listing(directory)  # noqa: E731 - a condition with a name
    case.stays(same, "nothing is written after the abort was answered 200", "CKPT-COMMIT-041")


def _listing(directory: Path) -> list[tuple[str, int]]:
    return sorted((path.name, path.stat().st_size) for path in directory.iterdir())


@check(
    "CKPT-LEASE-010",
    "CKPT-RENEW-003",
    "CKPT-COMMIT-025",
    "CKPT-RESUME-004",
    profile="checkpoint",
    shared_dir=True,
    points=("commit.write",),
)
def a_lease_ends_with_the_pause(case: Case) -> None:
    """The gate is open, and the writing takes longer than the lease: nothing ends it, and it ends as committed."""
    c, p = case.controller, case.sessions
    lease_ms = p.limit("min_lease_ms")
    if lease_ms > case.patience.ms(LONG_LEASE_MS):
        raise NotOffered(f"the shortest lease is {lease_ms} ms")
    with case.failpoint("commit.write", "hold") as point:
        open_id, _, _ = begun(case, p, point, lease_ms=lease_ms)
        resumed = case.accepted(c.resume(p, open_id), "resume")
        said = (resumed["phase"], resumed["ended_as"])
        case.equal(("committing", None), said, "what resume says while the cut is written", "CKPT-RESUME-004")
        renewed = case.accepted(c.renew(p, open_id, lease_ms=lease_ms), "a renew after the resume")
        left = renewed["lease_remaining_ms"]
        case.equal(None, left, "the lease that is left once the gate is open", "CKPT-RENEW-003")
        case.step(f"let the lease of {lease_ms} ms pass twice")
        still = lambda: p.status()["checkpoint_id"] == open_id  # noqa: E731 - a condition with a name
        seconds = 2 * lease_ms / 1000 / case.patience.scale
        case.stays(still, "no lease ends it", "CKPT-LEASE-010", for_s=seconds)
        point.release()
    last = over(case, p, "CKPT-COMMIT-025")
    ended = (last["checkpoint_id"], last["ended_as"])
    case.equal((open_id, "committed"), ended, "how it ended, lease or not, as `last` tells", "CKPT-LEASE-010")


@check(
    "CKPT-COMMIT-028",
    "CKPT-CKID-008",
    "CKPT-GATE-015",
    profile="checkpoint",
    each="participant",
    shared_dir=True,
    points=("commit.write",),
)
def a_writing_that_fails_behind_an_open_gate(case: Case) -> None:
    """The gate is open again, and then the writing fails: the checkpoint ends as `failed`, with the reason."""
    c, p = case.controller, case.p
    with case.failpoint("commit.write", "hold") as point:
        open_id, target, directory = begun(case, p, point)
        case.accepted(c.resume(p, open_id), "resume")
        admits(case, p, "while the cut is written")
        case.step("let the writing fail for lack of space")
        point.turn_into("fail")
        last = over(case, p, "CKPT-COMMIT-028")
    admits(case, p, "after the writing has failed")
    got = (last["checkpoint_id"], last["ended_as"], last["manifest"])
    case.equal((open_id, "failed", None), got, "how it ended, as `last` tells", "CKPT-COMMIT-028")
    case.equal("insufficient_storage", last["error_code"], "its error", "CKPT-CKID-008")
    case.refused(c.commit(p, open_id, target), "stale_checkpoint", "the cut is gone", "CKPT-COMMIT-028")
    case.true(not (directory / MANIFEST).exists(), "there is no manifest", "CKPT-COMMIT-028", got="it is there")


@check(
    "CKPT-ART-004",
    profile="checkpoint",
    each="participant",
    features=("conformance", "artifacts_http"),
    points=("commit.write",),
)
def a_cut_that_is_being_written_is_not_fetched(case: Case) -> None:
    """A writer with target http is held: no file of its cut is there yet, under the names that an earlier cut had."""
    c, p = case.controller, case.p
    if "artifacts_http" not in p.capabilities["features"]:
        raise NotOffered("it does not list artifacts_http")
    first = prepared_at(case, p)
    done = case.accepted(c.commit(p, first, {"scheme": "http"}), "a commit with target http")
    manifest = case.accepted(p.get_artifact(first, done["manifest"]["name"]), "its manifest").json
    case.accepted(c.resume(p, first), "resume")
    held = prepared_at(case, p)
    with case.failpoint("commit.write", "hold") as point:
        case.step(f"commit {held} with target http, and hold the writer")
        case.accepted(c.commit(p, held, {"scheme": "http"}, wait="captured"), "commit is accepted")
        point.wait_reached()
        for name in [*(row["name"] for row in manifest["files"]), done["manifest"]["name"]]:
            what = f"GET of {name} of a checkpoint that is not committed"
            case.refused(p.get_artifact(held, name), "not_found", what, "CKPT-ART-004")
    case.accepted(c.abort(p, held), "abort")


@check(
    "CKPT-ERR-031",
    "CKPT-COMMIT-026",
    "CKPT-COMMIT-029",
    "CKPT-REPEAT-018",
    profile="checkpoint",
    each="participant",
    shared_dir=True,
    points=("commit.write",),
)
def a_target_without_space(case: Case) -> None:
    """C44: no space for a cut: `insufficient_storage`, back to prepared; once there is space the repeat works."""
    c, p = case.controller, case.p
    open_id = prepared_at(case, p)
    target, directory = target_for(case, p, open_id)
    with case.failpoint("commit.write", "fail"):
        refused = c.commit(p, open_id, target)
        keys = ("CKPT-ERR-031", "CKPT-COMMIT-029")
        reply = case.refused(refused, "insufficient_storage", "a commit that finds no space", *keys)
        case.equal((True, True), (reply["retryable"], reply["definite"]), "retryable, definite", "CKPT-ERR-031")
        status = p.status()
        case.equal(("prepared", True), (status["phase"], status["captured"]), "kept", "CKPT-COMMIT-026")
        case.true(not (directory / MANIFEST).exists(), "nothing is published", "CKPT-ERR-031", got="a manifest")
    elsewhere, _ = target_for(case, p, f"{open_id}-other")
    other = c.commit(p, open_id, elsewhere)
    case.refused(other, "argument_conflict", "a commit to another target, after the failure", "CKPT-REPEAT-018")
    case.step("now there is space: commit again")
    again = case.accepted(c.commit(p, open_id, target), "the same commit", "CKPT-REPEAT-018")
    case.equal(True, again["durable"], "it is durable", "CKPT-REPEAT-018")


@check(
    "CKPT-COMMIT-030",
    "CKPT-COMMIT-028",
    profile="checkpoint",
    shared_dir=True,
    points=("commit.write",),
)
def a_writing_has_a_time_limit(case: Case) -> None:
    """A writer that is held beyond `max_write_ms`: the checkpoint ends as failed, with `deadline_exceeded`."""
    c, p = case.controller, case.p
    limit = p.limit("max_write_ms")
    if limit > case.patience.ms(LONG_WRITE_MS):
        raise NotOffered(f"max_write_ms is {limit}")
    with case.failpoint("commit.write", "hold") as point:
        open_id, _, directory = begun(case, p, point)
        case.accepted(c.resume(p, open_id), "resume")
        case.step(f"hold the writer for more than {limit} ms")
        case.patience.pause(limit / 1000 + 0.2)  # Only then may the writer, which cannot see the limit pass, go on.
        point.release()
        last = over(case, p, "CKPT-COMMIT-030")
    got = (last["checkpoint_id"], last["ended_as"], last["error_code"])
    what = "how it ended, as `last` tells"
    case.equal((open_id, "failed", "deadline_exceeded"), got, what, "CKPT-COMMIT-030", "CKPT-COMMIT-028")
    case.true(not (directory / MANIFEST).exists(), "no manifest appeared", "CKPT-COMMIT-030", got="it is there")
