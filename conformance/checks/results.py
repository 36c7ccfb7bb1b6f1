# SPDX-License-Identifier: Apache-2.0
"""Results: starting, repeating, listing and retiring rollouts, and the counts."""

from __future__ import annotations

from conformance.case import DEFAULT_SCRIPT, Case, Rollout
from conformance.checks.discovery import counts_add_up
from conformance.controller import Json
from conformance.errors import NotOffered
from conformance.registry import check
from conformance.script import add, script, world

COMMON = ("conformance",)
SHORT = script(add(1), "done")


@check(
    "CKPT-ROLL-004",
    "CKPT-ROLL-001",
    "CKPT-ROLL-002",
    "CKPT-ROLL-005",
    "CKPT-ROLL-006",
    "CKPT-ROLL-007",
    "CKPT-ROLL-008",
    "CKPT-ROLL-009",
    "CKPT-ROLL-023",
    "CKPT-ROLL-025",
    "CKPT-ROLL-003",
    features=COMMON,
    budget=("quick", "demo"),
)
def a_batch_is_answered_item_by_item(case: Case) -> None:
    """One batch with an item of every kind: one outcome each, in request order, the first that fits."""
    fenced = case.new_id("fenced")
    case.controller.retire(case.agent, {fenced: 3})
    policy = {"policy": case.witness.policy()}
    unfit = {"task": {"seed": "x"}}
    wanted: dict[str, tuple[str, Json]] = {
        case.new_id("good"): ("started", policy),
        case.new_id("unfit"): ("invalid", {**policy, **unfit}),
        case.new_id("nopolicy"): ("invalid", {}),
        case.new_id("agent"): ("invalid", {**policy, "agent": "no-such-agent"}),
        case.new_id("env"): ("unknown_environment", {**policy, "environment": "no-such-environment"}),
        fenced: ("stale_attempt", policy),
        case.new_id("last"): ("started", policy),
    }
    items = [{**case.item(key), **more} for key, (_, more) in wanted.items()]
    reply = case.accepted(case.controller.start(case.agent, items), "the batch is answered 200", "CKPT-ROLL-001")
    case.equal(list(wanted), [row["rollout_id"] for row in reply["outcomes"]], "the order", "CKPT-ROLL-002")
    keys = {
        "unfit": "CKPT-ROLL-006",
        "nopolicy": "CKPT-ROLL-005",
        "agent": "CKPT-ROLL-007",
        "env": "CKPT-ROLL-008",
        "fenced": "CKPT-ROLL-009",
    }
    for row in reply["outcomes"]:
        expected = wanted[row["rollout_id"]][0]
        stem = row["rollout_id"].rpartition("-")[2].rstrip("0123456789")
        case.equal(expected, row["outcome"], f"the outcome of {row['rollout_id']}", keys.get(stem, "CKPT-ROLL-004"))
    known = set(case.agent.rollouts())
    refused = {key for key, (outcome, _) in wanted.items() if outcome in ("invalid", "unknown_environment")}
    case.equal(set(), refused & known, "refused items leave no trace", "CKPT-ROLL-023")
    for key, (outcome, _) in wanted.items():
        case.attempts[key] = 3
        if outcome == "started":
            asked = case.witness.wait_asked(key, 1)
            case.equal(0, asked.attempt, "it runs as the attempt that it names", "CKPT-ROLL-025")
    twin = case.item(case.new_id("twin"))
    reply = case.start_items([twin, case.item(case.new_id("single")), twin])
    got = [row["outcome"] for row in reply["outcomes"]]
    case.equal(["invalid", "started", "invalid"], got, "one rollout twice in a batch", "CKPT-ROLL-003")


@check("CKPT-ROLL-025", features=COMMON)
def a_start_runs_as_the_attempt_that_it_names(case: Case) -> None:
    """A rollout that nobody knows starts as attempt 7: so it asks the policy, is listed, and ends."""
    rollout = case.start_at(1, attempt=7)
    case.equal(7, case.row(rollout)["attempt"], "the attempt in the listing", "CKPT-ROLL-025")
    asked = {one.attempt for one in case.witness.generations(rollout.rollout_id)}
    case.equal({7}, asked, "the attempts that ask the policy", "CKPT-ROLL-025")
    case.release(rollout)
    entry = case.result(rollout)
    named = (entry["receipt"]["attempt"], entry["content"]["info"]["attempt"])
    case.equal((7, 7), named, "the attempt of its receipt and of its result", "CKPT-ROLL-025")


@check(
    "CKPT-ROLL-012",
    "CKPT-ROLL-013",
    "CKPT-ROLL-014",
    "CKPT-ROLL-015",
    "CKPT-ROLL-016",
    "CKPT-ROLL-017",
    "CKPT-ROLL-020",
    "CKPT-ROLL-029",
    "CKPT-ROLL-030",
    "CKPT-ROLL-011",
    features=COMMON,
    budget=("quick", "demo"),
)
def repeated_starts(case: Case) -> None:
    """C05: a repeat of a live rollout, of a finished one, with another task, and after the ACK: each its outcome."""
    # No participant computes a task digest: any text is as good as another.
    rollout = case.start_at(1, SHORT, task_digest="any-text-at-all")
    case.equal("any-text-at-all", case.row(rollout)["task_digest"], "stored as it is", "CKPT-ROLL-030")
    other_task = {**rollout.item, "task_digest": "another-digest"}
    case.equal("already_started", case.outcome(rollout.item)["outcome"], "the same again", "CKPT-ROLL-020")
    relabelled = {**rollout.item, "labels": {"x": "y"}, "limits": {"max_turns": 1, "episode_ms": 1}}
    case.equal("already_started", case.outcome(relabelled)["outcome"], "other limits", "CKPT-ROLL-029")
    case.equal("conflict", case.outcome(other_task)["outcome"], "another task while live", "CKPT-ROLL-012")
    case.release(rollout)
    entry = case.result(rollout)
    case.equal("completed", entry["content"]["body"]["outcome"], "the first start counts", "CKPT-ROLL-029")
    for attempt in (0, 1):
        outcome = case.outcome({**rollout.item, "attempt": attempt})
        key = "CKPT-ROLL-015" if attempt else "CKPT-ROLL-014"
        case.equal("already_finished", outcome["outcome"], f"attempt {attempt}", key)
        case.equal(entry["receipt"], outcome.get("receipt"), "with the receipt", "CKPT-ROLL-016")
    outcome = case.outcome({**other_task, "attempt": 1})
    case.equal("conflict", outcome["outcome"], "another task, higher attempt", "CKPT-ROLL-013")
    case.equal(0, case.row(rollout)["attempt"], "the rollout is as it was", "CKPT-ROLL-017")
    case.equal(["released"], case.ack(entry["receipt"]), "the ACK")
    for item in (rollout.item, other_task, {**other_task, "attempt": 7}):
        case.equal("released", case.outcome(item)["outcome"], "after the ACK, whatever the task", "CKPT-ROLL-011")


@check(
    "CKPT-ROLL-018",
    "CKPT-ROLL-019",
    "CKPT-ACK-010",
    "CKPT-ACK-011",
    "CKPT-ACK-012",
    "CKPT-ACK-032",
    "CKPT-ROLL-046",
    "CKPT-ROLL-047",
    "CKPT-STATUS-019",
    "CKPT-STATUS-021",
    "CKPT-RETIRE-009",
    "CKPT-CONF-029",
    features=COMMON,
    world=True,
    budget="quick",
)
def a_failure_is_no_end(case: Case) -> None:
    """A non-terminal failure: superseded by a higher attempt, or ACKed, which leaves a fence; the next one starts."""

    def fail(rollout_id: str, attempt: int = 0) -> tuple[Rollout, Json]:
        case.world.fail(kind="verify", rollout_id=rollout_id)
        rollout = case.start(SHORT, rollout_id=rollout_id, attempt=attempt, verify_in_world=True)
        entry = case.result(rollout)
        case.true("failure" in entry["content"], "its verification fails", "CKPT-CONF-029", got=entry["content"])
        return rollout, entry

    first, entry = fail(case.new_id())
    row = case.row(first)
    case.equal("failed", row["state"], "its state", "CKPT-ROLL-046")
    case.equal(entry["receipt"], row.get("receipt"), "its receipt", "CKPT-ROLL-047")
    before = case.agent.status()["counts"]["failed_unreleased"]
    case.true(before >= 1, "a failure is counted", "CKPT-STATUS-019", got=before)
    item = {**first.item, "attempt": 1}
    case.equal("started", case.outcome(item)["outcome"], "a higher attempt", "CKPT-ROLL-018")
    second = Rollout(first.rollout_id, 1, item, SHORT)
    entry = case.result(second)
    case.equal(1, entry["receipt"]["attempt"], "the failure is superseded", "CKPT-ROLL-019")
    acked, entry = fail(case.new_id())
    case.equal(["released"], case.ack(entry["receipt"]), "ACK of a failure")
    case.equal(["already_released"], case.ack(entry["receipt"]), "again", "CKPT-ACK-012")
    case.equal("stale_attempt", case.outcome(acked.item)["outcome"], "its own attempt", "CKPT-ACK-011")
    item = {**acked.item, "attempt": 1}
    case.equal("started", case.outcome(item)["outcome"], "a higher attempt than the ACKed one", "CKPT-ACK-010")
    again = Rollout(acked.rollout_id, 1, item, SHORT)
    case.equal(["unknown"], case.ack(entry["receipt"]), "once a higher attempt is started", "CKPT-ACK-032")
    case.body(again, "CKPT-ACK-010")
    third, _ = fail(case.new_id())
    retired = case.agent.status()["counts"]["retired"]
    reply = case.accepted(case.controller.retire(case.agent, {third.rollout_id: 0}), "retire")
    case.equal("retired", reply["outcomes"][0]["outcome"], "an unreleased failure is removed", "CKPT-RETIRE-009")
    served = sorted(case.agent.results())
    case.true(third.rollout_id not in served, "a retired failure is served no more", "CKPT-RETIRE-009", got=served)
    now = case.agent.status()["counts"]["retired"]
    case.equal(retired + 1, now, "a retired failure is counted as retired", "CKPT-STATUS-021")


@check("CKPT-ROLL-026", "CKPT-REPEAT-014", features=COMMON)
def fifty_equal_starts_start_once(case: Case) -> None:
    """C31: the same start 50 times in parallel: one `started`, 49 `already_started`, one policy call."""
    item = case.item(case.new_id())
    hold = case.witness.hold(item["rollout_id"], 1)
    case.step("start it 50 times at once")
    replies = case.wire.together([lambda: case.start_items([item])] * 50)
    outcomes = [reply["outcomes"][0]["outcome"] for reply in replies]
    got = (outcomes.count("started"), outcomes.count("already_started"))
    case.equal((1, 49), got, "started and already_started", "CKPT-ROLL-026")
    hold.wait_asked()
    case.equal(1, case.witness.asked(item["rollout_id"]), "policy calls", "CKPT-ROLL-026")


@check("CKPT-ROLL-038", "CKPT-ROLL-040", "CKPT-ROLL-041", features=COMMON, budget="quick")
def rollouts_are_listed_by_page_and_state(case: Case) -> None:
    """Paging lists every rollout once; `state` filters; each can be read, also when released or retired."""
    live = [case.start_at(1) for _ in range(3)]
    done, entry = case.finished(script("done"))
    seen: list[str] = []
    after: str | None = None
    while True:
        page = case.accepted(case.agent.get_rollouts(after=after, limit=1), "a page of one")
        case.true(len(page["rollouts"]) <= 1, "a page keeps its limit of 1", "CKPT-ROLL-038", got=page.brief)
        seen += [row["rollout_id"] for row in page["rollouts"]]
        after = page["next"]
        if after is None:
            break
    mine = {rollout.rollout_id for rollout in [*live, done]}
    case.equal(dict.fromkeys(mine, 1), {key: seen.count(key) for key in mine}, "each once", "CKPT-ROLL-038")
    for state in ("waiting_policy", "finished", "failed", "restart"):
        rows = case.accepted(case.agent.get_rollouts(state=state), f"state={state}")["rollouts"]
        case.equal({state} if rows else set(), {row["state"] for row in rows}, "the filter", "CKPT-ROLL-040")
    case.equal("finished", case.row(done)["state"], "finished", "CKPT-ROLL-041")
    case.ack(entry["receipt"])
    case.equal("released", case.row(done)["state"], "released", "CKPT-ROLL-041")
    case.controller.retire(case.agent, {live[0].rollout_id: 0})
    case.until_state(live[0], "retired", requirements=("CKPT-ROLL-041",))
    case.refused(case.agent.get_rollout(case.new_id()), "not_found", "a rollout that nobody knows")


@check(
    "CKPT-RETIRE-001",
    "CKPT-RETIRE-002",
    "CKPT-RETIRE-003",
    "CKPT-RETIRE-004",
    "CKPT-RETIRE-005",
    "CKPT-RETIRE-006",
    "CKPT-RETIRE-007",
    "CKPT-RETIRE-008",
    "CKPT-RETIRE-011",
    "CKPT-RETIRE-012",
    "CKPT-RETIRE-013",
    "CKPT-STATUS-021",
    "CKPT-STATUS-016",
    features=COMMON,
    budget=("quick", "demo"),
)
def retire_fences_stops_and_frees(case: Case) -> None:
    """Live, finished, unknown and higher rollouts in one retire: each its outcome, in order; a success stays."""
    live, high = case.start_at(1), case.start_at(1, attempt=5)
    done, entry = case.finished(script("done"))
    gone, released = case.finished(script("done"))
    case.ack(released["receipt"])
    unknown = case.new_id()
    before = case.agent.status()["counts"]
    through = {live.rollout_id: 0, done.rollout_id: 3, unknown: 2, high.rollout_id: 4, gone.rollout_id: 1}
    case.step("retire a live, a finished, an unknown and a released rollout, and one whose attempt is higher")
    reply = case.accepted(case.controller.retire(case.agent, through), "retire")
    rows = {row["rollout_id"]: row for row in reply["outcomes"]}
    case.equal(list(through), list(rows), "outcomes in request order", "CKPT-RETIRE-005")
    stopped = rows[live.rollout_id]["outcome"]
    case.true(stopped in ("retired", "pending"), "the live one", "CKPT-RETIRE-002", got=stopped)
    case.equal("waiting_policy", case.row(high)["state"], "the one whose attempt is higher", "CKPT-RETIRE-003")
    for idle, what in ((high, "whose attempt is higher"), (gone, "that was released")):
        outcome = rows[idle.rollout_id]["outcome"]
        case.equal("retired", outcome, f"nothing is left to free of the one {what}", "CKPT-RETIRE-011")
    case.until_state(live, "retired", requirements=("CKPT-RETIRE-004", "CKPT-RETIRE-011"))
    kept = (rows[done.rollout_id]["outcome"], rows[done.rollout_id].get("receipt"))
    case.equal(("finished", entry["receipt"]), kept, "the finished one", "CKPT-RETIRE-006", "CKPT-RETIRE-007")
    case.equal("retired", rows[unknown]["outcome"], "the unknown one", "CKPT-RETIRE-013")
    stale = case.outcome(case.item(unknown, attempt=2))
    case.equal("stale_attempt", stale["outcome"], "its fence", "CKPT-RETIRE-012")
    served = sorted(case.agent.results())
    case.true(done.rollout_id in served, "a success that was retired is still served", "CKPT-RETIRE-008", got=served)
    counts = case.agent.status()["counts"]
    moved = (counts["retired"] - before["retired"], before["live"] - counts["live"])
    case.equal((1, 1), moved, "the counts; the unknown one was never admitted", "CKPT-STATUS-021", "CKPT-STATUS-016")
    case.release(high)
    case.body(high, "CKPT-RETIRE-003")
    late = case.start(SHORT, rollout_id=unknown, attempt=3)
    case.body(late, "CKPT-RETIRE-001")


@check("CKPT-INV-001", "CKPT-STATUS-014", "CKPT-STATUS-015", features=COMMON, world=True)
def counts_add_up_at_every_moment(case: Case) -> None:
    """I1: in every status while rollouts start, finish, are ACKed and retired, the counts add up."""
    case.world.fail("breaks", rollout_id=(broken := case.new_id("broken")))
    case.until_state(case.start(script([world("breaks")], "done"), rollout_id=broken), "restart", "failed")
    before = case.agent.status()["counts"]["admitted"]
    rollouts = [case.start(SHORT) for _ in range(6)]
    statuses = [case.agent.status()]
    for rollout in rollouts[:4]:
        entry = case.result(rollout)
        statuses.append(case.agent.status())
        case.ack(entry["receipt"])
        statuses.append(case.agent.status())
    case.controller.retire(case.agent, {rollouts[5].rollout_id: 0})
    statuses.append(case.agent.status())
    for status in statuses:
        counts_add_up(case, status)
    after = statuses[-1]["counts"]["admitted"]
    case.equal(before + 6, after, "each is counted once", "CKPT-STATUS-014", "CKPT-STATUS-015")


@check("CKPT-ROLL-031", features=COMMON)
def the_policy_of_an_item_wins(case: Case) -> None:
    """A policy in the item is used instead of the batch's."""
    address = f"{case.prefix}item"
    rollout_id = case.new_id()
    item = {**case.item(rollout_id), "policy": case.witness.policy(address)}
    case.equal("started", case.outcome(item)["outcome"], "it starts")
    case.body(Rollout(rollout_id, 0, item, DEFAULT_SCRIPT))
    found = {call.address for call in case.witness.generations(rollout_id)}
    case.equal({address}, found, "the addresses called", "CKPT-ROLL-031")


@check("CKPT-ROLL-022", "CKPT-ROLL-024", "CKPT-ROLL-020", features=COMMON)
def over_capacity_is_said(case: Case) -> None:
    """More live rollouts than `max_live_rollouts`: `over_capacity`; startable once there is room."""
    limit = case.agent.limit("max_live_rollouts")
    room = limit - case.agent.status()["counts"]["live"]
    if room > 200:
        raise NotOffered(f"max_live_rollouts is {limit}")
    case.witness.hold(None, 1)
    items = [case.item(case.new_id()) for _ in range(room + 1)]
    batch = case.agent.limit("max_batch")
    outcomes: list[str] = []
    for start in range(0, len(items), batch):
        reply = case.start_items(items[start : start + batch])
        outcomes += [row["outcome"] for row in reply["outcomes"]]
    case.equal(["started"] * room + ["over_capacity"], outcomes, "the outcomes", "CKPT-ROLL-022")
    again = case.outcome(items[0])["outcome"]
    case.equal("already_started", again, "a start of a live one, of which there are as many as can be", "CKPT-ROLL-020")
    case.controller.retire(case.agent, {items[0]["rollout_id"]: 0})
    case.until(lambda: case.row(items[0]["rollout_id"])["state"] == "retired", "one is freed")
    case.equal("started", case.outcome(items[-1])["outcome"], "the refused one starts", "CKPT-ROLL-024")
    case.witness.release_all()
