# SPDX-License-Identifier: Apache-2.0
"""Level 1: what a kill leaves: in each phase, during an effect, during a commit, between commit and resume."""

from __future__ import annotations

import contextlib
import json

from conformance.case import Case, Rollout
from conformance.checks.process import arise, born_again, must_remember, rediscover, rediscover_quietly
from conformance.checks.snapshots_sources import verifies
from conformance.controller import Json, Participant
from conformance.cuts import committed_at, prepared_at, restore_cut, restored_at, take_cut, target_for
from conformance.errors import Lost
from conformance.gym import Gym
from conformance.registry import check
from conformance.script import add, grow, script, world

COMMON = ("conformance",)
KEPT = (
    "CKPT-PHASE-009",
    "CKPT-PHASE-011",
    "CKPT-PHASE-013",
    "CKPT-PHASE-015",
    "CKPT-ID-022",
    "CKPT-FENCE-004",
    "CKPT-CTRL-007",
    "CKPT-CKID-010",
    "CKPT-DIR-023",
)
"""What only a participant that keeps its incarnation gives occasion to judge."""


@check(
    "CKPT-PHASE-008",
    "CKPT-PHASE-009",
    "CKPT-PHASE-011",
    "CKPT-PHASE-013",
    "CKPT-PHASE-014",
    "CKPT-PHASE-015",
    "CKPT-ID-022",
    "CKPT-ID-027",
    "CKPT-ID-028",
    "CKPT-FENCE-004",
    "CKPT-CTRL-007",
    "CKPT-CKID-010",
    "CKPT-DIR-023",
    profile="checkpoint",
    level=1,
    features=COMMON,
    world=True,
    storage=True,
    budget="default",
)
def a_kill_in_every_phase(case: Case) -> None:
    """C25: killed while preparing, prepared, committed, restored: idle and open; everything kept, or a new life."""
    fenced = case.new_id("fenced")
    lives = set[str]()
    for phase in ("preparing", "prepared", "committed", "restored"):
        case.new_controller(phase)
        case.controller.retire(case.agent, {fenced: 4})
        rollout = case.start_at(1)
        open_id = _open(case, phase)
        before = {p.name: (p.capabilities["incarnation"], p.status()) for p in case.gym.participants}
        case.release(rollout)
        case.step(f"SIGKILL in phase {phase}, start again on its data")
        case.process.kill()
        case.process.start()
        case.wire.reconnect()
        found = Gym.discover(case.wire, [endpoint.url for endpoint in case.process.endpoints])
        case.gym.participants = found.participants
        for p in case.gym.participants:
            status = p.status()
            got = (status["phase"], status["gate"], status["checkpoint_id"])
            case.equal(("idle", "open", None), got, f"{p.name} after {phase}", "CKPT-PHASE-008")
            incarnation, old = before[p.name]
            if p.capabilities["incarnation"] == incarnation:
                _kept(case, phase, open_id, old, status)
                lives.add("kept")
            else:
                _new_life(case, status)
                lives.add("new")
        case.world.release_all()
        kept_by = {p.name for p in case.gym.participants if p.capabilities["incarnation"] == before[p.name][0]}
        agent_kept = case.agent.name in kept_by
        if agent_kept:
            # Turn 2 had been asked: what its question depends on was on disk before it left.
            kept = case.row(rollout)["turns_done"] if phase != "restored" else 1
            # The restarted rollout may have gone on already; it has to hold the turn on which its policy call depended.
            case.true(kept >= 1, "a turn on which a policy call depended", "CKPT-DIR-023", got=kept)
            stale = case.outcome(case.item(fenced, attempt=4))["outcome"]
            case.equal("stale_attempt", stale, "a fence outlives the process", "CKPT-FENCE-004", "CKPT-ID-022")
        if phase == "restored":
            live = case.agent.status()["counts"]["live"]
            case.equal(0, live, "what was installed is discarded", "CKPT-PHASE-014")
        if len(kept_by) == len(before) and phase != "restored" and "turn-recovery" in case.gym.profiles:
            case.body(rollout, "CKPT-PHASE-015")
            case.equal(1, case.witness.completed(rollout.rollout_id, 1), "turn 1 was not redone", "CKPT-PHASE-015")
    if "kept" not in lives:
        case.leave_out("it took a new incarnation", *KEPT)
    if "new" not in lives:
        case.leave_out("it kept its incarnation", "CKPT-ID-027", "CKPT-ID-028")


def _open(case: Case, phase: str) -> str:
    if phase == "preparing":
        return _preparing_at(case, case.agent)
    if phase == "prepared":
        return prepared_at(case, case.agent)
    if phase == "committed":
        return committed_at(case, case.agent)[0]
    return restored_at(case, case.agent)


def _preparing_at(case: Case, p: Participant) -> str:
    """Open a checkpoint that an effect keeps from being prepared, and return its id."""
    rollout_id, open_id = case.new_id("slow"), case.controller.next_id()
    effect = case.world.hold("slow", rollout_id=rollout_id)
    case.start(script([world("slow")], "done"), rollout_id=rollout_id)
    effect.wait_begun()
    reply = case.accepted(case.controller.prepare(p, open_id, timeout_ms=1), "prepare")
    case.equal("preparing", reply["phase"], "an effect keeps it from being prepared")
    return open_id


def _kept(case: Case, phase: str, open_id: str, old: Json, status: Json) -> None:
    """Judge a participant that kept its incarnation."""
    case.equal(old["controller"], status["controller"], "the adopted pair", "CKPT-CTRL-007")
    if old["checkpoint_id"] != open_id:
        got = status["last"]["checkpoint_id"] if status["last"] else None
        wanted = old["last"]["checkpoint_id"] if old["last"] else None
        case.equal(wanted, got, "how it ended, in `last`", "CKPT-CKID-010")
        return
    key, ended_as = {
        "preparing": ("CKPT-PHASE-009", "failed"),
        "prepared": ("CKPT-PHASE-009", "failed"),
        "committed": ("CKPT-PHASE-011", "committed"),
        "restored": ("CKPT-PHASE-013", "aborted"),
    }[phase]
    last = (status["last"]["checkpoint_id"], status["last"]["ended_as"])
    case.equal((open_id, ended_as), last, f"what was {phase}", key)


def _new_life(case: Case, status: Json) -> None:
    """Judge a participant that took a new incarnation."""
    case.equal(None, status["last"], "a new life knows no checkpoint", "CKPT-ID-027")
    case.equal(None, status["controller"], "and no controller", "CKPT-ID-028")


@check(
    "CKPT-ID-036",
    "CKPT-ID-020",
    "CKPT-ID-026",
    "CKPT-ID-039",
    "CKPT-STATUS-009",
    "CKPT-FEED-003",
    "CKPT-CKID-030",
    profile="checkpoint",
    level=1,
    features=COMMON,
    storage=True,
)
def state_lost_between_commit_and_resume(case: Case) -> None:
    """N5: the state is lost between commit and resume: the resume is stale, by incarnation and by checkpoint."""
    rollout = case.start_at(1)
    cut = take_cut(case, resume=False)
    c = case.controller
    feed = case.agent.get_results()["feed"]
    case.process.kill()
    case.process.start(fresh=True)
    case.wire.reconnect()
    old = {p.name: p.capabilities["incarnation"] for p in case.gym.participants}
    found = Gym.discover(case.wire, [endpoint.url for endpoint in case.process.endpoints])
    case.gym.participants = found.participants
    case.true(case.agent.get_results()["feed"] != feed, "a new feed", "CKPT-FEED-003", got=feed)
    case.release(rollout)
    for p in case.gym.participants:
        lives = set(old.values())
        new = p.capabilities["incarnation"]
        case.true(new not in lives, "a new incarnation", "CKPT-ID-020", "CKPT-ID-026", got=new)
        case.equal(True, p.status()["fresh"], "nothing was accepted yet", "CKPT-STATUS-009")
        c.expect(p, old[p.name])
        case.refused(c.resume(p, cut.checkpoint_id), "stale_incarnation", "the old life", "CKPT-ID-036")
        case.equal(True, p.status()["fresh"], "a refused call changes that not", "CKPT-STATUS-009")
        c.expect(p, p.capabilities["incarnation"])
        case.refused(c.resume(p, cut.checkpoint_id), "stale_checkpoint", "the cut is gone", "CKPT-CKID-030")
    case.equal(0, case.witness.asked(rollout.rollout_id, 3), "nothing goes on by itself", "CKPT-ID-039")


@check(
    "CKPT-ENV-017",
    "CKPT-ID-023",
    "CKPT-ID-015",
    "CKPT-PHASE-018",
    "CKPT-ENV-006",
    profile="checkpoint",
    level=1,
    features=COMMON,
    world=True,
    storage=True,
)
def a_kill_during_an_effect(case: Case) -> None:
    """C61: killed while an effect runs: it is never run again by itself; restored from the cut, it happens once."""
    written = script(add(1), [world("mid")], "done")
    expected = case.baseline(written)
    rollout = case.start_at(1, written)
    cut = take_cut(case)
    with case.world.hold("mid", rollout_id=rollout.rollout_id) as effect:
        case.release(rollout)
        effect.wait_begun()
        case.step("SIGKILL while the effect runs, start again on its data")
        case.process.kill()
    before = {p.name: p.capabilities["incarnation"] for p in case.gym.participants}
    case.process.start()
    rediscover(case)
    kept = {p.name for p in case.gym.participants if p.capabilities["incarnation"] == before[p.name]}
    if case.agent.name in kept:
        _stopped(case, rollout, sessions_kept=case.sessions.name in kept)
        case.leave_out("it kept its incarnation", "CKPT-ID-023")
    else:
        # A new incarnation is permitted here (CKPT-ID-023): the rollout is restored instead of restarted.
        case.leave_out("it took a new incarnation", "CKPT-PHASE-018")
    case.stays(lambda: len(case.world.calls("mid", rollout_id=rollout.rollout_id)) == 1, "not repeated", "CKPT-ENV-017")
    if not case.continues:
        case.leave_out("no rollout continues without turn-recovery", "CKPT-ENV-006", "CKPT-ID-015")
        return
    restore_cut(case, cut)
    case.equal(expected, case.body(rollout), "restored from the cut", "CKPT-ENV-006")
    happened = case.world.happened("mid", rollout_id=rollout.rollout_id)
    case.equal(1, happened, "times that it happened, for an outside that honours request ids", "CKPT-ID-015")


def _stopped(case: Case, rollout: Rollout, *, sessions_kept: bool) -> None:
    """Judge a rollout whose effect was under way at the kill, where the owner of rollouts kept its incarnation."""
    if sessions_kept:
        case.until_state(rollout, "restart", requirements=("CKPT-PHASE-018",))
        return
    # The owner of sessions took a new life, so that its rollouts are restored; the agent may have asked it before.
    row = case.until_state(rollout, "restart", "failed", "waiting_policy", requirements=("CKPT-PHASE-018",))
    if row["state"] == "failed":
        case.equal("session_lost", case.failure(rollout)["kind"], "what it failed of", "CKPT-PHASE-018")


@check(
    "CKPT-DIR-001",
    "CKPT-DIR-002",
    "CKPT-PHASE-009",
    "CKPT-PHASE-010",
    profile="checkpoint",
    level=1,
    features=COMMON,
    shared_dir=True,
)
def a_kill_during_a_commit(case: Case) -> None:
    """C40: killed while it writes a cut: no manifest, or one whose every file fits; `last` agrees with it."""
    rollouts = [case.start_at(1, script(grow(300_000), "done")) for _ in range(8)]
    p = case.sessions
    before = p.capabilities["incarnation"]
    open_id = prepared_at(case, p)
    target, directory = target_for(case, p, open_id)
    case.step("commit, and SIGKILL while it is written")
    committing = case.wire.background(lambda: case.controller.commit(p, open_id, target))
    case.until(lambda: any(directory.iterdir()) or committing.done(), "the first file is there")
    case.process.kill()
    with contextlib.suppress(Lost):
        committing.result()
    try:
        manifest = verifies(directory)
    except json.JSONDecodeError as error:
        case.true(False, "a manifest appears whole", "CKPT-DIR-002", got=str(error))
    except (ValueError, OSError) as error:
        case.true(False, "a manifest comes after all that it names", "CKPT-DIR-001", got=str(error))
    case.process.start()
    rediscover_quietly(case)
    reborn_p = next(q for q in case.gym.participants if q.name == p.name)
    if reborn_p.capabilities["incarnation"] != before:
        case.leave_out("it took a new incarnation", "CKPT-PHASE-009", "CKPT-PHASE-010")
    else:
        case.leave_out("the kill came at another moment", "CKPT-PHASE-009" if manifest else "CKPT-PHASE-010")
        key = "CKPT-PHASE-010" if manifest else "CKPT-PHASE-009"
        last = reborn_p.status()["last"]
        wanted = "committed" if manifest else "failed"
        case.equal((open_id, wanted), (last["checkpoint_id"], last["ended_as"]), "last", key)
    for rollout in rollouts:
        case.release(rollout)


@check(
    "CKPT-PHASE-017",
    "CKPT-PHASE-019",
    "CKPT-PHASE-013",
    profile="checkpoint",
    level=1,
    features=COMMON,
    storage=True,
)
def a_kill_in_restored_fences_what_was_installed(case: Case) -> None:
    """N16: killed in `restored` with its incarnation kept: the installed attempts and results stay fenced."""
    rollout = case.start_at(1)
    done, _ = case.finished(script("done"))
    cut = take_cut(case)
    case.release(rollout)
    lists = restore_cut(case, cut, resume=False)
    born_again(case)
    case.equal("stale_attempt", case.outcome(done.item)["outcome"], "an installed result", "CKPT-PHASE-019")
    attempt = lists.next_attempts.get(rollout.rollout_id)
    if attempt is None:
        case.leave_out("no rollout continues without turn-recovery", "CKPT-PHASE-017")
        return
    stale = case.outcome({**rollout.item, "attempt": attempt})["outcome"]
    case.equal("stale_attempt", stale, "an installed attempt", "CKPT-PHASE-017")
    again = case.start(rollout_id=rollout.rollout_id, attempt=attempt + 1)
    case.body(again, "CKPT-PHASE-017")


@check("CKPT-GATE-023", profile="turn-recovery", level=1, features=COMMON)
def budgets_stop_while_the_process_is_down(case: Case) -> None:
    """C28: down for longer than the whole budget: with the incarnation kept the rollout still succeeds."""
    must_remember(case)
    budget_ms = case.patience.ms(2_000)
    rollout = case.start_at(1, episode_ms=budget_ms)
    case.step("SIGKILL the Gym, and leave it down for longer than the budget")
    case.process.kill()
    case.release(rollout)  # It asks again as soon as it lives; what is judged is the time without a process.
    case.patience.pause(budget_ms / 1000 + 0.1)
    arise(case)
    case.body(rollout, "CKPT-GATE-023")
