# SPDX-License-Identifier: Apache-2.0
"""Late calls, lost participants and other policies, with a real Gym in three processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from reference_rl.errors import Incompatible, RecoveryFailed, Superseded
from reference_rl.sealed import seal, unseal
from tests.crash_matrix import judge
from tests.crash_matrix.bench import BOUND_S, Bench
from tests.crash_matrix.forks import ForkServer
from tests.rl.harness import until
from tests.rl.policy import Policy, serving
from tests.rl.real import (
    PROCESSES,
    RECOVERY,
    SNAPSHOT,
    SURVIVES,
    TAXI,
    A,
    B,
    C,
    D,
    begin,
    bench_of,
    ended_well,
    hows,
    snapshot,
)
from tests.rl.relay import KEEP, PASS, Asked, relaying

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

FOUR = TAXI | {"siblings": 4}
BLIND = {"recovery": {"health_s": 60.0}}
"""RL looks for lost participants so seldom that others notice first."""


def starts_of(asked: Asked, rollout_id: str) -> list[int]:
    """Return the attempts of a rollout that a call wants to start."""
    if (asked.method, asked.operation) != ("POST", "rollouts"):
        return []
    return [start["attempt"] for start in asked.body["rollouts"] if start["rollout_id"] == rollout_id]


async def test_a_late_start_meets_a_restored_gym(tmp_path: Path, forks: ForkServer) -> None:
    """N21, N23: resources dies, the agent's session_lost is the first sign; the late start of D comes after that.

    B and C continue from the snapshot, nothing of them begins again at turn 1. The start of D that was under way all
    the time is stale for an agent that never saw D; attempt 1 of D runs and is trained.
    """
    policy = Policy(hold_from={1: 3, 2: 5})
    more: dict[str, Any] = {**BLIND, "max_live": 3, "client": {"call_ms": 60_000}}
    async with (
        bench_of(forks, tmp_path / "b", policy, FOUR, parts=PROCESSES, **more) as bench,
        relaying(lambda: bench.urls()["agent"]) as relay,
    ):
        relay.rule = lambda asked: KEEP if 0 in starts_of(asked, D) else PASS
        bench.through = {"agent": relay.url}
        await begin(bench)
        await until(lambda: relay.kept, "the start of D is under way", BOUND_S)
        await snapshot(bench)
        await bench.kill({"resources"}, "quiet")
        await bench.bring_back()
        calls = len(policy.calls)
        await policy.let({1: 99})
        recovered = await bench.event("gym_recovered")
        assert ("restored", "1-1") == (recovered["how"], recovered["snapshot"])
        assert {B: ("continued", 2), C: ("continued", 4), D: ("restarted", 0)} == hows(recovered)
        replies = await relay.send_kept()
        assert [["stale_attempt"]] == [[row["outcome"] for row in reply["outcomes"]] for reply in replies]
        samples = await ended_well(bench)
        assert {A: 0, B: 1, C: 1, D: 1} == {row["rollout_id"]: row["attempt"] for row in samples}
        assert [] == [call for call in policy.calls[calls:] if call.turn <= {B: 2, C: 4}.get(call.rollout_id, 0)]
        assert {1} == {call.attempt for call in policy.calls if call.rollout_id == D}


async def test_a_straggler_is_trained_once(tmp_path: Path, forks: ForkServer) -> None:
    """N24: RL loses the Gym with a start under way and adopts it; the start arrives after that, succeeds, and counts.

    The start of attempt 1 is still under way when the result of attempt 0 comes. Then it arrives as well, and changes
    nothing.
    """
    policy = Policy(hold_from={1: 3, 2: 5})
    more: dict[str, Any] = {"max_live": 3, "client": {"call_ms": 300, "grace_s": 0.2, "attempts": 1}}
    async with (
        bench_of(forks, tmp_path / "b", policy, FOUR, parts=PROCESSES, **more) as bench,
        relaying(lambda: bench.urls()["agent"]) as relay,
    ):
        relay.rule = lambda asked: KEEP if starts_of(asked, D) else PASS
        bench.through = {"agent": relay.url}
        await begin(bench)
        await until(lambda: relay.kept, "the start of D is under way", BOUND_S)
        await relay.away()
        await bench.event("gym_lost")
        await relay.back()
        # The Gym lives and does not have it: RL reserves attempt 1, whose start is kept back as well.
        recovered = await bench.event("gym_recovered")
        assert ("adopted", ("restarted", 0)) == (recovered["how"], hows(recovered)[D])
        await until(lambda: any(1 in starts_of(asked, D) for asked in relay.kept), "attempt 1 is reserved", BOUND_S)
        late = next(asked for asked in relay.kept if starts_of(asked, D) == [0])
        relay.kept = [asked for asked in relay.kept if starts_of(asked, D) != [0]]
        await relay.send(late)
        await until(lambda: D in bench.saved(), "the straggler has a result", BOUND_S)
        finished = [event["attempt"] for event in bench.events("finished") if event["rollout_id"] == D]
        assert [0] == finished
        await until(lambda: any(D in event["rollouts"] for event in bench.events("trained")), "trained", BOUND_S)
        replies = await relay.send_kept()
        assert {"started"} & {row["outcome"] for reply in replies for row in reply.get("outcomes", ())} == set()
        relay.rule = lambda asked: PASS
        samples = await ended_well(bench)
        assert {A: 0, B: 0, C: 0, D: 0} == {row["rollout_id"]: row["attempt"] for row in samples}
        assert {0} == {call.attempt for call in policy.calls if call.rollout_id == D}


async def test_a_participant_is_lost_between_commit_and_resume(tmp_path: Path, forks: ForkServer) -> None:
    """N5, N8: resources dies alone when all have captured: that snapshot is dropped, the whole Gym is restored.

    B and C go on after the turns of the snapshot before; none of them meets a fresh environment.
    """
    policy = Policy(hold_from={1: 3, 2: 5})
    async with bench_of(forks, tmp_path / "b", policy, parts=PROCESSES) as bench:
        await begin(bench, "snapshot.captured:2")
        good = (await snapshot(bench))["checkpoint_id"]
        await policy.let({1: 4})
        await until(lambda: policy.was_asked(B, 4), "B has 3 turns", BOUND_S)
        lines = len(bench.all_events())
        assert bench.client is not None
        bench.client.send(signal.SIGUSR1)
        await bench.stopped_at("snapshot.captured")
        await bench.kill({"resources"}, "snapshot.captured")
        await bench.bring_back()
        failed = await bench.event("snapshot_failed", after=lines)
        recovered = await bench.event("gym_recovered", after=lines)
        assert ("restored", good) == (recovered["how"], recovered["snapshot"])
        assert {B: ("continued", 2), C: ("continued", 4)} == hows(recovered)
        samples = await ended_well(bench)
        assert failed["checkpoint_id"] not in [event["checkpoint_id"] for event in bench.events("snapshot_published")]
        assert {A: 0, B: 1, C: 1} == {row["rollout_id"]: row["attempt"] for row in samples}
        assert [] == judge.regenerated(bench) + bench.events("failed", "retried")


@pytest.mark.parametrize("restored", [False, True], ids=["adopted", "restored"])
async def test_the_policy_moves_while_rl_is_away(tmp_path: Path, forks: ForkServer, restored: bool) -> None:
    """N3, N18: after a restart every rollout calls the new address, whether the Gym lived or was restored.

    The old one is gone for good, and nothing failed of it meanwhile.
    """
    old, new = Policy(hold_from={1: 3, 2: 5}), Policy()
    more = {} if restored else SURVIVES
    async with bench_of(forks, tmp_path / "b", new, parts=PROCESSES, **more) as bench:
        async with serving(old):
            bench.move_policy(old)
            await begin(bench)
            await snapshot(bench)
            await bench.kill({"all" if restored else "rl"}, "quiet", lose_disk=restored)
            calls, old.gone = len(old.calls), True
        bench.move_policy(new)
        lines = len(bench.all_events())
        await bench.bring_back()
        restarted = await bench.event("restarted", after=lines)
        assert {"gym": "restored" if restored else "adopted"} == restarted["gyms"]
        samples = await ended_well(bench)
        assert calls == len(old.calls)
        assert {(B, 3), (B, 4), (B, 5), (C, 5)} == {(call.rollout_id, call.turn) for call in new.calls}
        assert [0, int(restored), int(restored)] == [row["attempt"] for row in samples]
        assert [] == bench.events("retried", "failed")


async def test_a_result_of_newer_weights_runs_again(tmp_path: Path, forks: ForkServer) -> None:
    """N17: C finished and was ACKed after the cut, with newer weights: it is not released for ever.

    RL dies and the Gym lives: it is restored, and C goes on after the four turns that the snapshot holds.
    """
    policy = Policy(hold_from={1: 3, 2: 5}, version=0)
    async with bench_of(forks, tmp_path / "b", policy, parts=PROCESSES) as bench:
        await begin(bench)
        await snapshot(bench)
        policy.version = 7
        await policy.let({2: 99})
        await until(lambda: len(bench.events("acked")) >= 2 and C in bench.saved(), "C is released", BOUND_S)
        assert "released" == (await bench.ask("agent", f"rollouts/{C}"))["state"]
        policy.version = 0
        await bench.kill({"rl"}, "quiet")
        calls, lines = len(policy.calls), len(bench.all_events())
        await bench.bring_back()
        restarted = await bench.event("restarted", after=lines)
        assert ([C], ("continued", 4)) == (restarted["dropped"], hows(restarted)[C])
        samples = await ended_well(bench)
        assert [5] == [call.turn for call in policy.calls[calls:] if call.rollout_id == C]
        assert [(A, 0), (B, 1), (C, 1)] == [(row["rollout_id"], row["attempt"]) for row in samples]


async def test_the_newest_sound_snapshot_is_used(tmp_path: Path, forks: ForkServer) -> None:
    """C41, C42, C43: of 1-1, 1-2, 1-9 and 1-10 the two highest are damaged or of another run: 1-2 is restored.

    The report names the file and the run; a draft and the trash are no snapshots, and times of change do not count.
    """
    policy = Policy(hold_from={1: 3, 2: 5})
    async with bench_of(forks, tmp_path / "b", policy, parts=PROCESSES) as bench:
        await begin(bench)
        await snapshot(bench)
        await policy.let({1: 4})
        await until(lambda: policy.was_asked(B, 4), "B has 3 turns", BOUND_S)
        await snapshot(bench)
        await bench.kill({"all"}, "quiet", lose_disk=True)
        snapshots = bench.run_dir / "snapshots"
        for name in ("1-9", "1-10", "7-7.tmp", ".trash/8-8"):
            shutil.copytree(snapshots / "1-2", snapshots / name)
        for name, run_id in (("1-9", "m"), ("1-10", "other")):
            manifest = snapshots / name / "manifest.json"
            content = unseal(manifest.read_bytes()) | {"checkpoint_id": name, "run_id": run_id}
            manifest.write_bytes(seal(content))
        index = snapshots / "1-9/gym/gym/agent/rollouts.jsonl"
        index.unlink()  # whose bytes another snapshot may share
        index.write_bytes(b"|" + (snapshots / "1-2/gym/gym/agent/rollouts.jsonl").read_bytes()[1:])
        os.utime(snapshots / "1-1")  # the last one to be changed
        lines = len(bench.all_events())
        await bench.bring_back()
        restarted = await bench.event("restarted", after=lines)
        assert "1-2" == restarted["snapshot"]
        assert ("continued", 3) == hows(restarted)[B]
        foreign, damaged = sorted(restarted["refused"])
        assert "1-10: manifest.json: it belongs to run 'other', not to 'm'" == foreign
        assert damaged.startswith("1-9: gym/gym/agent/rollouts.jsonl: ")
        for name in ("1-9", "1-10"):
            shutil.rmtree(snapshots / name)
        await ended_well(bench)


async def test_a_participant_that_is_silent_to_restores_is_named(tmp_path: Path, forks: ForkServer) -> None:
    """C24: one of three never answers restore: RL ends within its limit and names it, the others are open.

    Nothing is lost by that: when it answers, the next RL goes on with every turn.
    """
    policy = Policy(hold_from={1: 3, 2: 5})
    more: dict[str, Any] = {
        "snapshot": {"durable_timeout_ms": 400},
        "client": {"call_ms": 400, "grace_s": 0.2, "attempts": 1},
        "recovery": {"reach_s": 1.5, "restore_tries": 2},
    }
    async with (
        bench_of(forks, tmp_path / "b", policy, parts=PROCESSES, **more) as bench,
        relaying(lambda: bench.urls()["model"]) as relay,
    ):
        bench.through = {"model": relay.url}
        await begin(bench)
        bench.change(snapshot=SNAPSHOT, recovery=RECOVERY)
        await snapshot(bench)
        await bench.kill({"all"}, "quiet")
        bench.change(**{name: more[name] for name in ("snapshot", "recovery")})
        relay.rule = lambda asked: "silence" if asked.operation == "restore" else PASS
        lines = len(bench.all_events())
        await bench.bring_back()
        assert bench.client is not None
        assert RecoveryFailed.exit_code == await bench.client.wait(BOUND_S)
        assert "model" in bench.rl_log()
        others = [status for name, status in (await bench.statuses()).items() if name != "model"]
        assert [("idle", "open")] * 2 == [(status["phase"], status["gate"]) for status in others]
        relay.rule = lambda asked: PASS
        bench.change(snapshot=SNAPSHOT, recovery=RECOVERY, client={"call_ms": 5000})
        await bench.start_rl()
        restarted = await bench.event("restarted", after=lines)
        assert {B: ("continued", 2), C: ("continued", 4)}.items() <= hows(restarted).items()
        await ended_well(bench)


async def test_a_server_that_was_a_participant_and_is_none_now(tmp_path: Path, forks: ForkServer) -> None:
    """N11: at the model's address somebody else answers 404: an error that names it, not a Gym of two participants.

    The other two are left as they were; when the model is back there, the next RL restores all three.
    """
    policy = Policy(hold_from={1: 3, 2: 5})
    async with bench_of(forks, tmp_path / "b", policy, parts=PROCESSES) as bench:
        await begin(bench)
        await snapshot(bench)
        url = bench.urls()["model"]
        await bench.kill({"rl", "model"}, "quiet")
        before = await obeyed(bench)
        lines = len(bench.all_events())
        async with somebody_else(url):
            await bench.start_rl()
            assert bench.client is not None
            assert Incompatible.exit_code == await bench.client.wait(BOUND_S)
            assert "model" in bench.rl_log()
        assert before == await obeyed(bench)
        await bench.start_gym()
        await bench.start_rl()
        restarted = await bench.event("restarted", after=lines)
        assert {B: ("continued", 2), C: ("continued", 4)}.items() <= hows(restarted).items()
        await ended_well(bench)


async def obeyed(bench: Bench) -> list[tuple[Any, ...]]:
    """Return phase, gate and controller of agent and resources."""
    statuses = [await bench.ask(name, "checkpoint") for name in ("agent", "resources")]
    return [(status["phase"], status["gate"], status["controller"]) for status in statuses]


@contextlib.asynccontextmanager
async def somebody_else(url: str) -> AsyncIterator[None]:
    """Answer 404 to the whole protocol at an address, and "later" to the policy calls of an agent."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=404 if request.path.startswith("/gym-checkpoint/") else 503)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(url.rpartition(":")[2]), reuse_address=True).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def test_two_clients_at_once_over_three_participants(tmp_path: Path, forks: ForkServer) -> None:
    """C12: two runs choose an epoch at the same instant: one wins everywhere, the other stops for good."""
    policy = Policy()
    async with bench_of(forks, tmp_path / "b", policy, parts=PROCESSES) as bench:
        await bench.start_gym()
        rival = await bench.start_rival("rival")
        await bench.start_rl()
        assert bench.client is not None
        codes = sorted([await rival.wait(BOUND_S), await bench.client.wait(BOUND_S)])
        assert [0, Superseded.exit_code] == codes
        pairs = {tuple(status["controller"].values()) for status in (await bench.statuses()).values()}
        assert 1 == len(pairs), "all three obey the same one"
        assert 3 == (
            tmp_path / "b" / ("rival" if rival.returncode == 0 else "run") / "results.jsonl"
        ).read_bytes().count(b"\n")
