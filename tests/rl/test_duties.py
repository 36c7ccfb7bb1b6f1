# SPDX-License-Identifier: Apache-2.0
"""What a controller does while a snapshot is taken and when it fails: limits, leases, repeats, back-off, fallback."""

import asyncio
import contextlib
import logging
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from reference_rl import events as events_module
from reference_rl.checkpointer import Health
from reference_rl.cli import summary
from reference_rl.events import Events
from reference_rl.managed import ManagedSession
from reference_rl.settings import SnapshotSettings
from tests.rl.harness import QUICK, dispatched, running, settings, until
from tests.rl.scripted import Fault, ScriptedParticipant, calls_of, one_gym, serving, three_servers

A, B, C = "r1_g0_s0", "r1_g0_s1", "r1_g0_s2"


async def test_later_stages_are_prepared_although_an_earlier_one_is_blocked(tmp_path: Path) -> None:
    """CKPT-COMMIT-047, CKPT-COMMIT-046: the agent's limit passes, then model and resources are asked; all commit."""
    servers = three_servers()
    order: list[tuple[str, str]] = []
    for server in servers:
        server.watch = lambda operation, name=server.name: order.append((name, operation))  # type: ignore[misc] # binds the name
    snapshot = {"timeout_ms": 300, "leave_out_blocked": True}
    async with serving(*servers), running(settings(tmp_path / "run", servers[0], snapshot=snapshot)) as run:
        await dispatched(run, servers[0])
        servers[0].blocked = asyncio.Event()
        order.clear()
        began = time.monotonic()
        assert "published" == (await run.snapshot()).outcome
        assert time.monotonic() - began >= 0.3
        asked = [name for name, operation in order if operation == "prepare"]
        assert ["model", "resources"] == [name for name in asked if name != "agent"]
        assert "agent" not in asked[asked.index("model") :]
        assert {True} == {body["leave_out_blocked"] for s in servers for body in calls_of(s)["commit"]}


async def test_a_longer_wait_than_the_participant_allows_is_several_calls(tmp_path: Path) -> None:
    """CKPT-TIME-012: three seconds' wait where half a second is the most is repeated, each call within limits."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym, snapshot={"timeout_ms": 3000})) as run:
        await dispatched(run, gym)
        gym.blocked = asyncio.Event()
        taking = asyncio.create_task(run.snapshot())
        await until(lambda: len(calls_of(gym)["prepare"]) >= 3, "asked three times")
        gym.blocked.set()
        assert "published" == (await taking).outcome
        assert all(body["timeout_ms"] <= 500 for body in calls_of(gym)["prepare"])
        assert all(int(query.get("wait_ms", 0)) <= 500 for query in calls_of(gym)["results"])


async def test_leases_are_renewed_for_as_long_as_a_gate_is_closed(tmp_path: Path) -> None:
    """CKPT-LEASE-015: a capture that takes longer than a lease: every one is renewed, each third, and none opens."""
    servers = three_servers()
    servers[2].hold["commit"] = asyncio.Event()
    times: list[float] = []
    servers[0].watch = lambda operation: times.append(time.monotonic()) if operation == "renew" else None
    patient: dict[str, Any] = {"snapshot": {"lease_ms": 1500, "timeout_ms": 10_000}, "client": {"grace_s": 20.0}}
    async with serving(*servers), running(settings(tmp_path / "run", servers[0], **patient)) as run:
        await dispatched(run, servers[0])
        taking = asyncio.create_task(run.snapshot())
        await until(lambda: all(len(calls_of(s)["renew"]) >= 4 for s in servers), "four renewals everywhere")
        assert {"closed"} == {s.gate for s in servers}
        servers[2].hold["commit"].set()
        assert "published" == (await taking).outcome
        assert not [s.name for s in servers if "lease_end" in s.journal]
        assert min(b - a for a, b in pairwise(times)) <= 1.5 / 3 + 0.1


async def test_an_abort_that_hangs_delays_no_other(tmp_path: Path) -> None:
    """CKPT-STAGE-008, CKPT-DUTY-002: aborts leave at the same time: two are idle and open while the third is silent."""
    servers = three_servers()
    servers[1].faults["commit"] = Fault("500")
    async with serving(*servers), running(settings(tmp_path / "run", servers[0])) as run:
        await dispatched(run, servers[0])
        servers[0].hold["abort"] = asyncio.Event()
        taking = asyncio.create_task(run.snapshot())
        await until(lambda: len(calls_of(servers[0])["abort"]) == 2, "the agent is asked, and silent")
        await until(lambda: [s.phase for s in servers[1:]] == ["idle", "idle"], "the others have ended it")
        assert not taking.done()
        servers[0].hold["abort"].set()
        assert "failed" == (await taking).outcome
        assert [["1-0", "1-1"]] * 3 == [sorted({b["checkpoint_id"] for b in calls_of(s)["abort"]}) for s in servers]


async def test_each_participant_has_a_limit_of_its_own(tmp_path: Path) -> None:
    """CKPT-STAGE-011: two of one stage, one silent: the other is asked, the client returns and names the silent one."""
    servers = three_servers()
    for server in servers:
        server.stage = 10
    async with serving(*servers), running(settings(tmp_path / "run", servers[0], **QUICK)) as run:
        await dispatched(run, servers[0])
        servers[1].faults["prepare"] = Fault("silence")
        report = await run.snapshot()
        assert ("failed", True) == (report.outcome, "gym/model" in report.reason)
        assert all(calls_of(s)["prepare"] for s in servers)
        assert "gym/model" == run.events("snapshot_failed")[0]["participant"]


async def test_failed_snapshots_back_off_under_new_ids(tmp_path: Path) -> None:
    """CKPT-DUTY-006, CKPT-DUTY-007: each try comes later than the one before, under an id that was never used."""
    gym = one_gym()
    async with serving(gym):
        config = settings(tmp_path / "run", gym, snapshot={"backoff_s": 50.0, "interval_s": 0.01})
        async with running(config) as run:
            await dispatched(run, gym)
            gym.faults["prepare"] = Fault("500")
            gym.turn(A)
            await run.event("snapshot_failed")
            assert 40 < run.health.not_before - time.monotonic() <= 50
            asked = len(calls_of(gym)["prepare"])
            gym.turn(A)
            await asyncio.sleep(0.2)  # twenty intervals
            assert asked == len(calls_of(gym)["prepare"])
            await run.snapshot()  # somebody asks for one all the same
            assert 80 < run.health.not_before - time.monotonic() <= 100
            ids = [body["checkpoint_id"] for body in calls_of(gym)["prepare"]]
            failed = [e["checkpoint_id"] for e in run.events("snapshot_failed")]
            assert (2, failed) == (len(set(failed)), [i for i in dict.fromkeys(ids) if i in failed])


async def test_the_fallback_is_loud_and_tries_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CKPT-DUTY-009…011, CKPT-DUTY-029, CKPT-DUTY-030: three failures: log, metric, summary; tried at each interval."""
    gym = one_gym()
    assert 3 == SnapshotSettings().failures_before_fallback
    async with serving(gym):
        config = settings(tmp_path / "run", gym, snapshot={"interval_s": 0.02, "backoff_s": 0.01})
        async with running(config) as run:
            await dispatched(run, gym)
            gym.faults["prepare"] = Fault("500")
            gym.turn(A)
            with caplog.at_level(logging.WARNING, "reference_rl"):
                await run.event("snapshot_mode")
            assert 3 == run.events("snapshot_failed")[2]["consecutive"]
            assert any("snapshot_mode: mode column 2" in record.getMessage() for record in caplog.records)
            assert 1 == run.session.values()["ckpt_fallen_back_to_column_2"]
            assert "FALLEN BACK TO COLUMN 2" in summary(run.session)
            run.health.not_before = time.monotonic() + 1000
            tried = len({b["checkpoint_id"] for b in calls_of(gym)["prepare"]})
            gym.turn(A)
            await until(lambda: len({b["checkpoint_id"] for b in calls_of(gym)["prepare"]}) > tried, "tried again")
            gym.faults.clear()
            await until(lambda: not run.health.reduced, "back to normal")
            assert 0 == run.session.values()["ckpt_fallen_back_to_column_2"]
            assert "FALLEN BACK" not in summary(run.session)
            failures = {n: v for n, v in run.session.values().items() if n.startswith("ckpt_snapshot_failures{")}
            assert ['ckpt_snapshot_failures{step="prepare",participant="gym/gym",reason="internal"}'] == list(failures)


async def test_a_mandatory_gym_is_never_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CKPT-DUTY-016, CKPT-DUTY-028: it fails: nothing is published; an optional one is left out and logged."""
    good, bad = one_gym(), ScriptedParticipant("spare", ("rollouts", "sessions", "ledger"), 10)
    async with serving(good, bad):
        for optional in (False, True):
            gyms = [{"alias": "gym", "url": good.url}, {"alias": "spare", "url": bad.url, "optional": optional}]
            tasks = {"groups": 2, "siblings": 1}
            config = settings(tmp_path / str(optional) / "run", good, gyms=gyms, tasks=tasks, run_id=f"r{optional:d}")
            async with running(config) as run:
                await run.event("dispatched", 2)
                bad.faults["commit"] = Fault("500")
                with caplog.at_level(logging.WARNING, "reference_rl"):
                    outcome = (await run.snapshot()).outcome
                bad.faults.clear()
                said = [r.getMessage() for r in caplog.records if "gym_left_out" in r.getMessage()]
                if optional:
                    assert ("published", 1) == (outcome, run.session.values()["ckpt_gyms_left_out"])
                    assert "gym spare" in said[0]
                else:
                    assert ("failed", [], []) == (outcome, run.session.store.ids(), said)
            for gym in (good, bad):
                gym.new_life()


async def test_a_failed_resume_is_repeated_at_once(tmp_path: Path) -> None:
    """CKPT-DUTY-018, CKPT-DUTY-019: two resets: sent again at once; never answered: renewing stops, the lease opens."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym, snapshot={"lease_ms": 900})) as run:
        await dispatched(run, gym)
        gym.faults["resume"] = Fault("reset_before", times=2)
        assert "published" == (await run.snapshot()).outcome
        assert (3, 0) == (len(calls_of(gym)["resume"]), run.health.resume_failures)
        gym.turn(A)
        gym.faults["resume"] = Fault("reset_before")
        assert "published" == (await run.snapshot()).outcome
        assert 1 == run.health.resume_failures
        renewed = len(calls_of(gym)["renew"])
        await until(lambda: gym.gate == "open", "the lease opened the gate")
        assert ("lease_end" in gym.journal, renewed) == (True, len(calls_of(gym)["renew"]))


async def test_the_metrics_of_a_snapshot_say_where_its_time_went(tmp_path: Path) -> None:
    """Pause by participant and phase, wait for readiness, capture, writing, bytes; and what a restart saved."""
    servers = three_servers()
    agent = servers[0]
    async with serving(*servers):
        async with running(settings(tmp_path / "run", agent)) as run:
            await dispatched(run, agent)
            agent.turn(B, 2)
            agent.turn(C, 4)
            agent.finish(A)
            await run.event("trained")
            servers[2].hold["commit"] = held = asyncio.Event()
            loop = asyncio.get_running_loop()
            servers[2].watch = lambda operation: _later(loop, held) if operation == "commit" else None
            await run.snapshot()
            values = run.session.values()
            for name in ("agent", "model", "resources"):
                who = f'participant="gym/{name}"'
                pause = {p: values[f'ckpt_pause_ms{{{who},phase="{p}"}}'] for p in ("prepare", "commit", "resume")}
                assert pause["commit"] >= 200, "nobody is resumed before the slowest capture"
                assert 7 == values[f'ckpt_pause_ms{{{who},phase="gate"}}'], "what the participant says itself"
                assert 100 == values[f"ckpt_bytes{{{who}}}"]
                assert {f"ckpt_park_wait_ms{{{who}}}", f"ckpt_write_ms{{{who}}}"} <= values.keys()
            assert values['ckpt_capture_ms{participant="gym/resources"}'] >= 200
            assert 1 == values['ckpt_outcomes{outcome="finished"}']
            assert 0 <= values["ckpt_seconds_since_last_success"] < 60
            assert "skipped" == (await run.snapshot()).outcome
            assert 1 == run.session.values()["ckpt_snapshots_skipped"]
        for server in servers:
            server.new_life()
        async with running(settings(tmp_path / "run", agent)) as run:
            await run.event("restarted")
            values = run.session.values()
            assert 6 == values["ckpt_turns_saved"]
            assert (2, 1) == tuple(values[f'ckpt_rollouts_recovered{{how="{how}"}}'] for how in ("continued", "reused"))
            assert 2 == values['ckpt_attempts_reserved{origin="restore"}']


def _later(loop: asyncio.AbstractEventLoop, held: asyncio.Event) -> None:
    loop.call_later(0.2, held.set)


async def test_a_gym_that_is_away_fills_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each thing that is wrong, again after one, three, seven minutes; when it is back, at once again."""
    now = 1000.0
    monkeypatch.setattr(events_module.time, "monotonic", lambda: now)
    log = Events(tmp_path / "events.jsonl")
    said = []
    log.mirror = said.append  # type: ignore[assignment] # a list is enough
    for _ in range(3600):  # an hour, once a second
        log.trouble("gym_away", "gym", gym="gym", reason="it cannot be reached")
        now += 1
    assert [0, 60, 180, 420, 900, 1860] == [round(e.get("times", 0)) for e in said]
    log.trouble("gym_away", "gym", gym="gym", reason="another reason")
    log.over("gym")
    log.trouble("gym_away", "gym", gym="gym", reason="it cannot be reached")
    assert 8 == len(said)
    log.close()


async def test_a_dead_gym_is_reported_once(tmp_path: Path) -> None:
    """A Gym whose server is gone while everything asks for it: the event log does not grow with the time."""
    gym = one_gym()
    recovery = {"reach_s": 0.1, "health_s": 0.05}
    async with contextlib.AsyncExitStack() as server:
        await server.enter_async_context(serving(gym))
        async with running(settings(tmp_path / "run", gym, recovery=recovery)) as run:
            await dispatched(run, gym)
            assert isinstance(run.session, ManagedSession)
            wait, tries = run.session.recovery.wait_for, 0

            async def counted(lost: Any) -> Any:
                nonlocal tries
                tries += 1
                await wait(lost)

            run.session.recovery.wait_for = counted  # type: ignore[method-assign] # to count its calls
            await server.aclose()
            await until(lambda: tries >= 12, "it is looked for again and again")
            counts = {name: len(run.events(name)) for name in ("gym_away", "gym_lost", "discovered")}
            assert {"gym_away": 1, "gym_lost": 1, "discovered": 1} == counts
            assert len(run.events("gym_trouble")) <= 6, run.events("gym_trouble")


def test_health_begins_well() -> None:
    """Nothing has failed, nothing was published yet."""
    health: Any = Health()
    assert (0, 0, 0, False, None) == (
        health.consecutive,
        health.failed,
        health.resume_failures,
        health.reduced,
        health.last_success,
    )
