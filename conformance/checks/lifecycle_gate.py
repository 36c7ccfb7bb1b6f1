# SPDX-License-Identifier: Apache-2.0
"""The gate: what it holds, what blocks it, what is left out, and whose budget stops."""

from __future__ import annotations

import functools
import time

from conformance.case import Case
from conformance.controller import Json, Participant
from conformance.cuts import (
    commit_everywhere,
    prepare_everywhere,
    prepared_at,
    read_part,
    ready_at,
    resume_everywhere,
    target_for,
)
from conformance.gym import RESTART_ONLY
from conformance.registry import check
from conformance.script import add, script, world

COMMON = ("conformance",)
SLOW = script([world("slow")], add(1), "done")
SHORT_MS = 150
RAN_MS = 250
"""How long an effect has run already when a prepare arrives."""


def _effect_owners(case: Case) -> list[Participant]:
    """Return the participants at which a running effect keeps a turn open."""
    found = {p.name: p for p in (case.agent, case.sessions)}
    return list(found.values())


@check(
    "CKPT-COMMIT-003",
    "CKPT-PREP-005",
    "CKPT-PREP-006",
    "CKPT-PREP-008",
    "CKPT-PREP-009",
    "CKPT-PREP-010",
    "CKPT-PREP-011",
    "CKPT-PREP-013",
    "CKPT-PREP-014",
    "CKPT-PREP-002",
    "CKPT-TIME-002",
    "CKPT-ERR-022",
    "CKPT-GATE-002",
    "CKPT-GATE-010",
    "CKPT-REPEAT-001",
    "CKPT-STATUS-002",
    profile="checkpoint",
    features=COMMON,
    world=True,
    storage=True,
    budget=("quick", "demo"),
)
def commit_while_preparing(case: Case) -> None:
    """C29: a running effect blocks: prepare says so, a commit is `not_ready` and changes nothing; then it is ready."""
    for p in _effect_owners(case):
        with case.world.hold("slow", rollout_id=(rollout_id := case.new_id())) as effect:
            rollout = case.start(SLOW, rollout_id=rollout_id)
            effect.wait_begun()
            begun = time.monotonic()
            case.patience.pause(RAN_MS / 1000)
            open_id = case.controller.next_id()
            case.step(f"prepare {open_id} at {p.name} with a short limit, when the effect has run for {RAN_MS} ms")
            reply = case.accepted(case.controller.prepare(p, open_id, timeout_ms=SHORT_MS), "200 after the limit")
            got = (reply["ready"], reply["phase"])
            case.equal((False, "preparing"), got, "not ready", "CKPT-TIME-002", "CKPT-GATE-002", "CKPT-GATE-010")
            case.equal("closed", p.status()["gate"], "the gate while preparing", "CKPT-STATUS-002")
            waited = reply["wait_ms"]
            case.true(SHORT_MS <= waited <= 5000, "wait_ms covers the wait", "CKPT-PREP-014", got=waited)
            passed = (time.monotonic() - begun) * 1000
            blocker = _blocker(case, reply.json["blockers"], rollout.key, "effect")
            since = blocker["since_ms"]
            least = RAN_MS + SHORT_MS
            case.true(least <= since <= passed + 2000, f"since_ms is {least} or more", "CKPT-PREP-011", got=since)
            case.true(reply["blockers"], "what blocks is listed", "CKPT-PREP-005", got=reply.brief)
            case.equal(len(reply["blockers"]), reply["blocker_count"], "all blockers are counted", "CKPT-PREP-006")
            target, _ = target_for(case, p, open_id)
            with case.unchanged(at=[p]):
                refused = case.refused(
                    case.controller.commit(p, open_id, target), "not_ready", "while preparing", "CKPT-COMMIT-003"
                )
                _blocker(case, refused.json.get("blockers", []), rollout.key, "effect", "CKPT-ERR-022")
            case.step("release the effect")
            effect.release()
        again = case.accepted(case.controller.prepare(p, open_id), "the same prepare again", "CKPT-REPEAT-001")
        what = "the same prepare again waits, and is ready once the effect has ended"
        case.equal(True, again["ready"], what, "CKPT-PREP-002", "CKPT-REPEAT-001")
        _progress_is_told(case, p, open_id)
        case.accepted(case.controller.abort(p, open_id), "abort")
        case.body(rollout)


def _progress_is_told(case: Case, p: Participant, open_id: str) -> None:
    """Judge `progress` of a prepare that is answered at once; a ledger may record rows meanwhile (CKPT-ENV-020)."""
    before = p.status()["progress"]
    told = case.accepted(case.controller.prepare(p, open_id), "prepare of a prepared id")["progress"]
    after = p.status()["progress"]
    got = f"{told}; status said {before} before, and {after} after it"
    case.true(before <= told <= after, "progress of prepare is that of the status", "CKPT-PREP-013", got=got)


def _blocker(case: Case, blockers: list[Json], key: tuple[str, int], kind: str, *requirements: str) -> Json:
    mine = [row for row in blockers if row.get("rollout_id") == key[0]]
    case.true(mine, "a blocker names the rollout", *(requirements or ("CKPT-PREP-009",)), got=blockers)
    case.equal(kind, mine[0]["kind"], "the kind of the blocker", "CKPT-PREP-008")
    case.equal(key[1], mine[0].get("attempt"), "its attempt", "CKPT-PREP-010")
    return mine[0]


@check(
    "CKPT-GATE-014",
    "CKPT-GATE-006",
    "CKPT-GATE-007",
    "CKPT-GATE-008",
    "CKPT-GATE-001",
    "CKPT-GATE-009",
    "CKPT-GATE-003",
    "CKPT-ROLL-045",
    "CKPT-ABORT-010",
    profile="checkpoint",
    features=COMMON,
    world=True,
    budget=("quick", "demo"),
)
def prepare_never_waits_for_a_generation(case: Case) -> None:
    """C30: prepare is ready while the policy thinks; its answer is held until the gate opens, and then used."""
    rollout = case.start_at(1, script(add(1), [world("late")], "done"))
    ending = case.start_at(1, script(add(1), "done"))
    open_id = case.controller.next_id()
    started = time.monotonic()
    prepare_everywhere(case, open_id)
    took = time.monotonic() - started
    case.true(took < case.patience.seconds(3.0), "ready at once", "CKPT-GATE-014", got=f"{took:.2f} s")
    before = case.row(rollout)["turns_done"]
    progress = case.agent.status()["progress"]
    case.release(rollout, ending)
    case.witness.wait_completed(ending.rollout_id, 2)
    ended = case.witness.wait_completed(rollout.rollout_id, 2)
    case.equal("completed", ended.state, "the policy call was not cancelled", "CKPT-GATE-006")
    quiet = functools.partial(case.world.calls, "late", rollout_id=rollout.rollout_id)
    case.stays(lambda: not quiet(), "no turn opens", "CKPT-GATE-001", "CKPT-GATE-007")
    last = case.row(ending)
    what = "turns_done and state of a rollout whose final reply came while the gate was closed"
    case.equal((1, "parked"), (last["turns_done"], last["state"]), what, "CKPT-GATE-007")
    if not case.agent.owns("ledger"):  # whose owner may record rows meanwhile
        case.equal(progress, case.agent.status()["progress"], "progress stands still", "CKPT-GATE-009")
    row = case.row(rollout)
    got, what = (row["turns_done"], row["state"]), "turns_done and state of a rollout whose reply is held"
    case.equal((before, "parked"), got, what, "CKPT-GATE-009", "CKPT-ROLL-045")
    case.equal(None, row["open_turn"], "the open turn of a parked rollout", "CKPT-GATE-001")
    case.step(f"abort {open_id} everywhere")
    for p in case.gym.participants:
        case.accepted(case.controller.abort(p, open_id), "abort")
    body = case.body(rollout, "CKPT-GATE-008", "CKPT-ABORT-010")
    case.equal(3, body["turns"], "it went on; the last turn had no effects", "CKPT-GATE-008", "CKPT-GATE-003")
    case.equal(1, case.witness.completed(rollout.rollout_id, 2), "turn 2 was generated once", "CKPT-GATE-008")
    case.equal(2, case.body(ending, "CKPT-GATE-008")["turns"], "the other ended", "CKPT-GATE-003")


@check(
    "CKPT-GATE-004",
    "CKPT-PREP-002",
    "CKPT-GATE-001",
    profile="checkpoint",
    features=COMMON,
    world=True,
    budget="quick",
)
def an_open_turn_runs_to_its_boundary(case: Case) -> None:
    """N1: the gate closes during the first of three effects: all three run, then it is ready; no further turn opens."""
    written = script([world("one"), world("two"), world("three")], [world("four")], "done")
    rollout_id = case.new_id()
    with case.world.hold("one", rollout_id=rollout_id) as effect:
        rollout = case.start(written, rollout_id=rollout_id)
        effect.wait_begun()
        open_id = case.controller.next_id()
        case.step(f"prepare {open_id} at the agent during the first effect")
        case.accepted(case.controller.prepare(case.agent, open_id, timeout_ms=1), "prepare is accepted")
        effect.release()
    prepare_everywhere(case, open_id)
    ended = [call.tag for call in case.world.calls(rollout_id=rollout_id, state="ended")]
    case.equal(["one", "two", "three"], ended, "the open turn ran to its boundary", "CKPT-GATE-004")
    case.equal(1, case.row(rollout)["turns_done"], "one boundary", "CKPT-GATE-004")
    case.stays(lambda: not case.world.calls("four", rollout_id=rollout_id), "turn 2 does not open", "CKPT-GATE-001")
    for p in case.gym.participants:
        case.controller.abort(p, open_id)
    case.body(rollout)


@check(
    "CKPT-ROLL-021",
    "CKPT-ROLL-020",
    "CKPT-ROLL-024",
    "CKPT-GATE-015",
    "CKPT-ROLL-023",
    profile="checkpoint",
    features=COMMON,
    budget=("quick", "demo"),
)
def a_closed_gate_admits_nothing(case: Case) -> None:
    """While prepared a new rollout gets `admission_closed` and leaves no trace; after abort the item is started."""
    live = case.start_at(1)
    open_id = prepared_at(case, case.agent)
    item = case.item(case.new_id())
    with case.unchanged("CKPT-ROLL-023", at=[case.agent]):
        case.equal("admission_closed", case.outcome(item)["outcome"], "a new rollout", "CKPT-ROLL-021")
        again = case.outcome(live.item)["outcome"]
        case.equal("already_started", again, "a live one", "CKPT-ROLL-021", "CKPT-ROLL-020")
    case.accepted(case.controller.abort(case.agent, open_id), "abort")
    case.equal("started", case.outcome(item)["outcome"], "after abort", "CKPT-ROLL-024", "CKPT-GATE-015")


@check(
    "CKPT-PHASE-005",
    "CKPT-ABORT-001",
    profile="checkpoint",
    features=COMMON,
    world=True,
    budget="quick",
)
def an_abort_answers_a_waiting_prepare(case: Case) -> None:
    """C22: abort while prepare long-polls: the prepare is answered at once with `stale_checkpoint`."""
    rollout_id = case.new_id()
    with case.world.hold("slow", rollout_id=rollout_id) as effect:
        rollout = case.start(SLOW, rollout_id=rollout_id)
        effect.wait_begun()
        open_id = case.controller.next_id()
        case.step(f"prepare {open_id} in the background, then abort it")
        waiting = case.wire.background(lambda: case.controller.prepare(case.agent, open_id, timeout_ms=10_000))
        case.until(lambda: case.agent.status()["phase"] == "preparing", "the participant is preparing")
        case.accepted(case.controller.abort(case.agent, open_id), "abort while prepare waits", "CKPT-ABORT-001")
        started = time.monotonic()
        case.refused(waiting.result(), "stale_checkpoint", "the waiting prepare", "CKPT-PHASE-005")
        took = time.monotonic() - started
        case.true(took < case.patience.seconds(2), "answered at once", "CKPT-PHASE-005", got=f"{took:.1f} s")
    case.body(rollout)


@check(
    "CKPT-COMMIT-031",
    "CKPT-COMMIT-032",
    "CKPT-COMMIT-033",
    "CKPT-COMMIT-034",
    "CKPT-COMMIT-035",
    "CKPT-COMMIT-036",
    "CKPT-COMMIT-037",
    "CKPT-COMMIT-038",
    "CKPT-COMMIT-049",
    "CKPT-DIR-012",
    profile="checkpoint",
    features=COMMON,
    world=True,
    storage=True,
    budget="default",
)
def a_blocked_rollout_can_be_left_out(case: Case) -> None:
    """N13: with `leave_out_blocked` the cut holds everyone else; the blocked one is listed and goes on after resume."""
    free = case.start_at(1)
    case.start_at(1, environment=RESTART_ONLY)
    slow_id = case.new_id("slow")
    with case.world.hold("slow", rollout_id=slow_id) as effect:
        slow = case.start(script([world("slow"), world("further")], add(1), "done"), rollout_id=slow_id)
        effect.wait_begun()
        open_id = case.controller.next_id()
        for p in case.gym.participants:
            case.accepted(case.controller.prepare(p, open_id, timeout_ms=50), "prepare")
        case.step("commit everywhere with leave_out_blocked")
        parts = commit_everywhere(case, open_id, leave_out_blocked=True)
        case.equal(True, parts[case.agent.name][2]["captured"], "accepted while preparing", "CKPT-COMMIT-031")
        rows = read_part(case, case.agent, open_id, *parts[case.agent.name]).rows
        blocked = rows.get(slow_id, {})
        got = (blocked.get("state"), blocked.get("reason"))
        case.equal(("restart", "blocked"), got, "blocked", "CKPT-COMMIT-032", "CKPT-DIR-012")
        restarts = sum(1 for row in rows.values() if row["state"] == "restart")
        counted = parts[case.agent.name][2]["counts"]["restart"]
        case.equal(restarts, counted, "counts.restart: rows in state restart, for whatever reason", "CKPT-COMMIT-049")
        wanted = "turn" if "turn-recovery" in case.gym.profiles else rows[free.rollout_id]["state"]
        got = (rows[free.rollout_id]["state"], rows[free.rollout_id]["turns_done"])
        case.equal((wanted, 1), got, "the others are in it", "CKPT-COMMIT-033")
        effect.release()
        case.equal("ended", case.world.wait_ended("slow", rollout_id=slow_id).state, "it ends", "CKPT-COMMIT-034")
        further = functools.partial(case.world.calls, "further", rollout_id=slow_id)
        case.stays(lambda: not further(), "no further effect begins", "CKPT-COMMIT-035")
        case.stays(lambda: case.row(slow)["state"] != "finished", "it does not finish", "CKPT-COMMIT-037")
        case.equal(0, case.row(slow)["turns_done"], "and crosses no boundary", "CKPT-COMMIT-036")
        resume_everywhere(case, open_id)
    case.body(slow, "CKPT-COMMIT-038")


@check(
    "CKPT-ENV-007", "CKPT-ENV-008", "CKPT-PREP-008", "CKPT-GATE-005", profile="checkpoint", features=COMMON, world=True
)
def a_running_verification_blocks(case: Case) -> None:
    """A running verification with `wait` is a blocker of that kind; one that has not begun does not begin."""
    rollout_id, later = case.new_id(), case.new_id()
    hold = case.witness.hold(later, 1)
    with case.world.hold(rollout_id=rollout_id, kind="verify") as verification:
        rollout = case.start(script("done"), rollout_id=rollout_id, verify_in_world=True)
        waiting = case.start(script("done"), rollout_id=later, verify_in_world=True)
        verification.wait_begun()
        hold.wait_asked()
        open_id = case.controller.next_id()
        reply = case.controller.prepare(case.agent, open_id, timeout_ms=SHORT_MS)
        case.equal(False, reply["ready"], "prepare waits for it", "CKPT-ENV-007")
        _blocker(case, reply["blockers"], rollout.key, "verification", "CKPT-ENV-008")
        verification.release()
    ready_at(case, case.agent, open_id)
    hold.release()
    case.witness.wait_completed(later)
    unseen = lambda: not case.world.calls(rollout_id=later, kind="verify")  # noqa: E731 - a condition with a name
    case.stays(unseen, "no verification begins while the gate is closed", "CKPT-GATE-005")
    case.controller.abort(case.agent, open_id)
    case.body(rollout)
    case.body(waiting)


@check("CKPT-GATE-016", profile="checkpoint", features=COMMON, budget="default")
def budgets_stop_while_parked(case: Case) -> None:
    """C28: a rollout that is parked for longer than its whole budget has not used it up."""
    rollout = case.start_at(1, episode_ms=case.patience.ms(1_000))
    open_id = case.controller.next_id()
    prepare_everywhere(case, open_id)
    case.release(rollout)
    case.step("keep it parked for longer than its budget")
    case.patience.pause(case.patience.seconds(1.2))
    for p in case.gym.participants:
        case.controller.abort(p, open_id)
    case.body(rollout, "CKPT-GATE-016")


@check("CKPT-STATUS-006", "CKPT-STATUS-007", features=COMMON, budget="quick")
def progress_rises_with_every_change(case: Case) -> None:
    """Start, a turn, a result, an ACK and a retire each raise `progress`, which never falls."""
    seen = [case.agent.status()["progress"]]

    def higher(what: str) -> None:
        now = case.agent.status()["progress"]
        key = "CKPT-STATUS-006" if now == seen[-1] else "CKPT-STATUS-007"
        case.true(now > seen[-1], f"progress rises with {what}", key, got=f"{seen[-1]} → {now}")
        seen.append(now)

    rollout = case.start_at(1)
    higher("a start and a turn")
    case.release(rollout)
    entry = case.result(rollout)
    higher("a result")
    case.ack(entry["receipt"])
    higher("an ACK")
    other = case.start_at(0)
    higher("a start")
    case.controller.retire(case.agent, {other.rollout_id: 0})
    higher("a retire")
