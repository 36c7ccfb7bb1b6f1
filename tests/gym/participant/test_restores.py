# SPDX-License-Identifier: Apache-2.0
"""Restores: what is verified, what is installed, what is left as it was, and twice from one snapshot."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reference_gym.participant import EnvironmentInfo, Participant, ProtocolError, Sessions, StateSchema, restorer
from reference_gym.participant.errors import SessionLost, StaleAttempt
from reference_gym.participant.restorer import Restorer
from spec import wire
from tests.gym.participant.kit import POLICY, Counter, Gym, MovedClock, settle, until


@pytest.fixture
def gym(tmp_path: Path) -> Gym:
    """A Gym that owns rollouts and sessions."""
    return Gym(tmp_path)


async def refused(call: Any) -> ProtocolError:
    """Return the refusal of a call."""
    with pytest.raises(ProtocolError) as refusal:
        await call
    return refusal.value


async def example(gym: Gym) -> tuple[str, Any]:
    """Take the snapshot 1-1: `a` finished, `b` has done 2 turns, `c` 1; return the digest and a's receipt."""
    await gym.start("a", "b", "c")
    gym.loop.reply("a", [("add", 1)])
    (receipt,) = await gym.finish("a")
    gym.loop.reply("b", [("add", 1)], [("add", 10), ("add", 100)])
    gym.loop.reply("c", [("add", 5)])
    await until(lambda: {("b", 0, 3), ("c", 0, 2)} <= set(gym.loop.asked))
    return (await gym.snapshot("1-1"))["manifest"]["digest"], receipt


ROWS = [("b", 0, 1, 2), ("c", 0, 1, 1)]


async def final(gym: Gym, rollout_id: str) -> Any:
    """End a rollout and return its result's content."""
    await gym.finish(rollout_id)
    (served,) = [r for r in (await gym.results()).results if r.receipt.rollout_id == rollout_id]
    return json.loads(served.result)


async def test_a_restore_into_another_process_continues_after_the_last_turn(gym: Gym, tmp_path: Path) -> None:
    """C46 and the acid test: no turn of the cut is asked for again, and the bodies are equal."""
    digest, receipt = await example(gym)
    gym.loop.reply("b", [("add", 7)])
    expected = await final(gym, "b")
    other = Gym(tmp_path)
    reply = await other.restore("2-1", "1-1", digest, ROWS, [receipt])
    assert ("restored", 2, [], 1) == tuple(reply[k] for k in ("phase", "restored_count", "restarts", "results_count"))
    assert ({"parked"}, []) == ({other.state("b"), other.state("c")}, other.loop.asked)
    await other.resume("2-1")
    await until(lambda: 2 == len(other.loop.asked))
    assert {("b", 1, 3), ("c", 1, 2)} == set(other.loop.asked)
    other.loop.reply("b", [("add", 7)])
    found = await final(other, "b")
    assert expected["body"] == found["body"]
    assert 1 == found["info"]["attempt"]
    (served,) = [r for r in (await other.results()).results if r.receipt.rollout_id == "a"]
    assert receipt == served.receipt.to_object()
    second = await other.snapshot("2-2")
    third = Gym(tmp_path)
    (result_b,) = [r.receipt.to_object() for r in (await other.results()).results if r.receipt.rollout_id == "b"]
    digest = second["manifest"]["digest"]
    await third.restore("3-1", "2-2", digest, [("c", 1, 2, 1)], [result_b, receipt])
    await third.resume("3-1")
    assert {"a", "b"} == {r.receipt.rollout_id for r in (await third.results()).results}


async def test_a_verification_that_repeats_is_run_again_after_a_restore(gym: Gym, tmp_path: Path) -> None:
    """CKPT-ENV-010: under way at the cut and not waited for; run again as the next attempt, without another turn."""
    gym.loop.verifying["r"] = asyncio.Event()
    await gym.start("r", environment="judged")
    gym.loop.reply("r", [("add", 3)], [])
    await until(lambda: ["r"] == gym.loop.verifications)
    digest = (await gym.snapshot("1-1"))["manifest"]["digest"]
    other = Gym(tmp_path)
    await other.restore("2-1", "1-1", digest, [("r", 0, 1, 2)])
    await other.resume("2-1")
    await until(lambda: 1 == other.status["counts"]["finished_unreleased"])
    assert (["r"], []) == (other.loop.verifications, other.loop.asked)
    (served,) = (await other.results()).results
    body = json.loads(served.result)["body"]
    assert (1, 3.0, 2) == (served.receipt.attempt, body["reward"], body["turns"])


async def test_a_restore_into_the_living_process_drops_all_earlier_work(gym: Gym) -> None:
    """Earlier attempts are fenced, results not kept are gone, the feed is new; twice from one snapshot (N15)."""
    digest, receipt = await example(gym)
    gym.loop.reply("b", [("add", 7)])
    expected = await final(gym, "b")
    await gym.start("late")
    await gym.waiting("c", "late")
    cursor = await gym.results()
    for attempt in (1, 2):
        rows = [("b", 0, attempt, 2), ("c", 0, attempt, 1)]
        await gym.restore(f"1-{attempt + 1}", "1-1", digest, rows, fences=[("late", 5), ("never", 3)])
        assert {"admitted": 2, "live": 2} == {k: gym.status["counts"][k] for k in ("admitted", "live")}
        await gym.resume(f"1-{attempt + 1}")
        await gym.waiting("b", "c")
        page = await gym.results(cursor.next)
        assert page.feed != cursor.feed, "N19: a page fetched before belongs to another feed"
        assert ["stale_attempt"] * 4 == await gym.start("a", "late", "never", "b")
    gym.loop.reply("b", [("add", 7)])
    assert expected["body"] == (await final(gym, "b"))["body"]
    assert 2 == len([asked for asked in gym.loop.asked if asked[:2] == ("b", 2)]), "turn 3, and the one that ends it"
    assert ["started"] == await gym.start("late", attempt=6)
    assert ["unknown"] == await gym.acks(receipt)


async def test_counts_after_a_restore_start_from_what_it_installed(gym: Gym, tmp_path: Path) -> None:
    """C08: 32 admitted, 10 acknowledged, 15 capturable and 7 restart-only in the cut: 10 + 15 + 7 = 32 afterwards."""
    done = [f"d{number:02}" for number in range(10)]
    kept = [f"k{number:02}" for number in range(15)]
    once = [f"o{number:02}" for number in range(7)]
    await gym.start(*done, *kept)
    await gym.start(*once, environment="once")
    await gym.acks(*await gym.finish(*done))
    await gym.waiting(*kept, *once)
    reply = await gym.prepare("1-1")
    assert (True, 7) == (reply["ready"], reply["restart_count"])
    commit = await gym.commit("1-1")
    assert (15, 0, 7) == tuple(commit["counts"][k] for k in ("turn", "finished", "restart"))
    other = Gym(tmp_path)
    await other.restore(
        "2-1", "1-1", commit["manifest"]["digest"], [(name, 0, 1, 0) for name in kept], fences=[(n, 0) for n in once]
    )
    await other.resume("2-1")
    assert ["started"] * 7 == await other.start(*once, attempt=1, environment="once", epoch=2)
    counts = other.status["counts"]
    assert (32, 22, 10) == (counts["admitted"], counts["live"], counts["released"])
    assert ["released"] == await other.start("d00", attempt=1, epoch=2)


async def test_an_acknowledged_rollout_runs_again_after_the_restore_of_an_earlier_cut(gym: Gym) -> None:
    """N17: the tombstone made after the cut is replaced, and leaves its attempt as a fence."""
    await gym.start("a")
    await gym.waiting("a")
    digest = (await gym.snapshot("1-1"))["manifest"]["digest"]
    await gym.acks(*await gym.finish("a"))
    assert ["released"] == await gym.start("a", attempt=1)
    await gym.restore("1-2", "1-1", digest, [("a", 0, 1, 0)])
    await gym.resume("1-2")
    await gym.waiting("a")
    assert ("a", 1, 1) == gym.loop.asked[-1]


async def test_a_kept_result_can_be_asked_for_again_at_its_own_attempt(gym: Gym) -> None:
    """CKPT-RESTORE-054, CKPT-FENCE-011: acknowledged after the cut or not, its own attempt is already_finished."""
    await gym.start("a", "b")
    receipts = await gym.finish("a", "b")
    digest = (await gym.snapshot("1-1"))["manifest"]["digest"]
    assert ["released"] == await gym.acks(receipts[0])
    await gym.restore("1-2", "1-1", digest, results=receipts)
    await gym.resume("1-2")
    assert ["already_finished"] * 2 == await gym.start("a", "b")
    assert ["released", "released"] == await gym.acks(*receipts)
    assert ["released"] * 2 == await gym.start("a", "b", attempt=1)


async def test_a_reset_leaves_nothing_and_fences_everything(gym: Gym) -> None:
    """`source: null`: no rollout, no result, no tombstone; every earlier attempt is fenced."""
    await gym.start("a", "b", "c")
    receipts = await gym.finish("a", "b")
    await gym.acks(receipts[0])
    await gym.restore("1-1", None)
    await gym.resume("1-1")
    assert 0 == sum(gym.status["counts"].values())
    assert 0 == len(gym.sessions)
    assert ["stale_attempt"] * 3 == await gym.start("a", "b", "c")
    assert ["started"] * 3 == await gym.start("a", "b", "c", attempt=1)


async def test_the_policy_of_a_restore_replaces_the_saved_one(gym: Gym, tmp_path: Path) -> None:
    """N3: restored rollouts call the new address and never the old one; without one they call the saved one."""
    digest, _ = await example(gym)
    moved = {**POLICY, "base_url": "http://new.test/v1"}
    others = [Gym(tmp_path), Gym(tmp_path)]  # Kept until the end: a Gym that nobody holds takes its tasks with it.
    for other, policy, expected in zip(others, (moved, None), (moved["base_url"], POLICY["base_url"]), strict=True):
        await other.restore("2-1", "1-1", digest, ROWS, **({} if policy is None else {"policy": policy}))
        await other.resume("2-1")
        await until(lambda other=other: 2 == len(other.loop.calls))
        assert {expected} == {url for _, url in other.loop.calls}


async def test_a_restore_that_takes_longer_than_its_limit_goes_on_and_a_repeat_joins_it(
    gym: Gym, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N4, CKPT-TIME-006: 504 that says so, with another time limit the same work, each session is built once."""
    digest, _ = await example(gym)
    free, real = threading.Event(), restorer.make_plan

    def slow(*what: Any) -> Any:
        assert free.wait(10)
        return real(*what)

    monkeypatch.setattr(restorer, "make_plan", slow)
    other = Gym(tmp_path)
    for limit in (1, 20):
        late = await refused(other.restore("2-1", "1-1", digest, ROWS, timeout_ms=limit))
        assert ("deadline_exceeded", 504, True) == (late.code, late.status, late.extra["continues"])
        assert "restoring" == other.status["phase"]
    joined = asyncio.ensure_future(other.restore("2-1", "1-1", digest, ROWS))
    await settle()
    free.set()
    assert 2 == (await joined)["restored_count"] == len(other.counters)
    await other.participant.close()


async def test_fifty_restores_at_once_run_once(gym: Gym, tmp_path: Path) -> None:
    """C31, N4: 50 equal replies, lists in any order; other arguments conflict, another time limit does not."""
    digest, receipt = await example(gym)
    other = Gym(tmp_path)
    calls = [
        other.restore("2-1", "1-1", digest, rows, [receipt], timeout_ms=timeout_ms)
        for rows, timeout_ms in 25 * [(ROWS, 5_000), (ROWS[::-1], 4_000)]
    ]
    replies = await asyncio.gather(*calls)
    assert 1 == len({json.dumps(reply) for reply in replies})
    assert 2 == len(other.counters), "each session was built once"
    assert "argument_conflict" == (await refused(other.restore("2-1", "1-1", digest, ROWS[:1], [receipt]))).code
    await other.resume("2-1")
    assert replies[0] | {"phase": "idle"} == await other.restore("2-1", "1-1", digest, ROWS, [receipt])


FLIPS: dict[str, Callable[[bytes], bytes]] = {
    "flip a byte": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "cut a byte": lambda data: data[:-1],
    "append a newline": lambda data: data + b"\n",
    "duplicate a line": lambda data: data + data.splitlines(keepends=True)[-1],
    "empty the file": lambda data: b"",
    "prepend a BOM": lambda data: b"\xef\xbb\xbf" + data,
}


@pytest.mark.parametrize("damage", FLIPS, ids=str)
@pytest.mark.parametrize(
    "name", ["state.jsonl", "results.jsonl", "rollouts.jsonl", "tombstones.jsonl", "manifest.json"]
)
async def test_damage_is_refused_by_name_and_nothing_is_installed(
    gym: Gym, tmp_path: Path, name: str, damage: str
) -> None:
    """C41: the file, and for payload files the record, is named; everything is as it was."""
    await gym.start("z")
    await gym.acks(*await gym.finish("z"))
    digest, receipt = await example(gym)
    path = tmp_path / "1-1" / name
    path.write_bytes(FLIPS[damage](path.read_bytes()))
    other = Gym(tmp_path)
    await other.start("live", epoch=2)
    await other.waiting("live")
    before = other.status
    refusal = await refused(other.restore("2-1", "1-1", digest, ROWS, [receipt]))
    assert ("checkpoint_corrupt", 422) == (refusal.code, refusal.status)
    assert name in refusal.detail
    if damage == "flip a byte" and name in ("state.jsonl", "results.jsonl", "tombstones.jsonl"):
        assert "record " in refusal.detail
    after = other.status
    assert ("failed", "checkpoint_corrupt") == (after["last"]["ended_as"], after["last"]["error_code"])
    assert {**before, "last": None} == {**after, "last": None}
    other.loop.reply("live", [("add", 1)])
    await until(lambda: other.world.done)


async def test_files_that_are_missing_linked_or_of_another_participant_are_refused(gym: Gym, tmp_path: Path) -> None:
    """C41, C43: missing, a link, a pipe; another participant's, another run's, another checkpoint's, a newer schema."""
    digest, _ = await example(gym)

    async def judge(at: Path, other: Gym | None = None, **more: Any) -> ProtocolError:
        return await refused((other or Gym(tmp_path)).restore("2-1", "1-1", digest, ROWS, path=at, **more))

    def copy(name: str) -> Path:
        at = tmp_path / name
        shutil.copytree(tmp_path / "1-1", at)
        return at

    missing = copy("missing")
    (missing / "state.jsonl").unlink()
    linked = copy("linked")
    (linked / "state.jsonl").unlink()
    (linked / "state.jsonl").symlink_to(tmp_path / "1-1" / "state.jsonl")
    pipe = copy("pipe")
    (pipe / "state.jsonl").unlink()
    os.mkfifo(pipe / "state.jsonl")
    for at in (missing, linked, pipe):
        refusal = await judge(at)
        assert "checkpoint_corrupt" == refusal.code
        assert "state.jsonl" in refusal.detail
    whole = tmp_path / "1-1"
    assert "state_incompatible" == (await judge(whole, run_id="run-2")).code
    assert "state_incompatible" == (await judge(whole, Gym(tmp_path, name="other"))).code
    newer = Gym(tmp_path, state_schema=StateSchema(version=2, reads=(2,)))
    assert "state_incompatible" == (await judge(whole, newer)).code
    source = {"scheme": "file", "path": str(whole), "checkpoint_id": "1-7", "manifest_digest": digest}
    assert "state_mismatch" == (await judge(whole, source=source)).code
    assert "forbidden_target" == (await judge(tmp_path.parent)).code
    assert "forbidden_target" == (await judge(tmp_path / "nowhere")).code


async def test_lists_that_disagree_with_the_files_name_their_rollouts(gym: Gym) -> None:
    """C15: absent, another attempt, turn count or task, a receipt that is not there: state_mismatch by name."""
    digest, receipt = await example(gym)
    for rows in ([("x", 0, 1, 0)], [("a", 0, 1, 2)], [("b", 1, 2, 2)], [("b", 0, 1, 1)]):
        refusal = await refused(gym.restore(f"1-{2 + len(gym.loop.asked)}", "1-1", digest, rows))
        gym.loop.asked.append(("", 0, 0))
        assert ("state_mismatch", [{"rollout_id": rows[0][0]}]) == (
            refusal.code,
            [{"rollout_id": named["rollout_id"]} for named in refusal.extra["rollouts"]],
        )
    other = {**receipt, "digest": wire.result_digest("other")}
    refusal = await refused(gym.restore("1-90", "1-1", digest, [], [other]))
    assert ("state_mismatch", "a") == (refusal.code, refusal.extra["rollouts"][0]["rollout_id"])
    assert ("open", 2) == (gym.status["gate"], gym.status["counts"]["live"])


@pytest.mark.parametrize("turns", [0, 20])
async def test_on_a_busy_loop_a_restore_that_waited_is_not_ready_all_the_same(
    turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CKPT-RESTORE-009: wait and call are found due in one step; the failure is told, also some turns later."""
    discard = Restorer._discard

    async def late(restorer: Restorer) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await discard(restorer)

    monkeypatch.setattr(Restorer, "_discard", late)
    clock = MovedClock()
    gym = Gym(tmp_path, clock=clock)
    gym.world.hold("a/1/1")
    await gym.start("a")
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: gym.world.begun)
    restoring = asyncio.ensure_future(refused(gym.restore("1-1", None, timeout_ms=300)))
    await until(lambda: gym.status["phase"] == "restoring" and gym.status["gate"] == "closed")
    await settle()
    clock.stall(10.0)
    assert "not_ready" == (await asyncio.wait_for(restoring, 5)).code
    gym.world.release("a/1/1")


async def test_a_participant_is_busy_while_it_builds_writes_or_frees_what_nobody_holds(tmp_path: Path) -> None:
    """Whoever looks through all objects waits until that is over: it is much, though little is held."""
    gym = Gym(tmp_path)
    busy = lambda: gym.participant.busy  # noqa: E731 - asked again and again
    assert not busy()
    gym.world.hold("a/1/1")
    await gym.start("a")
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: gym.world.begun)
    restoring = asyncio.ensure_future(gym.restore("1-1", None))
    await until(lambda: gym.status["phase"] == "restoring")
    assert busy()
    gym.world.release("a/1/1")
    await restoring
    await gym.resume("1-1")
    await until(lambda: not busy())
    await gym.prepare("1-2")
    await gym.commit("1-2")
    assert busy()
    await gym.resume("1-2")
    await until(lambda: not busy())


async def test_a_restore_waits_for_handlers_here_and_not_for_turns(tmp_path: Path) -> None:
    """N22: a running handler is waited for until the time limit, then not_ready with the blocker and all as before."""
    clock = MovedClock()
    gym = Gym(tmp_path, clock=clock)
    digest, _ = await example(gym)
    gym.world.hold("b/3/1")
    gym.loop.reply("b", [("add", 1), ("add", 1)])
    await until(lambda: "b/3/1" in gym.world.begun)
    restoring = asyncio.ensure_future(gym.restore("1-2", "1-1", digest, ROWS, timeout_ms=2_000))
    await until(lambda: gym.status["gate"] == "closed")
    await clock.advance(2)
    refusal = await refused(restoring)
    assert ("not_ready", "b") == (refusal.code, refusal.extra["blockers"][0]["rollout_id"])
    assert ("open", "failed", "not_ready") == (
        gym.status["gate"],
        gym.status["last"]["ended_as"],
        gym.status["last"]["error_code"],
    )
    gym.world.release("b/3/1")
    await until(lambda: "b/3/2" in gym.world.done)
    gym.world.hold("c/2/1")
    gym.loop.reply("c", [("add", 1), ("add", 1)])
    await until(lambda: "c/2/1" in gym.world.begun)
    restoring = asyncio.ensure_future(gym.restore("1-3", "1-1", digest, ROWS))
    await until(lambda: gym.status["gate"] == "closed")
    gym.world.release("c/2/1")
    assert 2 == (await restoring)["restored_count"]
    assert "c/2/2" not in gym.world.begun, "the rest of the turn is not waited for"


@pytest.mark.parametrize("environment", ["counter", "judged"])
async def test_a_restore_goes_on_when_the_verification_has_ended_that_it_waited_for(gym: Gym, environment: str) -> None:
    """CKPT-RESTORE-007: its verdict is there, its result waits for the gate and falls with everything else."""
    gym.loop.verifying["v"] = asyncio.Event()
    await gym.start("v", environment=environment)
    gym.loop.reply("v", [])
    await until(lambda: gym.loop.verifications)
    restoring = asyncio.ensure_future(gym.restore("1-1", None, timeout_ms=2_000))
    await until(lambda: gym.status["gate"] == "closed")
    await settle()
    assert not restoring.done()
    gym.loop.verifying["v"].set()
    assert "restored" == (await asyncio.wait_for(restoring, 1))["phase"]
    assert 0 == gym.status["counts"]["admitted"]


async def test_a_verification_that_ended_during_a_restore_has_its_result_when_that_is_aborted(gym: Gym) -> None:
    """CKPT-ABORT-006: nothing was dropped, and what waited for the gate finishes."""
    for name in ("v", "w"):
        gym.loop.verifying[name] = asyncio.Event()
        await gym.start(name)
        gym.loop.reply(name, [])
    await until(lambda: {"v", "w"} == set(gym.loop.verifications))
    restoring = asyncio.ensure_future(refused(gym.restore("1-1", None)))
    await until(lambda: gym.status["gate"] == "closed")
    gym.loop.verifying["v"].set()
    await settle()
    assert (2, 0) == (gym.status["counts"]["live"], gym.status["counts"]["finished_unreleased"])
    await gym.abort("1-1")
    assert "stale_checkpoint" == (await restoring).code
    await until(lambda: gym.status["counts"]["finished_unreleased"] == 1)
    assert 1 == gym.status["counts"]["live"]


async def test_abort_of_a_restore_under_way_leaves_everything_as_before(gym: Gym) -> None:
    """N12: cancelled while it waits for a handler; the poll is answered at once, live work goes on."""
    digest, _ = await example(gym)
    gym.world.hold("b/3/1")
    gym.loop.reply("b", [("add", 1)])
    await until(lambda: "b/3/1" in gym.world.begun)
    before = gym.status
    restoring = asyncio.ensure_future(gym.restore("1-2", "1-1", digest, ROWS))
    await until(lambda: gym.status["gate"] == "closed")
    assert "aborted" == (await gym.abort("1-2"))["ended_as"]
    assert "stale_checkpoint" == (await refused(restoring)).code
    assert {**before, "last": None} == {**gym.status, "last": None}
    gym.world.release("b/3/1")
    await until(lambda: 3 == gym.participant.rollout("b")["turns_done"])


@pytest.mark.parametrize("how", ["abort", "lease", "higher controller"])
async def test_what_was_restored_and_not_resumed_is_discarded_and_fenced(tmp_path: Path, how: str) -> None:
    """N16's other half: an abort, the lease or a higher controller leaves an empty, open participant."""
    clock = MovedClock()
    gym = Gym(tmp_path, clock=clock)
    digest, receipt = await example(gym)
    await gym.restore("1-2", "1-1", digest, ROWS, [receipt], lease_ms=5_000)
    if how == "abort":
        await gym.abort("1-2")
    elif how == "lease":
        await clock.advance(5)
    else:
        await gym.abort("2-0")
    status = gym.status
    assert ("idle", "open", 0, 0) == (status["phase"], status["gate"], status["counts"]["live"], len(gym.sessions))
    expected = {"abort": "aborted", "lease": "expired", "higher controller": "aborted"}[how]
    assert expected == status["last"]["ended_as"]
    epoch = 2 if how == "higher controller" else 1
    assert ["stale_attempt"] * 2 == await gym.start("b", "c", attempt=1, epoch=epoch)
    assert "stale_attempt" == (await refused(gym.restore(f"{epoch}-8", "1-1", digest, ROWS))).code
    rows = [("b", 0, 2, 2), ("c", 0, 2, 1)]
    assert 2 == (await gym.restore(f"{epoch}-9", "1-1", digest, rows, [receipt]))["restored_count"]


async def test_a_session_that_cannot_be_built_fails_the_whole_restore(gym: Gym, tmp_path: Path) -> None:
    """C63: nothing is installed, what was built is closed again, live work goes on."""
    digest, _ = await example(gym)
    other = Gym(tmp_path)
    await other.start("live", epoch=2)
    await other.waiting("live")
    load = other.sessions._load

    def broken(environment: str, saved: Any, restored: Any) -> Counter:
        if restored.rollout_id == "c":
            raise ValueError("damaged state")
        return load(environment, saved, restored)

    other.sessions._load = broken  # type: ignore[method-assign]
    refusal = await refused(other.restore("2-1", "1-1", digest, ROWS))
    assert "internal" == refusal.code
    assert "damaged state" not in refusal.detail
    assert [True] == [counter.closed for counter in other.counters]
    assert (1, 1, "open") == (other.status["counts"]["live"], len(other.sessions), other.status["gate"])


async def test_rollouts_of_an_environment_that_cannot_continue_any_more_become_restarts(
    gym: Gym, tmp_path: Path
) -> None:
    """CKPT-RESTORE-039: the rest is installed, the others are named."""
    digest, _ = await example(gym)
    other = Gym(tmp_path)
    environments = (EnvironmentInfo("counter", "export_restore", "wait", "2"),)
    other.participant.config = replace(other.config, environments=environments)
    reply = await other.restore("2-1", "1-1", digest, ROWS)
    assert (0, {"b", "c"}) == (reply["restored_count"], {restart["rollout_id"] for restart in reply["restarts"]})
    assert 0 == other.status["counts"]["live"]


async def test_a_session_owner_alone_restores_its_sessions(tmp_path: Path) -> None:
    """A participant without rollouts: index by session, restore as the next attempt, recorded replies included."""
    owner = Gym(tmp_path, rollouts=False)
    for name in ("a", "b"):
        await owner.sessions.open(name, 0, "counter", "task", Counter(owner.world))
    first = effect("a", 1, 1)
    await owner.sessions.effect(first)
    last = effect("a", 2, 1, n=10, done=1)
    reply = await owner.sessions.effect(last)
    digest = (await owner.snapshot("1-1"))["manifest"]["digest"]
    rows = [json.loads(line) for line in (tmp_path / "1-1" / "rollouts.jsonl").read_text().splitlines()]
    assert [("a", 2, {"counter": 2}), ("b", 0, {"counter": 0})] == [
        (row["rollout_id"], row["turns_done"], row["effects"]) for row in rows
    ]
    other = Gym(tmp_path, rollouts=False)
    restored = await other.restore("2-1", "1-1", digest, [("a", 0, 1, 2)], fences=[("b", 0)])
    assert 1 == restored["restored_count"]
    await other.resume("2-1")
    assert reply == await other.sessions.effect(replace(last, attempt=1)), "a repeat is answered, not run"
    assert [] == other.world.done
    assert {"value": 111} == await other.sessions.effect(effect("a", 3, 1, n=100, done=2, attempt=1))
    with pytest.raises(StaleAttempt):
        await other.sessions.effect(effect("a", 3, 1, n=1, done=2))
    with pytest.raises(StaleAttempt):
        await other.sessions.effect(effect("b", 1, 1))
    with pytest.raises(SessionLost):
        await other.sessions.effect(effect("b", 1, 1, attempt=1))
    assert 0 == sum(other.status["counts"].values())


def effect(rollout_id: str, turn: int, number: int, *, n: int = 1, done: int | None = 0, attempt: int = 0) -> Any:
    """Return one `add` effect."""
    from reference_gym.participant import EffectCall

    request_id = wire.request_id(rollout_id, turn, number)
    return EffectCall(rollout_id, attempt, turn, request_id, "add", {"n": n}, done)


async def test_held_effects_of_dropped_work_are_answered_stale(tmp_path: Path) -> None:
    """N7, N21: an effect that was held while its session was replaced never runs in the new one."""
    owner = Gym(tmp_path, rollouts=False)
    await owner.sessions.open("a", 0, "counter", "task", Counter(owner.world))
    digest = (await owner.snapshot("1-1"))["manifest"]["digest"]
    await owner.prepare("1-2")
    held = asyncio.ensure_future(owner.sessions.effect(effect("a", 1, 1)))
    await settle()
    await owner.abort("1-2")
    assert {"value": 1} == await held
    await owner.prepare("1-3")
    held = asyncio.ensure_future(owner.sessions.effect(effect("a", 2, 1, done=1)))
    await settle()
    await owner.retire(("a", 0))
    with pytest.raises(StaleAttempt):
        await held
    await owner.abort("1-3")
    await owner.restore("1-4", "1-1", digest, [("a", 0, 1, 0)])
    assert ["a/1/1"] == owner.world.done


def test_a_participant_takes_a_fresh_incarnation_each_time(tmp_path: Path) -> None:
    """CKPT-ID-026: no two incarnations are equal, unless the caller has recovered one."""
    gym = Gym(tmp_path, rollouts=False)
    assert gym.participant.incarnation != Gym(tmp_path, rollouts=False).participant.incarnation
    assert "kept" == Participant(gym.config, incarnation="kept").incarnation
    assert isinstance(gym.sessions, Sessions)


@pytest.mark.parametrize("order", ["restore first", "abort first"])
@pytest.mark.parametrize("ending", ["2-1", "2-2"], ids=["its own id", "a higher id"])
async def test_a_restore_that_is_aborted_before_its_first_step_comes_to_its_end(
    gym: Gym, order: str, ending: str
) -> None:
    """A restore and an abort that arrive together: whichever is judged first, the participant is idle afterwards."""
    calls = [gym.restore("2-1", None, None, []), gym.abort(ending, epoch=2)]
    outcomes = await asyncio.gather(*(calls if order == "restore first" else calls[::-1]), return_exceptions=True)
    assert ["StaleCheckpoint"] == [type(o).__name__ for o in outcomes if isinstance(o, BaseException)]
    status = gym.status
    assert ("idle", "open", ending) == (status["phase"], status["gate"], status["last"]["checkpoint_id"])
    assert "idle" == (await gym.abort("2-3", epoch=2))["phase"]
