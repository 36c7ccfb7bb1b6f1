# SPDX-License-Identifier: Apache-2.0
"""Identity and fencing: every operation in every stale way; controllers that choose one epoch, or wake up late."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from conformance.case import Case, Rollout
from conformance.checks.environments_effects import probe
from conformance.controller import Controller, Json, Participant
from conformance.cuts import Part, read_part, target_for
from conformance.errors import NotOffered
from conformance.registry import check
from conformance.script import add, script, world
from conformance.wire import Reply
from spec import wire as names

COMMON = ("conformance",)
Call = Callable[[Controller, str], Reply]
"""Calls an operation as a controller, with a checkpoint id."""


def table(case: Case, p: Participant, rollout: Rollout | None) -> Mapping[str, Call]:
    """Return every mutating operation that a participant serves, ready to be called."""
    item = rollout.item if rollout else case.item("nobody")
    receipt = {"rollout_id": item["rollout_id"], "attempt": 0, "digest": names.result_digest("{}")}
    target, _ = target_for(case, p, "never-written")
    calls: dict[str, Call] = {
        "abort": lambda c, open_id: c.abort(p, open_id),
        "retire": lambda c, _: c.retire(p, {item["rollout_id"]: 7}),
        "prepare": lambda c, open_id: c.prepare(p, open_id, timeout_ms=100),
        "commit": lambda c, open_id: c.commit(p, open_id, target),
        "resume": lambda c, open_id: c.resume(p, open_id),
        "renew": lambda c, open_id: c.renew(p, open_id),
        "restore": lambda c, open_id: c.restore(p, open_id, None),
    }
    if p.owns("rollouts"):
        policy = case.witness.policy(f"{case.prefix}nowhere")
        calls["start"] = lambda c, _: c.start(p, [{**item, "attempt": 8}], policy=policy)
        calls["acks"] = lambda c, _: c.ack(p, [receipt])
    if "artifacts_http" in p.capabilities["features"]:
        calls["put"] = lambda c, open_id: c.put_artifact(p, open_id, "stray.bin", b"stray")
    return calls


@check(
    "CKPT-CTRL-005",
    "CKPT-CTRL-008",
    "CKPT-ID-036",
    "CKPT-ID-037",
    "CKPT-ORDER-004",
    "CKPT-CKID-019",
    "CKPT-CKID-023",
    profile="checkpoint",
    each="participant",
    features=COMMON,
    storage=True,
)
def every_operation_in_every_stale_way(case: Case) -> None:
    """C11: each operation by a lower controller, for another life, with an ended id: refused, and nothing changes."""
    p = case.p
    rollout = case.start_at(1) if p.owns("rollouts") else None
    c = case.new_controller() if case.controller.epoch == 1 else case.controller
    ended = f"{c.epoch}-5"
    case.accepted(c.abort(p, ended), "an id ends")
    lower = Controller("zzz", c.epoch - 1)
    equal = Controller("A", c.epoch)  # Of equal epochs the id that is lower bytewise.
    stranger = Controller(c.controller_id, c.epoch)
    stranger.expect(p, "another-life")
    ways: list[tuple[str, Controller, str, str, str]] = [
        ("a lower epoch", lower, f"{lower.epoch}-9", "stale_controller", "CKPT-CTRL-005"),
        ("a lower id of the epoch", equal, f"{c.epoch}-9", "stale_controller", "CKPT-CTRL-005"),
        ("another life", stranger, f"{c.epoch}-9", "stale_incarnation", "CKPT-ID-036"),
    ]
    calls = table(case, p, rollout)
    with case.unchanged("CKPT-CTRL-008", "CKPT-ID-037", "CKPT-ORDER-004", at=[p]):
        for way, controller, checkpoint_id, code, key in ways:
            for name, call in calls.items():
                case.refused(call(controller, checkpoint_id), code, f"{name} with {way}", key)
        for name in ("prepare", "commit", "resume", "renew", "restore"):
            reply = calls[name](c, ended)
            case.refused(reply, "stale_checkpoint", f"{name} of an ended id", "CKPT-CKID-019")
            reply = calls[name](c, f"{c.epoch}-4")
            case.refused(reply, "stale_checkpoint", f"{name} of a lower id", "CKPT-CKID-023")
        case.refused(calls["abort"](c, f"{c.epoch}-4"), "stale_checkpoint", "abort of a lower id", "CKPT-CKID-023")
    if rollout is not None:
        case.release(rollout)
        case.equal(0, case.result(rollout)["receipt"]["attempt"], "its own attempt ends it", "CKPT-CTRL-008")


@check(
    "CKPT-FENCE-001",
    "CKPT-FENCE-003",
    "CKPT-EFFECT-008",
    "CKPT-RESTORE-029",
    "CKPT-ACK-014",
    profile="turn-recovery",
    features=COMMON,
    world=True,
    storage=True,
)
def every_operation_with_a_stale_attempt(case: Case) -> None:
    """C11: start, restore and effect as a fenced attempt are `stale_attempt`, and change nothing; an ACK never is."""
    a, c = case.agent, case.controller
    done, entry = case.finished(script("done"))
    rollout = case.start_at(1, script(add(1), add(2), "done"))
    part = _cut_of(case, a)
    for p in case.gym.participants:
        case.accepted(c.retire(p, {rollout.rollout_id: 4, done.rollout_id: 4}), "retire through attempt 4")
    case.until_state(rollout, "retired")
    row = part.rows[rollout.rollout_id]
    item = {key: row[key] for key in ("rollout_id", "attempt", "turns_done", "task_digest")}
    with case.unchanged("CKPT-FENCE-003", at=case.gym.participants):
        for attempt in (0, 3, 4):
            outcome = case.outcome({**rollout.item, "attempt": attempt})["outcome"]
            case.equal("stale_attempt", outcome, f"a start as attempt {attempt}", "CKPT-FENCE-001")
            stale = probe(case, rollout, 1, "world", attempt=attempt)
            case.refused(stale, "stale_attempt", f"an effect as attempt {attempt}", "CKPT-EFFECT-008")
        for attempt in (1, 4):
            listed = [{**item, "next_attempt": attempt}]
            reply = c.restore(a, c.next_id(), part.source(part.manifest_json()["checkpoint_id"]), rollouts=listed)
            case.refused(reply, "stale_attempt", f"a restore as attempt {attempt}", "CKPT-RESTORE-029")
    case.equal([], case.world.calls("probe", rollout_id=rollout.rollout_id), "effects outside", "CKPT-EFFECT-008")
    case.equal(["released"], case.ack(entry["receipt"]), "an ACK of a fenced attempt", "CKPT-ACK-014")


def _cut_of(case: Case, p: Participant) -> Part:
    """Prepare, commit and resume one participant alone, and return what it wrote."""
    c = case.controller
    open_id = c.next_id()
    case.equal(True, case.accepted(c.prepare(p, open_id), "prepare")["ready"], "ready")
    target, directory = target_for(case, p, open_id)
    part = read_part(case, p, open_id, target, directory, case.accepted(c.commit(p, open_id, target), "commit"))
    case.accepted(c.resume(p, open_id), "resume")
    return part


@check("CKPT-CTRL-001", "CKPT-CTRL-002", "CKPT-CTRL-005", "CKPT-CTRL-006")
def two_controllers_choose_one_epoch(case: Case) -> None:
    """C12: two controllers call every participant with one epoch at the same moment: everywhere the same one wins."""
    for turn in range(4):
        epoch = case.gym.controller("x").epoch
        ids = ("suite-a", "suite-b") if turn % 2 else ("suite-b", "suite-a")
        low, high = sorted((Controller(name, epoch) for name in ids), key=lambda c: c.controller_id)
        case.step(f"{ids[0]} and {ids[1]} abort {epoch}-0 at every participant at once")
        order = [low, high] if turn % 2 else [high, low]
        calls = [functools.partial(c.adopt, p) for p in case.gym.participants for c in order]
        case.wire.together(calls)
        for p in case.gym.participants:
            pair = {"id": high.controller_id, "epoch": epoch}
            case.equal(pair, p.status()["controller"], f"who {p.name} has adopted", "CKPT-CTRL-001", "CKPT-CTRL-002")
            refused = case.refused(low.retire(p, {}), "stale_controller", "the other, from then on", "CKPT-CTRL-005")
            case.equal(pair, refused.json.get("controller"), "who is named to it", "CKPT-CTRL-006")
            case.accepted(high.retire(p, {}), "the one that won goes on", "CKPT-CTRL-001")


@check(
    "CKPT-CTRL-004",
    "CKPT-CTRL-005",
    "CKPT-PHASE-005",
    profile="checkpoint",
    features=COMMON,
    world=True,
    storage=True,
)
def an_old_controller_wakes_up(case: Case) -> None:
    """C13: the old controller sleeps while its prepare waits, another takes over: its commit and abort are refused."""
    old, a = case.controller, case.agent
    rollout_id = case.new_id()
    with case.world.hold("slow", rollout_id=rollout_id) as effect:
        rollout = case.start(script([world("slow")], "done"), rollout_id=rollout_id)
        effect.wait_begun()
        open_id = old.next_id()
        waiting = case.wire.background(functools.partial(old.prepare, a, open_id))
        case.until(lambda: a.status()["phase"] == "preparing", "its prepare waits")
        target, directory = target_for(case, a, open_id)
        new = case.new_controller("suite-next")
        late = waiting.result()
        case.true(
            late.code in ("stale_checkpoint", "stale_controller"), "its prepare", "CKPT-PHASE-005", got=late.brief
        )
        mine = new.next_id()
        case.accepted(new.prepare(a, mine, timeout_ms=1), "the new one prepares")
        with case.unchanged("CKPT-CTRL-005", at=[a]):
            for reply in (old.commit(a, open_id, target), old.abort(a, open_id), old.abort(a, old.next_id())):
                case.refused(reply, "stale_controller", reply.exchange.operation, "CKPT-CTRL-005")
        case.equal([], list(directory.iterdir()), "what it wrote", "CKPT-CTRL-005")
        case.equal(mine, a.status()["checkpoint_id"], "the new one's is open", "CKPT-CTRL-004")
        effect.release()
    ready = case.accepted(new.prepare(a, mine), "prepare")
    case.equal(True, ready["ready"], "the new one gets ready", "CKPT-CTRL-004")
    case.accepted(new.abort(a, mine), "abort")
    case.body(rollout)


@check(
    "CKPT-FENCE-003",
    "CKPT-EFFECT-008",
    "CKPT-FENCE-012",
    profile="turn-recovery",
    level=1,
    features=COMMON,
    world=True,
    storage=True,
)
def a_frozen_agent_wakes_up_fenced(case: Case) -> None:
    """C10: SIGSTOP while attempt 0 waits for the policy, attempt 1 goes on elsewhere, SIGCONT: attempt 0 is stale."""
    a, s, c = case.agent, case.sessions, case.controller
    if a is s:
        raise NotOffered("one process owns rollouts and sessions: it cannot be frozen alone")
    rollout = case.start_at(1, script(add(1), [world("late")], "done"))
    part = _cut_of(case, s)
    case.step("SIGSTOP the agent, then let the policy answer it")
    case.process.stop(a.name)
    case.release(rollout)
    row = part.rows[rollout.rollout_id]
    item = {key: row[key] for key in ("rollout_id", "attempt", "turns_done")}
    listed: list[Json] = [{**item, "task_digest": rollout.item["task_digest"], "next_attempt": 1}]
    restore_id = c.next_id()
    case.step("attempt 1 goes on without it: restore the sessions, and run an effect")
    source = part.source(part.manifest_json()["checkpoint_id"])
    case.accepted(c.restore(s, restore_id, source, rollouts=listed), "the sessions are restored")
    case.accepted(c.resume(s, restore_id), "resume")
    first = case.accepted(probe(case, rollout, 1, attempt=1, turn=2), "an effect of attempt 1")
    case.step("SIGCONT")
    case.process.cont()
    case.until(lambda: case.agent.status()["counts"]["live"] == 0, "attempt 0 ends", "CKPT-FENCE-012")
    case.equal([], case.world.calls("late", rollout_id=rollout.rollout_id), "its effects", "CKPT-EFFECT-008")
    case.true(rollout.rollout_id not in a.results(), "its result", "CKPT-FENCE-012", got="there is one")
    again = case.accepted(probe(case, rollout, 1, attempt=1, turn=2), "the effect of attempt 1, repeated")
    case.equal(first["observation"], again["observation"], "the state of attempt 1 is untouched", "CKPT-FENCE-003")
