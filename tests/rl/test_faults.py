# SPDX-License-Identifier: Apache-2.0
"""Failures of snapshots never end a run: every control call × every fault, and what follows from a failure."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from reference_rl.checkpointer import Health
from reference_rl.snapshots import SnapshotStore
from tests.rl.harness import QUICK, Running, results_of, running, settings, until
from tests.rl.scripted import FAULTS, Fault, ScriptedParticipant, calls_of, one_gym, serving, three_servers

BROKEN = "resources"


async def under_way(run: Running, agent: ScriptedParticipant) -> None:
    """Wait until three rollouts are started, and let each do a turn."""
    await until(lambda: len(agent.runs) == 3, "three rollouts started")
    await run.event("dispatched")
    for rollout_id in list(agent.runs):
        agent.turn(rollout_id)


async def finish(run: Running, agent: ScriptedParticipant) -> None:
    """Finish what is left and see the run end with every sample trained once."""
    for rollout_id, work in list(agent.runs.items()):
        if work.result is None:
            agent.finish(rollout_id)
    assert await run.done() == 0
    assert [0, 1, 2] == [r["sibling"] for r in results_of(run.run_dir)]


def store_of(run: Running) -> SnapshotStore:
    """Return the run's snapshots."""
    return run.session.store


def health_of(run: Running) -> Health:
    """Return how the run's snapshots fare."""
    assert run.session.checkpointer is not None
    return run.session.checkpointer.health


# The fault hits every try of one snapshot's call, at one of three participants.
SPOILED = {"prepare", "commit", "abort"}


@pytest.mark.parametrize("kind", ["answered", "504", "silence"])
@pytest.mark.parametrize("operation", ["prepare", "commit", "resume", "abort", "renew", "status"])
async def test_no_fault_of_a_control_call_ends_the_run(tmp_path: Path, operation: str, kind: str) -> None:
    """C20, CKPT-DUTY-001, -004, -005, -025: the run goes on, the previous snapshot is in use, the counter says 1."""
    servers = three_servers()
    agent = servers[0]
    # Only who waits for the end of a limit needs a short one; all others may be as slow as this machine is.
    limits: dict[str, dict[str, Any]] = {
        "answered": {"snapshot": {}, "client": {}},
        "504": {"snapshot": {"durable_timeout_ms": 3000}, "client": {"attempts": 1, "call_ms": 1000, "grace_s": 2.0}},
        "silence": {"snapshot": QUICK["snapshot"], "client": QUICK["client"] | {"attempts": 1}},
    }
    # A lease that is to be renewed, and one that ends when the test says so.
    lease = {"lease_ms": 1500 if operation == "renew" else 60_000}
    config = limits[kind] | {"snapshot": limits[kind]["snapshot"] | lease}
    async with serving(*servers), running(settings(tmp_path / "run", agent, **config)) as run:
        await under_way(run, agent)
        assert (await run.snapshot()).outcome == "published"
        slow = ("504", "silence")
        faults = [name for name in FAULTS if name not in slow] if kind == "answered" else [kind]
        for number, fault in enumerate(faults):
            await one_fault(run, servers, operation, fault, number)
        await finish(run, agent)


async def one_fault(
    run: Running, servers: tuple[ScriptedParticipant, ...], operation: str, fault: str, number: int
) -> None:
    """Spoil one call of one snapshot at one of three participants, look at what is left, and take a good one."""
    agent, resources = servers[0], servers[2]
    before = store_of(run).ids()
    failed_before, resumes_before = health_of(run).failed, health_of(run).resume_failures
    agent.turn("r1_g0_s0")
    resources.faults[operation] = Fault(fault)
    if operation == "abort":
        resources.faults["commit"] = Fault("500")
    if operation == "renew":
        resources.hold["commit"] = held = asyncio.Event()
        resources.watch = lambda called: held.set() if called == "renew" else None
    report = await run.snapshot()
    resources.faults.clear()
    for server in servers:
        if server.gate == "closed":
            server.end_lease()
    health = health_of(run)
    if operation in SPOILED:
        assert ("failed", 1, 1) == (report.outcome, health.failed - failed_before, health.consecutive), fault
        assert before == store_of(run).ids()
        assert BROKEN in run.events("snapshot_failed")[number]["participant"]
        assert [] == list(store_of(run).root.glob("*.tmp"))
    else:
        assert "published" == report.outcome, fault
    assert (1 if operation == "resume" else 0) == health.resume_failures - resumes_before
    store_of(run).verify(store_of(run).ids()[0])
    await until(lambda: all(s.gate == "open" for s in servers), "every gate is open")
    agent.turn("r1_g0_s1")
    assert "published" == (await run.snapshot()).outcome
    assert health_of(run).consecutive == 0


@pytest.mark.parametrize("operation", ["capabilities", "status", "restore", "resume", "abort"])
async def test_no_fault_of_a_restart_ends_the_run(tmp_path: Path, operation: str) -> None:
    """C20: each fault once at each call of a restart: repeated or tried anew, the saved turns are continued."""
    servers = three_servers()
    agent = servers[0]
    async with serving(*servers):
        async with running(settings(tmp_path / "run", agent)) as run:
            await under_way(run, agent)
            assert "published" == (await run.snapshot()).outcome
        for fault in FAULTS:
            for server in servers:
                server.new_life()
            servers[2].faults = {operation: Fault(fault, times=1)}
            async with running(settings(tmp_path / "run", agent, **QUICK)) as run:
                restarted = await run.event("restarted")
                assert 0 == servers[2].faults[operation].times, f"{fault} was never met"
                assert ["continued"] * 3 == [r["how"] for r in restarted["rollouts"]], fault
                assert [1, 1, 1] == [agent.runs[f"r1_g0_s{n}"].turns for n in range(3)]
        async with running(settings(tmp_path / "run", agent)) as run:
            await until(lambda: len(agent.runs) == 3, "all run")
            await finish(run, agent)


async def test_no_fault_of_a_retire_loses_a_rollout(tmp_path: Path) -> None:
    """C20: each fault once, while a stopped rollout is retired: it starts again under the next attempt."""
    servers = three_servers()
    agent = servers[0]
    async with serving(*servers), running(settings(tmp_path / "run", agent, **QUICK)) as run:
        await under_way(run, agent)
        for fault in FAULTS:
            before = agent.runs["r1_g0_s1"].attempt
            servers[2].faults = {"retire": Fault(fault, times=1)}
            agent.runs["r1_g0_s1"].state = "restart"
            await until(
                lambda before=before: "r1_g0_s1" in agent.runs and agent.runs["r1_g0_s1"].attempt > before,
                f"{fault}: its next attempt runs",
            )
            assert 0 == servers[2].faults["retire"].times
        await finish(run, agent)


@pytest.mark.parametrize("fault", ["500", "502", "reset_before", "reset_after", "cut_json", "html"])
async def test_no_fault_of_the_data_calls_loses_or_doubles_a_result(tmp_path: Path, fault: str) -> None:
    """C07, C20: starts, results and ACKs are repeated until they are through, each result counts once."""
    gym = one_gym()
    for operation in ("start", "acks", "results"):
        gym.faults[operation] = Fault(fault, times=3)
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        await until(lambda: len(gym.runs) == 3, "three rollouts started")
        for rollout_id in list(gym.runs):
            gym.finish(rollout_id)
        assert await run.done() == 0
        assert 3 == len(run.events("trained"))
        assert 3 == len(gym.released), "every result is acknowledged"


async def test_prepare_timeouts_lead_to_column_2_and_back(tmp_path: Path) -> None:
    """C21, CKPT-DUTY-008, -027: three time-outs: the last good snapshot loads, column 2; the next try is normal."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym, snapshot={"timeout_ms": 150})) as run:
        await under_way(run, gym)
        await run.snapshot()
        gym.blocked = asyncio.Event()
        for _ in range(3):
            gym.turn("r1_g0_s0")
            assert "failed" == (await run.snapshot()).outcome
        health = health_of(run)
        assert (3, True) == (health.consecutive, health.reduced)
        assert ["column 2"] == [e["mode"] for e in run.events("snapshot_mode")]
        ids = store_of(run).ids()
        held = [bool(store_of(run).verify(i).manifest.gyms[0].included) for i in ids]
        assert [False, True] == held, "the RL state alone was saved, and the last full one is still there"
        gym.blocked.set()
        gym.turn("r1_g0_s1")
        assert "published" == (await run.snapshot()).outcome
        assert ["column 2", "full"] == [e["mode"] for e in run.events("snapshot_mode")]
        assert (0, False) == (health_of(run).consecutive, health_of(run).reduced)
        await finish(run, gym)


async def test_one_refused_target_leaves_all_idle_and_open(tmp_path: Path) -> None:
    """C23, CKPT-DUTY-002, -003: one of three refuses commit: all three end idle and open, nothing is there."""
    servers = three_servers()
    async with serving(*servers), running(settings(tmp_path / "run", servers[0])) as run:
        await under_way(run, servers[0])
        servers[1].faults["commit"] = Fault("target_exists")
        report = await run.snapshot()
        assert "failed" == report.outcome
        assert "target_exists" in report.reason
        assert [("idle", "open")] * 3 == [(s.phase, s.gate) for s in servers]
        assert [] == store_of(run).ids()
        assert [] == [p.name for p in store_of(run).root.iterdir() if p.name != ".trash"]
        assert ["1-1"] * 3 == [calls_of(s)["abort"][-1]["checkpoint_id"] for s in servers]
        servers[1].faults.clear()
        await finish(run, servers[0])


async def test_a_write_that_fails_after_resume_is_dropped(tmp_path: Path) -> None:
    """N5, CKPT-SNAP-025: a state lost between commit and durable: nothing is published, its Gym is restored."""
    servers = three_servers()
    agent, resources = servers[0], servers[2]
    async with serving(*servers), running(settings(tmp_path / "run", agent)) as run:
        await under_way(run, agent)
        await run.snapshot()
        agent.turn("r1_g0_s0")
        resources.hold_write = asyncio.Event()
        taking = asyncio.create_task(run.snapshot())
        await until(lambda: resources.phase == "committing" and resources.gate == "open", "resumed, still writing")
        resources.new_life()
        assert "failed" == (await taking).outcome
        assert ["1-1"] == [str(i) for i in store_of(run).ids()]
        resources.hold_write = None
        recovered = await run.event("gym_recovered")
        assert ("restored", "1-1") == (recovered["how"], recovered["snapshot"])
        await until(lambda: len(agent.runs) == 3, "all three continue")
        await finish(run, agent)


async def test_a_lease_that_ends_after_durability_spoils_nothing(tmp_path: Path) -> None:
    """CKPT-SNAP-027, -036, CKPT-DUTY-017: a resume that never works is counted apart, the snapshot is published."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym, snapshot={"lease_ms": 600})) as run:
        await under_way(run, gym)
        gym.faults["resume"] = Fault("503")
        assert "published" == (await run.snapshot()).outcome
        assert 1 == health_of(run).resume_failures
        await until(lambda: gym.gate == "open", "the lease opened the gate")
        assert "lease_end" in gym.journal
        gym.faults.clear()
        await finish(run, gym)


async def test_a_blocked_rollout_can_be_left_out(tmp_path: Path) -> None:
    """N13, CKPT-COMMIT-046: with leave_out_blocked it is published within its limit, the flag is everywhere."""
    servers = three_servers()
    async with (
        serving(*servers),
        running(settings(tmp_path / "run", servers[0], snapshot={"timeout_ms": 100, "leave_out_blocked": True})) as run,
    ):
        await under_way(run, servers[0])
        servers[0].blocked = asyncio.Event()
        assert "published" == (await run.snapshot()).outcome
        flags = [body["leave_out_blocked"] for s in servers for op, body in s.calls if op == "commit"]
        assert flags
        assert all(flags)
        servers[0].blocked = None
        await finish(run, servers[0])


async def test_an_optional_gym_is_left_out_whole(tmp_path: Path) -> None:
    """CKPT-DUTY-012…015: it fails before resume: aborted there, its rollouts are listed, the snapshot is published."""
    good, bad = one_gym(), ScriptedParticipant("spare", ("rollouts", "sessions", "ledger"), 10)
    async with serving(good, bad):
        gyms = [{"alias": "gym", "url": good.url}, {"alias": "spare", "url": bad.url, "optional": True}]
        config = settings(tmp_path / "run", good, gyms=gyms, tasks={"groups": 2, "siblings": 1})
        async with running(config) as run:
            await until(lambda: good.runs and bad.runs, "each Gym runs a group")
            await run.event("dispatched", 2)
            bad.faults["commit"] = Fault("500")
            assert "published" == (await run.snapshot()).outcome
            snapshot = store_of(run).verify(store_of(run).ids()[0])
            assert {"gym": True, "spare": False} == {g.alias: g.included for g in snapshot.manifest.gyms}
            assert {("spare", "r1_g1_s0"): "left_out"} == {k: r.reason for k, r in snapshot.restarts().items()}
            assert ["spare"] == [e["gym"] for e in run.events("gym_left_out")]
            assert ("idle", "open") == (bad.phase, bad.gate)


async def test_nothing_new_is_not_saved_again(tmp_path: Path) -> None:
    """CKPT-SNAP-001: skipped while neither ledger nor progress moved; a new turn alone is reason enough."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        await under_way(run, gym)
        assert ["published", "skipped"] == [(await run.snapshot()).outcome for _ in range(2)]
        gym.turn("r1_g0_s0")
        assert "published" == (await run.snapshot()).outcome
        await finish(run, gym)


async def test_a_snapshot_is_a_context(tmp_path: Path) -> None:
    """Inside, the cut is captured and the gates are open; an exception aborts everywhere and publishes nothing."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        await under_way(run, gym)
        checkpointer: Any = run.session.checkpointer
        async with checkpointer.snapshot() as cut:
            assert "open" == gym.gate
            await cut.write("trainer/state.bin", b"weights")
        assert b"weights" == (cut.published.path / "trainer/state.bin").read_bytes()
        gym.turn("r1_g0_s0")
        with pytest.raises(RuntimeError, match="the trainer failed"):
            async with checkpointer.snapshot():
                raise RuntimeError("the trainer failed")
        assert ["1-1"] == [str(i) for i in store_of(run).ids()]
        assert ("idle", "open") == (gym.phase, gym.gate)
        await finish(run, gym)


async def test_stages_are_called_in_order(tmp_path: Path) -> None:
    """CKPT-STAGE-003…007: prepare ascending, commit when all are prepared, resume descending after every capture."""
    servers = three_servers()
    log: list[tuple[str, str]] = []
    for server in servers:
        server.calls = _Log(log, server.name)  # type: ignore[assignment] # one list for all, with names
    async with serving(*servers), running(settings(tmp_path / "run", servers[0])) as run:
        await under_way(run, servers[0])
        log.clear()
        await run.snapshot()
        verbs = [entry for entry in log if entry[1] in ("prepare", "commit", "resume")]
        assert [("agent", "prepare"), ("model", "prepare"), ("resources", "prepare")] == verbs[:3]
        assert {("agent", "commit"), ("model", "commit"), ("resources", "commit")} == set(verbs[3:6])
        assert [("resources", "resume"), ("model", "resume"), ("agent", "resume")] == verbs[6:9]
        await finish(run, servers[0])


class _Log(list[Any]):
    def __init__(self, shared: list[tuple[str, str]], name: str) -> None:
        super().__init__()
        self._shared, self._name = shared, name

    def append(self, call: Any) -> None:
        super().append(call)
        self._shared.append((self._name, call[0]))
