# SPDX-License-Identifier: Apache-2.0
"""Lifecycle and gate: what waits for what, and for how long: captures, leases, handlers, begun turns, ledgers."""

from __future__ import annotations

import time

from conformance.case import Case
from conformance.checks.environments_effects import probe
from conformance.cuts import prepared_at, ready_at, reset, take_cut, target_for
from conformance.errors import NotOffered
from conformance.gym import RESTART_ONLY
from conformance.registry import check
from conformance.script import add, script, world

COMMON = ("conformance",)
SLOW = script([world("slow")], add(1), "done")
SHORT_MS = 150


@check(
    "CKPT-COMMIT-014",
    "CKPT-COMMIT-009",
    "CKPT-COMMIT-010",
    "CKPT-COMMIT-019",
    "CKPT-COMMIT-025",
    "CKPT-RESUME-002",
    "CKPT-RESUME-003",
    "CKPT-RESUME-004",
    profile="checkpoint",
    each="participant",
    storage=True,
    budget="quick",
)
def the_gate_opens_before_the_cut_is_durable(case: Case) -> None:
    """Commit with `wait: captured`, resume at once: the gate is open, and `last` becomes committed by itself."""
    c, p = case.controller, case.p
    open_id = prepared_at(case)
    target, _ = target_for(case, p, open_id)
    case.step("commit, wait: captured, and resume at once")
    first = case.accepted(c.commit(p, open_id, target, wait="captured"), "commit", "CKPT-COMMIT-014")
    case.equal(True, first["captured"], "captured", "CKPT-COMMIT-014", "CKPT-COMMIT-010")
    parts = (first["manifest"] is not None, first["index"] is not None)
    # It may be durable already: a participant may do both in one step.
    case.equal((first["durable"],) * 2, parts, "manifest and index", "CKPT-COMMIT-019", "CKPT-COMMIT-009")
    resumed = case.accepted(c.resume(p, open_id), "resume", "CKPT-RESUME-003")
    status = p.status()
    case.equal("open", status["gate"], "the gate is open", "CKPT-RESUME-002", "CKPT-RESUME-003")
    if first["durable"]:
        case.leave_out("it was durable at once", "CKPT-COMMIT-019", "CKPT-COMMIT-025", "CKPT-RESUME-003")
    over = resumed["phase"] == "idle"
    if over:
        case.leave_out("it was written before resume was answered", "CKPT-RESUME-004")
    case.equal("committed" if over else None, resumed["ended_as"], "null while it is written", "CKPT-RESUME-004")
    case.until(lambda: p.status()["phase"] == "idle", "it ends by itself", "CKPT-COMMIT-025")
    last = p.status()["last"]
    case.equal(
        (open_id, "committed"), (last["checkpoint_id"], last["ended_as"]), "how it ended, in `last`", "CKPT-COMMIT-025"
    )
    case.true(last["manifest"], "with its manifest", "CKPT-COMMIT-025", got=last)


@check("CKPT-LEASE-008", profile="checkpoint", features=COMMON, world=True)
def a_lease_does_not_run_while_prepare_waits(case: Case) -> None:
    """A prepare that waits longer than its own lease is not ended by it."""
    lease_ms = case.agent.limit("min_lease_ms")
    if lease_ms > case.patience.ms(2_000):
        raise NotOffered(f"the shortest lease is {lease_ms} ms")
    rollout_id = case.new_id()
    with case.world.hold("slow", rollout_id=rollout_id) as effect:
        rollout = case.start(SLOW, rollout_id=rollout_id)
        effect.wait_begun()
        open_id = case.controller.next_id()
        wait = min(lease_ms * 2, case.agent.limit("max_wait_ms"))
        reply = case.controller.prepare(case.agent, open_id, timeout_ms=wait, lease_ms=lease_ms)
        case.accepted(reply, "the prepare that waited", "CKPT-LEASE-008")
        case.equal("preparing", case.agent.status()["phase"], "it is still open", "CKPT-LEASE-008")
    case.controller.abort(case.agent, open_id)
    case.body(rollout)


@check("CKPT-PREP-012", profile="checkpoint", features=COMMON, world=True, storage=True)
def restart_count_is_what_the_cut_will_list(case: Case) -> None:
    """`restart_count` of prepare is the number of `restart` rows of the cut, without what would be there as blocked."""
    reset(case)
    case.start_at(1)
    case.start_at(1, environment=RESTART_ONLY)
    broken = case.new_id()
    case.world.fail("breaks", rollout_id=broken)
    case.until_state(case.start(script([world("breaks")], "done"), rollout_id=broken), "restart")
    blocked, checkpoint_id = case.new_id("slow"), case.controller.next_id()
    with case.world.hold("slow", rollout_id=blocked) as effect:
        case.start(SLOW, rollout_id=blocked)
        effect.wait_begun()
        case.step(f"prepare {checkpoint_id} at the agent with a short limit, while an effect blocks")
        early = case.accepted(case.controller.prepare(case.agent, checkpoint_id, timeout_ms=SHORT_MS), "prepare")
        effect.release()
    told = {p.name: ready_at(case, p, checkpoint_id)["restart_count"] for p in case.gym.participants}
    cut = take_cut(case, checkpoint_id=checkpoint_id)
    rows = cut.parts[case.agent.name].rows
    restarts = {rollout for rollout, row in rows.items() if row["state"] == "restart"}
    case.equal(len(restarts), told[case.agent.name], "restart_count, and the rows of the cut", "CKPT-PREP-012")
    early_count = len(restarts - {blocked})  # Where nothing continues the cut lists it too, and then for that reason.
    case.equal(early_count, early["restart_count"], "restart_count while another one blocks", "CKPT-PREP-012")


@check(
    "CKPT-GATE-011",
    "CKPT-GATE-012",
    "CKPT-GATE-013",
    profile="checkpoint",
    features=COMMON,
    world=True,
)
def a_session_owner_lets_a_begun_turn_go_on(case: Case) -> None:
    """While it prepares, a session owner runs further effects of a turn of which it has run one, and no first one."""
    p = case.sessions
    if p.owns("rollouts"):
        raise NotOffered("no participant owns sessions and no rollouts")
    begun, fresh, slow = case.start_at(0), case.start_at(0), case.start_at(0)
    with case.world.hold("probe", rollout_id=slow.rollout_id) as effect:
        holding = case.wire.background(lambda: probe(case, slow, 1, "world"))
        effect.wait_begun()
        case.accepted(probe(case, begun, 1), "the first effect of a turn, before prepare")
        open_id = case.controller.next_id()
        case.step(f"prepare {open_id} while an effect of another rollout runs")
        case.accepted(case.controller.prepare(p, open_id, timeout_ms=SHORT_MS), "prepare")
        case.equal("preparing", p.status()["phase"], "the phase")
        case.accepted(probe(case, begun, 2), "the second effect of that turn", "CKPT-GATE-011")
        first = case.wire.background(lambda: probe(case, fresh, 1))
        case.stays(lambda: not (first.done() and first.result().ok), "a first effect waits", "CKPT-GATE-012")
        effect.release()
    case.accepted(holding.result(), "the slow effect ends")
    ready_at(case, p, open_id)
    later = case.wire.background(lambda: probe(case, begun, 3))
    case.stays(lambda: not (later.done() and later.result().ok), "prepared: every effect waits", "CKPT-GATE-013")
    case.controller.abort(p, open_id)
    for held in (first, later):
        held.result()


@check(
    "CKPT-RESTORE-007",
    "CKPT-RESTORE-009",
    "CKPT-RESTORE-012",
    "CKPT-ABORT-006",
    "CKPT-PHASE-005",
    profile="checkpoint",
    features=COMMON,
    world=True,
)
def a_restore_waits_for_running_handlers(case: Case) -> None:
    """N12: a restore waits for a running effect: at its limit it fails as before; an abort cancels it."""
    p = case.sessions
    rollout_id = case.new_id()
    with case.world.hold("slow", rollout_id=rollout_id) as effect:
        rollout = case.start(SLOW, rollout_id=rollout_id)
        effect.wait_begun()
        first = case.controller.next_id()
        case.step(f"reset {p.name} while an effect runs there, with a short limit")
        reply = case.controller.restore(p, first, None, timeout_ms=300)
        case.refused(reply, "not_ready", "it waited for the handler", "CKPT-RESTORE-007", "CKPT-RESTORE-009")
        status = p.status()
        last = (status["phase"], status["gate"], status["last"]["checkpoint_id"], status["last"]["ended_as"])
        case.equal(("idle", "open", first, "failed"), last, "as before", "CKPT-RESTORE-012")
        second = case.controller.next_id()
        case.step(f"reset again as {second} and abort it while it waits")
        waiting = case.wire.background(lambda: case.controller.restore(p, second, None, timeout_ms=3000))
        case.until(lambda: p.status()["checkpoint_id"] == second, "the restore is open")
        case.accepted(case.controller.abort(p, second), "abort of a restore", "CKPT-ABORT-006")
        case.refused(waiting.result(), "stale_checkpoint", "the restore that waited", "CKPT-PHASE-005")
        effect.release()
    case.body(rollout, "CKPT-ABORT-006")


@check("CKPT-RESTORE-008", profile="checkpoint", features=COMMON, world=True)
def a_restore_does_not_wait_for_turns(case: Case) -> None:
    """N22: an agent whose rollout has an effect under way elsewhere restores at once."""
    if case.agent is case.sessions:
        raise NotOffered("effects run in the participant that owns rollouts")
    rollout_id = case.new_id()
    with case.world.hold("slow", rollout_id=rollout_id) as effect:
        case.start(SLOW, rollout_id=rollout_id)
        effect.wait_begun()
        restore_id = case.controller.next_id()
        reply = case.controller.restore(case.agent, restore_id, None, timeout_ms=2000)
        case.accepted(reply, "it does not wait for the turn", "CKPT-RESTORE-008")
        effect.release()
    case.accepted(case.controller.resume(case.agent, restore_id), "resume")


@check(
    "CKPT-ENV-018",
    "CKPT-ENV-019",
    "CKPT-DIR-033",
    "CKPT-DIR-034",
    profile="checkpoint",
    features=COMMON,
    storage=True,
)
def a_ledger_owner_is_always_ready(case: Case) -> None:
    """A participant that owns only a ledger is ready at once, and its index has the rows of every completed call."""
    p = case.gym.owner("ledger")
    if p is None or p.owns("rollouts") or p.owns("sessions"):
        raise NotOffered("no participant owns a ledger alone")
    rollouts = [case.start_at(n) for n in (1, 2, 3)]
    started = time.monotonic()
    ready_at(case, p, checkpoint_id := case.controller.next_id())
    took = time.monotonic() - started
    case.true(took < case.patience.seconds(2), "ready at once", "CKPT-ENV-018", got=f"{took:.1f} s")
    cut = take_cut(case, checkpoint_id=checkpoint_id)
    rows = cut.parts[p.name].rows
    for turns, rollout in enumerate(rollouts, 1):
        row = rows.get(rollout.rollout_id, {})
        got = (row.get("state"), row.get("turns_done"))
        case.equal(("turn", turns), got, "its row", "CKPT-DIR-033", "CKPT-DIR-034", "CKPT-ENV-019")


@check("CKPT-GATE-025", "CKPT-GATE-008", profile="checkpoint", features=COMMON, world=True, storage=True)
def a_policy_call_while_parked_breaks_nothing(case: Case) -> None:
    """A turn closes while the gate is closing; whether its rollout asks on at once or later, nothing comes of it."""
    written = script([world("slow")], add(1), "done")
    expected = case.baseline(written)
    rollout_id = case.new_id()
    with case.world.hold("slow", rollout_id=rollout_id) as effect:
        rollout = case.start(written, rollout_id=rollout_id)
        effect.wait_begun()
        open_id = case.controller.next_id()
        case.accepted(case.controller.prepare(case.agent, open_id, timeout_ms=1), "prepare, in the middle of a turn")
        effect.release()
    ready_at(case, case.agent, open_id)
    case.stays(lambda: case.row(rollout)["turns_done"] == 1, "no boundary comes of an early call", "CKPT-GATE-025")
    case.stays(lambda: case.row(rollout)["open_turn"] is None, "no turn opens by an early call", "CKPT-GATE-025")
    if not case.witness.asked(rollout_id, 2):
        case.leave_out("it asks the policy only when the gate is open", "CKPT-GATE-025")
    cut = take_cut(case, checkpoint_id=open_id)
    case.equal(1, cut.row(case, rollout_id)["turns_done"], "the cut holds one turn", "CKPT-GATE-025")
    case.equal(expected, case.body(rollout, "CKPT-GATE-025"), "the same body", "CKPT-GATE-025", "CKPT-GATE-008")
    case.equal(1, case.witness.completed(rollout_id, 2), "turn 2 was generated once", "CKPT-GATE-008")
