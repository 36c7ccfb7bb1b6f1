# SPDX-License-Identifier: Apache-2.0
"""Errors, repeats and time: the form of requests, the order of checks, limits of size and time."""

from __future__ import annotations

import json
from collections.abc import Iterator

from conformance.case import Case
from conformance.checks.identity import post, retiring
from conformance.controller import Json
from conformance.cuts import target_for
from conformance.errors import LostReply, NotOffered
from conformance.registry import check
from conformance.script import script, world
from spec import wire as names

COMMON = ("conformance",)
BIG_S = 20.0


@check(
    "CKPT-ERR-001",
    "CKPT-ERR-004",
    "CKPT-ERR-006",
    "CKPT-ERR-036",
    "CKPT-ERR-037",
    each="participant",
    budget=("quick", "demo"),
)
def malformed_bodies_are_refused(case: Case) -> None:
    """No JSON, another type, an unknown field, a missing one, a value out of bounds: all `invalid_request`."""
    good = retiring(case.new_id(), 0)
    url = case.p.url + names.PREFIX + "/retire"
    headers = {**case.controller.headers(case.p), "Content-Type": "application/json"}
    numbers = [b'{"rollouts": [], "timeout_ms": %s}' % word for word in (b"NaN", b"Infinity", b"-Infinity")]
    lone = b'{"rollouts": [{"rollout_id": "a\\ud800", "through_attempt": 0}], "timeout_ms": 1}'
    for key, contents in (
        ("CKPT-ERR-006", [b"", b"{", b"[]", b"null", b"\xff\xfe"]),
        ("CKPT-ERR-037", numbers),
        ("CKPT-ERR-036", [lone]),
    ):
        for content in contents:
            reply = case.wire.raw("POST", url, headers=headers, content=content)
            case.refused(reply, "invalid_request", f"the body {content!r}", key)
    wrong: list[tuple[str, Json]] = [
        ("CKPT-ERR-001", {**good, "more": 1}),
        ("CKPT-ERR-001", {**good, "rollouts": [{**good["rollouts"][0], "more": 1}]}),  # type: ignore[index]  # a list
        ("CKPT-ERR-006", {"rollouts": []}),
        ("CKPT-ERR-004", {**good, "timeout_ms": -1}),
        ("CKPT-ERR-004", {**good, "timeout_ms": 86_400_001}),
        ("CKPT-ERR-004", {**good, "timeout_ms": 2**63}),
        ("CKPT-ERR-006", {**good, "timeout_ms": "1"}),
        ("CKPT-ERR-006", {**good, "timeout_ms": None}),
    ]
    for key, body in wrong:
        case.equal("invalid_request", post(case, "/retire", body), json.dumps(body)[:120], key)


@check("CKPT-ORDER-001", "CKPT-ORDER-002", each="participant", budget="quick")
def refusals_have_an_order(case: Case) -> None:
    """Of several refusals that fit, the first counts: token, form, incarnation, controller, checkpoint id."""
    c, p = case.controller, case.p
    url = p.url + names.PREFIX + "/checkpoint/abort"
    stale_id = json.dumps({"checkpoint_id": f"{c.epoch}-0", "timeout_ms": 100}).encode()
    whole = {**c.headers(p), "Content-Type": "application/json"}
    life = {names.HEADER_EXPECT_INCARNATION: "another-life"}
    lower = {names.HEADER_CONTROLLER_EPOCH: str(c.epoch - 1 or 1), names.HEADER_CONTROLLER_ID: "aaa"}
    lower_id = json.dumps({"checkpoint_id": f"{c.epoch - 1 or 1}-0", "timeout_ms": 100}).encode()
    bad_token = {"Authorization": "Bearer wrong"}
    c.abort(p, f"{c.epoch}-5")
    rows = [
        ("unauthorized", {**whole, **life, **bad_token}, b"{"),
        ("invalid_request", {**whole, **life, **lower}, b"{"),
        ("stale_incarnation", {**whole, **life, **lower}, lower_id),
        ("stale_controller", {**whole, **lower}, lower_id),
        ("stale_checkpoint", whole, stale_id),
    ]
    for code, headers, content in rows:
        if code == "unauthorized" and not case.wire.tokens.get("control"):
            continue
        reply = case.wire.raw("POST", url, headers=headers, content=content)
        case.refused(reply, code, f"the first refusal is {code}", "CKPT-ORDER-001")
    no_header = {"Content-Type": "text/plain"}
    reply = case.wire.raw("POST", url, headers=no_header, content=b"{")
    case.refused(reply, "unsupported_media_type", "media type before JSON and headers", "CKPT-ORDER-002")


@check(
    "CKPT-TIME-007",
    "CKPT-TIME-008",
    "CKPT-TIME-009",
    "CKPT-TIME-013",
    "CKPT-RETIRE-010",
    features=COMMON,
    world=True,
)
def a_retire_that_cannot_wait_goes_on(case: Case) -> None:
    """A retire whose limit ends while an effect runs says `pending` or `continues`; repeated, it joins and ends."""
    rollout_id = case.new_id()
    with case.world.hold("slow", rollout_id=rollout_id) as effect:
        rollout = case.start(script([world("slow")], "done"), rollout_id=rollout_id)
        effect.wait_begun()
        reply = case.controller.retire(case.agent, {rollout_id: 0}, timeout_ms=50)
        if reply.ok:
            outcome = reply["outcomes"][0]["outcome"]
            case.true(outcome in ("pending", "retired"), "the outcome", "CKPT-RETIRE-010", got=outcome)
            case.leave_out("retire answers at once", "CKPT-TIME-007", "CKPT-TIME-008", "CKPT-TIME-009", "CKPT-TIME-013")
        else:
            case.leave_out("retire waits and answers when it is done", "CKPT-RETIRE-010")
            case.refused(reply, "deadline_exceeded", "the limit ended", "CKPT-TIME-007")
            case.equal(True, reply.json.get("continues"), "the work goes on", "CKPT-TIME-013")
        effect.release()
    case.until_state(rollout, "retired", requirements=("CKPT-TIME-008",))
    again = case.accepted(case.controller.retire(case.agent, {rollout_id: 0}), "the repeat", "CKPT-TIME-009")
    case.equal("retired", again["outcomes"][0]["outcome"], "the repeat", "CKPT-TIME-009")


@check("CKPT-ERR-029", "CKPT-SEC-011", "CKPT-SEC-012", profile="checkpoint", each="participant", shared_dir=True)
def targets_outside_the_roots_are_refused(case: Case) -> None:
    """C45: outside, missing, through a link, relative, with a control character: refused, nothing written."""
    c, p = case.controller, case.p
    open_id = c.next_id()
    case.accepted(c.prepare(p, open_id), "prepare")
    _, directory = target_for(case, p, open_id)
    link = directory.parent / "link"
    link.symlink_to("/tmp")  # noqa: S108 - a directory that is outside every root
    for path in ("/", "/tmp", str(directory / "missing"), str(link), str(directory / ".." / ".." / ".." / "..")):  # noqa: S108 - as above
        reply = c.commit(p, open_id, {"scheme": "file", "path": path})
        case.refused(reply, "forbidden_target", f"the target {path}", "CKPT-ERR-029")
    body = {"checkpoint_id": open_id, "wait": "durable", "timeout_ms": 100}
    for path in ("relative", "./x", "/a\0b", "", "/a\nb"):
        found = post(case, "/checkpoint/commit", {**body, "target": {"scheme": "file", "path": path}})
        case.equal("invalid_request", found, f"the target {path!r}", "CKPT-SEC-012")
    case.equal([], list(directory.iterdir()), "nothing was written", "CKPT-SEC-011")
    case.accepted(c.abort(p, open_id), "abort")
    cut = {"scheme": "file", "checkpoint_id": open_id, "manifest_digest": names.bytes_digest(b"none")}
    for path in ("/", "/tmp", str(link), str(directory / ".." / ".." / ".." / "..")):  # noqa: S108 - as above
        reply = c.restore(p, c.next_id(), {**cut, "path": path})
        case.refused(reply, "forbidden_target", f"the source {path}", "CKPT-ERR-029", "CKPT-SEC-011")
    link.unlink()


@check(
    "CKPT-COMMIT-040",
    "CKPT-COMMIT-039",
    "CKPT-ERR-030",
    "CKPT-REPEAT-016",
    profile="checkpoint",
    each="participant",
    shared_dir=True,
)
def a_target_that_holds_something_is_refused(case: Case) -> None:
    """C23: a target directory that is not empty: `target_exists`, left as it was, the phase stays prepared."""
    c, p = case.controller, case.p
    open_id = c.next_id()
    case.accepted(c.prepare(p, open_id), "prepare")
    target, directory = target_for(case, p, open_id)
    (directory / "stranger").write_bytes(b"x")
    case.refused(c.commit(p, open_id, target), "target_exists", "a stranger's file", "CKPT-ERR-030")
    found = [path.name for path in directory.iterdir()]
    case.equal(["stranger"], found, "the directory is as it was", "CKPT-COMMIT-040")
    missing = {"scheme": "file", "path": str(directory / "missing")}
    case.refused(c.commit(p, open_id, missing), "forbidden_target", "a directory that is not there", "CKPT-COMMIT-039")
    case.true(not (directory / "missing").exists(), "it is not created", "CKPT-COMMIT-039", got="it is there")
    case.equal("prepared", p.status()["phase"], "the phase", "CKPT-REPEAT-016")
    (directory / "stranger").unlink()
    case.accepted(c.commit(p, open_id, target), "the same commit, once it is empty")


@check("CKPT-ROLL-052", "CKPT-ROLL-053", each="participant")
def bodies_have_a_limit(case: Case) -> None:
    """C71: a body of one byte above `max_body_bytes`, with a length or chunked, is `payload_too_large`."""
    limit = case.p.limit("max_body_bytes")
    if limit > 64 * 1024 * 1024:
        raise NotOffered(f"max_body_bytes is {limit}")
    url = case.p.url + names.PREFIX + "/retire"
    headers = {**case.controller.headers(case.p), "Content-Type": "application/json"}
    start, end = b'{"rollouts":[],"timeout_ms":1', b"}"
    fits = start + b" " * (limit - len(start) - len(end)) + end
    reply = case.wire.raw("POST", url, headers=headers, content=fits, within_s=BIG_S)
    case.accepted(reply, "a body of exactly the limit", "CKPT-ROLL-053")
    large = start + b" " * (limit + 1 - len(start) - len(end)) + end

    def chunks() -> Iterator[bytes]:
        for place in range(0, len(large), 65536):
            yield large[place : place + 65536]

    for what, content in (("with a length", large), ("chunked", chunks())):
        try:
            reply = case.wire.raw("POST", url, headers=headers, content=content, within_s=BIG_S)
        except LostReply:
            # A server may close the connection on an oversized body before the client has sent all of it.
            continue
        case.refused(reply, "payload_too_large", f"one byte more, {what}", "CKPT-ROLL-052")
