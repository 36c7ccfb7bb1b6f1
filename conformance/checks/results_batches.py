# SPDX-License-Identifier: Apache-2.0
"""Results in numbers: a hundred receipts at once, and the sets into which a cut and its restore divide all rollouts."""

from __future__ import annotations

from conformance.case import Case
from conformance.controller import Json
from conformance.cuts import reset, restore_cut, take_cut
from conformance.errors import NotOffered
from conformance.gym import RESTART_ONLY
from conformance.registry import check
from conformance.script import script, world

COMMON = ("conformance",)
HUNDRED = 100
ACKED, GOING, ONCE = 10, 15, 7
"""Of 32 admitted: acknowledged, to be continued, and those that can only start again."""
DONE = script("done")


def finish_crowd(case: Case, number: int) -> list[Json]:
    """Start rollouts in one batch, and return the receipts of their results, in the order of the batch."""
    items = [case.item(case.new_id()) for _ in range(number)]
    for item in items:
        case.witness.script(item["rollout_id"], DONE)
    case.step(f"start {number} rollouts in one batch, and wait for their results")
    reply = case.accepted(case.start_items(items), "a batch starts")
    case.equal({"started"}, {row["outcome"] for row in reply["outcomes"]}, "the outcomes of the batch")
    ids = [item["rollout_id"] for item in items]
    case.until(lambda: set(ids) <= set(case.agent.results()), "all results are served")
    served = case.agent.results()
    return [served[key]["receipt"] for key in ids]


def _judge_pages(case: Case) -> None:
    """Judge that no page of the hundred results, or of their rollouts, is longer than the Gym declares."""
    most = case.agent.limit("max_page_items")
    if most >= HUNDRED:
        return
    for limit in (None, HUNDRED):
        pages = {
            "results": case.agent.get_results(limit=limit),
            "rollouts": case.agent.get_rollouts(limit=limit),
        }
        for name, reply in pages.items():
            number = len(case.accepted(reply, f"a page of {name}")[name])
            what = f"a page of {name} (limit {limit}) has at most max_page_items {most}"
            case.true(number <= most, what, "CKPT-ROLL-056", got=number)


@check(
    "CKPT-ACK-006",
    "CKPT-ACK-007",
    "CKPT-ACK-002",
    "CKPT-ACK-003",
    "CKPT-ACK-004",
    "CKPT-ROLL-056",
    features=COMMON,
)
def one_wrong_digit_among_a_hundred_receipts(case: Case) -> None:
    """C03: 100 receipts in one batch, one off by one hex digit: 99 `released`, one `mismatch`, still served."""
    limit = min(case.agent.limit("max_batch"), case.agent.limit("max_live_rollouts"))
    if limit < HUNDRED:
        raise NotOffered(f"no more than {limit} at once")
    receipts = finish_crowd(case, HUNDRED)
    _judge_pages(case)
    place = 57
    digest = receipts[place]["digest"]
    wrong = {**receipts[place], "digest": digest[:-1] + ("0" if digest[-1] != "0" else "1")}
    outcomes = case.ack(*receipts[:place], wrong, *receipts[place + 1 :])
    case.equal("mismatch", outcomes[place], "the one with another digit", "CKPT-ACK-006")
    expected = ["released"] * place + ["mismatch"] + ["released"] * (HUNDRED - place - 1)
    case.equal(expected, outcomes, "the outcomes in order", "CKPT-ACK-002", "CKPT-ACK-003")
    mine = {receipt["rollout_id"] for receipt in receipts}
    left = [row["receipt"] for key, row in case.agent.results().items() if key in mine]
    case.equal([receipts[place]], left, "what is still served", "CKPT-ACK-004", "CKPT-ACK-007")
    case.equal(["released"], case.ack(receipts[place]), "its own digest", "CKPT-ACK-007")


@check(
    "CKPT-STATUS-016",
    "CKPT-STATUS-014",
    "CKPT-STATUS-015",
    "CKPT-ROLL-020",
    profile="checkpoint",
    features=COMMON,
    world=True,
)
def each_rollout_is_counted_once_by_its_state(case: Case) -> None:
    """A rollout in each state: the one that lives and the one that stopped are live, what has ended is not."""
    reset(case)
    going = case.start_at(1)
    case.world.fail("broken")
    stopped = case.start(script(world("broken"), "done"))
    case.until_state(stopped, "restart")
    again = case.outcome(stopped.item)["outcome"]
    case.equal("already_started", again, "a start of the one that stopped and is live", "CKPT-ROLL-020")
    case.finished(DONE)
    lost = case.new_id()
    case.world.fail(rollout_id=lost, kind="verify", times=9)
    case.failure(case.start(DONE, rollout_id=lost, verify_in_world=True))
    released = case.finished(DONE)[1]["receipt"]
    case.equal(["released"], case.ack(released), "the ACK")
    gone = case.start_at(1)
    retired = case.controller.retire(case.agent, {gone.rollout_id: gone.attempt})
    case.accepted(retired, "retire")
    counts = case.agent.status()["counts"]
    wanted = {
        "admitted": 6,
        "live": 2,
        "restart": 1,
        "finished_unreleased": 1,
        "failed_unreleased": 1,
        "released": 1,
        "retired": 1,
    }
    got = {name: counts[name] for name in wanted}
    case.equal(wanted, got, "the counts", "CKPT-STATUS-016", "CKPT-STATUS-014", "CKPT-STATUS-015")
    case.release(going, gone)


@check(
    "CKPT-STATUS-024",
    "CKPT-STATUS-014",
    "CKPT-STATUS-015",
    "CKPT-COMMIT-020",
    "CKPT-ENV-001",
    "CKPT-FENCE-009",
    profile="turn-recovery",
    features=COMMON,
    storage=True,
)
def the_sets_of_a_cut_do_not_overlap(case: Case) -> None:
    """C08: of 32 admitted 10 are ACKed, 15 go on and 7 start again: after the restore 10 + 15 + 7 = 32, each once."""
    reset(case)
    acked = finish_crowd(case, ACKED)
    case.equal(["released"] * ACKED, case.ack(*acked), "the ACKs")
    going = case.start_crowd(GOING, 1)
    once = case.start_crowd(ONCE, 1, environment=RESTART_ONLY)
    case.equal(32, case.agent.status()["counts"]["admitted"], "admitted", "CKPT-STATUS-014")
    cut = take_cut(case)
    rows = cut.parts[case.agent.name].rows
    sets = {state: {key for key, row in rows.items() if row["state"] == state} for state in ("turn", "restart")}
    wrong = sorted({r.rollout_id for r in once} - sets["restart"])
    case.equal([], wrong, "restart_only rollouts that the cut does not list as restart", "CKPT-ENV-001")
    wrong = sorted({r.rollout_id for r in going} ^ sets["turn"])
    case.equal([], wrong, "rollouts that go on and are no turn rows, or the other way round", "CKPT-COMMIT-020")
    restore_cut(case, cut)
    counts = case.agent.status()["counts"]
    got = (counts["admitted"], counts["released"], counts["live"])
    case.equal((ACKED + GOING, ACKED, GOING), got, "what the restore installed", "CKPT-STATUS-024")
    for receipt in acked:
        outcome = case.outcome(case.item(receipt["rollout_id"], attempt=9))["outcome"]
        case.equal("released", outcome, "what was acknowledged before the cut", "CKPT-FENCE-009")
    items = [{**rollout.item, "attempt": case.next_attempt(rollout.rollout_id)} for rollout in once]
    started = case.accepted(case.start_items(items), "the others start again")
    case.equal({"started"}, {row["outcome"] for row in started["outcomes"]}, "their outcomes", "CKPT-STATUS-015")
    counts = case.agent.status()["counts"]
    got = (counts["admitted"], counts["released"], counts["live"])
    case.equal((32, ACKED, GOING + ONCE), got, "10 + 15 + 7", "CKPT-STATUS-015", "CKPT-STATUS-024")


@check("CKPT-FEED-006", "CKPT-FEED-004", "CKPT-FEED-016", profile="turn-recovery", features=COMMON, storage=True)
def an_old_cursor_gets_everything(case: Case) -> None:
    """N2: 10 results were read, 15 rollouts live; restored, 5 of them end: the old cursor gets all 15 results."""
    a = case.agent
    reset(case)
    read = {receipt["rollout_id"] for receipt in finish_crowd(case, ACKED)}
    page = a.get_results()
    while page["more"]:
        page = a.get_results(after=page["next"])
    live = case.start_crowd(GOING, 1)
    restore_cut(case, take_cut(case))
    others = live[:5]
    case.release(*others)
    wanted = read | {rollout.rollout_id for rollout in others}
    case.until(lambda: wanted <= set(a.results()), "all results are there", "CKPT-FEED-016")
    seen, after, feed = set[str](), page["next"], page["feed"]
    more = True
    while more:
        reply = case.accepted(a.get_results(after=after, limit=4), "a read with the old cursor", "CKPT-FEED-006")
        case.true(reply["feed"] != feed, "a new feed", "CKPT-FEED-004", got=feed)
        seen |= {row["receipt"]["rollout_id"] for row in reply["results"]}
        after, more = reply["next"], reply["more"]
    case.equal(wanted, seen, "what the old cursor leads to", "CKPT-FEED-006", "CKPT-FEED-016")
