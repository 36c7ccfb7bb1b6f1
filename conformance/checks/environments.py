# SPDX-License-Identifier: Apache-2.0
"""Environments: continuation, budgets, the policy that is away, and rollouts whose calls are refused."""

from __future__ import annotations

from conformance.case import DEFAULT_SCRIPT, Case
from conformance.cuts import prepared_at, restored_at, take_cut
from conformance.errors import NotOffered
from conformance.gym import RESTART_ONLY
from conformance.registry import check

COMMON = ("conformance",)


@check("CKPT-EFFECT-016", "CKPT-GATE-008", "CKPT-GATE-013", profile="checkpoint", features=COMMON)
def no_refusal_reaches_the_policy(case: Case) -> None:
    """N7: a tool call meets a closed gate of the sessions: the policy sees what it would have seen without it."""
    expected = case.baseline()
    rollout = case.start_at(1)
    open_id = prepared_at(case, case.sessions)
    case.release(rollout)
    case.witness.wait_completed(rollout.rollout_id, 2)
    case.stays(lambda: case.row(rollout)["turns_done"] == 1, "the turn waits", "CKPT-GATE-013")
    case.accepted(case.controller.abort(case.sessions, open_id), "abort")
    case.equal(expected, case.body(rollout, "CKPT-GATE-008"), "the same body", "CKPT-EFFECT-016", "CKPT-GATE-008")


@check(
    "CKPT-FENCE-012",
    "CKPT-FENCE-013",
    "CKPT-FENCE-014",
    "CKPT-EFFECT-016",
    profile="checkpoint",
    features=COMMON,
    budget="quick",
)
def a_stale_call_ends_its_rollout_without_a_result(case: Case) -> None:
    """C10, N7: the sessions are reset under a live rollout: its next effect is stale, it ends without a result."""
    if case.sessions is case.agent:
        raise NotOffered("one participant owns rollouts and sessions: it cannot fence one of them alone")
    rollout = case.start_at(1)
    restore_id = restored_at(case, case.sessions)
    case.accepted(case.controller.resume(case.sessions, restore_id), "resume")
    case.release(rollout)
    case.witness.wait_completed(rollout.rollout_id, 2)
    case.until(lambda: case.agent.status()["counts"]["live"] == 0, "it ends at once", "CKPT-FENCE-012")
    served = sorted(case.agent.results())
    case.true(rollout.rollout_id not in served, "the feed has no result of the stale one", "CKPT-FENCE-012", got=served)
    case.equal("stale_attempt", case.outcome(rollout.item)["outcome"], "its attempt is fenced", "CKPT-FENCE-014")
    case.equal(0, case.witness.asked(rollout.rollout_id, 3), "the policy was not asked on", "CKPT-EFFECT-016")
    reply = case.accepted(case.controller.prepare(case.agent, case.controller.next_id()), "prepare")
    case.equal(True, reply["ready"], "it blocks nothing", "CKPT-FENCE-013")


@check(
    "CKPT-ENV-001",
    "CKPT-ENV-002",
    "CKPT-DIR-030",
    profile="checkpoint",
    features=COMMON,
    storage=True,
    budget=("quick", "demo"),
)
def each_continuation_has_its_index_state(case: Case) -> None:
    """C08: a `restart_only` rollout is listed as `restart`, others as `turn` with what they have done, 0 included."""
    rollouts = [case.start_at(n) for n in (0, 1)]
    restart = case.start_at(1, environment=RESTART_ONLY)
    cut = take_cut(case)
    saved = cut.row(case, restart.rollout_id)
    case.equal(
        ("restart", "restart_only"),
        (saved["state"], saved.get("reason")),
        "restart_only",
        "CKPT-ENV-001",
        "CKPT-DIR-030",
    )
    if "turn-recovery" not in case.gym.profiles:
        case.leave_out("no rollout continues without turn-recovery", "CKPT-ENV-002")
    else:
        for turns, rollout in enumerate(rollouts):
            row = cut.row(case, rollout.rollout_id)
            case.equal(("turn", turns), (row["state"], row["turns_done"]), "continues", "CKPT-ENV-002")


@check("CKPT-GATE-019", "CKPT-GATE-024", features=COMMON)
def a_policy_that_is_away_is_asked_again(case: Case) -> None:
    """429, 503 and a cut connection: the agent repeats the call, the turn keeps its number, the rollout succeeds."""
    rollout_id = case.new_id()
    case.witness.answer(429, rollout_id, 2, retry_after_s=0.05)
    case.witness.answer(503, rollout_id, 2)
    case.witness.drop(rollout_id, 2)
    expected = case.baseline()
    rollout = case.start(rollout_id=rollout_id)
    case.equal(expected, case.body(rollout, "CKPT-GATE-019"), "the same body", "CKPT-GATE-019")
    calls = case.witness.generations(rollout_id, 2)
    case.equal([2] * len(calls), [call.turn for call in calls], "the turn keeps its number", "CKPT-GATE-024")
    case.true(len(calls) >= 4, "it was asked again after each", "CKPT-GATE-019", got=len(calls))


@check("CKPT-GATE-020", "CKPT-GATE-021", features=COMMON)
def a_policy_that_stays_away_ends_the_rollout(case: Case) -> None:
    """A policy that cannot be reached within `policy_retry_ms`: the non-terminal failure `policy_unavailable`."""
    limit = case.agent.limit("policy_retry_ms")
    if limit > case.patience.ms(5_000):
        raise NotOffered(f"policy_retry_ms is {limit} ms")
    address = f"{case.prefix}dead"
    policy = case.witness.policy(address)
    case.witness.refuse(address)
    rollout = case.start(policy=policy)
    failure = case.failure(rollout, "CKPT-GATE-020")
    case.equal("policy_unavailable", failure["kind"], "the kind", "CKPT-GATE-020")
    case.equal(False, failure["terminal"], "a next attempt may succeed", "CKPT-GATE-021")


@check("CKPT-ROLL-037", "CKPT-ROLL-064", features=COMMON, budget="default")
def a_spent_budget_ends_the_rollout(case: Case) -> None:
    """A rollout whose `episode_ms` is used up ends with the non-terminal failure `episode_timeout`."""
    rollout = case.start_at(1, episode_ms=300)
    case.step("keep the policy thinking until the budget is spent")
    failure = case.failure(rollout, "CKPT-ROLL-037")
    case.equal("episode_timeout", failure["kind"], "the kind", "CKPT-ROLL-037")
    case.equal(False, failure["terminal"], "a next attempt may succeed", "CKPT-ROLL-064")


@check("CKPT-GATE-018", features=COMMON)
def a_policy_that_is_away_costs_no_budget(case: Case) -> None:
    """C28: while the policy answers 503 the rollout's budget does not run."""
    limit = case.agent.limit("policy_retry_ms")
    if limit < 1200:
        raise NotOffered(f"policy_retry_ms is {limit} ms")
    rollout_id = case.new_id()
    case.witness.answer(503, rollout_id, 2, times=10_000)
    rollout = case.start(rollout_id=rollout_id, episode_ms=900)
    case.witness.wait_asked(rollout_id, 2)
    case.step("the policy is away for 1.1 s, longer than the whole budget")
    case.patience.pause(1.1)
    case.witness.forget(rollout_id)
    case.witness.script(rollout_id, DEFAULT_SCRIPT)
    case.body(rollout, "CKPT-GATE-018")


@check("CKPT-ROLL-065", features=COMMON)
def a_retry_goes_to_the_policy_that_the_rollout_then_has(case: Case) -> None:
    """N18: the old policy is unreachable; a repeated start moves the retries of the call under way elsewhere."""
    dead, alive = f"{case.prefix}dead", f"{case.prefix}alive"
    policy = case.witness.policy(dead)
    case.witness.refuse(dead)
    rollout = case.start(policy=policy)
    outcome = case.outcome(rollout.item, policy=case.witness.policy(alive))
    case.equal("already_started", outcome["outcome"], "the repeated start")
    case.body(rollout, "CKPT-ROLL-065")


@check("CKPT-FENCE-002", profile="checkpoint", features=COMMON)
def a_ledger_owner_refuses_fenced_attempts(case: Case) -> None:
    """An attempt that is retired at the owner of the ledger gets no policy call through; its rollout ends."""
    p = case.gym.owner("ledger")
    if p is None or p.owns("rollouts"):
        raise NotOffered("no participant owns a ledger without owning rollouts")
    rollout = case.start_at(0)
    case.accepted(case.controller.retire(p, {rollout.rollout_id: 0}), "retire at the ledger owner")
    case.release(rollout)
    case.until(lambda: case.agent.status()["counts"]["live"] == 0, "its calls are stale: it ends", "CKPT-FENCE-002")
    case.equal(0, case.witness.completed(rollout.rollout_id, 2), "no further policy call", "CKPT-FENCE-002")
