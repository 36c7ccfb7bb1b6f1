# SPDX-License-Identifier: Apache-2.0
"""Level 1: what a participant that keeps its incarnation over a kill has kept, and when it must not keep it."""

from __future__ import annotations

import shutil

from conformance.case import Case
from conformance.checks.process import born_again, must_remember, rediscover
from conformance.controller import Json
from conformance.cuts import committed_at, restored_at, take_cut
from conformance.registry import check
from conformance.script import add, grow, script

COMMON = ("conformance",)
MOST_GROWN = 20_000_000
"""How large a record is made, in bytes, so that writing it takes longer than a message and a kill."""
MEASURED = ("phase", "continues")


@check(
    "CKPT-DIR-023",
    "CKPT-ID-022",
    "CKPT-PHASE-015",
    profile="turn-recovery",
    level=1,
    features=COMMON,
)
def a_question_leaves_after_its_boundary(case: Case) -> None:
    """Killed the moment a question arrives: the large turn before it, on which it depends, is there."""
    bytes_ = min(MOST_GROWN, case.gym.limit("max_record_bytes") * 2 // 3)
    rollout = case.start_at(1, script(grow(bytes_), add(1), "done"))
    born_again(case)
    asked = [1, 1]

    def asked_again() -> bool:
        asked[:] = [case.witness.asked(rollout.rollout_id, turn) for turn in (1, 2)]
        return sum(asked) > 2

    case.until(asked_again, "the rollout goes on", "CKPT-PHASE-015")
    case.equal([1, 2], asked, "how often turns 1 and 2 were asked", "CKPT-DIR-023", "CKPT-PHASE-015")
    case.release(rollout)
    case.body(rollout, "CKPT-PHASE-015")


@check(
    "CKPT-FENCE-006",
    "CKPT-FENCE-007",
    "CKPT-FEED-005",
    "CKPT-FEED-008",
    "CKPT-ACK-005",
    "CKPT-ACK-006",
    "CKPT-ROLL-011",
    "CKPT-STATUS-007",
    "CKPT-STATUS-015",
    profile="checkpoint",
    level=1,
    features=COMMON,
    storage=True,
)
def a_kept_life_knows_what_it_released(case: Case) -> None:
    """Killed after a result was released and a cut was taken: it is released, and an old cursor hides nothing new."""
    done, entry = case.finished(script("done"))
    page = case.accepted(case.agent.get_results(), "the feed can be read")
    case.equal(["released"], case.ack(entry["receipt"]), "the ACK")
    take_cut(case)
    before = case.agent.status()
    born_again(case)
    after = case.agent.status()
    case.true(after["progress"] >= before["progress"], "progress does not fall", "CKPT-STATUS-007", got=after)
    case.equal(before["counts"], after["counts"], "the counts", "CKPT-STATUS-015", "CKPT-FENCE-006")
    case.equal(page["feed"], after["feed"], "the feed", "CKPT-FEED-005")
    outcome = case.outcome(done.item)["outcome"]
    case.equal("released", outcome, "the start of what is released", "CKPT-ROLL-011", "CKPT-FENCE-006")
    case.equal(["already_released"], case.ack(entry["receipt"]), "the ACK again", "CKPT-ACK-005", "CKPT-FENCE-006")
    other = {**entry["receipt"], "digest": f"sha256:{'0' * 64}"}
    case.equal(["mismatch"], case.ack(other), "an ACK with another digest", "CKPT-FENCE-007", "CKPT-ACK-006")
    later, _ = case.finished(script("done"))
    page = case.accepted(case.agent.get_results(after=page["next"]), "the feed goes on after an old cursor")
    served = [row["receipt"]["rollout_id"] for row in page["results"]]
    case.true(later.rollout_id in served, "a new result comes after an old cursor", "CKPT-FEED-008", got=served)


@check("CKPT-CKID-010", "CKPT-CKID-014", "CKPT-CKID-015", "CKPT-CKID-016", profile="checkpoint", level=1, storage=True)
def a_kept_life_answers_for_its_last_checkpoint(case: Case) -> None:
    """Killed after a commit, and after a restore, was resumed: `last` answers their repeats as before."""
    c, p = case.controller, case.agent
    committed, target, first = committed_at(case, p)
    resumed = case.accepted(c.resume(p, committed), "the resume")
    born_again(case, quietly=True)
    p = case.agent
    again = case.accepted(c.commit(p, committed, target), "the commit again", "CKPT-CKID-014", "CKPT-CKID-010")
    case.equal(told(first.json), told(again.json), "its outcome", "CKPT-CKID-014")
    again = case.accepted(c.resume(p, committed), "the resume again", "CKPT-CKID-015", "CKPT-CKID-010")
    case.equal(told(resumed.json), told(again.json), "its outcome", "CKPT-CKID-015")
    restored = restored_at(case, p)
    case.accepted(c.resume(p, restored), "the resume of the restore")
    born_again(case, quietly=True)
    again = case.accepted(c.restore(case.agent, restored, None), "the restore again", "CKPT-CKID-016", "CKPT-CKID-010")
    case.equal(0, again["restored_count"], "its outcome", "CKPT-CKID-016")


def told(reply: Json) -> Json:
    """Return what a repeated reply must have in common with the first (CKPT-CKID-018)."""
    return {key: value for key, value in reply.items() if key not in MEASURED and not key.endswith("_ms")}


@check("CKPT-ID-021", "CKPT-ID-020", profile="checkpoint", level=1, features=COMMON)
def an_older_copy_is_another_life(case: Case) -> None:
    """The data of the Gym is put back from a copy while more has happened since: no incarnation is kept."""
    must_remember(case)
    case.start_at(1)
    case.process.kill()
    older = case.bench.work_dir / f"{case.prefix}older"
    case.step("copy the data of the killed Gym, start it again")
    shutil.copytree(case.process.data_dir, older, symlinks=True)
    before = {p.name: p.capabilities["incarnation"] for p in case.gym.participants}
    case.process.start()
    rediscover(case)
    kept = [p for p in case.gym.participants if p.capabilities["incarnation"] == before[p.name]]
    if not kept:
        case.process.remembers = False
        must_remember(case)
    done, entry = case.finished(script("done"))
    case.equal(["released"], case.ack(entry["receipt"]), "the ACK")
    case.step("SIGKILL, put the older copy in the place of the data, start")
    case.process.kill()
    shutil.rmtree(case.process.data_dir)
    shutil.copytree(older, case.process.data_dir, symlinks=True)
    case.process.start()
    rediscover(case)
    for p in case.gym.participants:
        new = p.capabilities["incarnation"]
        if p.name in {one.name for one in kept}:
            what = f"{p.name} has moved back to an earlier state"
            case.true(new != before[p.name], what, "CKPT-ID-021", "CKPT-ID-020", got=new)
    case.equal("started", case.outcome(done.item)["outcome"], "what the new life does not know can start")
