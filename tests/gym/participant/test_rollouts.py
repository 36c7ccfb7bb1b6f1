# SPDX-License-Identifier: Apache-2.0
"""Rollouts, their results and what is remembered of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from reference_gym.participant import Limits, RolloutFailure, Success
from reference_gym.participant.errors import NotFound, StaleAttempt
from spec import messages, wire
from tests.gym.participant.kit import POLICY, Gym, settle, start_item, until


@pytest.fixture
def gym(tmp_path: Path) -> Gym:
    """A Gym that owns rollouts and sessions."""
    return Gym(tmp_path)


async def test_one_wrong_digest_in_a_batch_of_a_hundred(gym: Gym) -> None:
    """C03: 99 are released, 1 is a mismatch, and that result is still served."""
    names = [f"r{number:03}" for number in range(100)]
    await gym.start(*names)
    receipts = await gym.finish(*names)
    wrong = dict(receipts[41])
    wrong["digest"] = wrong["digest"][:-1] + ("0" if wrong["digest"][-1] != "0" else "1")
    outcomes = await gym.acks(*receipts[:41], wrong, *receipts[42:])
    assert (99, 1) == (outcomes.count("released"), outcomes.count("mismatch"))
    assert "mismatch" == outcomes[41]
    page = await gym.results()
    assert ["r041"] == [result.receipt.rollout_id for result in page.results]
    assert (99, 1) == (gym.status["counts"]["released"], gym.status["counts"]["finished_unreleased"])


async def test_the_same_ack_fifty_times_at_once(gym: Gym) -> None:
    """C04: one is released, 49 are released already."""
    await gym.start("a")
    (receipt,) = await gym.finish("a")
    outcomes = [outcome for (outcome,) in await asyncio.gather(*(gym.acks(receipt) for _ in range(50)))]
    assert (1, 49) == (outcomes.count("released"), outcomes.count("already_released"))


async def test_a_released_rollout_never_starts_again(gym: Gym) -> None:
    """C05: whatever the task and the attempt, the outcome is released; the old result is not served."""
    await gym.start("a")
    (receipt,) = await gym.finish("a")
    await gym.acks(receipt)
    assert ["released"] == await gym.start("a", task_digest="other", task={"x": 1})
    assert ["released"] == await gym.start("a", attempt=3)
    assert () == (await gym.results()).results
    assert "released" == gym.state("a")
    other = {**receipt, "digest": wire.result_digest("another")}
    assert ["already_released", "mismatch", "unknown"] == await gym.acks(receipt, other, {**receipt, "attempt": 1})


async def test_equal_starts_at_once_start_once(gym: Gym) -> None:
    """C31: of 50 equal starts one is answered started."""
    outcomes = [outcome for (outcome,) in await asyncio.gather(*(gym.start("a") for _ in range(50)))]
    assert (1, 49) == (outcomes.count("started"), outcomes.count("already_started"))
    await gym.waiting("a")
    assert [("a", 0, 1)] == gym.loop.asked


async def test_start_outcomes_come_in_the_order_of_precedence(gym: Gym) -> None:
    """Each refusal that fits first is told, in request order, and leaves everything as it was."""
    await gym.start("live", "done", "failed")
    gym.loop.success = lambda rollout, value: Success("completed", 1.0, [])
    (receipt,) = await gym.finish("done")
    gym.loop.success = _fail
    await gym.finish("failed")
    before = gym.status
    items = [
        start_item("x1", policy=None),
        start_item("x2", task={"bad": True}),
        start_item("x3", agent="nobody"),
        start_item("x4", environment="nowhere"),
        start_item("twice"),
        start_item("twice", attempt=1),
        start_item("live", task_digest="other"),
        start_item("done", task_digest="other"),
    ]
    more = [start_item("done", attempt=2, task_digest="other"), start_item("failed")]
    outcomes = []
    for batch in (items, more, [start_item("done", attempt=2)]):
        reply = await gym.participant.start(gym.caller(), messages.StartRequest.of({"rollouts": batch}))
        messages.StartResponse.of(reply)
        outcomes += reply["outcomes"]
    assert [
        "invalid",
        "invalid",
        "invalid",
        "unknown_environment",
        "invalid",
        "invalid",
        "conflict",
        "conflict",
        "conflict",
        "already_finished",
        "already_finished",
    ] == [outcome["outcome"] for outcome in outcomes]
    assert receipt == outcomes[-1]["receipt"]
    assert before["counts"] == gym.status["counts"]


def _fail(rollout: Any, value: int) -> Success:
    raise RolloutFailure("broken", "it broke", terminal=False)


async def test_a_higher_attempt_fences_and_replaces_the_lower(gym: Gym) -> None:
    """C10 on one participant: every later call of the lower attempt is stale and changes nothing."""
    await gym.start("a")
    await gym.waiting("a")
    lower = gym.participant.registry.live["a"].rollout  # type: ignore[union-attr]  # it owns rollouts
    assert ["started"] == await gym.start("a", attempt=2)
    assert ["stale_attempt"] == await gym.start("a", attempt=1)
    await gym.waiting("a")
    before = gym.status
    for call in (lower.record({}), lower.finish(Success("completed", 9.0, []))):
        with pytest.raises(StaleAttempt):
            await call
    with pytest.raises(StaleAttempt):
        gym.sessions.get("a", 0)
    assert before == gym.status
    (receipt,) = await gym.finish("a")
    assert (2, 1) == (receipt["attempt"], gym.status["counts"]["admitted"])


async def test_a_failure_is_superseded_and_a_released_one_leaves_only_a_fence(gym: Gym) -> None:
    """A next attempt may start after a failure that is not terminal, whether it was acknowledged or not."""
    gym.loop.success = _fail
    await gym.start("a", "b")
    first, second = await gym.finish("a", "b")
    assert (0, 2) == (gym.status["counts"]["finished_unreleased"], gym.status["counts"]["failed_unreleased"])
    assert ["started"] == await gym.start("a", attempt=1)
    assert ["unknown"] == await gym.acks(first)
    assert ["released"] == await gym.acks(second)
    assert ["stale_attempt"] == await gym.start("b")
    assert ["already_released"] == await gym.acks(second)
    assert ["started"] == await gym.start("b", attempt=1)
    assert ["unknown"] == await gym.acks(second)
    assert 2 == gym.status["counts"]["live"]


async def test_a_repeated_start_replaces_the_policy_from_the_next_call_on(gym: Gym) -> None:
    """N18: adopted rollouts call the new address."""
    await gym.start("a")
    await gym.waiting("a")
    moved = {**POLICY, "base_url": "http://elsewhere.test/v1"}
    assert ["already_started"] == await gym.start("a", policy=moved)
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: 2 == len(gym.loop.calls))
    assert [POLICY["base_url"], moved["base_url"]] == [url for _, url in gym.loop.calls]


async def test_retire_stops_fences_and_frees(gym: Gym) -> None:
    """A live rollout is freed, an unreleased success stays with its receipt, an unknown id leaves a fence alone."""
    await gym.start("live", "done")
    (receipt,) = await gym.finish("done")
    await gym.waiting("live")
    outcomes = await gym.retire(("live", 0), ("done", 0), ("unknown", 4))
    assert ["retired", "finished", "retired"] == [outcome["outcome"] for outcome in outcomes]
    assert receipt == outcomes[1]["receipt"]
    counts = gym.status["counts"]
    assert (0, 1, 1) == (counts["live"], counts["finished_unreleased"], counts["retired"])
    assert 0 == len(gym.sessions) - 1, "the session of the finished rollout is kept until its release"
    assert ["stale_attempt", "stale_attempt"] == await gym.start("live", "unknown")
    assert ["started"] == await gym.start("unknown", attempt=5)
    with pytest.raises(NotFound):
        gym.participant.rollout("nobody")


async def test_retire_answers_pending_while_a_handler_runs(gym: Gym) -> None:
    """What has not stopped in time is pending; asked again once it has stopped it is retired."""
    gym.world.hold("a/1/1")
    await gym.start("a")
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: gym.world.begun)
    assert ["pending"] == [outcome["outcome"] for outcome in await gym.retire(("a", 0), timeout_ms=20)]
    assert (await gym.prepare("1-1"))["ready"], "a retired rollout blocks nothing"
    gym.world.release("a/1/1")
    assert ["retired"] == [outcome["outcome"] for outcome in await gym.retire(("a", 0))]


async def test_a_rollout_that_blocks_is_not_counted_as_one_that_restarts(gym: Gym) -> None:
    """CKPT-PREP-012, CKPT-COMMIT-032: a cut would list it as blocked, until its turn has reached its boundary."""
    gym.world.hold("a/1/1")
    await gym.start("a", environment="once")
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: gym.world.begun)
    reply = await gym.prepare("1-1", timeout_ms=0)
    assert (False, 0) == (reply["ready"], reply["restart_count"])
    gym.world.release("a/1/1")
    reply = await gym.prepare("1-1")
    assert (True, 1) == (reply["ready"], reply["restart_count"])


async def test_a_dead_handler_makes_its_rollout_restart(gym: Gym) -> None:
    """C62: the rollout is listed under restart, blocks nothing, is in the cut as uncertain; retire frees it."""
    await gym.start("a")
    gym.loop.reply("a", [("add", 1), ("die", 0)])
    await until(lambda: gym.state("a") == "restart")
    assert (1, 1) == (gym.status["counts"]["live"], gym.status["counts"]["restart"])
    reply = await gym.prepare("1-1")
    assert (True, 1) == (reply["ready"], reply["restart_count"])
    assert 1 == (await gym.commit("1-1"))["counts"]["restart"]
    row = json.loads((gym.root / "1-1" / "rollouts.jsonl").read_text())
    assert ("restart", "uncertain") == (row["state"], row["reason"])
    await gym.resume("1-1")
    assert ["retired"] == [outcome["outcome"] for outcome in await gym.retire(("a", 0))]
    assert 0 == len(gym.sessions)
    assert ["a/1/1"] == gym.world.done, "nothing ran twice"


@pytest.mark.parametrize(
    ("success", "kind"),
    [
        (Success("completed", float("nan"), []), "result_not_representable"),
        (Success("completed", float("inf"), []), "result_not_representable"),
        (Success("completed", 1.0, [{"content": "\ud800"}]), "result_not_representable"),
        (Success("completed", 1.0, [{"content": float("-inf")}]), "result_not_representable"),
        (Success("completed", 1.0, ["no object"]), "result_not_representable"),
        (Success("completed", 1.0, [{"content": object()}]), "result_not_representable"),
        (Success("completed", 1.0, [{"content": "x" * 5_000}]), "result_too_large"),
        (Success("completed", 1.0, [{"content": 2**60}], {"big": 2**60}), None),
        (Success("completed", 0.1 + 0.2, [{"content": "\U0001f600\u2028"}]), None),
    ],
    ids=lambda value: str(value).partition(" object at")[0][:100],
)
async def test_what_cannot_be_represented_is_a_failure_and_never_breaks_the_feed(
    tmp_path: Path, success: Success, kind: str | None
) -> None:
    """N10: a result is exact, or a terminal failure that says why."""
    gym = Gym(tmp_path, limits=Limits(max_result_bytes=4_000))
    gym.loop.success = lambda rollout, value: success
    await gym.start("a")
    await gym.finish("a")
    (served,) = (await gym.results()).results
    assert served.receipt.digest == wire.result_digest(served.result)
    content = json.loads(served.result)
    if kind is None:
        assert (success.reward, list(success.messages)) == (content["body"]["reward"], content["body"]["messages"])
    else:
        assert (kind, True) == (content["failure"]["kind"], content["failure"]["terminal"])


async def test_twenty_waiters_of_which_nineteen_leave(gym: Gym) -> None:
    """C06: the last one gets the result."""
    await gym.start("a")
    waiters = [asyncio.ensure_future(gym.results(wait_ms=20_000)) for _ in range(20)]
    await settle()
    for waiter in waiters[:19]:
        waiter.cancel()
    await gym.finish("a")
    assert ["a"] == [result.receipt.rollout_id for result in (await waiters[19]).results]


async def test_the_feed_pages_by_items_and_bytes_and_serves_again(gym: Gym) -> None:
    """C07, N2: nothing unseen sorts before a cursor; a cursor of another feed, or nonsense, counts as none."""
    names = [f"r{number}" for number in range(7)]
    await gym.start(*names)
    for name in names:
        await gym.finish(name)
    seen: list[str] = []
    after = ""
    while True:
        page = await gym.results(after, limit=3)
        seen += [result.receipt.rollout_id for result in page.results]
        after = page.next
        if not page.more:
            break
    assert names == seen
    assert () == (await gym.results(after)).results
    for cursor in ("", "f0.3", "nonsense", f"{page.feed}.x", f"{page.feed}.-1", f"{page.feed}.99999999999999999999"):
        found = (await gym.results(cursor)).results
        assert 7 == len(found), cursor
    await gym.acks(*(result.receipt.to_object() for result in (await gym.results("", 2)).results))
    assert names[2:] == [result.receipt.rollout_id for result in (await gym.results()).results]


async def test_a_page_never_exceeds_its_bytes_unless_it_is_one_item(tmp_path: Path) -> None:
    """A page of several items stays within max_page_bytes; one item that is larger is served alone."""
    gym = Gym(tmp_path, limits=Limits(max_page_bytes=2_000))
    gym.loop.success = lambda rollout, value: Success(
        "completed", 1.0, [{"content": "x" * (3_000 if rollout.rollout_id == "big" else 300)}]
    )
    for name in ("a", "b", "big", "c"):
        await gym.start(name)
        await gym.finish(name)
    sizes: list[tuple[int, int]] = []
    after, more = "", True
    while more:
        text = await gym.participant.results(after, None, 0)
        page = messages.ResultsPage.read(text)
        sizes.append((len(page.results), len(text)))
        after, more = page.next, page.more
    assert 4 == sum(items for items, _ in sizes)
    assert all(size <= 2_000 or items == 1 for items, size in sizes)
    listed = []
    after, more = "", True
    while more:
        page_text = gym.participant.rollouts_page(after, 1, "finished")
        rollouts = messages.RolloutsPage.read(page_text)
        listed += [rollout.rollout_id for rollout in rollouts.rollouts]
        after, more = rollouts.next or "", rollouts.next is not None
    assert ["a", "b", "big", "c"] == listed


async def test_more_rollouts_than_max_live_are_over_capacity(tmp_path: Path) -> None:
    """A refused item can be started later at the same attempt."""
    gym = Gym(tmp_path, limits=Limits(max_live_rollouts=2))
    assert ["started", "started", "over_capacity"] == await gym.start("a", "b", "c")
    assert ["started"] == await gym.start("a", attempt=1), "a replaced attempt needs no room"
    await gym.retire(("b", 0))
    assert ["started"] == await gym.start("c")


async def test_the_closed_gate_admits_no_rollout_and_draining_neither(gym: Gym) -> None:
    """The outcome is admission_closed; a known rollout is still told what it is."""
    await gym.start("a")
    await gym.prepare("1-1")
    assert ["already_started", "admission_closed"] == await gym.start("a", "b")
    await gym.abort("1-1")
    gym.participant.begin_draining()
    assert ["admission_closed"] == await gym.start("b")
    assert gym.status["draining"]


async def test_a_stale_answer_of_another_participant_ends_the_rollout(gym: Gym) -> None:
    """CKPT-FENCE-012: it ends at once, without a result, and blocks nothing."""

    def stale(rollout: Any, value: int) -> Success:
        raise StaleAttempt.of(rollout.rollout_id, rollout.attempt)

    gym.loop.success = stale
    await gym.start("a")
    gym.loop.reply("a", [])
    await until(lambda: gym.state("a") == "retired")
    assert () == (await gym.results()).results


def test_rollout_ids_and_attempts() -> None:
    """C14: accepted or refused as the identity chapter says; no two accepted pairs share a key."""
    refused: list[Any] = ["a-a1", "a-a01", "-x", 129 * "x", "é", "", "..", "a/b", "a\n"]
    for rollout_id in refused:
        with pytest.raises(ValueError, match="rollout_id"):
            messages.StartRequest.of({"rollouts": [start_item(rollout_id)]})
    for attempt in (True, 1.0, "1", -1, 2**63, 2**31):
        with pytest.raises(ValueError, match="attempt"):
            messages.StartRequest.of({"rollouts": [start_item("a") | {"attempt": attempt}]})
    with pytest.raises(ValueError, match="attempt"):
        messages.StartRequest.of({"rollouts": [start_item("a") | {"attempt": None}]})
    accepted = [
        (rollout_id, attempt) for rollout_id in ("a", "a-a", "a-b1", 128 * "x") for attempt in (0, 1, 2**31 - 1)
    ]
    for rollout_id, attempt in accepted:
        messages.StartRequest.of({"rollouts": [start_item(rollout_id, attempt)]})
    assert len(accepted) == len({wire.rollout_key(rollout_id, attempt) for rollout_id, attempt in accepted})
