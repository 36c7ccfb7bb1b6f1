# SPDX-License-Identifier: Apache-2.0
"""Level 1: the acid test through kills, SIGTERM, SIGSTOP, logs, older routes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from typing import Any

from conformance.case import DEFAULT_SCRIPT, Case, Rollout
from conformance.checks.snapshots import LONG, judge_kept_turns
from conformance.cuts import Cut, prepared_at, reset, restore_cut, take_cut
from conformance.errors import LostRequest, NotOffered
from conformance.gym import Gym
from conformance.registry import check
from conformance.script import Script, script, world
from conformance.wire import Reply

COMMON = ("conformance",)


def reborn(case: Case, *, fresh: bool = False) -> None:
    """SIGKILL the Gym, start it again on another port, and discover it anew."""
    case.step(f"SIGKILL the Gym and start it again{' on no data' if fresh else ''}")
    case.process.kill()
    case.process.start(fresh=fresh)
    rediscover(case)


def rediscover(case: Case) -> None:
    """Find the participants of the running Gym again, and adopt a new controller."""
    case.wire.reconnect()
    found = Gym.discover(case.wire, [endpoint.url for endpoint in case.process.endpoints])
    case.gym.participants = found.participants
    case.new_controller("reborn")


def must_remember(case: Case) -> None:
    """Leave a check of what a kept incarnation keeps to Gyms that keep theirs.

    Raises:
        NotOffered: an earlier check has seen that the owner of rollouts takes a new incarnation.
    """
    if not case.process.remembers:
        raise NotOffered("it takes a new incarnation instead")


def born_again(case: Case, *, quietly: bool = False) -> None:
    """SIGKILL, start on the same data.

    Args:
        case: this one; no effect is under way in it.
        quietly: adopt no new controller.

    Raises:
        NotOffered: the owner of rollouts takes a new incarnation.
    """
    must_remember(case)
    case.step("SIGKILL the Gym, start it again on its data")
    case.process.kill()
    arise(case, quietly=quietly)


def arise(case: Case, *, quietly: bool = False) -> None:
    """Start a killed Gym on the same data; see `born_again`."""
    before = case.agent.capabilities["incarnation"]
    case.process.start()
    (rediscover_quietly if quietly else rediscover)(case)
    case.process.remembers = case.agent.capabilities["incarnation"] == before
    must_remember(case)


def restore_after(case: Case, cut: Cut, rollout: Rollout) -> None:
    """Restore a cut into the reborn Gym; the held call of the old life was abandoned, its hold is released."""
    case.release(rollout)
    restore_cut(case, cut)


@check(
    "CKPT-ENV-006",
    "CKPT-INV-002",
    "CKPT-RESTORE-020",
    "CKPT-RESTORE-059",
    "CKPT-DISC-016",
    "CKPT-ID-020",
    profile="turn-recovery",
    level=1,
    features=COMMON,
    world=True,
    storage=True,
    budget=("quick", "demo"),
)
def acid_test_through_a_kill(case: Case) -> None:
    """The acid test at level 1: SIGKILL after turn 3, start on no data and another port, restore: the same body."""
    expected = case.baseline(LONG)
    rollout = case.start_at(3, LONG)
    cut = take_cut(case)
    before = [p.capabilities["incarnation"] for p in case.gym.participants]
    reborn(case, fresh=True)
    after = [p.capabilities["incarnation"] for p in case.gym.participants]
    case.equal(set(), set(before) & set(after), "incarnations that outlived their state", "CKPT-ID-020")
    case.attempts[rollout.rollout_id] = 5
    restore_after(case, cut, rollout)
    case.equal(expected, case.body(rollout), "killed = unkilled", "CKPT-ENV-006", "CKPT-RESTORE-020", "CKPT-DISC-016")
    late = case.sessions.probe(rollout.rollout_id, 5, 4, f"{rollout.rollout_id}/4/1", "add", {"n": 1})
    what = "an effect of an attempt that this life has never seen, below the restored one"
    case.refused(late, "stale_attempt", what, "CKPT-RESTORE-059")
    judge_kept_turns(case, rollout, 3)


@check(
    "CKPT-ENV-006",
    "CKPT-ENV-026",
    "CKPT-INV-002",
    profile="turn-recovery",
    level=1,
    features=COMMON,
    world=True,
    storage=True,
)
def acid_test_through_two_kills(case: Case) -> None:
    """C46: cut, kill, restore, cut, kill, restore, each time on no data: both parts are there, the same body."""
    expected = case.baseline(LONG)
    rollout = case.start_at(1, LONG)
    first = take_cut(case)
    reborn(case, fresh=True)
    hold = case.witness.hold(rollout.rollout_id, 4, attempt=1)
    restore_after(case, first, rollout)
    hold.wait_asked()
    second = take_cut(case)
    reborn(case, fresh=True)
    hold.release()
    restore_cut(case, second)
    case.equal(expected, case.body(rollout), "killed twice = unkilled", "CKPT-ENV-006", "CKPT-ENV-026")
    judge_kept_turns(case, rollout, 3, again=2)


@check(
    "CKPT-SEC-018",
    "CKPT-SEC-019",
    "CKPT-SEC-020",
    "CKPT-SEC-021",
    "CKPT-SEC-022",
    "CKPT-SEC-025",
    profile="checkpoint",
    level=1,
    features=COMMON,
)
def a_terminated_gym_drains(case: Case) -> None:
    """C70: after SIGTERM it says `draining`, serves the control plane while a rollout lives, and ends in its budget."""
    grace = max(p.limit("shutdown_grace_ms") for p in case.gym.participants) / 1000
    if grace > case.patience.seconds(20):
        raise NotOffered(f"shutdown_grace_ms is {grace * 1000:.0f}")
    case.start_at(1)  # Without it the Gym might end as soon as no checkpoint is open.
    open_ids = {p.name: prepared_at(case, p) for p in case.gym.participants}
    case.step("SIGTERM while prepared")
    case.process.send_signal(signal.SIGTERM)
    try:
        case.until(lambda: case.agent.status()["draining"], "it reports draining", "CKPT-SEC-019")
        case.accepted(case.controller.abort(case.agent, open_ids[case.agent.name]), "abort", "CKPT-SEC-020")
        case.equal("admission_closed", case.outcome(case.item(case.new_id()))["outcome"], "a start", "CKPT-SEC-018")
        refused = case.controller.restore(case.agent, case.controller.next_id(), None)
        case.refused(refused, "unavailable", "no restore begins", "CKPT-SEC-022")
    except LostRequest as error:
        case.true(False, "the control plane is served while a rollout lives", "CKPT-SEC-020", got=str(error))
    started = time.monotonic()
    code = case.process.wait(within_s=grace + 8)
    took = time.monotonic() - started
    case.true(took < grace + case.patience.seconds(4), "it ends in its budget", "CKPT-SEC-021", got=f"{took:.1f} s")
    case.equal(0, code, "the exit code", "CKPT-SEC-025")


@check("CKPT-SEC-006", level=1, features=COMMON, last=True)
def no_token_is_in_a_log(case: Case) -> None:
    """C75: the logs of the Gym hold none of its tokens."""
    case.finished()
    logs = case.process.logs()
    for name, token in {**case.process.tokens, "policy": case.process.policy_token}.items():
        case.true(token not in logs, f"the {name} token is in no log", "CKPT-SEC-006", got="it is")


@check("CKPT-CTRL-005", profile="checkpoint", level=1, features=COMMON)
def a_stopped_gym_is_taken_over(case: Case) -> None:
    """C13: the Gym is stopped and continued: a controller that was replaced is refused, the new one is served."""
    old = case.controller
    rollout = case.start_at(1)
    open_id = prepared_at(case, case.agent)
    case.step("SIGSTOP, SIGCONT")
    case.process.stop()
    waiting = case.wire.background(case.agent.get_status)
    case.stays(lambda: not waiting.done(), "a stopped Gym does not answer", for_s=0.2)
    case.process.cont()
    case.accepted(waiting.result(), "it answers once continued")
    case.new_controller("next")
    reply = old.resume(case.agent, open_id)
    case.refused(reply, "stale_controller", "the old one", "CKPT-CTRL-005")
    case.release(rollout)
    case.body(rollout)


def rediscover_quietly(case: Case) -> None:
    """Find the participants of the running Gym again, without adopting anyone."""
    case.wire.reconnect()
    found = Gym.discover(case.wire, [endpoint.url for endpoint in case.process.endpoints])
    case.gym.participants = found.participants


def older(case: Case, route: Mapping[str, Any], written: Script = DEFAULT_SCRIPT) -> Reply:
    """Run a rollout through the Gym's older route, and return its answer."""
    case.witness.script("", written)  # of policy calls that name no rollout
    policy = case.witness.policy(f"{case.prefix}older")
    body = {key: policy if value == "{policy}" else value for key, value in dict(route["body"]).items()}
    headers = {"Content-Type": "application/json"}
    content = json.dumps(body).encode()
    url = case.agent.url + route["path"]
    return case.wire.raw("POST", url, headers=headers, content=content, plane="data", within_s=30)


@check(
    "CKPT-STATUS-022",
    "CKPT-STATUS-023",
    "CKPT-PREP-015",
    "CKPT-GATE-022",
    "CKPT-COMMIT-007",
    "CKPT-RESTORE-017",
    "CKPT-DISC-029",
    profile="checkpoint",
    level=1,
    storage=True,
)
def an_unmanaged_rollout_is_left_alone(case: Case) -> None:
    """N14: a rollout of the Gym's older route: counted, not captured, neither held nor dropped; no header of ours."""
    route = case.process.file.unmanaged
    if route is None:
        raise NotOffered("target.yaml names no older route")
    before = case.agent.status()["counts"]
    hold = case.witness.hold(None, 1)
    case.step("run a rollout through the older route; its first policy call is held")
    running = case.wire.background(lambda: older(case, route))
    first = hold.wait_asked()
    ours = [name for name in first.headers if name.startswith("gym-")]
    case.equal([], ours, "headers of this protocol", "CKPT-DISC-029")
    counts = case.agent.status()["counts"]
    case.equal(before["unmanaged"] + 1, counts.pop("unmanaged"), "it is counted", "CKPT-STATUS-022")
    case.equal({k: v for k, v in before.items() if k in counts}, counts, "and nowhere else", "CKPT-STATUS-023")
    open_id = case.controller.next_id()
    for p in case.gym.participants:
        ready = case.accepted(case.controller.prepare(p, open_id), "prepare")
        case.equal(True, ready["ready"], "it blocks nothing", "CKPT-PREP-015")
    cut = take_cut(case, checkpoint_id=open_id, resume=False)
    others = {key for key in cut.parts[case.agent.name].rows if not key.startswith(case.bench.nonce)}
    case.equal(set(), others, "rows of the unmanaged one", "CKPT-COMMIT-007")
    hold.release()
    case.until(lambda: case.witness.generations(address=f"{case.prefix}older", turn=2), "it goes on", "CKPT-GATE-022")
    for p in case.gym.participants:
        case.controller.abort(p, open_id)
    reset(case)
    reply = running.result()
    case.accepted(reply, "the older route answers as ever", "CKPT-RESTORE-017", "CKPT-GATE-022")
    case.step("run another one, the handler of whose effect raises: its task names no world")
    older(case, route, script([world("nowhere")], "done"))
    counts = case.agent.status()["counts"]
    case.equal(before["unmanaged"], counts["unmanaged"], "those that have ended are not counted", "CKPT-STATUS-022")
