# SPDX-License-Identifier: Apache-2.0
"""What a restore brings back exactly as it was, and what one that fails leaves alone."""

from __future__ import annotations

from pathlib import Path

from conformance.case import Case
from conformance.controller import Json, Participant
from conformance.cuts import plan, restore_at, restore_cut, resume_everywhere, take_cut
from conformance.registry import check
from conformance.script import add, grow, script
from spec import wire as names

COMMON = ("conformance",)


@check(
    "CKPT-FEED-016",
    "CKPT-RESULT-002",
    "CKPT-RESULT-004",
    "CKPT-RESTORE-021",
    "CKPT-FEED-017",
    profile="checkpoint",
    features=COMMON,
    storage=True,
)
def a_kept_result_is_the_same_string(case: Case) -> None:
    """A result that was restored, and restored once more from a cut of that, is the string that its receipt names."""
    done, before = case.finished()
    for life in ("once", "twice"):
        restore_cut(case, take_cut(case), only=set(), keep={done.rollout_id})
        kept = case.result(done, "CKPT-FEED-016", "CKPT-FEED-017")
        case.equal(before["receipt"], kept["receipt"], f"its receipt, restored {life}", "CKPT-RESTORE-021")
        case.equal(before["result"], kept["result"], f"its text, restored {life}", "CKPT-RESULT-004", "CKPT-RESULT-002")


@check("CKPT-CKID-016", "CKPT-CKID-018", profile="checkpoint", features=COMMON, storage=True)
def a_restore_is_told_again(case: Case) -> None:
    """A restore of a rollout and a result is repeated after its resume: the counts of its first reply come again."""
    rollout = case.start_at(1)
    case.finished(script("done"))
    cut = take_cut(case)
    case.release(rollout)
    lists, restore_id = plan(case, cut), case.controller.next_id()

    def restore(p: Participant) -> Json:
        reply = case.accepted(restore_at(case, p, cut, lists, restore_id), f"{p.name} restores", "CKPT-CKID-016")
        return {name: reply[name] for name in ("restored_count", "restarts", "results_count")}

    first = {p.name: restore(p) for p in case.gym.descending}
    kept = first[case.agent.name]["results_count"]
    case.true(kept > 0, "the owner of rollouts has restored a result", "CKPT-RESTORE-021", got=first)
    resume_everywhere(case, restore_id)
    again = {p.name: restore(p) for p in case.gym.descending}
    case.equal(first, again, "the outcome of the restore, told again", "CKPT-CKID-016", "CKPT-CKID-018")


@check("CKPT-RESTORE-059", profile="turn-recovery", features=COMMON, storage=True)
def a_restore_fences_attempts_that_nobody_saw(case: Case) -> None:
    """A rollout of attempt 0 is restored as attempt 6: effects and starts of the attempts between are stale."""
    rollout = case.start_at(1)
    cut = take_cut(case)
    case.attempts[rollout.rollout_id] = 5
    restore_cut(case, cut)
    case.equal(6, rollout.attempt, "the attempt that the restore names")
    for attempt in (1, 5):
        reply = case.sessions.probe(rollout.rollout_id, attempt, 2, f"{rollout.rollout_id}/2/9", "add", {"n": 1})
        case.refused(reply, "stale_attempt", f"an effect of attempt {attempt}", "CKPT-RESTORE-059")
        outcome = case.outcome({**rollout.item, "attempt": attempt})["outcome"]
        case.equal("stale_attempt", outcome, f"a start of attempt {attempt}", "CKPT-RESTORE-059")
    case.release(rollout)
    case.body(rollout, "CKPT-RESTORE-059")


@check("CKPT-RESTORE-036", "CKPT-ROLL-033", profile="turn-recovery", features=COMMON, storage=True)
def a_replaced_policy_is_in_the_cut(case: Case) -> None:
    """N18: a repeated start, or a restore, gives a rollout another policy; a cut before its next boundary holds it."""
    rollout = case.start_at(1)
    moved, given = f"{case.prefix}moved", f"{case.prefix}given"
    outcome = case.outcome(rollout.item, policy=case.witness.policy(moved))
    case.equal("already_started", outcome["outcome"], "the start again, with another policy", "CKPT-ROLL-033")
    restore_cut(case, take_cut(case))
    asked = case.witness.wait_asked(rollout.rollout_id, 2, attempt=rollout.attempt)
    case.equal(moved, asked.address, "where turn 2 is asked after a restore without policy", "CKPT-RESTORE-036")
    restore_cut(case, take_cut(case), policy=case.witness.policy(given))
    case.witness.wait_asked(rollout.rollout_id, 2, attempt=rollout.attempt)
    restore_cut(case, take_cut(case))
    case.release(rollout)
    case.body(rollout, "CKPT-RESTORE-036")
    calls = case.witness.generations(rollout.rollout_id, attempt=rollout.attempt)
    elsewhere = [(call.conversation_turn, call.address) for call in calls if call.address != given]
    case.equal([], elsewhere, "calls elsewhere than the restore before the last cut said", "CKPT-RESTORE-036")


@check(
    "CKPT-RESTORE-011",
    "CKPT-RESTORE-002",
    "CKPT-RESTORE-012",
    profile="turn-recovery",
    features=COMMON,
    storage=True,
)
def a_restore_that_fails_raises_no_fence(case: Case) -> None:
    """A restore whose lists disagree with its source fails: the fences that it asks for are not there afterwards."""
    live, other = case.start_at(1), case.start_at(1)
    cut = take_cut(case)
    lists = plan(case, cut, only={other.rollout_id})
    unseen = case.new_id()
    lists.fences.append({"rollout_id": unseen, "through_attempt": 3})
    named = sorted(fence["rollout_id"] for fence in lists.fences)
    case.equal(sorted([live.rollout_id, unseen]), named, "fences for what is not continued")
    lists.rollouts[case.agent.name][0]["turns_done"] += 1
    case.step(f"restore {cut.checkpoint_id} with a wrong turns_done, and with fences")
    reply = restore_at(case, case.agent, cut, lists, case.controller.next_id())
    case.refused(reply, "state_mismatch", "the lists disagree with the source", "CKPT-RESTORE-002")
    case.equal("open", case.agent.status()["gate"], "the gate is open again", "CKPT-RESTORE-012")
    started = case.outcome(case.item(unseen, attempt=3))
    case.equal("started", started["outcome"], "what it would have fenced can start", "CKPT-RESTORE-011")
    case.release(live, other)
    for rollout in (live, other):
        entry = case.result(rollout, "CKPT-RESTORE-011")
        case.equal(0, entry["receipt"]["attempt"], "the live work went on as it was", "CKPT-RESTORE-011")


@check("CKPT-COMMIT-043", "CKPT-RESTORE-044", profile="turn-recovery", features=COMMON, shared_dir=True)
def a_cut_outlives_what_it_holds(case: Case) -> None:
    """C46: all that a cut holds ends and is released, and later cuts are taken: its files stay as they were."""
    written = script(grow(40_000), add(1), "done")
    expected = case.baseline(written)
    rollouts = [case.start_at(1, written) for _ in range(3)]
    # Two, because a Gym may write one cut in another way than the next, e.g. every few of them as a full copy.
    first, second = take_cut(case), take_cut(case)
    directories = [part.directory for cut in (first, second) for part in cut.parts.values()]
    before = contents(directories)
    case.release(*rollouts)
    case.ack(*(case.result(rollout)["receipt"] for rollout in rollouts))
    for _ in range(3):
        case.release(case.start_at(1, written))
        take_cut(case)
    case.equal(before, contents(directories), "the files of the first two cuts", "CKPT-COMMIT-043")
    again = rollouts[0]
    restore_cut(case, first, only={again.rollout_id})
    case.equal(expected, case.body(again, "CKPT-RESTORE-044"), "its body, restored from there", "CKPT-RESTORE-044")


def contents(directories: list[Path]) -> dict[str, str]:
    """Return the digest of every file in some directories."""
    files = [path for directory in directories for path in sorted(directory.iterdir())]
    return {str(path.relative_to(path.parents[2])): names.bytes_digest(path.read_bytes()) for path in files}
