# SPDX-License-Identifier: Apache-2.0
"""The rules of a restart, one by one: when a Gym is adopted, in which order it is restored, what each step respects."""

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from reference_rl import queries, settling, transitions
from reference_rl.dataplane import RowKey
from reference_rl.errors import EpochTaken
from reference_rl.ledger import Ledger
from reference_rl.metrics import collect
from reference_rl.preview import preview
from reference_rl.records import Receipt, Reservation
from reference_rl.restore_plan import SavedGym, plan_restore
from spec import wire
from spec.messages import IndexRecord
from tests.rl.harness import dispatched, finished, results_of, running, settings, until
from tests.rl.scripted import Fault, ScriptedParticipant, calls_of, one_gym, serving, three_servers
from tests.rl.test_ledger import failure, planned, settle, success

A, B, C = "r1_g0_s0", "r1_g0_s1", "r1_g0_s2"
SURVIVES = {"trainer": {"survives": True}}
REDO = {"granularity": "prompt_group", "recovery": {"redo_groups": True}}


# --- adopt or not ---------------------------------------------------------------------------------------------


async def test_one_other_incarnation_rules_adopting_out(tmp_path: Path) -> None:
    """CKPT-RESTART-001: two of three participants are the known ones, the third is not: the Gym is restored."""
    servers = three_servers()
    agent = servers[0]
    async with serving(*servers):
        async with running(settings(tmp_path / "run", agent, **SURVIVES)) as run:
            await dispatched(run, agent)
            agent.turn(A, 2)
            await run.snapshot()
        servers[2].new_life()
        async with running(settings(tmp_path / "run", agent, **SURVIVES)) as run:
            restarted = await run.event("restarted")
            assert {"gym": "restored"} == restarted["gyms"]
            assert 2 == agent.runs[A].turns


async def test_a_trainer_that_goes_back_rules_adopting_out(tmp_path: Path) -> None:
    """CKPT-RESTART-002, CKPT-RESTART-011: the Gym lives, the trainer does not: its feed is read once, then restored.

    C finished while nobody listened: its result is a fact and is not in the lists of the restore.
    """
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            gym.turn(B, 2)
            await run.snapshot()
            gym.finish(A)
            await run.event("trained")
        gym.finish(C)
        gym.calls.clear()
        async with running(settings(tmp_path / "run", gym)) as run:
            restarted = await run.event("restarted")
            assert {"gym": "restored"} == restarted["gyms"]
            assert {A: "reused", B: "continued", C: "reused"} == {
                r["rollout_id"]: r["how"] for r in restarted["rollouts"]
            }
            order = [op for op, _ in gym.calls if op in ("results", "restore")]
            assert ["results", "restore"] == order[:2]
            body = calls_of(gym)["restore"][0]
            assert ([B], [], []) == ([r["rollout_id"] for r in body["rollouts"]], body["results"], body["fences"])


# --- order ----------------------------------------------------------------------------------------------------


async def test_a_restart_goes_step_by_step(tmp_path: Path) -> None:
    """CKPT-RESTART-030…033, -064, CKPT-STAGE-006, CKPT-RESTORE-051: rows, participants, ledger, resume, starts.

    Nothing is resumed before every participant is restored, in descending stages; C, which the snapshot does not
    hold, is started after the resume, above every attempt of it that there was.
    """
    servers = three_servers()
    agent = servers[0]
    log: list[tuple[str, str, int, int]] = []

    def watching(server: ScriptedParticipant) -> Any:
        def look(operation: str) -> None:
            if operation in ("restore", "resume", "start"):
                log.append((server.name, operation, *_on_disk(tmp_path / "run")))

        return look

    async with serving(*servers):
        async with running(settings(tmp_path / "run", agent)) as run:
            await dispatched(run, agent)
            await run.session.plane.put(RowKey(B, 0, 1), {"ids": [1]})
            agent.turn(B, 1)
            del agent.runs[C]
            await run.snapshot()
            await run.session.ledger.do(transitions.reserve, [Reservation(C, "a start that was lost", 6)], 1)
            agent.finish(A)
            await run.event("trained")
            assert (1, 1) == _on_disk(tmp_path / "run")
        con = sqlite3.connect(tmp_path / "run/dataplane.sqlite")
        con.execute("DELETE FROM rows")
        con.commit()
        con.close()
        for server in servers:
            server.new_life()
            server.watch = watching(server)
        async with running(settings(tmp_path / "run", agent)) as run:
            await run.event("restarted")
            await until(lambda: C in agent.runs, "C is started")
            assert 8 == agent.runs[C].attempt
        names = ["resources", "model", "agent"]
        assert [(name, "restore", 1, 1) for name in names] == log[:3], "rows are back, the trainer's step is not"
        assert [(name, "resume", 1, 0) for name in names] == log[3:6], "the ledger is back before the first resume"
        assert {("agent", "start")} == {entry[:2] for entry in log[6:]}


def _on_disk(run_dir: Path) -> tuple[int, int]:
    """Return (token rows, the trainer's step) as another process sees them now."""
    found = []
    for file, query in (("dataplane", "SELECT count(*) FROM rows"), ("ledger", "SELECT step FROM trainer")):
        con = sqlite3.connect(run_dir / f"{file}.sqlite", timeout=5)
        found.append(con.execute(query).fetchone()[0])
        con.close()
    return found[0], found[1]


async def test_the_note_of_an_open_restore_goes_with_the_last_resume(tmp_path: Path) -> None:
    """CKPT-RESTART-006, CKPT-RESTART-041, CKPT-RESTART-042: one participant never resumes: nothing starts or is saved.

    A Gym that died alone: two of three are resumed, the note still stands, a snapshot waits, no start is sent. When
    the third one answers, everything goes on.
    """
    servers = three_servers()
    agent, _, resources = servers
    longer: dict[str, Any] = {"snapshot": {"durable_timeout_ms": 20_000}, "client": {"grace_s": 20.0}}
    async with serving(*servers), running(settings(tmp_path / "run", agent, **longer)) as run:
        await dispatched(run, agent)
        agent.turn(A, 2)
        await run.snapshot()
        agent.hold["resume"] = held = asyncio.Event()
        for server in servers:
            server.calls.clear()
        resources.new_life()
        await until(lambda: "resume" in calls_of(agent), "the agent is asked to resume")
        assert [("idle", "open")] * 2 == [(s.phase, s.gate) for s in servers[1:]]
        assert run.session.ledger.read(queries.restore_is_open, "gym")
        taking = asyncio.create_task(run.snapshot())
        done, _ = await asyncio.wait([taking], timeout=0.5)
        assert not done, "it waits for the restore"
        assert not {"start", "prepare"} & {op for server in servers for op, _ in server.calls}
        held.set()
        recovered = await run.event("gym_recovered")
        assert "restored" == recovered["how"]
        assert not run.session.ledger.read(queries.restore_is_open, "gym")
        assert "published" == (await taking).outcome


async def test_a_gym_with_a_lost_participant_is_not_saved(tmp_path: Path) -> None:
    """CKPT-RESTART-043: its incarnation is another one: nothing of it is published before the Gym is restored."""
    servers = three_servers()
    agent, _, resources = servers
    async with serving(*servers), running(settings(tmp_path / "run", agent, recovery={"health_s": 60})) as run:
        await dispatched(run, agent)
        agent.turn(A, 2)
        await run.snapshot()
        resources.new_life()
        agent.turn(B, 1)
        assert "failed" == (await run.snapshot()).outcome
        recovered = await run.event("gym_recovered")
        assert ("restored", "1-1") == (recovered["how"], recovered["snapshot"])
        agent.turn(B, 1)
        assert "published" == (await run.snapshot()).outcome
        held = run.session.store.read(run.session.store.ids()[0]).manifest.gyms[0].participants
        assert resources.incarnation == next(p.incarnation for p in held if p.name == "resources")


async def test_survivors_are_reset_when_no_snapshot_holds_their_gym(tmp_path: Path) -> None:
    """CKPT-RESTART-052: a participant dies before the first snapshot: `source: null` everywhere, all start anew."""
    servers = three_servers()
    agent, model, resources = servers
    async with serving(*servers), running(settings(tmp_path / "run", agent)) as run:
        await dispatched(run, agent)
        agent.turn(A, 2)
        resources.new_life()
        recovered = await run.event("gym_recovered")
        assert "reset" == recovered["how"]
        assert [None] * 3 == [calls_of(s)["restore"][0]["source"] for s in (agent, model, resources)]
        await until(lambda: {1} == {work.attempt for work in agent.runs.values()}, "all started anew")
        assert [(0, 1), (1, 1), (2, 1)] == await finished(run, agent)


async def test_the_newest_snapshot_that_holds_the_gym_is_used(tmp_path: Path) -> None:
    """CKPT-RESTART-062: the newest one left the Gym out: when that dies alone the one before brings it back."""
    good, spare = one_gym(), ScriptedParticipant("spare", ("rollouts", "sessions", "ledger"), 10)
    async with serving(good, spare):
        gyms = [{"alias": "gym", "url": good.url}, {"alias": "spare", "url": spare.url, "optional": True}]
        config = settings(tmp_path / "run", good, gyms=gyms, tasks={"groups": 2, "siblings": 1})
        async with running(config) as run:
            await until(lambda: good.runs and spare.runs, "each Gym runs a group")
            await run.event("dispatched", 2)
            spare.turn("r1_g1_s0", 3)
            await run.snapshot()
            spare.faults["commit"] = Fault("500")
            good.turn("r1_g0_s0")
            newest = (await run.snapshot()).snapshot
            assert newest.gym("spare") is None
            spare.faults.clear()
            spare.new_life()
            recovered = await run.event("gym_recovered")
            assert ("spare", "restored", "1-1") == tuple(recovered[n] for n in ("gym", "how", "snapshot"))
            assert 3 == spare.runs["r1_g1_s0"].turns


# --- attempts -------------------------------------------------------------------------------------------------


def test_a_restart_is_one_transaction(tmp_path: Path) -> None:
    """CKPT-RESTART-005, CKPT-RESTART-024: epoch, attempts, keep list and the open note: all of them, or none."""
    ledger = Ledger(tmp_path / "l.sqlite", "r1")
    ledger.call(transitions.plan, [planned()])
    ledger.call(transitions.claim_epoch, 3, "other")
    kept = Receipt("r_g0_s1", 0, "sha256:x")
    wishes = [Reservation("r_g0_s0", "restore", continues=0, turns_kept=2), Reservation("r_g0_s2", "restore")]
    before = ledger.revision()
    with pytest.raises(EpochTaken):
        ledger.call(transitions.open_recovery, 3, "me", {"gym": (wishes, [kept])})
    assert (before, []) == (ledger.revision(), ledger.read(queries.attempts))
    attempts = ledger.call(transitions.open_recovery, 4, "me", {"gym": (wishes, [kept])})
    assert before + 1 == ledger.revision()
    assert {"gym": {"r_g0_s0": 1, "r_g0_s2": 1}} == attempts
    assert (4, True, [kept]) == (
        ledger.read(queries.highest_epoch),
        ledger.read(queries.restore_is_open, "gym"),
        ledger.read(queries.kept, "gym"),
    )
    ledger.close()


def row_of(rollout_id: str, attempt: int, state: str = "turn", **changes: Any) -> IndexRecord:
    """Return an index record."""
    row = {"rollout_id": rollout_id, "attempt": attempt, "state": state, "turns_done": 2, "task_digest": "digest"}
    return IndexRecord.read(json.dumps(row | {"environment": "taxi", "effects": {}, "data_refs": []} | changes))


def test_a_next_attempt_is_above_everything_that_was_seen(tmp_path: Path) -> None:
    """CKPT-RESTART-025, CKPT-RESTART-028: ledger, snapshot, listing: 1 above the highest; the origin is stored."""
    ledger = Ledger(tmp_path / "l.sqlite", "r1")
    ledger.call(transitions.plan, [planned()])
    ledger.call(transitions.reserve, [Reservation("r_g0_s0", "x", above=4), Reservation("r_g0_s2", "x", above=6)], 1)
    rows = [r for r in ledger.read(queries.rollouts) if r.state == "unfinished"]
    index = {f"r_g0_s{n}": row_of(f"r_g0_s{n}", attempt) for n, attempt in ((0, 5), (1, 0), (2, 2))}
    saved = SavedGym("1-1", "agent", {"agent": index}, {})
    plan = plan_restore(rows, saved, highest={"r_g0_s1": 9, "r_g0_s2": 3})
    attempts = ledger.call(transitions.open_restore, "gym", 1, plan.reservations("restore of 1-1"), [])
    assert {"r_g0_s0": 6, "r_g0_s1": 10, "r_g0_s2": 8} == attempts
    origins = {r["rollout_id"]: r["continues"] for r in ledger.read(queries.attempts) if r["attempt"] in (6, 8, 10)}
    assert {"r_g0_s0": 5, "r_g0_s1": 0, "r_g0_s2": None} == origins
    assert ["continued", "continued", "restarted"] == [fate.how for fate in plan.fates]
    ledger.close()


async def test_a_refused_attempt_is_stepped_over(tmp_path: Path) -> None:
    """CKPT-RESTART-025: a fence that only the refusal shows: the next try is above it, under a fresh checkpoint id."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            gym.turn(A, 2)
            await run.snapshot()
        gym.new_life()
        gym.fences[A] = 7
        gym.calls.clear()
        async with running(settings(tmp_path / "run", gym)) as run:
            await run.event("restarted")
            assert (8, 2) == (gym.runs[A].attempt, gym.runs[A].turns)
            assert ["2-1", "2-2"] == [body["checkpoint_id"] for body in calls_of(gym)["restore"]]


def test_receipts_that_are_awaited_or_owed_are_kept() -> None:
    """CKPT-RESTORE-047: a finished row that the ledger lacks or owes an ACK for is listed; a settled one is not."""
    ledger = [row for row in _rows(3) if row.rollout_id != "r_g0_s1"]
    receipts = {
        f"r_g0_s{n}": {"rollout_id": f"r_g0_s{n}", "attempt": 0, "digest": wire.bytes_digest(b"x")} for n in range(4)
    }
    index = {name: row_of(name, 0, "finished", receipt=receipt) for name, receipt in receipts.items()}
    owed = Receipt(**receipts["r_g0_s1"])
    plan = plan_restore(ledger, SavedGym("1-1", "agent", {"agent": index, "resources": {}}, {}), owed=[owed])
    listed = plan.request("agent", {})["results"]
    assert ["r_g0_s0", "r_g0_s1", "r_g0_s2"] == sorted(r["rollout_id"] for r in listed)
    assert [] == plan.request("resources", {})["results"]
    assert ["r_g0_s0", "r_g0_s2"] == [r.rollout_id for r in plan.awaited()]


def _rows(count: int) -> list[Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        ledger = Ledger(Path(directory) / "l.sqlite", "r1")
        ledger.call(transitions.plan, [planned(siblings=count)])
        rows = ledger.read(queries.rollouts)
        ledger.close()
    return rows


async def test_what_a_participant_cannot_continue_starts_again(tmp_path: Path) -> None:
    """CKPT-RESTART-038…040: one of three cannot restore B: retired everywhere, started anew, reported alone."""
    servers = three_servers()
    agent, _, resources = servers
    async with serving(*servers):
        async with running(settings(tmp_path / "run", agent)) as run:
            await dispatched(run, agent)
            for rollout_id in (A, B, C):
                agent.turn(rollout_id, 2)
            await run.snapshot()
        for server in servers:
            server.new_life()
            server.calls.clear()
        resources.cannot = {B: "install_failed"}
        async with running(settings(tmp_path / "run", agent)) as run:
            restarted = await run.event("restarted")
            hows = {r["rollout_id"]: (r["how"], r["turns_done"]) for r in restarted["rollouts"]}
            assert {A: ("continued", 2), B: ("restarted", 0), C: ("continued", 2)} == hows
            assert ["resources cannot continue it: install_failed"] == [
                r["reason"] for r in restarted["rollouts"] if r["how"] == "restarted"
            ]
            for server in servers:
                retired = [f for body in calls_of(server)["retire"] for f in body["rollouts"]]
                assert [{"rollout_id": B, "through_attempt": 1}] == retired
            await until(lambda: agent.runs.get(B) and agent.runs[B].attempt == 2, "B starts again")
            assert [(0, 1), (1, 2), (2, 1)] == await finished(run, agent)


# --- token rows -----------------------------------------------------------------------------------------------


async def test_rows_of_saved_turns_stay_and_those_of_lost_turns_go(tmp_path: Path) -> None:
    """CKPT-RESTART-034, CKPT-RESTART-035: turn 3 came after the cut: its row goes; 1 and 2 survive two restores."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            gym.turn(B, 2)
            for turn in (1, 2):
                await run.session.plane.put(RowKey(B, 0, turn), {"ids": [turn]})
            await run.snapshot()
            gym.turn(B, 1)
            await run.session.plane.put(RowKey(B, 0, 3), {"ids": [3]})
        for attempt in (1, 2):
            gym.new_life()
            async with running(settings(tmp_path / "run", gym)) as run:
                await run.event("restarted")
                assert attempt == gym.runs[B].attempt
                assert [RowKey(B, 0, 1), RowKey(B, 0, 2)] == [k for k in await run.session.plane.list() if k.turn < 9]
                await run.session.plane.put(RowKey(B, attempt, 3), {"ids": [attempt]})


# --- salvage --------------------------------------------------------------------------------------------------


async def test_everything_can_be_salvaged(tmp_path: Path) -> None:
    """CKPT-RESTART-047, CKPT-RESTART-049: told so, a result of newer weights is kept, and stands in no restore list."""
    gym = one_gym()
    async with serving(gym):
        config = settings(tmp_path / "run", gym, recovery={"salvage": "all"})
        async with running(config) as run:
            await dispatched(run, gym)
            gym.turn(A, 3)
            await run.snapshot()
            gym.finish(A, reward=9.0, versions=(5,))
            await run.event("trained")
            await until(lambda: A in gym.released, "it is released")
        gym.calls.clear()
        async with running(config) as run:
            restarted = await run.event("restarted")
            assert ([], "reused") == (restarted["dropped"], restarted["rollouts"][0]["how"])
            body = calls_of(gym)["restore"][0]
            named = [*body["rollouts"], *body["results"], *body["fences"]]
            assert [B, C] == sorted(entry["rollout_id"] for entry in named)
            assert 1 == (await run.event("rolled_back"))["salvaged"]
            assert 1 == run.session.values()["ckpt_results_salvaged"]


def test_of_two_results_the_lower_attempt_stays(tmp_path: Path) -> None:
    """CKPT-RESTART-048: the snapshot's ledger holds attempt 0, the live one attempt 1: attempt 0 is kept."""
    old, live = (Ledger(tmp_path / f"{name}.sqlite", "r1") for name in ("old", "live"))
    for ledger, attempt in ((old, 0), (live, 1)):
        ledger.call(transitions.plan, [planned()])
        if attempt:
            ledger.call(transitions.reserve, [Reservation("r_g0_s0", "x")], 1)
        settle(ledger, success("r_g0_s0", attempt=attempt, reward=float(attempt)))
    live.call(transitions.merge_results, old.read(queries.result_rows), {"r_g0_s0": 0})
    assert [("r_g0_s0", 0)] == [(r["rollout_id"], r["attempt"]) for r in live.read(queries.result_rows)]
    row = live.read(queries.rollout, "r_g0_s0")
    assert row is not None
    assert (1, "finished") == (row.attempt, row.state)
    old.close()
    live.close()


# --- whole groups ---------------------------------------------------------------------------------------------


async def test_a_restart_can_redo_whole_groups(tmp_path: Path) -> None:
    """CKPT-RESTART-060, CKPT-RESTART-065: A has finished and is released, B has turns: all three are redone.

    Their old names stay what they are to the Gym, so the siblings get new ones: each starts at turn 1, what the Gym
    still serves under an old name is surplus, and the group is trained whole, once.
    """
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym, **REDO)) as run:
            await dispatched(run, gym)
            gym.finish(A, reward=5.0)
            await until(lambda: A in gym.released, "released before the cut")
            gym.turn(B, 2)
            await run.snapshot()
        gym.new_life()
        config = settings(tmp_path / "run", gym, **REDO)
        seen = await preview(config)
        assert [("restarted", 0)] * 3 == [(p.how, p.turns_kept) for p in seen.rollouts]
        async with running(config) as run:
            restarted = await run.event("restarted")
            assert {A: f"{A}.r1", B: f"{B}.r1", C: f"{C}.r1"} == restarted["redone"]
            assert {("restarted", 0, "its group is redone")} == {
                (r["how"], r["turns_done"], r["reason"]) for r in restarted["rollouts"]
            }
            assert {B: 0, C: 0}.items() <= gym.fences.items(), "a late call under an old name is stale"
            await until(lambda: len(gym.runs) == 3, "all three run under their new names")
            assert {0} == {work.turns for work in gym.runs.values()}
            assert [(0, 1), (1, 1), (2, 1)] == await finished(run, gym)
            assert [3] == [len(e["rollouts"]) for e in run.events("trained")]
        assert [1.0] * 3 == [r["body"]["reward"] for r in results_of(tmp_path / "run")]


async def test_a_group_that_is_whole_or_adopted_is_not_redone(tmp_path: Path) -> None:
    """CKPT-RESTART-060: a finished group has nothing to redo, and a Gym that lives lost nothing."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym, **REDO, **SURVIVES)) as run:
            await dispatched(run, gym)
            gym.finish(A)
            await run.event("finished")
        async with running(settings(tmp_path / "run", gym, **REDO, **SURVIVES)) as run:
            restarted = await run.event("restarted")
            assert ({"gym": "adopted"}, {}) == (restarted["gyms"], restarted["redone"])
            gym.finish(B)
            gym.finish(C)
            assert await run.done() == 0


def test_names_of_redone_rollouts_are_never_used_twice(tmp_path: Path) -> None:
    """CKPT-RESTART-065: redone again, they get names again that were never sent; older results come to nothing."""
    ledger = Ledger(tmp_path / "l.sqlite", "r1")
    ledger.call(transitions.plan, [planned()])
    settle(ledger, success("r_g0_s0"))
    old_results = ledger.read(queries.result_rows)
    names = [f"r_g0_s{n}" for n in range(3)]
    for number in (1, 2):
        replaced = ledger.call(transitions.redo_rollouts, names, "its group is redone")
        names = list(replaced.values())
        assert [f"r_g0_s{n}.r{number}" for n in range(3)] == names
        assert all(wire.is_rollout_id(name) for name in names)
    assert ["r_g0_s0"] == [s["rollout_id"] for s in ledger.read(queries.surplus)]
    ledger.call(transitions.merge_results, old_results, {})
    assert {} == ledger.read(queries.result_receipts)
    assert ["surplus"] == settle(ledger, success("r_g0_s0"))
    assert 0 == ledger.call(transitions.plan, [planned()])
    ledger.close()


def test_granularity_is_per_source_and_per_agent(tmp_path: Path) -> None:
    """CKPT-RESTART-058, CKPT-RESTART-059: that of its source, else of its agent, else of the run."""
    source = {"environment": "scripted", "siblings": 2}
    tasks = [
        {**source, "name": "one"},
        {**source, "name": "two", "granularity": "sibling", "agent": "careful"},
        {**source, "name": "three", "agent": "careful"},
        {**source, "name": "four", "agent": "quick"},
    ]
    agents = {"careful": {"granularity": "prompt_group"}}
    config = settings(tmp_path, "http://h", tasks=tasks, agents=agents)
    assert ["sibling", "sibling", "prompt_group", "sibling"] == [g.granularity for g in config.groups()]
    config = settings(tmp_path, "http://h", tasks=tasks, agents=agents, granularity="prompt_group")
    assert ["prompt_group", "sibling", "prompt_group", "prompt_group"] == [g.granularity for g in config.groups()]
    ledger = Ledger(tmp_path / "l.sqlite", "r1")
    ledger.call(transitions.plan, config.groups())
    ledger.call(settling.settle, "gym", [success(f"r1_g{g}_s0") for g in range(4)], 3)
    assert [["r1_g1_s0"]] == ledger.read(queries.ready), "of the other groups a sibling is missing"
    ledger.close()


def test_metrics_of_attempts_and_outcomes_say_why(tmp_path: Path) -> None:
    """Reservations by origin are the whole run's; nothing in a name comes from a rollout."""
    from reference_rl.columns import SWITCHES
    from reference_rl.events import Events

    ledger = Ledger(tmp_path / "l.sqlite", "r1")
    ledger.call(transitions.plan, [planned()])
    ledger.call(transitions.mark_sent, ["r_g0_s0", "r_g0_s1"])
    settle(ledger, failure("r_g0_s0"))
    ledger.call(transitions.reserve, [Reservation("r_g0_s1", "restore of 1-1: continued")], 1)
    values = collect(SWITCHES[3], ledger, Events(), None)
    assert (4, 2) == (values["ckpt_attempts"], values["ckpt_attempts_reserved"])
    reserved = {name: value for name, value in values.items() if name.startswith("ckpt_attempts_reserved{")}
    assert {
        'ckpt_attempts_reserved{origin="restore"}': 1,
        'ckpt_attempts_reserved{origin="retry"}': 1,
    } == reserved
    ledger.close()
