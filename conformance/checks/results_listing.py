# SPDX-License-Identifier: Apache-2.0
"""Results and ACKs: what the listing says of a rollout, limits of batches, pages and results, the policy's words."""

from __future__ import annotations

import functools

from conformance.case import DEFAULT_SCRIPT, Case, Rollout
from conformance.cuts import reset, restore_cut, take_cut
from conformance.errors import NotOffered
from conformance.registry import check
from conformance.script import add, script, world

COMMON = ("conformance",)
MANY = 20_000


@check(
    "CKPT-ROLL-043",
    "CKPT-ROLL-044",
    "CKPT-ROLL-046",
    "CKPT-ROLL-047",
    "CKPT-ROLL-048",
    "CKPT-ROLL-049",
    "CKPT-ROLL-050",
    "CKPT-ROLL-060",
    features=COMMON,
    world=True,
    budget="quick",
)
def a_row_says_where_a_rollout_stands(case: Case) -> None:
    """Waiting for the policy, in a turn, finished: state, boundaries, open turn, time in that state, receipt."""
    rollout_id = case.new_id()
    with case.world.hold("mid", rollout_id=rollout_id) as effect:
        rollout = case.start_at(1, script(add(1), [add(2), world("mid")], "done"), rollout_id=rollout_id)
        row = case.row(rollout)
        case.equal("waiting_policy", row["state"], "while the policy thinks", "CKPT-ROLL-043")
        case.equal(1, row["turns_done"], "its boundaries", "CKPT-ROLL-048")
        case.equal(None, row["open_turn"], "between turns", "CKPT-ROLL-049")
        told = {key: row[key] for key in ("environment", "task_digest")}
        case.equal({key: rollout.item[key] for key in told}, told, "of its start", "CKPT-ROLL-060")
        older = functools.partial(case.row, rollout)
        case.until(lambda: older()["since_ms"] >= row["since_ms"] + 50, "since_ms grows", "CKPT-ROLL-050")
        case.release(rollout)
        effect.wait_begun()
        row = case.row(rollout)
        case.equal(("running", 2), (row["state"], row["open_turn"]), "in a turn", "CKPT-ROLL-044", "CKPT-ROLL-049")
        case.true(row["since_ms"] < 5000, "since_ms is of this state", "CKPT-ROLL-050", got=row["since_ms"])
        effect.release()
    entry = case.result(rollout)
    row = case.row(rollout)
    case.equal("finished", row["state"], "its end", "CKPT-ROLL-046")
    case.equal(entry["receipt"], row.get("receipt"), "its receipt", "CKPT-ROLL-047")
    case.equal(3, row["turns_done"], "its boundaries", "CKPT-ROLL-048")


@check("CKPT-ROLL-042", each="rollouts", budget="quick")
def an_unknown_rollout_is_not_found(case: Case) -> None:
    """A rollout id that this incarnation does not know is `not_found`."""
    case.refused(case.agent.get_rollout(case.new_id()), "not_found", "a rollout nobody knows", "CKPT-ROLL-042")


@check("CKPT-ROLL-051", each="rollouts")
def batches_have_a_limit(case: Case) -> None:
    """One item more than `max_batch` in a start, an ACK or a retire: refused as a whole with `payload_too_large`."""
    limit = case.agent.limit("max_batch")
    if limit >= 10_000:
        raise NotOffered(f"max_batch is {limit}, the most that the schema allows")
    ids = [f"{case.prefix}many{n}" for n in range(limit + 1)]
    receipts = [{"rollout_id": key, "attempt": 0, "digest": "sha256:" + "0" * 64} for key in ids]
    case.new_controller()
    with case.unchanged("CKPT-ROLL-051"):
        replies = [case.controller.retire(case.agent, dict.fromkeys(ids, 0))]
        replies.append(case.controller.ack(case.agent, receipts))
        items = [case.item(key, environment="none") for key in ids]
        replies.append(case.controller.start(case.agent, items, policy=case.witness.policy()))
        for reply in replies:
            case.refused(reply, "payload_too_large", reply.exchange.operation, "CKPT-ROLL-051")
    whole = case.accepted(case.controller.ack(case.agent, receipts[1:]), "max_batch items", "CKPT-ROLL-051")
    case.equal({"unknown"}, {row["outcome"] for row in whole["outcomes"]}, "each is judged", "CKPT-ROLL-051")


@check("CKPT-ROLL-054", "CKPT-ROLL-055", profile="checkpoint", features=COMMON, storage=True)
def restore_lists_have_no_other_limit(case: Case) -> None:
    """A restore may list more fences than `max_batch`; more rollouts than `max_live_rollouts` it may not."""
    a = case.agent
    batch, live = a.limit("max_batch"), a.limit("max_live_rollouts")
    if batch >= MANY or live >= MANY:
        raise NotOffered(f"max_batch is {batch}, max_live_rollouts {live}")
    cut = take_cut(case)
    source = cut.parts[a.name].source(cut.checkpoint_id)
    zero = {"attempt": 0, "next_attempt": 1, "turns_done": 1, "task_digest": "x"}
    many = [{"rollout_id": f"{case.prefix}m{n}", **zero} for n in range(live + 1)]
    reply = case.controller.restore(a, case.controller.next_id(), source, rollouts=many)
    case.refused(reply, "payload_too_large", "more rollouts than may live", "CKPT-ROLL-055")
    fences = [{"rollout_id": f"{case.prefix}f{n}", "through_attempt": 0} for n in range(batch + 1)]
    reply = case.controller.restore(a, case.controller.next_id(), None, fences=fences)
    case.accepted(reply, "more fences than max_batch", "CKPT-ROLL-054")


@check("CKPT-ROLL-057", "CKPT-ROLL-058", features=COMMON)
def pages_have_a_size(case: Case) -> None:
    """Large results: a page of several stays within `max_page_bytes`, and one that alone is larger is still served."""
    limit, most = case.agent.limit("max_page_bytes"), case.agent.limit("max_result_bytes")
    size = min(limit // 3, most // 2)
    if size > 2_000_000:
        raise NotOffered(f"max_page_bytes is {limit}")
    rollouts = [case.start(script("x" * size)) for _ in range(5)]
    for rollout in rollouts:
        case.result(rollout)
    after: str | None = None
    seen = 0
    while seen < 20:
        reply = case.agent.get_results(after=after)
        rows = len(reply["results"])
        case.true(rows >= 1 or not reply["more"], "a page holds at least one", "CKPT-ROLL-058", got=rows)
        fits = rows <= 1 or len(reply.content) <= limit
        case.true(fits, "a page of several is within max_page_bytes", "CKPT-ROLL-057", got=len(reply.content))
        after, seen = reply["next"], seen + 1
        if not reply["more"]:
            return


@check("CKPT-ROLL-067", "CKPT-ROLL-068", features=COMMON, budget="quick")
def the_seed_is_forwarded_and_the_agent_is_the_first(case: Case) -> None:
    """`seed` of the start is in each chat call; no `agent`, and the first one named, run alike."""
    bodies = []
    first = case.agent.capabilities["agents"][0]["name"]
    for more in ({"seed": 123456}, {"seed": 123456, "agent": first}):
        rollout_id = case.new_id()
        case.witness.script(rollout_id, DEFAULT_SCRIPT)
        rollout = Rollout(rollout_id, 0, {**case.item(rollout_id), **more}, DEFAULT_SCRIPT)
        case.equal("started", case.outcome(rollout.item)["outcome"], f"a start with {more}")
        bodies.append(case.body(rollout))
        seeds = {call.body.get("seed") for call in case.witness.generations(rollout.rollout_id)}
        case.equal({123456}, seeds, "the seed of each policy call", "CKPT-ROLL-067")
    case.equal(bodies[0], bodies[1], "no agent is the first agent", "CKPT-ROLL-068")


@check("CKPT-RESULT-013", "CKPT-RESULT-021", features=COMMON)
def a_result_has_a_limit(case: Case) -> None:
    """A result above `max_result_bytes` is the terminal failure `result_too_large`; the feed goes on."""
    limit = case.agent.limit("max_result_bytes")
    if limit > 8 * 1024 * 1024:
        raise NotOffered(f"max_result_bytes is {limit}")
    failure = case.failure(case.start(script("x" * limit)), "CKPT-RESULT-013")
    case.equal("result_too_large", failure["kind"], "the kind", "CKPT-RESULT-013")
    case.equal(True, failure["terminal"], "a next attempt is pointless", "CKPT-RESULT-021")


@check("CKPT-RESULT-016", "CKPT-RESULT-022", "CKPT-ROLL-011", features=COMMON)
def a_result_must_be_text(case: Case) -> None:
    """N10: a lone surrogate in the conversation: the terminal failure `result_not_representable`; the feed goes on."""
    rollout = case.start(script("lone \ud800 surrogate"))
    failure = case.failure(rollout, "CKPT-RESULT-016")
    case.equal("result_not_representable", failure["kind"], "the kind", "CKPT-RESULT-016")
    case.equal(True, failure["terminal"], "a next attempt is pointless", "CKPT-RESULT-022")
    case.body(case.start())
    case.equal(["released"], case.ack(case.result(rollout)["receipt"]), "the ACK of the failure")
    again = case.outcome({**rollout.item, "attempt": 1})["outcome"]
    case.equal("released", again, "a next attempt after a terminal failure was released", "CKPT-ROLL-011")


@check(
    "CKPT-RESULT-020",
    "CKPT-RESULT-023",
    "CKPT-DIR-016",
    "CKPT-DIR-018",
    profile="checkpoint",
    features=COMMON,
    storage=True,
)
def versions_and_references_of_the_policy_are_kept(case: Case) -> None:
    """What the policy says of its weights and token rows is in the index, and, restored from there, in the result."""
    rollout_id = case.new_id()
    case.witness.mark(rollout_id, {1: 7, 2: 9, 3: 7, 4: 9}, data_refs=True)
    rollout = case.start_at(2, rollout_id=rollout_id)
    cut = take_cut(case)
    row = cut.row(case, rollout_id)
    if row["state"] != "turn":
        case.leave_out("the rollout does not continue", "CKPT-DIR-016", "CKPT-DIR-018")
    else:
        case.equal(9, row.get("policy_version"), "the highest so far", "CKPT-DIR-016")
        case.equal([{"key": f"{rollout_id}/{n}"} for n in (1, 2)], row["data_refs"], "data so far", "CKPT-DIR-018")
        restore_cut(case, cut)
    case.release(rollout)
    info = case.result(rollout)["content"]["info"]
    case.equal([7, 9], info["policy_versions"], "each once, in order of first use", "CKPT-RESULT-020")
    case.equal([{"key": f"{rollout_id}/{n}"} for n in (1, 2, 3, 4)], info["data_refs"], "all", "CKPT-RESULT-023")


@check("CKPT-FEED-018", profile="checkpoint", features=COMMON)
def a_read_that_waits_lands_in_the_new_feed(case: Case) -> None:
    """N19: a read waits while a reset makes a new feed: it is answered as a read of that feed."""
    page = case.agent.get_results()
    waiting = case.wire.background(lambda: case.agent.get_results(after=page["next"], wait_ms=1000))
    case.stays(lambda: not waiting.done(), "the read waits", for_s=0.1)
    reset(case)
    reply = case.accepted(waiting.result(), "the read that waited", "CKPT-FEED-018")
    case.equal(case.agent.get_results()["feed"], reply["feed"], "the new feed", "CKPT-FEED-018")


@check(
    "CKPT-COMMIT-006",
    "CKPT-FENCE-009",
    "CKPT-FENCE-011",
    "CKPT-RESTORE-037",
    profile="checkpoint",
    features=COMMON,
    storage=True,
)
def tombstones_come_from_the_cut(case: Case) -> None:
    """N17: released before the cut: released after the restore. Released after the cut: fenced, and may run again."""
    before, entry = case.finished(script("done"))
    case.ack(entry["receipt"])
    cut = take_cut(case)
    after, entry = case.finished(script("done"))
    case.ack(entry["receipt"])
    asked = case.witness.asked(after.rollout_id)
    restore_cut(case, cut)
    kept = case.outcome({**before.item, "attempt": 1})
    case.equal("released", kept["outcome"], "of the cut", "CKPT-COMMIT-006", "CKPT-FENCE-009")
    case.equal("stale_attempt", case.outcome(after.item)["outcome"], "after the cut", "CKPT-FENCE-011")
    case.equal(asked, case.witness.asked(after.rollout_id), "it does not start by itself", "CKPT-RESTORE-037")
    again = Rollout(after.rollout_id, 1, {**after.item, "attempt": 1}, DEFAULT_SCRIPT)
    case.equal("started", case.outcome(again.item)["outcome"], "its next attempt", "CKPT-FENCE-009")
    case.body(again)
