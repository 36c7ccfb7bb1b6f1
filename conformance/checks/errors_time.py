# SPDX-License-Identifier: Apache-2.0
"""Time limits that end before the work, and optional fields that are left out."""

from __future__ import annotations

import functools
import time

from conformance.case import Case
from conformance.checks.writing import big
from conformance.controller import Json, Participant
from conformance.cuts import Cut, prepared_at, read_part, ready_at, target_for
from conformance.errors import NotOffered
from conformance.registry import check
from conformance.script import script, world
from conformance.wire import Reply

COMMON = ("conformance",)
SHORT_MS = 100
LIMIT_MS, ENDING = 300, 8
"""The limit of a prepare, and how many effects end meanwhile, one in every half of it."""
POLLS = 8
AT_ONCE_MS = 250
"""Within what a read that does not wait is answered."""


@check(
    "CKPT-TIME-003",
    "CKPT-TIME-005",
    "CKPT-TIME-008",
    "CKPT-TIME-009",
    "CKPT-TIME-013",
    profile="checkpoint",
    features=COMMON,
    shared_dir=True,
)
def a_limit_of_zero_ends_before_the_work(case: Case) -> None:
    """C32: commit and restore of a large state with no time at all: 504, the work goes on, and a repeat joins it."""
    c, p = case.controller, case.sessions
    slow = big(case)
    open_id = prepared_at(case, p)
    target, directory = target_for(case, p, open_id)
    case.step("commit a large state with timeout_ms 0")
    _ended_early(case, c.commit(p, open_id, target, timeout_ms=0), "a commit", "CKPT-TIME-003")
    done = case.accepted(c.commit(p, open_id, target), "the commit again, with time", "CKPT-TIME-009", "CKPT-TIME-008")
    cut = Cut(open_id, {p.name: read_part(case, p, open_id, target, directory, done)}, {})
    case.accepted(c.abort(p, open_id), "abort")
    row = cut.parts[p.name].rows[slow.rollout_id]
    fence = {"rollout_id": slow.rollout_id, "through_attempt": row["attempt"]}
    restore_id = c.next_id()

    def restore(timeout_ms: int) -> Reply:
        source = cut.parts[p.name].source(open_id)
        return c.restore(p, restore_id, source, fences=[fence], timeout_ms=timeout_ms)

    case.step("restore it with timeout_ms 0")
    _ended_early(case, restore(0), "a restore", "CKPT-TIME-005")
    again = case.accepted(restore(10_000), "the restore again, with time", "CKPT-TIME-009", "CKPT-TIME-008")
    case.equal("restored", again["phase"], "the work went on", "CKPT-TIME-008")


def _ended_early(case: Case, reply: Reply, what: str, key: str) -> None:
    """Judge a call whose limit ended at once, unless the work was done by then."""
    if reply.ok:
        case.leave_out(f"{what} was done before its limit ended", key)
        return
    case.refused(reply, "deadline_exceeded", f"{what} whose limit ends before the work", key)
    case.equal(True, reply.json.get("continues"), f"{what}: the work goes on", "CKPT-TIME-013")


@check("CKPT-TIME-004", "CKPT-RESUME-002", profile="checkpoint", features=COMMON, storage=True)
def a_resume_without_time_opens_or_says_so(case: Case) -> None:
    """A resume with timeout_ms 0 during the commit: 200 with the gate open, or 504, and it opens by itself."""
    c, p = case.controller, case.sessions
    big(case)
    open_id = prepared_at(case, p)
    target, _ = target_for(case, p, open_id)
    writing = case.wire.background(lambda: c.commit(p, open_id, target))
    case.until(lambda: p.status()["phase"] != "prepared", "the commit has begun")
    reply = c.resume(p, open_id, timeout_ms=0)
    if reply.ok:
        case.equal("open", p.status()["gate"], "the gate after a resume that was answered 200", "CKPT-RESUME-002")
        case.leave_out("the capture was there before the limit ended", "CKPT-TIME-004")
    else:
        case.refused(reply, "deadline_exceeded", "a resume whose limit ends before the gate is open", "CKPT-TIME-004")
        case.equal(True, reply.json.get("continues"), "the work goes on", "CKPT-TIME-004")
        case.until(lambda: p.status()["gate"] == "open", "the gate opens by itself", "CKPT-TIME-004")
    writing.result()


@check("CKPT-ERR-005", each="rollouts", features=COMMON)
def an_absent_field_means_its_default(case: Case) -> None:
    """`leave_out_blocked`, `wait_ms`, `after`, `agent`: left out, and given as the default, they mean the same."""
    a = case.agent
    _, first = case.finished(script("done"))
    absent = case.accepted(a.get_results(), "a read without parameters")
    given = case.accepted(a.get_results(wait_ms=0), "a read with wait_ms=0", "CKPT-ERR-005")
    case.equal(_receipts(absent), _receipts(given), "results with wait_ms left out, and 0", "CKPT-ERR-005")
    case.true(first["receipt"] in _receipts(absent), "no cursor: from the beginning", "CKPT-ERR-005", got=absent.brief)
    _a_read_without_wait_ms_does_not_wait(case)
    rollout = case.start_at(1)
    named = {**rollout.item, "agent": a.capabilities["agents"][0]["name"]}
    case.equal("already_started", case.outcome(named)["outcome"], "the first agent, named", "CKPT-ERR-005")
    if "checkpoint" in case.gym.profiles:
        for p in case.gym.participants:
            _leave_out_blocked(case, p)


def _a_read_without_wait_ms_does_not_wait(case: Case) -> None:
    """Judge a read at the end of the feed, where there is nothing to serve: the quickest of three."""
    end = case.agent.get_results()
    while end["more"]:
        end = case.agent.get_results(after=end["next"])
    took = []
    for _ in range(3):
        begun = time.monotonic()
        case.accepted(case.agent.get_results(after=end["next"]), "a read at the end of the feed", "CKPT-ERR-005")
        took.append((time.monotonic() - begun) * 1000)
    quick = min(took) < case.patience.ms(AT_ONCE_MS)
    case.true(quick, "without wait_ms a read does not wait", "CKPT-ERR-005", got=f"{min(took):.0f} ms")


def _receipts(page: Reply) -> list[Json]:
    return [row["receipt"] for row in page["results"]]


def _leave_out_blocked(case: Case, p: Participant) -> None:
    """Judge that a commit without `leave_out_blocked`, and with false, are repeats of one another."""
    c = case.controller
    if case.bench.target.shared_dir is None and "artifacts_http" not in p.capabilities["features"]:
        return
    for first in (None, False):
        open_id = c.next_id()
        ready_at(case, p, open_id)
        target, _ = target_for(case, p, open_id)
        for given in (first, None if first is False else False):
            reply = c.commit(p, open_id, target, leave_out_blocked=given)
            said = {None: "left out", False: "false"}
            what = f"a commit with leave_out_blocked {said[given]}, after one with it {said[first]}: a repeat"
            case.accepted(reply, what, "CKPT-ERR-005")
        case.accepted(c.abort(p, open_id), "abort")


@check(
    "CKPT-TIME-003",
    "CKPT-TIME-005",
    "CKPT-TIME-009",
    "CKPT-TIME-013",
    "CKPT-TIME-014",
    profile="checkpoint",
    features=COMMON,
    shared_dir=True,
    points=("commit.write", "restore.verify"),
)
def a_limit_ends_before_held_work(case: Case) -> None:
    """C32: commit and restore are held for longer than the limit of their call: 504 in time, and a repeat joins."""
    c, p = case.controller, case.agent
    open_id = prepared_at(case, p)
    target, directory = target_for(case, p, open_id)
    with case.failpoint("commit.write", "hold") as point:
        begun = time.monotonic()
        reply = c.commit(p, open_id, target, timeout_ms=SHORT_MS)
        _in_time(case, begun)
        case.refused(reply, "deadline_exceeded", "a commit whose writing is held", "CKPT-TIME-003")
        case.equal(True, reply.json.get("continues"), "the work goes on", "CKPT-TIME-013")
        point.release()
        done = case.accepted(c.commit(p, open_id, target), "the commit again", "CKPT-TIME-009")
    source = read_part(case, p, open_id, target, directory, done).source(open_id)
    case.accepted(c.abort(p, open_id), "abort")
    restore_id = c.next_id()
    with case.failpoint("restore.verify", "hold") as point:
        begun = time.monotonic()
        reply = c.restore(p, restore_id, source, timeout_ms=SHORT_MS)
        _in_time(case, begun)
        case.refused(reply, "deadline_exceeded", "a restore whose building is held", "CKPT-TIME-005")
        case.equal(True, reply.json.get("continues"), "the work goes on", "CKPT-TIME-013")
        point.release()
        again = case.accepted(c.restore(p, restore_id, source), "the restore again", "CKPT-TIME-009")
    case.equal("restored", again["phase"], "it joined the work", "CKPT-TIME-009")


def _in_time(case: Case, begun: float) -> None:
    passed = (time.monotonic() - begun) * 1000
    late = case.patience.ms(2_000)
    case.true(
        SHORT_MS - 20 <= passed <= SHORT_MS + late, "the limit ends in time", "CKPT-TIME-014", got=f"{passed:.0f} ms"
    )


@check("CKPT-TIME-010", "CKPT-INV-005", "CKPT-TIME-014", each="rollouts")
def waits_are_bounded(case: Case) -> None:
    """A `wait_ms` above `max_wait_ms` counts as that; the reply comes."""
    limit = case.agent.limit("max_wait_ms")
    if limit > case.patience.ms(5_000):
        raise NotOffered(f"max_wait_ms is {limit}")
    after = case.agent.get_results()["next"]
    started = time.monotonic()
    case.accepted(case.agent.get_results(after=after, wait_ms=86_400_000), "a day's wait", "CKPT-TIME-010")
    took = (time.monotonic() - started) * 1000
    case.true(took < limit + 3000, "it ends with max_wait_ms", "CKPT-TIME-010", "CKPT-INV-005", got=f"{took:.0f} ms")
    started = time.monotonic()
    case.accepted(case.agent.get_results(after=after, wait_ms=400), "400 ms", "CKPT-TIME-014")
    took = (time.monotonic() - started) * 1000
    case.true(380 < took < 2500, "it runs from the arrival of the call", "CKPT-TIME-014", got=f"{took:.0f} ms")
    case.step(f"{POLLS} reads at the same time, each with wait_ms 400")
    reads = [functools.partial(case.agent.get_results, after=after, wait_ms=400)] * POLLS
    started = time.monotonic()
    for reply in case.wire.together(reads):
        case.accepted(reply, "one of several reads that wait", "CKPT-TIME-014")
    took = (time.monotonic() - started) * 1000
    what = "reads that wait at the same time do not wait for each other"
    case.true(took < case.patience.ms(400 * POLLS // 2), what, "CKPT-TIME-014", got=f"{took:.0f} ms")


@check("CKPT-TIME-014", "CKPT-TIME-002", profile="checkpoint", features=("conformance",), world=True)
def a_limit_is_not_extended_by_what_happens(case: Case) -> None:
    """While a prepare waits for a held effect, others end one after the other: none of them gives it more time."""
    held, *others = [case.new_id() for _ in range(ENDING + 1)]
    effects = [case.world.hold("slow", rollout_id=key) for key in (held, *others)]
    rollouts = [case.start(script([world("slow")], "done"), rollout_id=key) for key in (held, *others)]
    for effect in effects:
        effect.wait_begun()
    open_id = case.controller.next_id()
    case.step(f"prepare {open_id} with timeout_ms {LIMIT_MS} while {ENDING + 1} effects run; all but one of them end")

    def prepared() -> tuple[Reply, float]:
        started = time.monotonic()
        reply = case.controller.prepare(case.agent, open_id, timeout_ms=LIMIT_MS)
        return reply, (time.monotonic() - started) * 1000

    waiting = case.wire.background(prepared)
    for effect in effects[1:]:
        case.patience.pause(LIMIT_MS / 2000)
        effect.release()
    reply, took = waiting.result()
    case.accepted(reply, "prepare")
    case.equal(False, reply["ready"], "an effect is held still", "CKPT-TIME-002")
    most = case.patience.ms(LIMIT_MS * ENDING // 2)
    case.true(took < most, "the limit runs from the arrival of the call", "CKPT-TIME-014", got=f"{took:.0f} ms")
    effects[0].release()
    case.accepted(case.controller.abort(case.agent, open_id), "abort")
    for rollout in rollouts:
        case.body(rollout)
