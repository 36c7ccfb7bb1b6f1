# SPDX-License-Identifier: Apache-2.0
"""Lifecycle: calls that come twice, many at once, with other arguments, or whose client goes away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from conformance.case import Case
from conformance.checks.lifecycle import steady
from conformance.controller import Participant
from conformance.cuts import (
    committed_at,
    restored_at,
    target_for,
)
from conformance.errors import LostReply
from conformance.registry import check
from conformance.wire import Fault

COMMON = ("conformance",)


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
        seen = {str(sorted(steady(reply.json).items())) for reply in replies}
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
