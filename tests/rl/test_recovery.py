# SPDX-License-Identifier: Apache-2.0
"""Restarts: adopted, restored, fallen through, taken over; nothing lost and nothing trained twice."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from reference_rl import epochs, queries, transitions
from reference_rl.errors import RecoveryFailed, Superseded
from reference_rl.managed import ManagedSession
from reference_rl.records import Reservation
from tests.rl.harness import QUICK, dispatched, finished, results_of, running, settings, until
from tests.rl.scripted import ENVIRONMENT, Fault, ScriptedParticipant, calls_of, one_gym, serving, three_servers

A, B, C = "r1_g0_s0", "r1_g0_s1", "r1_g0_s2"
SURVIVES = {"trainer": {"survives": True}}


async def test_a_new_client_adopts_a_living_gym(tmp_path: Path) -> None:
    """C01, CKPT-ACK-019, CKPT-RESTART-004, -010: the client dies before its first ACK, the Gym lives: no restore.

    All results are ACKed, and then the feed is empty.
    """
    gym = one_gym()
    gym.faults["acks"] = Fault("500")
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym, **SURVIVES)) as run:
            await dispatched(run, gym)
            gym.finish(A)
            gym.finish(B)
            await run.event("trained", 2)
        gym.faults.clear()
        async with running(settings(tmp_path / "run", gym, **SURVIVES)) as run:
            restarted = await run.event("restarted")
            assert {"gym": "adopted"} == restarted["gyms"]
            await until(lambda: {A, B} <= gym.released.keys(), "both results are released")
            assert [(0, 0), (1, 0), (2, 0)] == await finished(run, gym)
        assert "restore" not in calls_of(gym)
        assert 3 == len(gym.released)
        assert [] == [r for r in gym.runs.values() if r.result]


async def test_adopted_rollouts_learn_the_present_policy(tmp_path: Path) -> None:
    """N18, CKPT-RESTART-009: the policy has a new address: each live rollout is told by a repeated start."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym, **SURVIVES)) as run:
            await dispatched(run, gym)
        new = {"base_url": "http://127.0.0.1:10/v1"}
        async with running(settings(tmp_path / "run", gym, policy=new, **SURVIVES)) as run:
            await until(lambda: all(r.policy["base_url"] == new["base_url"] for r in gym.runs.values()), "all told")
            assert [0, 0, 0] == [r.attempt for r in gym.runs.values()]
            await finished(run, gym)


async def test_adoption_reconciles_attempts(tmp_path: Path) -> None:
    """CKPT-RESTART-007…009: another attempt is retired, a missing rollout starts anew, a live one goes on."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym, **SURVIVES)) as run:
            await dispatched(run, gym)
            await run.session.ledger.do(transitions.reserve, [Reservation(B, "a start that was never sent")], 1)
        del gym.runs[C]
        async with running(settings(tmp_path / "run", gym, **SURVIVES)) as run:
            await run.event("restarted")
            await until(lambda: {A: 0, B: 2, C: 1} == {r: work.attempt for r, work in gym.runs.items()}, "reconciled")
            retired = [f for body in calls_of(gym)["retire"] for f in body["rollouts"]]
            assert [{"rollout_id": B, "through_attempt": 0}] == retired
            await finished(run, gym)


async def test_a_second_crash_restores_the_same_snapshot_again(tmp_path: Path) -> None:
    """N15, CKPT-RESTART-036, CKPT-ID-038: killed before the next snapshot, three times: no saved turn is redone.

    Attempts rise each time, and each rollout keeps its id in all of them.
    """
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            for rollout_id, turns in ((A, 1), (B, 2), (C, 4)):
                gym.turn(rollout_id, turns)
            await run.snapshot()
        for crash in (1, 2, 3):
            gym.new_life()
            async with running(settings(tmp_path / "run", gym)) as run:
                await run.event("restarted")
                assert {A: 1, B: 2, C: 4} == {r: work.turns for r, work in gym.runs.items()}
                assert {crash} == {work.attempt for work in gym.runs.values()}
                if crash < 3:
                    gym.turn(A)
                else:
                    assert [(0, 3), (1, 3), (2, 3)] == await finished(run, gym)
        assert [A, B, C] == [r["rollout_id"] for r in results_of(tmp_path / "run")]


async def test_attempts_are_never_used_twice(tmp_path: Path) -> None:
    """N9, CKPT-RESTART-026, -027: a crash between reservation and restore: the next takes higher attempts."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            gym.turn(A, 2)
            await run.snapshot()
        gym.new_life()
        gym.faults["restore"] = Fault("silence")
        async with running(settings(tmp_path / "run", gym)) as run:
            await until(lambda: gym.hits["restore"], "the restore is sent")
            assert run.session.ledger.read(queries.restore_is_open, "gym")
        gym.faults.clear()
        async with running(settings(tmp_path / "run", gym)) as run:
            await run.event("restarted")
            assert {A: 2} == {r: work.turns for r, work in gym.runs.items() if work.turns}
            assert all(work.attempt >= 2 for work in gym.runs.values())
            assert not run.session.ledger.read(queries.restore_is_open, "gym")
            await finished(run, gym)


async def test_emptied_servers_are_not_adopted(tmp_path: Path) -> None:
    """N16, CKPT-RESTART-003: the client dies when all is restored and not resumed: that rules adoption out."""
    gym = one_gym()
    config: dict[str, Any] = dict(SURVIVES)
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym, **config)) as run:
            await dispatched(run, gym)
            gym.turn(B, 2)
            await run.snapshot()
        gym.new_life()
        gym.faults["resume"] = Fault("silence")
        async with running(settings(tmp_path / "run", gym, **config)) as run:
            await until(lambda: gym.phase == "restored" and gym.hits["resume"], "restored, resume under way")
        gym.faults.clear()
        async with running(settings(tmp_path / "run", gym, **config)) as run:
            restarted = await run.event("restarted")
            assert {"gym": "restored"} == restarted["gyms"]
            assert 2 == gym.runs[B].turns
            await finished(run, gym)


async def test_what_is_not_salvaged_runs_again(tmp_path: Path) -> None:
    """N17: finished and ACKed after the cut with newer weights: after the restore it continues and is trained once."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            gym.turn(A, 3)
            await run.snapshot()
            gym.finish(A, reward=9.0, versions=(5,))
            gym.finish(B, reward=7.0, versions=(0,))
            await run.event("trained", 2)
            await until(lambda: {A, B} <= gym.released.keys(), "both are released")
        async with running(settings(tmp_path / "run", gym)) as run:
            restarted = await run.event("restarted")
            assert [A] == restarted["dropped"]
            assert {A: "continued", B: "reused", C: "continued"} == {
                r["rollout_id"]: r["how"] for r in restarted["rollouts"]
            }
            assert 3 == gym.runs[A].turns
            assert [(0, 1), (1, 0), (2, 1)] == await finished(run, gym)
        assert [1.0, 7.0, 1.0] == [r["body"]["reward"] for r in results_of(tmp_path / "run")]


async def test_a_damaged_snapshot_falls_through_to_the_next(tmp_path: Path) -> None:
    """C41, CKPT-RESTART-012, -014, -015: the newest is damaged: reported with its file, and the older one is used."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            gym.turn(A, 2)
            await run.snapshot()
            gym.turn(A, 2)
            await run.snapshot()
        victim = tmp_path / "run/snapshots/1-2/gym/gym/gym/rollouts.jsonl"
        victim.write_bytes(victim.read_bytes()[:-1])
        gym.new_life()
        async with running(settings(tmp_path / "run", gym)) as run:
            restarted = await run.event("restarted")
            assert "1-1" == restarted["snapshot"]
            assert ["gym/gym/gym/rollouts.jsonl"] == [t.split(": ")[1] for t in restarted["refused"]]
            assert 2 == gym.runs[A].turns
            await finished(run, gym)


async def test_the_gym_refuses_what_rl_cannot_see(tmp_path: Path) -> None:
    """C41, CKPT-RESTORE-049, CKPT-RESTART-015: the newest cut is corrupt for the Gym: the next, with fresh ids."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            gym.turn(A, 2)
            await run.snapshot()
            gym.turn(A, 2)
            await run.snapshot()
        gym.new_life()
        gym.faults["restore"] = Fault("checkpoint_corrupt", times=1)
        async with running(settings(tmp_path / "run", gym)) as run:
            restarted = await run.event("restarted")
            assert "1-1" == restarted["snapshot"]
            bodies = calls_of(gym)["restore"]
            assert ["2-1", "2-2"] == [b["checkpoint_id"] for b in bodies]
            assert [1, 2] == [b["rollouts"][0]["next_attempt"] for b in bodies]
            await finished(run, gym)


async def test_every_snapshot_gone_means_a_clean_start(tmp_path: Path) -> None:
    """CKPT-RESTART-061: nothing can be used: survivors are reset, everything starts at turn 1 under new attempts."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            gym.turn(A, 2)
            await run.snapshot()
            gym.finish(B)
            await run.event("trained")
        (tmp_path / "run/snapshots/1-1/manifest.json").write_bytes(b"{}")
        async with running(settings(tmp_path / "run", gym)) as run:
            restarted = await run.event("restarted")
            assert ("clean", {"gym": "reset"}) == (restarted["rl_from"], restarted["gyms"])
            body = calls_of(gym)["restore"][0]
            assert (None, [], []) == (body["source"], body["rollouts"], body["results"])
            assert [A, C] == sorted(f["rollout_id"] for f in body["fences"])
            assert [(0, 1), (1, 0), (2, 1)] == await finished(run, gym)


async def test_the_marker_is_used_when_its_snapshot_never_landed(tmp_path: Path) -> None:
    """CKPT-SNAP-034, CKPT-RESTART-018: a trainer checkpoint newer than every snapshot: all starts at turn 1."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            gym.turn(B, 2)
            await run.snapshot()
            gym.finish(A)
            await run.event("trained")
            run.session.write_marker("step-1")
        gym.new_life()
        async with running(settings(tmp_path / "run", gym)) as run:
            restarted = await run.event("restarted")
            assert ("marker", {"gym": "reset"}) == (restarted["rl_from"], restarted["gyms"])
            await dispatched(run, gym, 2)
            assert {B: 0, C: 0} == {r: work.turns for r, work in gym.runs.items()}
            assert [(0, 0), (1, 1), (2, 1)] == await finished(run, gym)


async def test_a_lost_ledger_begins_with_the_snapshots_copy(tmp_path: Path) -> None:
    """The disk of the ledger is gone: the newest snapshot holds a copy, and attempts rise above what the Gym shows."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            gym.turn(A, 2)
            await run.snapshot()
            gym.finish(B)
            await run.event("trained")
        for path in (tmp_path / "run").glob("ledger.sqlite*"):
            path.unlink()
        gym.new_life()
        async with running(settings(tmp_path / "run", gym)) as run:
            await run.event("restarted")
            assert 2 == gym.runs[A].turns
            assert [(0, 1), (1, 1), (2, 1)] == await finished(run, gym)


# --- a Gym that dies alone ------------------------------------------------------------------------------------


async def test_a_gym_that_dies_alone_is_restored_and_rl_stays(tmp_path: Path) -> None:
    """CKPT-RESTART-050…054: the whole Gym comes back for exactly what is unfinished; training does not roll back."""
    servers = three_servers()
    agent, _, resources = servers
    async with serving(*servers), running(settings(tmp_path / "run", agent)) as run:
        await dispatched(run, agent)
        for rollout_id in (A, B, C):
            agent.turn(rollout_id, 2)
        await run.snapshot()
        agent.finish(A)
        await run.event("trained")
        agent.finish(B)
        agent.faults["results"] = Fault("503", times=2)
        resources.new_life()
        recovered = await run.event("gym_recovered")
        assert ("restored", "1-1") == (recovered["how"], recovered["snapshot"])
        assert {C: 2} == {r: work.turns for r, work in agent.runs.items()}
        assert (2, 0) == run.session.ledger.read(queries.trainer) or run.events("finished")
        assert [(0, 0), (1, 0), (2, 1)] == await finished(run, agent)


async def test_an_uncertain_rollout_is_retired_and_started_again(tmp_path: Path) -> None:
    """C62, CKPT-DUTY-031, -032: what the Gym lists as restart is retired everywhere; its next attempt starts."""
    servers = three_servers()
    agent = servers[0]
    async with serving(*servers), running(settings(tmp_path / "run", agent)) as run:
        await dispatched(run, agent)
        agent.turn(B, 2)
        agent.runs[B].state = "restart"
        await until(lambda: agent.runs.get(B) and agent.runs[B].attempt == 1, "attempt 1 of it runs")
        assert [0, 0, 0] == [server.fences[B] for server in servers]
        assert [(0, 0), (1, 1), (2, 0)] == await finished(run, agent)


async def test_session_lost_goes_into_the_restore(tmp_path: Path) -> None:
    """N23, CKPT-RESTART-055, -063: session_lost comes before anyone noticed: it continues from the snapshot."""
    servers = three_servers()
    agent, _, resources = servers
    async with serving(*servers):
        config = settings(tmp_path / "run", agent, recovery={"health_s": 60})
        async with running(config) as run:
            await dispatched(run, agent)
            for rollout_id in (A, B, C):
                agent.turn(rollout_id, 3)
            await run.snapshot()
            resources.new_life()
            agent.fail(A, "session_lost")
            recovered = await run.event("gym_recovered")
            assert {A: "continued", B: "continued", C: "continued"} == {
                r["rollout_id"]: r["how"] for r in recovered["rollouts"]
            }
            assert 3 == agent.runs[A].turns
            assert [(0, 1), (1, 1), (2, 1)] == await finished(run, agent)


async def test_a_late_start_of_an_old_attempt_changes_nothing(tmp_path: Path) -> None:
    """N21, CKPT-RESTORE-048: fences name what is not continued: a delayed start of attempt 0 is stale."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym, tasks={"siblings": 1})) as run:
            await dispatched(run, gym, 1)
        gym.new_life()
        async with running(settings(tmp_path / "run", gym, tasks={"siblings": 1})) as run:
            await run.event("restarted")
            assert [{"rollout_id": A, "through_attempt": 0}] == calls_of(gym)["restore"][0]["fences"]
            assert isinstance(run.session, ManagedSession)
            late = {"rollout_id": A, "attempt": 0, "environment": ENVIRONMENT, "task": {}, "task_digest": "d"}
            client = run.session.managers["gym"].gym.owner.client
            reply = await client.start([late], {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api": "responses"})
            assert ["stale_attempt"] == [outcome.outcome for outcome in reply.outcomes]
            assert [(0, 1)] == await finished(run, gym)


async def test_a_participant_that_never_answers_restore_is_named(tmp_path: Path) -> None:
    """C24, CKPT-DUTY-022: the client ends within its limit and names it; the other two are not left paused."""
    servers = three_servers()
    agent, model, resources = servers
    limits = QUICK["snapshot"] | {"durable_timeout_ms": 300}
    config: dict[str, Any] = {"snapshot": limits, "client": QUICK["client"], "recovery": {"restore_tries": 2}}
    async with serving(*servers):
        async with running(settings(tmp_path / "run", agent)) as run:
            await dispatched(run, agent)
            await run.snapshot()
        for server in servers:
            server.new_life()
        model.faults["restore"] = Fault("silence")
        async with running(settings(tmp_path / "run", agent, **config)) as run:
            with pytest.raises(RecoveryFailed, match="model"):
                await run.done()
        assert [("idle", "open")] * 2 == [(s.phase, s.gate) for s in (agent, resources)]
        tried = {body["checkpoint_id"] for body in calls_of(model)["restore"]}
        assert all(tried <= {body["checkpoint_id"] for body in calls_of(s)["abort"]} for s in servers)


# --- two controllers ------------------------------------------------------------------------------------------


async def test_the_old_controller_is_refused_after_a_takeover(tmp_path: Path) -> None:
    """C13: frozen during prepare, it wakes after the new one took over: what it sends is refused, it stops."""
    gym = one_gym()
    frozen: dict[str, Any] = {"snapshot": {"timeout_ms": 20_000}, "recovery": {"health_s": 60}}
    async with serving(gym), running(settings(tmp_path / "run", gym, **frozen)) as old:
        await dispatched(old, gym)
        gym.blocked = asyncio.Event()
        taking = asyncio.create_task(old.snapshot())
        await until(lambda: gym.phase == "preparing", "the old one prepares")
        async with running(settings(tmp_path / "run", gym, **SURVIVES)) as new:
            await until(lambda: new.events("in_office"), "the new one is in office")
            gym.blocked.set()
            with pytest.raises(Superseded):
                await taking
            assert ("idle", "open") == (gym.phase, gym.gate)
            await new.event("restarted")
            gym.faults["acks"] = Fault("503")  # so that the old one is served it too, however fast the new one is
            gym.finish(A)
            with pytest.raises(Superseded):
                await old.done()
            gym.faults.clear()
            assert [] == new.session.store.ids()
            await finished(new, gym)
        assert 2 == epochs.highest(tmp_path / "run")


async def test_a_controller_that_comes_back_before_the_lease_ends_takes_over(tmp_path: Path) -> None:
    """C26: killed while everything is prepared: the next one ends what was open at once and goes on."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym, snapshot={"lease_ms": 600_000})) as run:
            await dispatched(run, gym)
            gym.faults["commit"] = Fault("silence")
            taking = asyncio.create_task(run.snapshot())
            await until(lambda: gym.hits["commit"], "prepared, commit under way")
            taking.cancel()
            gym.faults["abort"] = Fault("reset_before", times=1_000)
            await asyncio.gather(taking, return_exceptions=True)
        gym.faults.clear()
        assert "closed" == gym.gate
        async with running(settings(tmp_path / "run", gym, **SURVIVES)) as run:
            await run.event("in_office")
            assert "open" == gym.gate
            assert [(0, 0), (1, 0), (2, 0)] == await finished(run, gym)


async def test_two_controllers_that_choose_one_epoch(tmp_path: Path) -> None:
    """C12, CKPT-CTRL-014: the same one wins on both; the other picks a higher epoch or stops, without a livelock."""
    agent = ScriptedParticipant("agent", ("rollouts",), 10)
    resources = ScriptedParticipant("resources", ("sessions",), 30)
    agent.peers = [resources]
    async with serving(agent, resources):
        # Two run directories: the exclusive file of one is not seen by the other.
        first = settings(tmp_path / "one" / "run", agent, tasks={"siblings": 1})
        second = settings(tmp_path / "two" / "run", agent, tasks={"siblings": 1}, run_id="r2")
        async with running(first) as one, running(second) as two:
            await until(
                lambda: (
                    agent.controller is not None
                    and agent.controller == resources.controller
                    and any(agent.controller.name == r.session.tenure.controller.id for r in (one, two))
                    and (one.task.done() or two.task.done())
                ),
                "one obeys, the other has stopped",
            )
            stopped = [r for r in (one, two) if r.task.done()]
            assert [Superseded] == [type(r.task.exception()) for r in stopped]
            winner = next(r for r in (one, two) if r not in stopped)
            assert winner.session.tenure.controller.id == agent.controller.name  # type: ignore[union-attr] # waited for
            assert winner.session.tenure.epoch <= 9


def test_an_epoch_is_claimed_once(tmp_path: Path) -> None:
    """CKPT-CTRL-010, CKPT-CTRL-011: many claims of one directory at once all differ, and are above what was seen."""
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda n: epochs.claim(tmp_path, f"c{n}", 5).epoch, range(24)))
    assert sorted(set(claims)) == sorted(claims)
    assert 6 == min(claims)


def test_a_claim_ends_when_a_higher_one_appears(tmp_path: Path) -> None:
    """CKPT-SNAP-026: what a superseded controller would publish is refused by its own claim."""
    claim = epochs.claim(tmp_path, "a")
    claim.check()
    epochs.claim(tmp_path, "b")
    with pytest.raises(Superseded):
        claim.check()
