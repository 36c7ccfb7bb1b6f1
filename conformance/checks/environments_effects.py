# SPDX-License-Identifier: Apache-2.0
"""Environments: effects, their request ids, sessions and their uncertainty, through agents and through the probe."""

from __future__ import annotations

import contextlib
import functools
import json

from conformance.case import DEFAULT_SCRIPT, Case, Rollout
from conformance.controller import Json
from conformance.cuts import prepared_at, take_cut
from conformance.errors import Lost, NotOffered
from conformance.registry import check
from conformance.script import add, script, world
from conformance.wire import Fault, Reply
from spec import wire as names

COMMON = ("conformance",)
LONG_LEASE_MS = 2_000
"""What a check waits for at most: sessions with a longer shortest lease are not asked."""
FAILING = script(add(1), [add(2), world("breaks"), add(3)], "done")


def probe(
    case: Case, rollout: Rollout, n: int, tool: str = "add", *, turn: int = 9, attempt: int | None = None, **kw: object
) -> Reply:
    """Send one effect of turn 9 of a rollout to the probe."""
    args = kw.pop("args", {"n": n} if tool == "add" else {"tag": "probe"})
    request = names.request_id(rollout.rollout_id, turn, n)
    return case.sessions.probe(
        rollout.rollout_id,
        rollout.attempt if attempt is None else attempt,
        turn,
        request,
        tool,
        args,  # type: ignore[arg-type]  # a JSON object
        **kw,  # type: ignore[arg-type]  # keywords of the probe
    )


@check(
    "CKPT-CONF-032",
    "CKPT-CONF-034",
    "CKPT-CONF-035",
    "CKPT-CONF-036",
    "CKPT-CONF-038",
    "CKPT-CONF-050",
    "CKPT-CONF-053",
    "CKPT-ID-011",
    features=COMMON,
    world=True,
    budget="quick",
)
def a_probe_is_an_effect_of_the_live_rollout(case: Case) -> None:
    """The probe acts on the session of the agent's turns, opens none of them, and is refused as they are."""
    rollout = case.start_at(1, script(world("first"), "done"), attempt=3)
    reply = case.accepted(probe(case, rollout, 1, "world"), "a probe", "CKPT-CONF-032", "CKPT-CONF-035")
    case.true(
        isinstance(reply.json.get("observation"), str), "the observation's text", "CKPT-CONF-050", got=reply.brief
    )
    seen = {"counter": 2, "effects": 2, "value": 1}
    # The agent's own effect of turn 1 reached the same session: its call said for whom it was (CKPT-ID-011).
    case.equal(seen, json.loads(reply["observation"]), "after the agent's effect", "CKPT-CONF-034", "CKPT-ID-011")
    case.equal(1, case.row(rollout)["turns_done"], "no turn of the agent opened", "CKPT-CONF-036")
    lower = probe(case, rollout, 2, attempt=2)
    case.refused(lower, "stale_attempt", "a lower attempt", "CKPT-CONF-038")
    foreign = names.request_id(case.new_id("other"), 9, 2)
    reply = case.sessions.probe(rollout.rollout_id, 3, 9, foreign, "add", {"n": 1})
    case.refused(reply, "invalid_request", "a foreign request id", "CKPT-CONF-053")


@check("CKPT-CONF-037", profile="checkpoint", features=COMMON, budget="quick")
def a_probe_leaves_no_turn_open(case: Case) -> None:
    """Right after a probe has returned its participant is ready."""
    rollout = case.start_at(0)
    case.accepted(probe(case, rollout, 1), "a probe")
    reply = case.accepted(case.controller.prepare(case.sessions, case.controller.next_id()), "prepare")
    case.equal(True, reply["ready"], "its turn is closed", "CKPT-CONF-037")


@check(
    "CKPT-EFFECT-001",
    "CKPT-EFFECT-002",
    "CKPT-EFFECT-003",
    "CKPT-EFFECT-004",
    "CKPT-EFFECT-017",
    profile="turn-recovery",
    features=COMMON,
    world=True,
    budget="quick",
)
def a_repeated_effect_runs_once(case: Case) -> None:
    """C32: the same request id gets the recorded reply and runs once; with another input it is `argument_conflict`."""
    rollout = case.start_at(0)
    case.step("probe a world effect three times with one request id")
    replies = [probe(case, rollout, 1, "world") for _ in range(3)]
    for reply in replies:
        case.accepted(reply, "an effect through the probe", "CKPT-EFFECT-001")
        case.equal(replies[0]["observation"], reply["observation"], "the recorded reply", "CKPT-EFFECT-001")
    happened = len(case.world.calls("probe", rollout_id=rollout.rollout_id))
    case.equal(1, happened, "calls that reached the outside", "CKPT-EFFECT-017")
    case.accepted(probe(case, rollout, 2), "another effect of the same turn")
    again = case.accepted(probe(case, rollout, 1, "world"), "a repeat after a later effect", "CKPT-EFFECT-002")
    case.equal(replies[0]["observation"], again["observation"], "kept through the turn", "CKPT-EFFECT-002")
    case.step("the same request id with another input")
    refused = probe(case, rollout, 2, args={"n": 77})
    case.refused(refused, "argument_conflict", "another input", "CKPT-EFFECT-003")
    next_one = probe(case, rollout, 3)
    case.refused(next_one, "internal", "a new effect of the session, which is uncertain now", "CKPT-EFFECT-004")
    case.release(rollout)
    case.until_state(rollout, "restart", "failed", requirements=("CKPT-EFFECT-004",))


@check("CKPT-EFFECT-005", "CKPT-EFFECT-019", profile="turn-recovery", features=COMMON, world=True)
def an_effect_survives_an_impatient_client(case: Case) -> None:
    """C32: three tries with a short client timeout on one slow effect: it happens once, and the last try sees it."""
    rollout = case.start_at(0)
    with case.world.hold("probe", rollout_id=rollout.rollout_id) as effect:
        case.step("probe a slow effect, and give up twice")
        for _ in range(2):
            with contextlib.suppress(Lost):
                probe(case, rollout, 1, "world", within_s=0.3)
        effect.wait_begun()
        third = case.wire.background(lambda: probe(case, rollout, 1, "world"))
        other = case.wire.background(lambda: probe(case, rollout, 2, "world"))
        begun = functools.partial(case.world.calls, "probe", rollout_id=rollout.rollout_id)
        case.stays(lambda: len(begun()) == 1, "one effect of a session at a time", "CKPT-EFFECT-019")
        effect.release()
    case.accepted(other.result(), "the effect that came after it")
    case.accepted(third.result(), "the third try", "CKPT-EFFECT-005")
    requests = [call.request_id for call in begun()]
    case.equal(
        1,
        requests.count(names.request_id(rollout.rollout_id, 9, 1)),
        "calls that reached the outside",
        "CKPT-EFFECT-005",
    )


@check(
    "CKPT-EFFECT-007",
    "CKPT-EFFECT-008",
    "CKPT-EFFECT-010",
    "CKPT-EFFECT-011",
    "CKPT-ID-016",
    "CKPT-ENV-011",
    profile="turn-recovery",
    features=COMMON,
    budget="quick",
)
def effects_are_refused_for_what_they_name(case: Case) -> None:
    """A fenced attempt is `stale_attempt`; an unknown session, or another `effects_done`, is `session_lost`."""
    rollout = case.start_at(1, attempt=3)
    lower = probe(case, rollout, 1, attempt=2, effects_done=99)
    case.refused(lower, "stale_attempt", "a lower attempt, before all else", "CKPT-EFFECT-008", "CKPT-EFFECT-007")
    unknown = Rollout(case.new_id("nobody"), 0, {}, DEFAULT_SCRIPT)
    case.refused(
        probe(case, unknown, 1), "session_lost", "a rollout without a session", "CKPT-EFFECT-010", "CKPT-CONF-038"
    )
    case.refused(probe(case, unknown, 1), "session_lost", "an effect opens no session", "CKPT-ENV-011")
    for other in (0, 2, 7):
        reply = probe(case, rollout, 1, effects_done=other)
        case.refused(reply, "session_lost", f"effects_done {other} where 1 is recorded", "CKPT-EFFECT-011")
    fits = probe(case, rollout, 1, effects_done=1)
    case.accepted(fits, "the recorded number of effects", "CKPT-EFFECT-011", "CKPT-ID-016")


@check(
    "CKPT-EFFECT-009",
    "CKPT-EFFECT-012",
    "CKPT-EFFECT-013",
    "CKPT-EFFECT-014",
    "CKPT-EFFECT-015",
    "CKPT-GATE-009",
    profile="turn-recovery",
    features=COMMON,
)
def a_closed_gate_answers_repeats_and_holds_the_rest(case: Case) -> None:
    """While prepared a repeat is answered; a new effect is held, or refused with `admission_closed`."""
    rollout = case.start_at(0)
    first = case.accepted(probe(case, rollout, 1), "an effect")
    open_id = prepared_at(case, case.sessions)
    again = case.accepted(probe(case, rollout, 1), "a repeat at the closed gate", "CKPT-EFFECT-009")
    case.equal(first["observation"], again["observation"], "the recorded reply", "CKPT-EFFECT-009")
    case.step("probe a new effect in the background")
    held = case.wire.background(lambda: probe(case, rollout, 2))
    case.stays(lambda: not (held.done() and held.result().ok), "it does not run", "CKPT-GATE-009")
    case.accepted(case.controller.abort(case.sessions, open_id), "abort")
    lease_ms = case.sessions.limit("min_lease_ms")
    if lease_ms <= case.patience.ms(LONG_LEASE_MS):
        held.result()
        prepared_at(case, case.sessions, lease_ms=lease_ms)
        ended = case.wire.background(lambda: probe(case, rollout, 3))
        case.step(f"probe another one, and let the lease of {lease_ms} ms end")
        case.until(lambda: case.sessions.status()["gate"] == "open", "the lease ends", "CKPT-EFFECT-013")
        case.until(ended.done, "the held effect is answered once the lease has ended", "CKPT-EFFECT-013", within_s=2.0)
    reply = held.result()
    if reply.ok:
        case.leave_out("it holds effects at its closed gate", "CKPT-EFFECT-014", "CKPT-EFFECT-015")
    else:  # a recommendation that this participant does not follow: CKPT-EFFECT-012
        case.refused(reply, "admission_closed", "an effect that is not held", "CKPT-EFFECT-014", "CKPT-EFFECT-013")
        case.true("retry-after" in reply.headers, "Retry-After is there", "CKPT-EFFECT-015", got=dict(reply.headers))


@check(
    "CKPT-ENV-013",
    "CKPT-ENV-014",
    "CKPT-ENV-015",
    "CKPT-ENV-016",
    "CKPT-ENV-017",
    "CKPT-ENV-025",
    "CKPT-STATUS-017",
    "CKPT-CONF-022",
    "CKPT-EFFECT-018",
    profile="checkpoint",
    features=COMMON,
    world=True,
    storage=True,
    budget=("quick", "demo"),
)
def a_broken_effect_leaves_its_rollout_uncertain(case: Case) -> None:
    """C61, C62: a handler that raises: `restart`, no blocker, listed as uncertain, never repeated; retire frees it."""
    rollout_id = case.new_id()
    case.world.fail("breaks", rollout_id=rollout_id)
    rollout = case.start(FAILING, rollout_id=rollout_id)
    case.step("the outside fails the second effect of turn 2")
    row = case.until_state(rollout, "restart", requirements=("CKPT-ENV-013", "CKPT-CONF-022"))
    case.equal(1, row["turns_done"], "the turn did not reach its boundary", "CKPT-ENV-013")
    counts = case.agent.status()["counts"]
    case.true(counts["restart"] >= 1, "counts.restart counts the uncertain one", "CKPT-STATUS-017", got=counts)
    if case.continues:
        case.refused(probe(case, rollout, 1), "internal", "a further effect", "CKPT-EFFECT-018")
    else:
        case.leave_out("effects are not deduplicated without turn-recovery", "CKPT-EFFECT-018")
    open_id = case.controller.next_id()
    for p in case.gym.participants:
        ready = case.accepted(case.controller.prepare(p, open_id), "prepare")["ready"]
        case.equal(True, ready, "an uncertain rollout does not block", "CKPT-ENV-014")
    cut = take_cut(case, checkpoint_id=open_id)
    saved = cut.row(case, rollout_id)
    reasons = ("uncertain",) if case.continues else ("uncertain", "restart_only")
    found = (saved["state"], saved.get("reason") in reasons)
    case.equal(("restart", True), found, f"the index says {saved.get('reason')}", "CKPT-ENV-015")
    calls = len(case.world.calls("breaks", rollout_id=rollout_id))
    case.equal(1, calls, "the effect ran once", "CKPT-ENV-017")
    case.equal(0, case.witness.asked(rollout_id, 3), "the policy was not asked on", "CKPT-ENV-025")
    outcome = case.accepted(case.controller.retire(case.agent, {rollout_id: 0}), "retire")["outcomes"][0]
    case.equal("retired", outcome["outcome"], "retire frees it", "CKPT-ENV-016")
    second = case.start(FAILING, rollout_id=rollout_id, attempt=1)
    case.body(second, "CKPT-ENV-016")


@check(
    "CKPT-ENV-012",
    "CKPT-ENV-029",
    "CKPT-CONF-040",
    "CKPT-CONF-051",
    "CKPT-EFFECT-011",
    "CKPT-EFFECT-016",
    profile="turn-recovery",
    features=COMMON,
    budget="quick",
)
def a_lost_session_ends_its_rollout(case: Case) -> None:
    """N7, N8: the session holds another effect than the agent knows: `session_lost`; the policy sees nothing of it."""
    rollout = case.start_at(1)
    case.step("add an effect through the probe, which the agent does not know of")
    case.accepted(probe(case, rollout, 1), "an effect of the probe", "CKPT-CONF-040")
    case.release(rollout)
    failure = case.failure(rollout, "CKPT-ENV-012")
    case.equal("session_lost", failure["kind"], "the kind", "CKPT-ENV-012", "CKPT-CONF-051")
    case.equal(False, failure["terminal"], "a next attempt may succeed", "CKPT-ENV-029")
    asked = case.witness.generations(rollout.rollout_id, turn=3)
    shown = [call.body["messages"][-1]["content"] for call in asked]
    ran = [text for text in shown if "counter" in text]
    case.equal([], ran, "effects that ran although the numbers differ", "CKPT-EFFECT-011")
    case.equal([], shown, "what the policy was shown in their place", "CKPT-EFFECT-016")


@check("CKPT-ID-014", features=COMMON, world=True, budget="quick")
def effects_have_request_ids(case: Case) -> None:
    """Each effect carries `<rollout_id>/<turn>/<n>`, n counting from 1 in its turn, refused ones included."""
    rollout = case.start(script([add(1), world("x"), world("y")], [world("z")], "done"))
    case.result(rollout)
    found = [(call.tag, call.turn, call.request_id) for call in case.world.calls(rollout_id=rollout.rollout_id)]
    places = (("x", 1, 2), ("y", 1, 3), ("z", 2, 1))
    expected = [(tag, turn, names.request_id(rollout.rollout_id, turn, n)) for tag, turn, n in places]
    case.equal(expected, found, "tag, turn and request id of each effect", "CKPT-ID-014")


@check("CKPT-CONF-033", features=COMMON)
def the_probe_is_on_the_data_plane(case: Case) -> None:
    """The probe takes the data-plane token alone."""
    tokens = case.wire.tokens
    if not tokens.get("control") or tokens.get("control") == tokens.get("data"):
        raise NotOffered("control plane and data plane have no tokens of their own")
    rollout = case.start_at(0)
    body: Json = {
        "rollout_id": rollout.rollout_id,
        "attempt": 0,
        "turn": 9,
        "request_id": names.request_id(rollout.rollout_id, 9, 1),
        "tool": "add",
        "args": {"n": 1},
        "effects_done": None,
    }
    url = case.sessions.url + names.PROBE_PATH
    headers = {"Content-Type": "application/json"}
    content = json.dumps(body).encode()
    reply = case.wire.raw("POST", url, headers=headers, content=content, plane="control")
    case.refused(reply, "unauthorized", "the control token", "CKPT-CONF-033")
    reply = case.wire.raw("POST", url, headers=headers, content=content, plane="data")
    case.accepted(reply, "the data token", "CKPT-CONF-033")


@check("CKPT-CONF-039", features=COMMON, world=True)
def a_probe_whose_handler_raised_is_internal(case: Case) -> None:
    """A probe whose effect fails outside is refused with `internal`."""
    rollout = case.start_at(1)
    case.world.fail("probe", rollout_id=rollout.rollout_id)
    case.refused(probe(case, rollout, 1, "world"), "internal", "the handler raised", "CKPT-CONF-039")


@check("CKPT-EFFECT-001", "CKPT-EFFECT-017", profile="turn-recovery", features=COMMON, world=True)
def a_lost_reply_of_an_effect_is_repeated(case: Case) -> None:
    """C32: the reply of an effect is lost; sent again, it is answered as before and happened once."""
    rollout = case.start_at(0)
    with contextlib.suppress(Lost):
        probe(case, rollout, 1, "world", fault=Fault.lost_reply())
    case.accepted(probe(case, rollout, 1, "world"), "the same effect again", "CKPT-EFFECT-001")
    case.equal(1, len(case.world.calls("probe", rollout_id=rollout.rollout_id)), "calls outside", "CKPT-EFFECT-017")


@check("CKPT-ENV-032", profile="turn-recovery", features=COMMON)
def an_end_with_differing_effects_is_a_lost_session(case: Case) -> None:
    """The session holds an effect that the agent does not know, and the policy ends: `session_lost`, not verified."""
    rollout = case.start_at(1, script(add(1), "done"))
    case.accepted(probe(case, rollout, 1), "an effect of the probe")
    case.release(rollout)
    failure = case.failure(rollout, "CKPT-ENV-032")
    case.equal("session_lost", failure["kind"], "the kind", "CKPT-ENV-032")


@check("CKPT-EFFECT-020", profile="turn-recovery", features=COMMON, world=True)
def a_new_attempt_runs_its_own_effects(case: Case) -> None:
    """A rollout that starts again at turn 1 gets no reply that was recorded for its lower attempt."""
    written = script([world("each")], "done")
    first = case.start_at(1, written)
    case.controller.retire(case.agent, {first.rollout_id: 0})
    for p in case.gym.participants:
        case.controller.retire(p, {first.rollout_id: 0})
    case.release(first)
    second = case.start(written, rollout_id=first.rollout_id, attempt=1)
    case.body(second, "CKPT-EFFECT-020")
    attempts = [call.attempt for call in case.world.calls("each", rollout_id=first.rollout_id)]
    case.equal([0, 1], attempts, "effects by attempt", "CKPT-EFFECT-020")


@check("CKPT-CONF-020", features=COMMON, world=True)
def a_slow_effect_is_waited_for(case: Case) -> None:
    """An answer of the world that takes its time is still taken."""
    rollout_id = case.new_id()
    with case.world.hold("slow", rollout_id=rollout_id) as effect:
        rollout = case.start(script([world("slow")], "done"), rollout_id=rollout_id)
        effect.wait_begun()
        case.step("let the effect take 1.5 s")
        case.patience.pause(1.5)
        effect.release()
    body = case.body(rollout, "CKPT-CONF-020")
    case.equal(1, body["final"]["effects"], "it was taken", "CKPT-CONF-020")
