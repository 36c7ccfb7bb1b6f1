# SPDX-License-Identifier: Apache-2.0
"""Results: what a result is, the feed that serves it, and the ACK that ends it."""

from __future__ import annotations

import contextlib
import json
import math
import time
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from conformance.case import Case
from conformance.controller import Json
from conformance.cuts import committed_at, prepared_at
from conformance.errors import Lost
from conformance.registry import check
from conformance.script import add, script, world
from conformance.wire import Fault
from spec import wire as names

COMMON = ("conformance",)
AT_ONCE_MS = 350
READING_S = 0.2
"""How long a reader waits already when its result comes."""


@check(
    "CKPT-RESULT-001",
    "CKPT-RESULT-002",
    "CKPT-RESULT-003",
    "CKPT-RESULT-004",
    "CKPT-RESULT-005",
    "CKPT-RESULT-006",
    "CKPT-RESULT-007",
    "CKPT-RESULT-010",
    "CKPT-RESULT-011",
    "CKPT-RESULT-012",
    "CKPT-FEED-001",
    features=COMMON,
    budget=("quick", "demo"),
)
def a_result_is_a_string_with_a_digest(case: Case) -> None:
    """The digest is over exactly the bytes of the string; the string stays the same; its content is the rollout's."""
    rollout = case.start(attempt=2, labels={"group": "g7"})
    entry = case.result(rollout)
    receipt, text = entry["receipt"], entry["result"]
    case.equal(names.result_digest(text), receipt["digest"], "the digest", "CKPT-RESULT-002")
    case.equal((rollout.rollout_id, 2), (receipt["rollout_id"], receipt["attempt"]), "whose it is", "CKPT-RESULT-003")
    case.equal(text, case.result(rollout)["result"], "served as the same string", "CKPT-RESULT-004", "CKPT-FEED-001")
    content = entry["content"]
    case.equal([], schema_faults(case, "result", content), "what does not fit its schema", "CKPT-RESULT-001")
    for key in ("environment", "task_digest", "rollout_id"):
        case.equal(rollout.item[key], content[key], f"its {key}", "CKPT-RESULT-005")
    case.equal(1, len({"body", "failure"} & set(content)), "exactly one of body and failure", "CKPT-RESULT-006")
    reward = content["body"]["reward"]
    case.true(math.isfinite(reward), "the reward is finite", "CKPT-RESULT-007", got=reward)
    case.equal(2, content["info"]["attempt"], "info.attempt", "CKPT-RESULT-010")
    case.equal({"group": "g7"}, content["info"].get("labels"), "info.labels", "CKPT-RESULT-011")
    size = len(text.encode())
    case.true(size <= case.agent.limit("max_result_bytes"), "within the limit", "CKPT-RESULT-012", got=size)


def schema_faults(case: Case, name: str, content: Json) -> list[str]:
    """Return what is wrong with a value by one of the schemas."""
    resources = [(schema["$id"], Resource.from_contents(schema)) for schema in case.spec.schemas.values()]
    registry: Registry[Any] = Registry().with_resources(resources)
    validator = Draft202012Validator(case.spec.schemas[name], registry=registry)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(content)]


@check(
    "CKPT-ACK-001",
    "CKPT-ACK-002",
    "CKPT-ACK-003",
    "CKPT-ACK-004",
    "CKPT-ACK-005",
    "CKPT-ACK-006",
    "CKPT-ACK-007",
    "CKPT-ACK-008",
    "CKPT-ACK-014",
    "CKPT-ACK-033",
    "CKPT-FENCE-006",
    "CKPT-FENCE-007",
    "CKPT-STATUS-018",
    "CKPT-STATUS-020",
    features=COMMON,
    budget=("quick", "demo"),
)
def acks_are_judged_one_by_one(case: Case) -> None:
    """C03: one wrong hex digit among good receipts: the others are released, that result is still served."""
    entries = [case.finished(script("done"))[1] for _ in range(8)]
    receipts = [entry["receipt"] for entry in entries]
    digit = "0" if receipts[3]["digest"][-1] != "0" else "1"
    wrong = {**receipts[3], "digest": receipts[3]["digest"][:-1] + digit}
    unknown = {"rollout_id": case.new_id(), "attempt": 0, "digest": receipts[0]["digest"]}
    before = case.agent.status()["counts"]
    sent = [*receipts[:3], wrong, *receipts[4:], unknown]
    expected = ["released"] * 3 + ["mismatch"] + ["released"] * 4 + ["unknown"]
    outcomes = case.ack(*sent)
    case.equal(len(expected), len(outcomes), "one outcome for each", "CKPT-ACK-001")
    case.equal("mismatch", outcomes[3], "another digest", "CKPT-ACK-006")
    case.equal("unknown", outcomes[-1], "a rollout that nobody knows", "CKPT-ACK-008")
    case.equal(expected, outcomes, "the outcomes in order", "CKPT-ACK-002", "CKPT-ACK-003")
    served = case.agent.results()
    mine = [receipt for receipt in receipts if receipt["rollout_id"] in served]
    case.equal([receipts[3]], mine, "what is still served", "CKPT-ACK-004", "CKPT-ACK-007")
    case.equal(["already_released"], case.ack(receipts[0]), "a repeat", "CKPT-ACK-005")
    twice = case.finished(script("done"))[1]["receipt"]
    case.equal(["released", "already_released"], case.ack(twice, twice), "twice in one batch", "CKPT-ACK-033")
    bent = {**receipts[0], "digest": wrong["digest"]}
    case.equal(["mismatch"], case.ack(bent), "another digest of a released result", "CKPT-FENCE-007")
    case.controller.retire(case.agent, {receipts[3]["rollout_id"]: 9})
    case.equal(["released"], case.ack(receipts[3]), "a fence does not make an ACK stale", "CKPT-ACK-014")
    after = case.agent.status()["counts"]
    moved = (after["released"] - before["released"], before["finished_unreleased"] - after["finished_unreleased"])
    case.equal((9, 8), moved, "the counts", "CKPT-STATUS-018", "CKPT-STATUS-020")
    case.equal("released", case.row(receipts[0]["rollout_id"])["state"], "a tombstone stays", "CKPT-FENCE-006")


@check("CKPT-REPEAT-014", "CKPT-ACK-005", features=COMMON)
def fifty_equal_acks_release_once(case: Case) -> None:
    """C04: the same ACK 50 times in parallel: one `released`, 49 `already_released`."""
    receipt = case.finished(script("done"))[1]["receipt"]
    case.step("ACK it 50 times at once")
    replies = case.wire.together([lambda: case.controller.ack(case.agent, [receipt])] * 50)
    outcomes = [reply["outcomes"][0]["outcome"] for reply in replies]
    got = (outcomes.count("released"), outcomes.count("already_released"))
    case.equal((1, 49), got, "released and already_released", "CKPT-REPEAT-014")


@check("CKPT-FEED-005", profile="checkpoint", features=COMMON, storage=True)
def a_feed_outlives_everything_but_a_restore(case: Case) -> None:
    """A start, a result, an ACK, a retire, a controller, a whole checkpoint and an abort leave the feed as it is."""
    a, c = case.agent, case.controller
    feed = a.status()["feed"]

    def same(when: str) -> None:
        case.equal(feed, a.status()["feed"], f"the feed {when}", "CKPT-FEED-005")

    rollout = case.start_at(1)
    same("after a start and a turn")
    receipt = case.finished(script("done"))[1]["receipt"]
    same("after a result")
    case.ack(receipt)
    same("after an ACK")
    case.accepted(c.retire(a, {rollout.rollout_id: rollout.attempt}), "retire")
    same("after a retire")
    case.release(rollout)
    open_id, _, _ = committed_at(case, a)
    same("after a commit")
    case.accepted(c.resume(a, open_id), "resume")
    same("after a resume")
    case.accepted(c.abort(a, prepared_at(case, a)), "abort")
    same("after an abort")
    case.new_controller("next")
    same("after another controller came")


@check("CKPT-FENCE-006", "CKPT-ROLL-011", profile="checkpoint", features=COMMON, storage=True)
def tombstones_outlive_a_checkpoint(case: Case) -> None:
    """A released and a retired rollout are remembered as what they are, before a checkpoint and after it."""
    a, c = case.agent, case.controller
    released, entry = case.finished(script("done"), attempt=2)
    case.equal(["released"], case.ack(entry["receipt"]), "the ACK")
    gone = case.start_at(1)
    case.accepted(c.retire(a, {gone.rollout_id: gone.attempt}), "retire")
    case.until_state(gone, "retired", requirements=("CKPT-FENCE-006",))
    case.release(gone)
    for when in ("at once", "after a checkpoint"):
        row = case.row(released)
        got = (row["state"], row["attempt"], case.row(gone)["state"])
        case.equal(("released", 2, "retired"), got, f"what is known of them {when}", "CKPT-FENCE-006")
        case.equal(["already_released"], case.ack(entry["receipt"]), f"the ACK again, {when}", "CKPT-FENCE-006")
        outcome = case.outcome({**released.item, "attempt": 3})["outcome"]
        case.equal("released", outcome, f"a higher attempt {when}", "CKPT-ROLL-011", "CKPT-FENCE-006")
        open_id, _, _ = committed_at(case, a)
        case.accepted(c.resume(a, open_id), "resume")


@check(
    "CKPT-FEED-001",
    "CKPT-FEED-002",
    "CKPT-ACK-004",
    "CKPT-ROLL-056",
    "CKPT-FEED-005",
    "CKPT-FEED-007",
    "CKPT-FEED-008",
    "CKPT-FEED-010",
    "CKPT-FEED-011",
    features=COMMON,
    budget=("quick", "demo"),
)
def the_feed_serves_until_the_ack(case: Case) -> None:
    """C01, C07: five results are served again and again, as a whole and page by page, until they are ACKed."""
    mine = {rollout.rollout_id for rollout in [case.start(script("done")) for _ in range(5)]}
    case.until(lambda: mine <= set(case.agent.results()), "all five are served", "CKPT-FEED-001")
    case.step("lose the reply of a read")
    with contextlib.suppress(Lost):
        case.agent.call("getResults", fault=Fault.lost_reply())
    served = set(case.agent.results())
    what = "results that are not served again after a reply that was lost"
    case.equal([], sorted(mine - served), what, "CKPT-FEED-001", "CKPT-FEED-002")
    first = case.agent.get_results(limit=2)
    case.true(len(first["results"]) <= 2, "a page keeps its limit", "CKPT-ROLL-056", got=len(first["results"]))
    case.true(first["more"], "a page of two has more behind it", "CKPT-FEED-011", got=first.brief)
    seen, after, feeds = set[str](), first["next"], {first["feed"]}
    seen.update(row["receipt"]["rollout_id"] for row in first["results"])
    more = True
    while more:
        page = case.agent.get_results(after=after, limit=2)
        case.true(len(page["results"]) <= 2, "a page keeps its limit", "CKPT-ROLL-056", got=len(page["results"]))
        ids = {row["receipt"]["rollout_id"] for row in page["results"]}
        case.equal(set(), ids & seen, "results that came twice on the way", "CKPT-FEED-008")
        seen |= ids
        feeds.add(page["feed"])
        after, more = page["next"], page["more"]
    case.true(mine <= seen, "page by page all were served", "CKPT-FEED-001", got=sorted(seen & mine))
    case.equal(1, len(feeds), "one feed throughout", "CKPT-FEED-005")
    empty = case.accepted(case.agent.get_results(after=after, wait_ms=50), "nothing new", "CKPT-FEED-010")
    case.equal(([], False), (empty["results"], empty["more"]), "an empty page", "CKPT-FEED-010")
    late = case.finished(script("done"))[0].rollout_id
    page = case.agent.get_results(after=empty["next"])
    found = {row["receipt"]["rollout_id"] for row in page["results"]}
    case.true(late in found, "a later result comes after the cursor", "CKPT-FEED-008", got=sorted(found))
    case.accepted(case.agent.get_results(after="no-cursor-of-anybody"), "a foreign cursor", "CKPT-FEED-007")
    receipts = [row["receipt"] for key, row in case.agent.results().items() if key in mine]
    case.equal(["released"] * 5, case.ack(*receipts), "all five ACKs")
    case.equal(set(), mine & set(case.agent.results()), "what is still served", "CKPT-ACK-004")


@check("CKPT-FEED-009", features=COMMON)
def a_waiting_read_returns_with_the_result(case: Case) -> None:
    """C06: readers wait for a result and get it as soon as it is there, although others went away meanwhile."""
    rollout = case.start_at(0, script("done"))
    after = case.agent.get_results()["next"]
    while (page := case.agent.get_results(after=after))["more"]:
        after = page["next"]
    after = page["next"]
    case.step("20 readers wait, 19 go away")
    gone = [
        case.wire.background(lambda: _impatient(case, after))  # a reader that gives up early
        for _ in range(19)
    ]
    waiting = case.wire.background(lambda: case.agent.get_results(after=after, wait_ms=8000))
    for reader in gone:
        reader.result()
    case.release(rollout)
    reply = case.accepted(waiting.result(), "the last reader", "CKPT-FEED-009")
    found = [row["receipt"]["rollout_id"] for row in reply["results"]]
    case.true(rollout.rollout_id in found, "it gets the result", "CKPT-FEED-009", got=found)
    late = sorted(_served_after(case) for _ in range(3))[1]
    what = f"a read that waits gets a result within {AT_ONCE_MS} ms of its being there (the median of three)"
    case.true(late < case.patience.ms(AT_ONCE_MS), what, "CKPT-FEED-009", got=f"{late:.0f} ms")


def _served_after(case: Case) -> float:
    """Return how long after a rollout has ended a read that waits for its result is answered, in milliseconds."""
    rollout, after = case.start_at(0, script("done")), None
    while (page := case.agent.get_results(after=after))["more"]:
        after = page["next"]

    def served() -> float:
        case.agent.get_results(after=page["next"], wait_ms=8000)
        return time.monotonic()

    waiting = case.wire.background(served)
    case.patience.pause(READING_S)
    case.release(rollout)
    case.until_state(rollout, "finished")
    ended = time.monotonic()
    return (waiting.result() - ended) * 1000


def _impatient(case: Case, after: str) -> None:
    try:
        case.agent.call("getResults", query={"after": after, "wait_ms": 8000}, within_s=0.3)
    except Lost:
        return


@check("CKPT-RESULT-009", features=COMMON, world=True)
def bodies_do_not_depend_on_the_run(case: Case) -> None:
    """The same task and policy under another id, attempt and time: the same body."""
    written = script([add(1), world("w")], add(2), "done")
    bodies = [case.body(case.start(written, attempt=attempt)) for attempt in (0, 3)]
    case.equal(json.dumps(bodies[0], sort_keys=True), json.dumps(bodies[1], sort_keys=True), "body", "CKPT-RESULT-009")
