# SPDX-License-Identifier: Apache-2.0
"""Identity and fencing: ids, attempts, headers, controllers, checkpoint ids."""

from __future__ import annotations

import json

from conformance.case import Case, Rollout
from conformance.controller import Controller, Participant
from conformance.cuts import committed_at, prepared_at, restored_at
from conformance.registry import check
from conformance.script import add, script
from conformance.wire import Reply
from spec import wire as names

CHECKPOINT_VERBS = ("prepare", "commit", "resume", "renew", "restore")
BAD_IDS = ("a-a1", "a-a01", "-x", "x" * 129, "ä", "", "..", "a/b", "a\n", ".a", "_a")
GOOD_IDS = ("a", "A.b_c-d", "x" * 128, "0", "a-a", "a-b1", "a1", "a-a1b")
BAD_ATTEMPTS = (True, "1", None, -1, 2**63, 2**31, 1.5)
BAD_CHECKPOINT_IDS = ("0-1", "1", "1-", "-1", "1-01", "01-1", "1-1 ", "1-1\n", "a-1", "1" * 16 + "-1", "1-" + "1" * 16)


def post(case: Case, path: str, body: object, headers: dict[str, str] | None = None) -> str:
    """Send a body that may be malformed and return the code of its refusal, or `200`."""
    sent = {**(headers or case.controller.headers(case.p)), "Content-Type": "application/json"}
    content = json.dumps(body).encode()
    reply = case.wire.raw("POST", case.p.url + names.PREFIX + path, headers=sent, content=content)
    return reply.code or str(reply.status)


def retiring(rollout_id: object, attempt: object) -> dict[str, object]:
    """Return a retire of one rollout, well-formed or not."""
    return {"rollouts": [{"rollout_id": rollout_id, "through_attempt": attempt}], "timeout_ms": 1000}


@check("CKPT-ID-001", "CKPT-ID-002", each="participant", budget="quick")
def rollout_ids_are_matched_as_a_whole(case: Case) -> None:
    """C14: ids outside the form, or with the reserved ending, are `invalid_request`; those at its edges are taken."""
    for wrong in BAD_IDS:
        case.step(f"name the rollout {wrong[:20]!r}")
        reserved = wrong in ("a-a1", "a-a01")
        key = "CKPT-ID-002" if reserved else "CKPT-ID-001"
        case.equal("invalid_request", post(case, "/retire", retiring(wrong, 0)), f"the id {wrong[:20]!r}", key)
    for right in GOOD_IDS:
        case.equal("200", post(case, "/retire", retiring(right, 0)), f"the id {right[:20]!r}", "CKPT-ID-001")


@check("CKPT-ID-003", "CKPT-ID-004", each="participant", budget="quick")
def attempts_are_strict_integers(case: Case) -> None:
    """C14: true, "1", null, −1, 2³¹ and fractions are no attempts; 0 and 2³¹−1 are; 1.0 may be either."""
    rollout_id = case.new_id()
    for wrong in BAD_ATTEMPTS:
        found = post(case, "/retire", retiring(rollout_id, wrong))
        case.equal("invalid_request", found, f"the attempt {json.dumps(wrong)}", "CKPT-ID-003")
    for right in (0, 2**31 - 1):
        case.equal("200", post(case, "/retire", retiring(rollout_id, right)), f"the attempt {right}", "CKPT-ID-003")
    found = post(case, "/retire", retiring(case.new_id(), 1.0))
    case.true(found in ("200", "invalid_request"), "1.0 is taken or refused", "CKPT-ID-004", got=found)


@check("CKPT-ID-032", "CKPT-ID-033", "CKPT-ID-034", each="participant")
def mutating_calls_carry_three_headers(case: Case) -> None:
    """A POST without one of the controller headers, or with a malformed one, is `invalid_request`."""
    whole = case.controller.headers(case.p)
    for name in whole:
        sent = {key: value for key, value in whole.items() if key != name}
        case.step(f"retire nothing, without {name}")
        case.equal("invalid_request", post(case, "/retire", retiring("a", 0), sent), f"no {name}", "CKPT-ID-032")
    for name, values, key in (
        (names.HEADER_CONTROLLER_ID, ("-x", "a b", "x" * 129), "CKPT-ID-033"),
        (names.HEADER_EXPECT_INCARNATION, (".x", "a/b", "x" * 129), "CKPT-ID-033"),
        (names.HEADER_CONTROLLER_EPOCH, ("0", "01", "-1", "1.0", "1" * 16, "x"), "CKPT-ID-034"),
    ):
        for value in values:
            found = post(case, "/retire", retiring("a", 0), {**whole, name: value})
            case.equal("invalid_request", found, f"{name}: {value[:20]}", key)


@check("CKPT-ID-036", "CKPT-ID-037", "CKPT-ORDER-004", "CKPT-ERR-013", each="participant", budget=("quick", "demo"))
def another_incarnation_changes_nothing(case: Case) -> None:
    """C11: every mutating call that expects another incarnation is `stale_incarnation`, and nothing changes."""
    rollout = case.start_at(1) if case.p.owns("rollouts") and "conformance" in case.gym.features else None
    c, p, fresh = case.controller, case.p, case.controller.next_id()
    higher = {names.HEADER_CONTROLLER_ID: "zzz"}
    stale = {names.HEADER_EXPECT_INCARNATION: "another-life", **higher}
    with case.unchanged("CKPT-ID-037", "CKPT-ORDER-004", "CKPT-ERR-013"):
        calls = [c.retire(p, {rollout.rollout_id if rollout else "a": 5}, headers=stale)]
        calls.append(c.abort(p, fresh, headers=stale))
        if "checkpoint" in case.gym.profiles:
            calls += [c.prepare(p, fresh, headers=stale), c.renew(p, fresh, headers=stale)]
            calls += [c.resume(p, fresh, headers=stale), c.restore(p, fresh, None, headers=stale)]
        if p.owns("rollouts"):
            calls += [c.start(p, [], headers=stale), c.ack(p, [], headers=stale)]
        for reply in calls:
            case.refused(reply, "stale_incarnation", reply.exchange.operation, "CKPT-ID-036")


@check(
    "CKPT-CTRL-001",
    "CKPT-CTRL-002",
    "CKPT-CTRL-005",
    "CKPT-CTRL-006",
    "CKPT-CTRL-008",
    "CKPT-ID-037",
    each="participant",
    budget=("quick", "demo"),
)
def a_lower_controller_is_refused(case: Case) -> None:
    """C11, C12: controllers are ordered by epoch, then by the bytes of the id; a lower one changes nothing."""
    low = case.controller
    middle = Controller(low.controller_id + "-B", low.epoch + 1)
    high = Controller(low.controller_id + "-a", low.epoch + 1)  # Higher by its bytes, lower by the alphabet.
    case.step(f"adopt {middle.controller_id}, then {high.controller_id}, of one epoch")
    case.accepted(middle.adopt(case.p), "a higher epoch is adopted", "CKPT-CTRL-002")
    case.accepted(high.adopt(case.p), "of equal epochs the id that is higher bytewise", "CKPT-CTRL-001")
    pair = {"id": high.controller_id, "epoch": high.epoch}
    case.equal(pair, case.p.status()["controller"], "the higher pair is adopted", "CKPT-CTRL-002")
    with case.unchanged("CKPT-CTRL-008", "CKPT-ID-037"):
        earlier = Controller(high.controller_id, low.epoch)  # An earlier life of the adopted one.
        for lower in (low, middle, earlier):
            for reply in (lower.abort(case.p, f"{lower.epoch}-7"), lower.retire(case.p, {case.new_id(): 0})):
                what = f"{reply.exchange.operation} of {lower.controller_id} in epoch {lower.epoch}, which is lower"
                case.refused(reply, "stale_controller", what, "CKPT-CTRL-005", "CKPT-CTRL-008")
                case.equal(pair, reply.json.get("controller"), "the adopted pair is named", "CKPT-CTRL-006")


@check("CKPT-CTRL-003", profile="checkpoint", each="participant")
def a_higher_controller_is_adopted_by_a_refused_call(case: Case) -> None:
    """A higher pair is adopted although a later check refuses the very call."""
    higher = Controller("suite-higher", case.controller.epoch + 3)
    reply = higher.resume(case.p, f"{higher.epoch}-1")
    case.refused(reply, "stale_checkpoint", "a resume of nothing")
    found = case.p.status()["controller"]
    case.equal({"id": "suite-higher", "epoch": higher.epoch}, found, "it is adopted all the same", "CKPT-CTRL-003")


@check("CKPT-CTRL-004", "CKPT-LEASE-014", "CKPT-CTRL-005", profile="checkpoint", each="participant", storage=True)
def a_higher_controller_ends_what_is_open(case: Case) -> None:
    """C13, C26: the first call of a higher controller ends an open checkpoint: aborted, or committed if it was."""
    for phase, ended_as in (("prepared", "aborted"), ("committed", "committed"), ("restored", "aborted")):
        old = case.new_controller("old")
        if phase == "committed":
            open_id, _, _ = committed_at(case)
        else:
            open_id = prepared_at(case) if phase == "prepared" else restored_at(case)
        higher = Controller("suite-new", old.epoch + 1)
        case.step(f"a higher controller calls in phase {phase}")
        case.accepted(higher.retire(case.p, {}), "a higher controller is served")
        status = case.p.status()
        case.equal(("idle", "open"), (status["phase"], status["gate"]), "it is over", "CKPT-CTRL-004")
        last = (status["last"]["checkpoint_id"], status["last"]["ended_as"])
        key = "CKPT-LEASE-014" if phase == "committed" else "CKPT-CTRL-004"
        case.equal((open_id, ended_as), last, f"what was {phase} ended as {ended_as}", key)
        with case.unchanged():
            for reply in (old.resume(case.p, open_id), old.abort(case.p, open_id)):
                case.refused(reply, "stale_controller", "the old controller wakes up", "CKPT-CTRL-005")


@check("CKPT-CKID-001", "CKPT-CKID-002", profile="checkpoint", each="participant", budget="quick")
def checkpoint_ids_have_a_form_and_the_epoch_of_the_header(case: Case) -> None:
    """Malformed checkpoint ids, and ids of another epoch than the header's, are `invalid_request`."""
    body = {"run_id": "r", "timeout_ms": 100, "lease_ms": 5000}
    for wrong in BAD_CHECKPOINT_IDS:
        found = post(case, "/checkpoint/prepare", {"checkpoint_id": wrong, **body})
        case.equal("invalid_request", found, f"the checkpoint id {wrong!r}", "CKPT-CKID-001")
    other = f"{case.controller.epoch + 1}-1"
    for verb, reply in calls_of(case, case.controller, other).items():
        case.refused(reply, "invalid_request", f"{verb} of another epoch", "CKPT-CKID-002")
    case.refused(case.controller.abort(case.p, other), "invalid_request", "abort of another epoch", "CKPT-CKID-002")


def calls_of(case: Case, controller: Controller, checkpoint_id: str, *verbs: str) -> dict[str, Reply]:
    """Call the verbs (default: all but abort) with one checkpoint id, and return the replies."""
    p = case.p
    target = {"scheme": "file", "path": "/nowhere"}
    if "file" not in p.capabilities["storage"]:
        target = {"scheme": "http"}
    calls = {
        "prepare": lambda: controller.prepare(p, checkpoint_id, timeout_ms=100),
        "commit": lambda: controller.commit(p, checkpoint_id, target),
        "resume": lambda: controller.resume(p, checkpoint_id),
        "renew": lambda: controller.renew(p, checkpoint_id),
        "restore": lambda: controller.restore(p, checkpoint_id, None),
        "abort": lambda: controller.abort(p, checkpoint_id),
    }
    return {verb: calls[verb]() for verb in verbs or CHECKPOINT_VERBS}


@check(
    "CKPT-CKID-020",
    "CKPT-CKID-021",
    "CKPT-CKID-019",
    "CKPT-CKID-023",
    "CKPT-CKID-030",
    "CKPT-RENEW-002",
    "CKPT-CKID-012",
    "CKPT-CKID-013",
    "CKPT-CKID-027",
    "CKPT-CKID-005",
    "CKPT-CKID-006",
    "CKPT-CKID-009",
    "CKPT-CKID-011",
    profile="checkpoint",
    each="participant",
    budget="quick",
)
def an_aborted_id_can_never_be_used(case: Case) -> None:
    """C11: while nothing is open, an unseen abort is recorded; then everything but that abort is `stale_checkpoint`."""
    c, p = case.controller, case.p
    lower, ended, unseen = (f"{c.epoch}-{n}" for n in (3, 5, 9))
    case.step(f"abort the unseen id {ended}")
    case.accepted(c.abort(p, ended), "an unseen higher id is recorded as aborted", "CKPT-CKID-027")
    with case.unchanged("CKPT-CKID-013", "CKPT-CKID-011"):
        again = case.accepted(c.abort(p, ended), "abort of last", "CKPT-CKID-012")
        case.equal("aborted", again["ended_as"], "the recorded outcome", "CKPT-CKID-012")
        keys = {"prepare": "CKPT-CKID-020", "renew": "CKPT-CKID-021"}
        for verb, reply in calls_of(case, c, ended).items():
            case.refused(reply, "stale_checkpoint", f"{verb} of last", keys.get(verb, "CKPT-CKID-019"))
        for verb, reply in calls_of(case, c, lower, *CHECKPOINT_VERBS, "abort").items():
            case.refused(reply, "stale_checkpoint", f"{verb} of a lower id", "CKPT-CKID-023")
        for verb, reply in calls_of(case, c, unseen, "commit", "resume", "renew").items():
            key = "CKPT-RENEW-002" if verb == "renew" else "CKPT-CKID-030"
            case.refused(reply, "stale_checkpoint", f"{verb} of an unseen id", key)
    last = p.status()["last"]
    case.equal(ended, last["checkpoint_id"], "how it ended, in `last`", "CKPT-CKID-005")
    case.equal(("aborted", 0), (last["ended_as"], last["pause_ms"]), "how it ended", "CKPT-CKID-006", "CKPT-CKID-009")


@check(
    "CKPT-CKID-024",
    "CKPT-CKID-022",
    "CKPT-CKID-004",
    "CKPT-CKID-031",
    "CKPT-CKID-025",
    "CKPT-CKID-026",
    "CKPT-CKID-028",
    "CKPT-ERR-021",
    "CKPT-RESTORE-001",
    "CKPT-RESUME-007",
    "CKPT-PHASE-004",
    "CKPT-ERR-010",
    "CKPT-ERR-011",
    "CKPT-ERR-012",
    profile="checkpoint",
    each="participant",
    budget="quick",
)
def while_one_is_open_other_ids_are_refused(case: Case) -> None:
    """C11: a higher id conflicts, a lower one is stale, the open one may be in the wrong phase; abort always works."""
    c, p = case.controller, case.p
    lower, last_id, open_id, higher = (f"{c.epoch}-{n}" for n in (7, 9, 10, 100))
    case.accepted(c.abort(p, last_id), "an abort of an unseen id")
    case.step(f"{last_id} is the last; prepare {open_id}, which is higher as a number and not as text")
    case.accepted(c.prepare(p, open_id), f"{open_id}, after {last_id}, is prepared", "CKPT-CKID-028")
    with case.unchanged():
        for verb, reply in calls_of(case, c, higher).items():
            keys = ("CKPT-CKID-024", "CKPT-CKID-004") if verb in ("prepare", "restore") else ("CKPT-CKID-024",)
            case.refused(reply, "checkpoint_conflict", f"{verb} of a higher id", *keys)
            case.equal(open_id, reply.json.get("checkpoint_id"), "the open id is named", "CKPT-CKID-031")
        for verb, reply in calls_of(case, c, lower, *CHECKPOINT_VERBS, "abort").items():
            case.refused(reply, "stale_checkpoint", f"{verb} of a lower id", "CKPT-CKID-022")
        for verb, reply in calls_of(case, c, open_id, "resume", "restore").items():
            key = "CKPT-RESUME-007" if verb == "resume" else "CKPT-RESTORE-001"
            case.refused(reply, "invalid_phase", f"{verb} while prepared", key, "CKPT-PHASE-004")
            case.equal("prepared", reply.json.get("phase"), "the phase is named", "CKPT-ERR-021")
    case.step(f"abort the higher id {higher}")
    case.accepted(c.abort(p, higher), "an abort of a higher id is accepted", "CKPT-CKID-025")
    status = p.status()
    case.equal(("idle", "open"), (status["phase"], status["gate"]), "the open one ended", "CKPT-CKID-025")
    last = (status["last"]["checkpoint_id"], status["last"]["ended_as"])
    case.equal((higher, "aborted"), last, "the higher one is recorded in its place", "CKPT-CKID-026")
    case.refused(c.prepare(p, higher), "stale_checkpoint", "its own late prepare", "CKPT-CKID-020")


@check("CKPT-CKID-025", "CKPT-CKID-026", profile="checkpoint", each="participant", storage=True)
def an_abort_of_a_higher_id_ends_what_is_open(case: Case) -> None:
    """In each phase in which a checkpoint waits for its controller: it ends unpublished, and the higher one is last."""
    c, p = case.controller, case.p
    for reach in (prepared_at, _committed_id, restored_at):
        reach(case, p)
        phase, higher = p.status()["phase"], c.next_id()
        case.accepted(c.abort(p, higher), f"an abort of a higher id in {phase}", "CKPT-CKID-025")
        status = p.status()
        got = (status["phase"], status["gate"])
        case.equal(("idle", "open"), got, f"the one that was {phase} ended", "CKPT-CKID-025")
        last = (status["last"]["checkpoint_id"], status["last"]["ended_as"], status["last"]["manifest"])
        case.equal((higher, "aborted", None), last, f"`last` after {phase}", "CKPT-CKID-026", "CKPT-CKID-025")


def _committed_id(case: Case, participant: Participant) -> str:
    return committed_at(case, participant)[0]


@check("CKPT-CKID-003", profile="checkpoint", each="participant")
def checkpoint_ids_are_compared_as_numbers(case: Case) -> None:
    """C42: 9 is lower than 10: `<epoch>-9` is stale after `<epoch>-10`."""
    c, p = case.controller, case.p
    case.accepted(c.abort(p, f"{c.epoch}-9"), "abort of 9")
    case.accepted(c.abort(p, f"{c.epoch}-10"), "10 is higher than 9", "CKPT-CKID-003")
    case.refused(c.abort(p, f"{c.epoch}-9"), "stale_checkpoint", "9 is lower than 10", "CKPT-CKID-003")


@check(
    "CKPT-ID-008",
    "CKPT-ID-009",
    "CKPT-ID-010",
    "CKPT-ID-012",
    "CKPT-ID-013",
    features=("conformance",),
    budget=("quick", "demo"),
)
def policy_calls_say_whose_turn_it_is(case: Case) -> None:
    """Every policy call carries rollout, attempt and turn; turns count from 1 and go up by one."""
    rollout, _ = case.finished(script(add(1), [add(2), add(3)], "done"), attempt=4)
    calls = case.witness.generations(rollout.rollout_id)
    case.equal(3, len(calls), "three policy calls under that rollout id", "CKPT-ID-008")
    case.equal([4, 4, 4], [call.attempt for call in calls], "Gym-Attempt", "CKPT-ID-009")
    case.equal([1, 2, 3], [call.turn for call in calls], "Gym-Turn", "CKPT-ID-010", "CKPT-ID-012")
    asked = [call.conversation_turn for call in calls]
    case.equal([1, 2, 3], asked, "the conversation agrees with the header", "CKPT-ID-013")


@check(
    "CKPT-FENCE-001",
    "CKPT-FENCE-003",
    "CKPT-FENCE-005",
    "CKPT-ROLL-010",
    "CKPT-ROLL-027",
    features=("conformance",),
    budget=("quick", "demo"),
)
def a_higher_attempt_fences_the_lower_one(case: Case) -> None:
    """C10, C11: attempt 1 replaces attempt 0; whatever attempt 0 does later changes nothing, attempt 1 finishes."""
    written = script(add(1), add(2), "done")
    first = case.start_at(1, written)
    hold = case.witness.hold(first.rollout_id, 1, attempt=1)
    case.step("start the same rollout as attempt 1 while attempt 0 waits for the policy")
    outcome = case.outcome({**first.item, "attempt": 1})
    case.equal("started", outcome["outcome"], "a higher attempt replaces the lower one", "CKPT-ROLL-027")
    second = Rollout(first.rollout_id, 1, first.item, written)
    hold.wait_asked()
    case.equal(
        "stale_attempt", case.outcome(first.item)["outcome"], "attempt 0 again", "CKPT-ROLL-010", "CKPT-FENCE-001"
    )
    case.release(first)
    hold.release()
    entry = case.result(second)
    case.equal(1, entry["receipt"]["attempt"], "the result is that of attempt 1", "CKPT-FENCE-003")
    case.equal(3, entry["content"]["body"]["turns"], "attempt 1 did every turn itself", "CKPT-FENCE-003")
    late = [g for g in case.witness.generations(first.rollout_id, attempt=0) if g.conversation_turn > 2]
    case.equal([], late, "attempt 0 asked nothing more", "CKPT-FENCE-001")
    case.equal("stale_attempt", case.outcome(first.item)["outcome"], "attempt 0 after the end", "CKPT-FENCE-005")


@check("CKPT-FENCE-005", "CKPT-FENCE-004", "CKPT-RETIRE-012", "CKPT-RETIRE-019", "CKPT-REPEAT-017", each="rollouts")
def fences_only_rise(case: Case) -> None:
    """A retire through 5 fences; a later retire through 2 does not lower it."""
    rollout_id = case.new_id()
    counts = case.p.status()["counts"]
    case.step("retire through 5, then through 2")
    for through in (5, 2):
        reply = case.accepted(case.controller.retire(case.p, {rollout_id: through}), "a retire", "CKPT-RETIRE-012")
        case.equal("retired", reply["outcomes"][0]["outcome"], "the outcome", "CKPT-REPEAT-017")
    case.equal(counts, case.p.status()["counts"], "an unknown rollout changes no count", "CKPT-RETIRE-019")
    case.new_controller("later")
    for attempt in (2, 5):
        outcome = case.outcome(case.item(rollout_id, attempt=attempt, environment=_any_environment(case)))
        case.equal(
            "stale_attempt", outcome["outcome"], f"attempt {attempt} is fenced", "CKPT-FENCE-005", "CKPT-FENCE-004"
        )


def _any_environment(case: Case) -> str:
    environments = case.gym.environments()
    return "conformance" if "conformance" in environments else next(iter(environments))
