# SPDX-License-Identifier: Apache-2.0
"""Snapshots and restart: the acid test, in the living server, through cycles, and with another policy."""

from __future__ import annotations

import time

from conformance.case import Case, Rollout
from conformance.cuts import (
    Cut,
    restore_cut,
    resume_everywhere,
    take_cut,
)
from conformance.errors import NotOffered
from conformance.registry import check
from conformance.script import add, grow, refuse, script, world
from spec import wire as names

COMMON = ("conformance",)
BUDGET_MS = 1_000
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
    "CKPT-ID-009",
    "CKPT-RESTORE-044",
    "CKPT-RESULT-003",
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
    finished = case.result(rollout)["receipt"]["attempt"]
    case.equal(rollout.attempt, finished, "the attempt of the receipt", "CKPT-RESULT-003")
    calls = case.witness.asked(rollout.rollout_id, attempt=rollout.attempt)
    case.true(calls, f"policy calls with Gym-Attempt {rollout.attempt}, as it was restored", "CKPT-ID-009", got=calls)
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
    calls = case.witness.generations(rollout.rollout_id, address=address)
    what = "policy calls of the restored rollout reach the address that the restore gave"
    case.true(calls, what, "CKPT-RESTORE-035", got="there are none")


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
    "CKPT-ENV-006",
    "CKPT-COMMIT-005",
    "CKPT-GATE-004",
    "CKPT-INV-002",
    profile="checkpoint",
    features=COMMON,
    world=True,
    storage=True,
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
    "CKPT-GATE-017",
    "CKPT-GATE-016",
    "CKPT-ROLL-037",
    profile="turn-recovery",
    features=COMMON,
    world=True,
    storage=True,
)
def a_budget_goes_on_where_it_stopped(case: Case) -> None:
    """C28: a part is spent, then parked and restored for longer than the whole: exactly the rest is left."""
    budget = case.patience.ms(BUDGET_MS) / 1000
    case.finished(script("done"))  # The first rollout of a process may take its time.
    rollout_id = case.new_id()
    hold = case.witness.hold(rollout_id, 2)
    with case.world.hold("slow", rollout_id=rollout_id) as effect:
        begun = time.monotonic()
        rollout = case.start(script(world("slow"), "done"), rollout_id=rollout_id, episode_ms=round(budget * 1000))
        effect.wait_begun()
        case.patience.pause(budget / 2)  # From here on its budget runs for certain.
    hold.wait_asked()
    spent = time.monotonic() - begun
    cut = take_cut(case, resume=False)
    if spent >= budget:
        raise NotOffered("everything takes too long to tell what is left of a budget")
    case.step(
        f"at most {spent:.2f} of {budget:g} s are spent; as much as the whole passes while it is parked, and restored"
    )
    case.patience.pause(budget / 2)
    resumed = _resume_much_later(case, cut, budget / 2)
    failure = case.failure(rollout, "CKPT-ROLL-037")
    left = time.monotonic() - resumed
    case.equal("episode_timeout", failure["kind"], "how it ends while the policy thinks on", "CKPT-ROLL-037")
    took = f"{left:.2f} s"
    case.true(left > (budget - spent) / 2, "the pause cost nothing", "CKPT-GATE-017", "CKPT-GATE-016", got=took)
    most = budget / 2 + case.patience.seconds(0.35)
    case.true(left < most, "what was spent stays spent", "CKPT-GATE-017", got=took)


def _resume_much_later(case: Case, cut: Cut, pause: float) -> float:
    """Restore a cut, let time pass before the resume, and return when it was resumed."""
    for p in case.gym.participants:
        case.accepted(case.controller.abort(p, cut.checkpoint_id), "abort")
    restore_cut(case, cut, resume=False)
    case.patience.pause(pause)
    open_id = case.agent.status()["checkpoint_id"]
    resume_everywhere(case, open_id)
    return time.monotonic()
