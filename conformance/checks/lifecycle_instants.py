# SPDX-License-Identifier: Apache-2.0
"""What is seen of a participant at one instant: while rollouts come and go, and while a restore installs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from conformance.case import Case, Rollout
from conformance.checks.discovery import counts_add_up
from conformance.controller import Json, Participant
from conformance.cuts import Cut, plan, reset, restore_at, take_cut, target_for
from conformance.registry import check
from conformance.script import add, grow, script, world
from conformance.wire import Reply
from spec import wire as names

COMMON = ("conformance",)
ONE = script(add(1), "done")
CROWD = 24
INSTANTS = 8
EYES = 3
"""How many readers look at the same time."""
ROUNDS = 4


@contextmanager
def watched(case: Case, look: Callable[[], None], eyes: int = EYES) -> Iterator[None]:
    """Let readers look again and again until the block ends; the first failure of a look is raised at the end."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            look()

    readers = [case.wire.background(watch) for _ in range(eyes)]
    try:
        yield
    finally:
        over.set()
    for reader in readers:
        reader.result()


def _status(case: Case, p: Participant) -> Json:
    """Read the status, without the time that judging its form takes."""
    return dict(case.wire.raw("GET", p.url + names.PREFIX + "/checkpoint").json)


@check(
    "CKPT-STATUS-027",
    "CKPT-INV-001",
    "CKPT-STATUS-006",
    "CKPT-STATUS-007",
    features=COMMON,
)
def a_status_is_of_one_instant(case: Case) -> None:
    """I1: read without pause while rollouts start, finish, are ACKed and retired: no reply mixes two moments."""
    a = case.agent
    seen: dict[int, str] = {}

    def look() -> None:
        before, after = _status(case, a), _status(case, a)
        for status in (before, after):
            counts_add_up(case, status)
            counts = {key: count for key, count in status["counts"].items() if key != "unmanaged"}
            said = str(sorted(counts.items()))
            known = seen.setdefault(status["progress"], said)
            case.equal(known, said, f"counts at progress {status['progress']}", "CKPT-STATUS-027", "CKPT-STATUS-006")
        rises = before["progress"] <= after["progress"]
        case.true(rises, "progress does not fall", "CKPT-STATUS-007", got=[before["progress"], after["progress"]])

    case.step(f"start, finish, ACK and retire, while {EYES} readers look at the status")
    with watched(case, look):
        for _ in range(3):
            items = [case.item(case.new_id()) for _ in range(CROWD // 3)]
            for item in items:
                case.witness.script(item["rollout_id"], ONE)
            case.accepted(case.start_items(items), "a batch starts")
            gone = {item["rollout_id"]: 0 for item in items[:2]}
            case.accepted(case.controller.retire(a, gone), "two are retired")
            mine = {item["rollout_id"] for item in items} - set(gone)
            found = case.until(lambda mine=mine: _all(a, mine), "the others finish")  # type: ignore[misc]
            case.ack(*(row["receipt"] for row in found))
    case.true(len(seen) >= CROWD // 3, "many moments were seen", got=len(seen))


def _all(a: Participant, wanted: set[str]) -> list[Json]:
    """Return the feed's entries of these rollouts once they are all there."""
    rows = {key: row for key, row in a.results().items() if key in wanted}
    return list(rows.values()) if len(rows) == len(wanted) else []


@check(
    "CKPT-STATUS-027",
    "CKPT-STATUS-010",
    "CKPT-STATUS-011",
    profile="checkpoint",
    each="participant",
    storage=True,
)
def a_status_in_a_checkpoint_is_of_one_instant(case: Case) -> None:
    """Read without pause through a checkpoint: phase, gate, id, lease, capture and `last` always belong together."""
    c, p = case.controller, case.p
    ids: list[str] = []

    def look() -> None:
        status = _status(case, p)
        last = (status["last"] or {}).get("checkpoint_id")
        said = {key: status[key] for key in ("phase", "gate", "checkpoint_id", "captured", "lease_remaining_ms")}
        open_id, phase = status["checkpoint_id"], status["phase"]
        fits = (open_id is None) == (phase == "idle") == (status["captured"] is None)
        fits = fits and (status["gate"], status["lease_remaining_ms"] is None) in _gates(phase)
        fits = fits and status["captured"] in _captured(phase)
        if open_id is not None and last is not None:
            fits = fits and _number(last) < _number(open_id)
        case.true(fits, "what one status says belongs together", "CKPT-STATUS-027", got={**said, "last": last})

    case.step(f"two checkpoints and a reset of {p.name}, while {EYES} readers look at the status")
    with watched(case, look):
        for ended in ("resumed", "aborted", "reset"):
            ids.append(c.next_id())
            if ended == "reset":
                case.accepted(c.restore(p, ids[-1], None), "a reset")
            else:
                case.accepted(c.prepare(p, ids[-1]), "prepare")
                target, _ = target_for(case, p, ids[-1])
                case.accepted(c.commit(p, ids[-1], target, wait="captured"), "commit")
            verb = c.abort if ended == "aborted" else c.resume
            case.accepted(verb(p, ids[-1]), f"the {ended} one")
            case.until(lambda: p.status()["phase"] == "idle", "it is over")


def _gates(phase: str) -> set[tuple[str, bool]]:
    """Return what gate and lease (null or not) may say in a phase."""
    parked = ("closed", False)
    if phase == "idle":
        return {("open", True)}
    if phase == "committing":
        return {parked, ("open", True)}
    # A restore verifies its source with the gate open; its lease runs from the beginning.
    return {parked, ("open", False), ("open", True)} if phase == "restoring" else {parked}


def _captured(phase: str) -> set[bool | None]:
    return {
        "idle": {None},
        "prepared": {False, True},
        "committing": {False, True},
        "committed": {True},
    }.get(phase, {False})  # type: ignore[return-value]


def _number(checkpoint_id: str) -> tuple[int, int]:
    epoch, _, sequence = checkpoint_id.partition("-")
    return int(epoch), int(sequence)


def _crowded(case: Case) -> tuple[Cut, list[Rollout], list[Rollout], list[Json]]:
    """Take a cut of many rollouts and results, then let others take their place; return it and who is there now."""
    reset(case)
    saved = case.start_crowd(CROWD // 2, 1, script(add(1), grow(100), "done"))
    kept = [case.finished(script("done"))[1]["receipt"] for _ in range(3)]
    cut = take_cut(case)
    later = case.start_crowd(CROWD // 2 - 3, 0)
    return cut, saved, later, kept


@check(
    "CKPT-RESTORE-014",
    "CKPT-RESTORE-015",
    "CKPT-FEED-004",
    profile="checkpoint",
    features=COMMON,
    storage=True,
)
def nobody_sees_half_an_installation(case: Case) -> None:
    """Status, listing and feed are read without pause while a restore installs: all of before, or all of after."""
    a, c = case.agent, case.controller
    cut, _, _, _ = _crowded(case)
    for _ in range(ROUNDS):
        extra = case.start_crowd(2, 0)
        lists = plan(case, cut)
        kept = {receipt["rollout_id"] for receipt in lists.results}
        replies: list[Reply] = []
        before = _picture(a)
        checkpoint_id = c.next_id()
        case.step(f"restore {cut.checkpoint_id} at {a.name} as {checkpoint_id} while {EYES} readers look")
        with watched(case, partial(_glance, case, a, replies)):
            case.accepted(restore_at(case, a, cut, lists, checkpoint_id), "the restore")
        after = _picture(a)
        case.true(after[0] != before[0], "a new feed, by which the two are told apart", "CKPT-FEED-004", got=after[0])
        for reply in replies:
            _all_or_nothing(case, reply, before, after, kept)
        there = {rollout.rollout_id for rollout in extra} & {key for key, _ in after[2]}
        case.equal(set(), there, "earlier work that is still there", "CKPT-RESTORE-015")
        case.accepted(c.resume(a, checkpoint_id), "resume")
    reset(case)


Picture = tuple[str, Json, set[tuple[str, int]]]
"""Feed, counts, and the rollouts with their attempts."""


def _glance(case: Case, a: Participant, replies: list[Reply]) -> None:
    """Read twice the status, and once each listing; quickly, for the moment that is looked for is short."""
    paths = ("/checkpoint", "/rollouts", "/checkpoint", "/results")
    replies += [case.wire.raw("GET", a.url + names.PREFIX + path) for path in paths]


def _picture(a: Participant) -> Picture:
    status = a.status()
    return status["feed"], status["counts"], _attempts(list(a.rollouts().values()))


def _attempts(rows: list[Json]) -> set[tuple[str, int]]:
    """Return the rollouts that are live or have a result, with their attempts."""
    return {(row["rollout_id"], row["attempt"]) for row in rows if row["state"] not in ("released", "retired")}


def _all_or_nothing(case: Case, reply: Reply, before: Picture, after: Picture, kept: set[str]) -> None:
    """Judge one reply that was made while a restore ran."""
    key = "CKPT-RESTORE-014"
    if "counts" in reply.json:
        said = (reply["feed"], reply["counts"])
        case.true(said in (before[:2], after[:2]), "feed and counts of before, or of after", key, got=said)
        phases = {"restored"} if reply["feed"] == after[0] else {"idle", "restoring"}
        fits = reply["phase"] in phases
        case.true(fits, "the phase goes with the feed", key, got=f"{reply['phase']}, and not {sorted(phases)}")
    elif "rollouts" in reply.json and reply["next"] is None:
        shown = _attempts(reply["rollouts"])
        odd = sorted((shown ^ before[2]) if len(shown & before[2]) else (shown ^ after[2]))[:6]
        case.true(shown in (before[2], after[2]), "the rollouts of before, or those of after", key, got=odd)
    elif "results" in reply.json and not reply["more"] and reply["feed"] == after[0]:
        served = {row["receipt"]["rollout_id"] for row in reply["results"]}
        case.equal(kept, served, "the results of the new feed, all at once", key)


@check(
    "CKPT-RESTORE-018",
    "CKPT-ABORT-006",
    "CKPT-ABORT-007",
    "CKPT-ABORT-008",
    "CKPT-FEED-004",
    profile="checkpoint",
    features=COMMON,
    storage=True,
)
def an_abort_that_races_an_installation(case: Case) -> None:
    """N12: aborted at many instants, a restore is as if it had never been, or was installed whole and is discarded."""
    a, c = case.agent, case.controller
    cut, saved, _, _ = _crowded(case)
    draw = random.Random(case.prefix)
    case.step("restore once, to see how long it takes")
    begun = time.monotonic()
    restored, feed = c.next_id(), a.status()["feed"]
    case.accepted(restore_at(case, a, cut, plan(case, cut), restored), "the restore")
    took = time.monotonic() - begun
    case.true(a.status()["feed"] != feed, "a new feed, which tells an installation", "CKPT-FEED-004", got=feed)
    case.accepted(c.abort(a, restored), "abort of the restored one", "CKPT-ABORT-007")
    for number in range(INSTANTS):
        live = case.start_at(0)
        lists = plan(case, cut)
        before = a.status()
        checkpoint_id = c.next_id()
        delay = took * (number + draw.random()) / INSTANTS
        case.step(f"restore as {checkpoint_id}, and abort it {delay * 1000:.1f} ms later")
        restoring = case.wire.background(partial(restore_at, case, a, cut, lists, checkpoint_id))
        case.patience.pause(delay)
        aborted = c.abort(a, checkpoint_id)
        reply = restoring.result()
        case.accepted(aborted, "an abort is never refused", "CKPT-RESTORE-018")
        after = a.status()
        case.equal(("idle", "open"), (after["phase"], after["gate"]), "it is over", "CKPT-RESTORE-018")
        if after["feed"] == before["feed"]:
            case.equal(before["counts"], after["counts"], "as if it had never been", "CKPT-ABORT-006")
            case.equal("waiting_policy", case.row(live)["state"], "the live work goes on", "CKPT-ABORT-006")
            case.release(live)
            case.body(live, "CKPT-ABORT-006")
            continue
        # Installed before the abort took effect: whole, so that the abort discards all of it, and fences it.
        case.equal(0, after["counts"]["live"], "what was installed is discarded", "CKPT-RESTORE-018", "CKPT-ABORT-007")
        installed = len(lists.rollouts[a.name]) + len(lists.results)
        kept = after["counts"]["admitted"]
        case.true(kept >= installed, "it had been installed whole", "CKPT-RESTORE-018", got=[installed, kept])
        case.true(reply.ok or reply.code == "stale_checkpoint", "the restore's own answer", got=reply.brief)
        for rollout in saved[:2]:
            attempt = lists.next_attempts.get(rollout.rollout_id)
            if attempt is not None:
                outcome = case.outcome({**rollout.item, "attempt": attempt})["outcome"]
                case.equal("stale_attempt", outcome, "an installed attempt", "CKPT-ABORT-008", "CKPT-RESTORE-018")
        case.release(live)


@check(
    "CKPT-RESTORE-006",
    "CKPT-RESTORE-012",
    profile="checkpoint",
    features=COMMON,
    world=True,
    storage=True,
)
def a_restore_closes_the_gate_before_it_builds(case: Case) -> None:
    """While a restore waits for a running effect, before it builds, the gate is closed and no further effect begins."""
    p = case.sessions
    rollout_id, other_id = case.new_id(), case.new_id()
    other = case.start_at(0, script(world("late"), "done"), rollout_id=other_id)
    cut = take_cut(case)
    with case.world.hold("slow", rollout_id=rollout_id) as effect:
        rollout = case.start(script([world("slow"), add(1)], "done"), rollout_id=rollout_id)
        effect.wait_begun()
        checkpoint_id = case.controller.next_id()
        case.step(f"restore {cut.checkpoint_id} at {p.name} while an effect runs there")
        source = cut.parts[p.name].source(checkpoint_id=cut.checkpoint_id)
        restoring = case.wire.background(
            partial(case.controller.restore, p, checkpoint_id, source, timeout_ms=3000),
        )
        closed = lambda: (s := p.status())["checkpoint_id"] == checkpoint_id and s["gate"] == "closed"  # noqa: E731
        case.until(closed, "the gate closes while it waits", "CKPT-RESTORE-006", within_s=2.5)
        case.equal("restoring", p.status()["phase"], "nothing is installed yet", "CKPT-RESTORE-006")
        case.release(other)
        quiet = lambda: not case.world.calls("late", rollout_id=other_id)  # noqa: E731 - a condition with a name
        case.stays(quiet, "no effect begins behind the closed gate", "CKPT-RESTORE-006")
        case.accepted(case.controller.abort(p, checkpoint_id), "abort")
        restoring.result()
        case.equal("open", p.status()["gate"], "the gate after the abort", "CKPT-RESTORE-012")
        effect.release()
    for found in (rollout, other):
        case.body(found, "CKPT-RESTORE-012")
