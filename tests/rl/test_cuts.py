# SPDX-License-Identifier: Apache-2.0
"""What a published snapshot holds, in which order it came to hold it, and what its indexes disagree about."""

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from reference_rl import queries, transitions
from reference_rl.crosscheck import Cut, cross_check
from reference_rl.dataplane import RowKey
from reference_rl.ledger import open_copy
from reference_rl.records import Reservation
from reference_rl.snapshots import LEDGER_FILE, REPLAY_FILE, ROWS_FILE
from reference_rl.verification import file_digest, read_index
from tests.rl.harness import dispatched, running, settings, until
from tests.rl.scripted import Fault, calls_of, one_gym, serving, three_servers

A, B, C, D = (f"r1_g0_s{n}" for n in range(4))
FOUR = {"tasks": {"siblings": 4}, "recovery": {"health_s": 60}}


async def test_a_published_snapshot_holds_what_a_restart_needs(tmp_path: Path) -> None:
    """CKPT-COMMIT-044, CKPT-SNAP-014, -015, -017…020, -022, -037…040, -042, -047, -048, CKPT-SEC-015, -016."""
    servers = three_servers()
    agent = servers[0]
    seen: dict[str, Any] = {}

    def look(operation: str) -> None:
        if operation == "commit" and "inode" not in seen:
            draft = tmp_path / "run/snapshots/1-1.tmp"
            seen["targets"] = [(draft / f"gym/gym/{s.name}").is_dir() for s in servers]
            seen["inode"] = draft.stat().st_ino
            seen["listed"] = [p.name for p in draft.parent.glob("*-*")]

    servers[0].watch = look
    async with serving(*servers), running(settings(tmp_path / "run", agent)) as run:
        await dispatched(run, agent)
        await run.session.plane.put(RowKey(B, 0, 1), {"ids": [1]})
        agent.turn(B, 2)
        agent.turn(C, 4)
        agent.finish(A)
        await run.event("trained")
        published = (await run.snapshot()).snapshot
    path = published.path
    assert ([True] * 3, ["1-1.tmp"]) == (seen["targets"], seen["listed"])
    assert (seen["inode"], "1-1") == (path.stat().st_ino, path.name), "one rename of the same directory"
    manifest = json.loads((path / "manifest.json").read_text())
    assert ("1.0", 1, "r1", "1-1") == tuple(
        manifest[n] for n in ("protocol_version", "schema_version", "run_id", "checkpoint_id")
    )
    assert (1, 0) == (manifest["trainer_step"], manifest["weights_version"])
    named = {p["name"]: p for p in manifest["gyms"][0]["participants"]}
    assert {s.name: s.incarnation for s in servers} == {n: p["incarnation"] for n, p in named.items()}
    for server in servers:
        assert named[server.name]["manifest"]["digest"] == file_digest(path / f"gym/gym/{server.name}/manifest.json")
    files = {str(p.relative_to(path)): p for p in path.rglob("*") if p.is_file()}
    digests = {entry["path"]: entry["digest"] for entry in manifest["files"]}
    assert {name: file_digest(p) for name, p in files.items() if name != "manifest.json"} == digests
    assert {path.stat().st_dev} == {p.lstat().st_dev for p in (tmp_path / "run/snapshots").rglob("*")}
    assert {0o600} == {p.stat().st_mode & 0o777 for p in files.values()}
    assert {0o700} == {p.stat().st_mode & 0o777 for p in path.rglob("*") if p.is_dir()}
    con = open_copy(path / LEDGER_FILE)
    assert {"unfinished": 2, "finished": 1, "failed": 0, "trained": 1} == queries.counts(con)
    con.close()
    replay = json.loads((path / REPLAY_FILE).read_text())["groups"]["0"]
    assert {"open": [B, C], "consumed": [A]} == {name: ids for name, ids in replay.items() if ids}
    assert {"ready", "claimed", "consumed"} <= replay.keys()
    assert [f"{B}/0/1"] == [json.loads(line)["key"] for line in (path / ROWS_FILE).read_text().splitlines()]


async def test_ledger_and_rows_are_captured_after_the_last_cut(tmp_path: Path) -> None:
    """CKPT-SNAP-004…006: what is saved while one participant has captured and another has not is in the snapshot."""
    servers = three_servers()
    agent, _, resources = servers
    resources.hold["commit"] = asyncio.Event()
    agent.page_gate = asyncio.Event()
    async with serving(*servers), running(settings(tmp_path / "run", agent)) as run:
        flushed: list[bool] = []
        flush = run.session.plane.flush

        async def noted() -> None:
            flushed.append(all(server.target for server in servers))
            await flush()

        run.session.plane.flush = noted  # type: ignore[method-assign] # to see when it is called
        await dispatched(run, agent)
        agent.finish(A)
        taking = asyncio.create_task(run.snapshot())
        await until(lambda: agent.captured and not resources.captured, "the agent has captured, resources has not")
        agent.page_gate.set()
        await run.event("finished")
        await run.session.plane.put(RowKey(A, 0, 1), {"ids": [1]})
        resources.hold["commit"].set()
        published = (await taking).snapshot
    assert [True] == flushed
    con = open_copy(published.path / LEDGER_FILE)
    assert [A] == list(queries.result_receipts(con))
    con.close()
    groups = json.loads((published.path / REPLAY_FILE).read_text())["groups"]["0"]
    assert [A] == groups["ready"] + groups["consumed"]
    assert f"{A}/0/1" in (published.path / ROWS_FILE).read_text()


async def test_one_slow_writer_delays_publication(tmp_path: Path) -> None:
    """CKPT-SNAP-008: gates are open and two of three cuts durable, and nothing is published before the third is."""
    servers = three_servers()
    servers[1].hold_write = asyncio.Event()
    async with serving(*servers), running(settings(tmp_path / "run", servers[0])) as run:
        await dispatched(run, servers[0])
        taking = asyncio.create_task(run.snapshot())
        await until(lambda: servers[0].manifest and servers[2].manifest, "two cuts are durable")
        await until(lambda: all(s.gate == "open" for s in servers), "every gate is open")
        assert [] == run.session.store.ids()
        assert not taking.done()
        servers[1].hold_write.set()
        assert "published" == (await taking).outcome


async def test_what_the_indexes_disagree_about_is_restarted(tmp_path: Path) -> None:
    """CKPT-SNAP-010…013, CKPT-RESTART-040: listed as restart, row missing, effects differ: named, and never continued.

    The fourth sibling is continued, and alone stands in the lists of the restore.
    """
    servers = three_servers()
    agent, _, resources = servers
    async with serving(*servers):
        async with running(settings(tmp_path / "run", agent, **FOUR)) as run:
            await dispatched(run, agent, 4)
            for rollout_id in (A, B, C, D):
                agent.turn(rollout_id, 2)
            resources.runs[A].state = "restart"
            del resources.runs[B]
            resources.runs[C].turns = 1
            snapshot = (await run.snapshot()).snapshot
            reasons = {rollout_id: record.reason for (_, rollout_id), record in snapshot.restarts().items()}
            assert {A: "uncertain", B: "row_missing", C: "effects_differ"} == reasons
        for server in servers:
            server.new_life()
            server.calls.clear()
        async with running(settings(tmp_path / "run", agent, **FOUR)) as run:
            restarted = await run.event("restarted")
            hows = {r["rollout_id"]: (r["how"], r["turns_done"]) for r in restarted["rollouts"]}
            assert {A: ("restarted", 0), B: ("restarted", 0), C: ("restarted", 0), D: ("continued", 2)} == hows
            said = {r["rollout_id"]: r["reason"] for r in restarted["rollouts"]}
            assert all(reasons[r] in said[r] for r in reasons)
        for server in servers:
            body = calls_of(server)["restore"][0]
            assert [D] == [r["rollout_id"] for r in body["rollouts"]]
            assert [A, B, C] == [f["rollout_id"] for f in body["fences"]]


def test_an_unknown_state_of_an_index_is_a_restart(tmp_path: Path) -> None:
    """CKPT-VER-010: a row of a state, and for a reason, that this version does not know begins at turn 1."""
    row = {"rollout_id": A, "attempt": 0, "state": "hibernating", "reason": "too_cold", "turns_done": 3}
    row |= {"task_digest": "d", "environment": "taxi", "effects": {"taxi": 3}, "data_refs": []}
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(row) + "\n")
    found = cross_check([Cut("agent", True, frozenset({"taxi"}), read_index(path))])
    assert [(A, "other")] == [(r.rollout_id, r.reason) for r in found]


async def test_owed_acks_are_settled_first_and_hold_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CKPT-SNAP-002, CKPT-SNAP-003: ACKs before the first prepare; a dead route for them stops no snapshot."""
    gym = one_gym()
    gym.faults["acks"] = Fault("500")
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        await dispatched(run, gym)
        gym.finish(A)
        await run.event("trained")
        assert "published" == (await run.snapshot()).outcome
        assert 1 == run.session.ledger.read(queries.debt_count)
        gym.faults.clear()
        monkeypatch.setattr("reference_rl.rollouts.DEBT_REST_S", 60.0)
        gym.turn(B)
        began = len(gym.calls)
        assert "published" == (await run.snapshot()).outcome
        operations = [operation for operation, _ in gym.calls[began:] if operation in ("acks", "prepare")]
        assert ["acks", "prepare"] == operations[:2]
        assert 0 == run.session.ledger.read(queries.debt_count)


async def test_a_cut_that_was_aborted_is_never_published(tmp_path: Path) -> None:
    """CKPT-COMMIT-045: two of three cuts have whole manifests when the third fails: nothing of them is published."""
    servers = three_servers()
    servers[1].faults["commit"] = Fault("insufficient_storage", after=1)
    async with serving(*servers), running(settings(tmp_path / "run", servers[0])) as run:
        await dispatched(run, servers[0])
        report = await run.snapshot()
        assert ("failed", True) == (report.outcome, "insufficient_storage" in report.reason)
        assert [True, True] == [bool(s.manifest) for s in (servers[0], servers[2])]
        assert [] == [p.name for p in (tmp_path / "run/snapshots").glob("*-*")]
        assert ["1-1"] * 3 == [[b["checkpoint_id"] for b in calls_of(s)["abort"]][-1] for s in servers]


async def test_a_marker_comes_before_its_snapshot(tmp_path: Path) -> None:
    """CKPT-SNAP-032: with a trainer checkpoint the marker is there when the first prepare of its snapshot arrives."""
    gym = one_gym()
    found: list[str] = []
    marker = tmp_path / "run/gym-restart-fallback.json"

    def look(operation: str) -> None:
        if operation == "prepare":
            found.append(json.loads(marker.read_text())["trainer_checkpoint"])

    gym.watch = look
    async with serving(gym), running(settings(tmp_path / "run", gym, trainer={"checkpoint_every": 1})) as run:
        await dispatched(run, gym)
        gym.finish(A)
        await run.event("snapshot_published")
    assert ["step-1"] == found[:1]


async def test_each_participant_is_asked_for_its_own_rows(tmp_path: Path) -> None:
    """CKPT-RESTORE-045, CKPT-RESTORE-046: rows and turns of the addressed participant's own index, `turn` rows alone.

    B has done a third turn without effects, of which the session owner knows nothing, and C has no session at all.
    """
    servers = three_servers()
    agent, _, resources = servers
    async with serving(*servers):
        async with running(settings(tmp_path / "run", agent)) as run:
            await dispatched(run, agent)
            agent.turn(B, 2)
            agent.turn_without_effect(B)
            agent.turn_without_effect(C)
            agent.turn(A, 1)
            agent.page_gate = asyncio.Event()
            agent.finish(A)
            await run.snapshot()
        agent.page_gate = None
        for server in servers:
            server.new_life()
            server.calls.clear()
        async with running(settings(tmp_path / "run", agent)) as run:
            await run.event("restarted")
        lists = {
            s.name: {r["rollout_id"]: r["turns_done"] for r in calls_of(s)["restore"][0]["rollouts"]}
            for s in (agent, resources)
        }
        assert {"agent": {B: 3, C: 1}, "resources": {B: 2}} == lists
        assert [A] == [r["rollout_id"] for r in calls_of(agent)["restore"][0]["results"]]
        assert [] == calls_of(resources)["restore"][0]["results"]


async def test_only_a_published_snapshot_is_read(tmp_path: Path) -> None:
    """CKPT-RESTART-019: a whole copy under a draft's name, one in the trash, an empty directory: all ignored."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            gym.turn(A, 2)
            await run.snapshot()
        root = tmp_path / "run/snapshots"
        for copy in ("8-1.tmp", ".trash/7-1"):
            shutil.copytree(root / "1-1", root / copy)
        (root / "9-9").mkdir()
        gym.new_life()
        async with running(settings(tmp_path / "run", gym)) as run:
            restarted = await run.event("restarted")
            assert ("1-1", 2) == (restarted["snapshot"], gym.runs[A].turns)
            assert ["9-9: manifest.json"] == sorted({":".join(t.split(":")[:2]) for t in restarted["refused"]})
            assert [] == list(root.glob("*.tmp"))


async def test_a_damaged_part_is_passed_over_alone(tmp_path: Path) -> None:
    """CKPT-RESTART-016, CKPT-RESTART-017: RL keeps the newest whose RL part is sound, each Gym the newest of its own.

    One Gym's cut of 1-2 is damaged: that Gym takes 1-1, the other one and RL take 1-2. With the ledger of 1-2 damaged
    RL as a whole, and every Gym with it, goes back to 1-1.
    """
    good, bad = one_gym(), one_gym()
    async with serving(good, bad):
        gyms = [{"alias": "good", "url": good.url}, {"alias": "bad", "url": bad.url}]
        config = settings(tmp_path / "run", good, gyms=gyms, tasks={"groups": 2, "siblings": 1})
        async with running(config) as run:
            await until(lambda: good.runs and bad.runs, "each Gym runs a group")
            await run.event("dispatched", 2)
            for _ in range(2):
                good.turn("r1_g0_s0", 1)
                bad.turn("r1_g1_s0", 1)
                await run.snapshot()
        victim = tmp_path / "run/snapshots/1-2/gym/bad/gym/rollouts.jsonl"
        victim.write_bytes(victim.read_bytes()[:-1])
        for gym in (good, bad):
            gym.new_life()
        async with running(config) as run:
            restarted = await run.event("restarted")
            assert ("snapshot", (2, 1)) == (
                restarted["rl_from"],
                (good.runs["r1_g0_s0"].turns, bad.runs["r1_g1_s0"].turns),
            )
        victim = tmp_path / "run/snapshots/1-2/rl/ledger.sqlite"
        victim.write_bytes(victim.read_bytes()[:-1])
        for gym in (good, bad):
            gym.new_life()
        async with running(config) as run:
            restarted = await run.event("restarted")
            assert "1-1" == restarted["snapshot"]
            assert (1, 1) == (good.runs["r1_g0_s0"].turns, bad.runs["r1_g1_s0"].turns)
            assert any("rl/ledger.sqlite" in text for text in restarted["refused"])


async def test_nothing_live_is_touched_before_the_snapshot_is_verified(tmp_path: Path) -> None:
    """CKPT-RESTART-013: when files are read no call but the first abort has reached the Gym; bad ones reach none."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            for _ in range(2):
                gym.turn(A, 1)
                await run.snapshot()
        victim = tmp_path / "run/snapshots/1-2/gym/gym/gym/rollouts.jsonl"
        victim.write_bytes(victim.read_bytes()[:-1])
        gym.new_life()
        gym.calls.clear()
        async with running(settings(tmp_path / "run", gym)) as run:
            verify = run.session.store.verify
            sent: list[set[str]] = []

            def noting(*arguments: Any) -> Any:
                sent.append({operation for operation, _ in gym.calls} & {"restore", "retire", "start", "resume"})
                return verify(*arguments)

            run.session.store.verify = noting  # type: ignore[method-assign] # to see when it is called
            await run.event("restarted")
            assert sent
            assert all(not operations for operations in sent)
            assert ["1-1"] == [body["source"]["checkpoint_id"] for body in calls_of(gym)["restore"]]


async def test_a_rollout_that_was_started_anew_after_the_cut_is_not_continued(tmp_path: Path) -> None:
    """CKPT-RESTART-037: the snapshot's attempt is neither the ledger's nor its origin: turn 1, under a new attempt."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym)) as run:
            await dispatched(run, gym)
            gym.turn(A, 2)
            gym.turn(B, 2)
            await run.snapshot()
            gym.fail(A)
            await run.event("retried")
            await until(lambda: A in gym.runs and gym.runs[A].attempt == 1, "attempt 1 of it runs")
            await run.session.ledger.do(transitions.reserve, [Reservation(C, "a start that was lost", 4)], 1)
        gym.new_life()
        async with running(settings(tmp_path / "run", gym)) as run:
            restarted = await run.event("restarted")
            assert [("restarted", 0), ("continued", 2), ("restarted", 0)] == [
                (r["how"], r["turns_done"]) for r in restarted["rollouts"]
            ]
            await until(lambda: len(gym.runs) == 3, "all run")
            assert {A: 2, B: 1, C: 6} == {r: work.attempt for r, work in gym.runs.items()}


async def test_a_gym_that_answers_at_once_is_asked_at_a_pace(tmp_path: Path) -> None:
    """CKPT-DUTY-033: it is asked to wait, for its readiness and for results, and does not: no loop lacks a rest."""
    gym = one_gym()
    gym.waits_s, gym.blocked = 0.0, asyncio.Event()
    limits = {"snapshot": {"timeout_ms": 500}, "client": {"first_wait_s": 0.1, "longest_wait_s": 0.1}}
    async with serving(gym), running(settings(tmp_path / "run", gym, **limits)) as run:
        await dispatched(run, gym)
        began, asked = time.monotonic(), len(calls_of(gym)["results"])
        assert "failed" == (await run.snapshot()).outcome
        most = 2 + (time.monotonic() - began) / 0.1
        assert 2 <= len(calls_of(gym)["prepare"]) <= most
        assert len(calls_of(gym)["results"]) - asked <= most
