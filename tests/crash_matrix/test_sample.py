# SPDX-License-Identifier: Apache-2.0
"""A seeded part of the crash matrix, and proof that its judge can say no."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reference_gym.participant.failpoints import points_of
from reference_rl import failpoints
from tests.crash_matrix import judge, report
from tests.crash_matrix.bench import Bench, Kill
from tests.crash_matrix.cells import (
    DISCARDED,
    NOT_HERE,
    ONE,
    RESTART,
    ROLES,
    SAVE,
    VICTIMS,
    WORK,
    Cell,
    every_cell,
    part,
    point_of,
    role_of,
    sample,
)
from tests.crash_matrix.forks import fork_server
from tests.crash_matrix.story import Verdict, run_cell, uninterrupted
from tests.rl.policy import Call, Policy

SEED = int(os.environ.get("CRASH_MATRIX_SEED", "1"))


AT_A_TIME = 3


@pytest.mark.timeout(300)
async def test_a_crash_of_every_kind_costs_nothing(tmp_path: Path) -> None:
    """C40, N9, N15, C25: work, save, restart, adoption, pairs, with and without a log; I1–I10 hold after each."""
    await all_hold(tmp_path, sample(SEED))


@pytest.mark.timeout(200)
async def test_a_participant_that_dies_while_a_controller_takes_office_costs_nothing(tmp_path: Path) -> None:
    """CKPT-CTRL-021: killed between discovery and the first call, or while it is adopted: it is discovered again."""
    wanted = [
        Cell("restart", "restart.claimed", None, "model"),
        Cell("adopt", "restart.known", None, "agent", log=True),
    ]
    await all_hold(tmp_path, wanted)


async def all_hold(directory: Path, cells: list[Cell]) -> None:
    """Run cells, a few at a time."""
    queue = list(enumerate(cells))
    verdicts: list[Verdict] = []
    (directory / "whole").mkdir()
    async with fork_server() as forks:
        yardstick = await uninterrupted(forks, directory / "whole")

        async def worker() -> None:
            while queue:
                number, cell = queue.pop(0)
                (directory / str(number)).mkdir()
                verdicts.append(await run_cell(forks, cell, directory / str(number), yardstick))

        await asyncio.gather(*(worker() for _ in range(AT_A_TIME)))
    assert [] == [verdict for verdict in verdicts if verdict.outcome != "held"]
    assert len(cells) == len(verdicts)


def test_the_matrix_leaves_out_no_step_of_rl_and_no_victim() -> None:
    """Every named step of RL is crashed at by every victim, singly; every save step meets every step of a restart."""
    cells = every_cell()
    steps = {*WORK, *SAVE, *RESTART}
    assert failpoints.POINTS == steps
    singly = {(cell.first, cell.victim, cell.log) for cell in cells if cell.second is None and not role_of(cell.first)}
    assert singly == {(step, victim, log) for step in steps for victim in VICTIMS for log in (False, True)}
    pairs = [cell for cell in cells if cell.second is not None and not role_of(cell.first + cell.second)]
    assert {(cell.first, cell.second) for cell in pairs} == {(a, b) for a in SAVE for b in RESTART}
    assert len(cells) == len({cell.name for cell in cells})
    parts = [cell for number in (1, 2, 3) for cell in part(cells, number, 3)]
    assert sorted(cells, key=str) == sorted(parts, key=str)


def test_the_matrix_leaves_out_no_point_of_the_gym_without_a_reason() -> None:
    """Every point of every process of the Gym has a cell, in three processes and in one, or says why it has none."""
    cells = [cell for cell in every_cell() if cell.second is None or cell.kind == "restart+abort"]
    steps = {step for cell in cells for step in (cell.first, cell.second) if step and role_of(step)}
    for role in (*ROLES, ONE):
        points = {point for point in points_of("all" if role == ONE else role) if f"{role}/{point}" not in NOT_HERE}
        points -= NOT_HERE.keys()
        if role in ("agent", ONE):
            points -= {DISCARDED}  # whoever is restored last, or alone, has nobody whose failure could discard it
        assert points == {point_of(step) for step in steps if role_of(step) == role}, role
    assert not NOT_HERE.keys() & (steps | {point_of(step) for step in steps})


async def test_a_gym_is_armed_before_rl_can_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore in place begins as soon as RL reads the new addresses: by then every point has to be armed."""
    bench = bench_with(tmp_path, [], [], [])
    bench.client = cast(Any, SimpleNamespace(returncode=None))
    steps = []
    for name in ("_start_roles", "arm"):
        monkeypatch.setattr(bench, name, _noting(steps, name))
    monkeypatch.setattr(bench, "_announce", lambda: steps.append("_announce"))
    await bench.bring_back(armed={"resources": "restore.installed"})
    assert ["_start_roles", "arm", "_announce"] == steps
    bench.roles = cast(Any, {"agent": None})
    with pytest.raises(AssertionError, match="where RL looks for it"):
        await bench.bring_back(armed={"resources": "restore.installed"})


def _noting(steps: list[str], name: str) -> Any:
    async def note(*arguments: Any) -> None:
        steps.append(name)

    return note


def bench_with(tmp_path: Path, events: list[dict[str, Any]], calls: list[Call], kills: list[Kill]) -> Bench:
    """Return a bench that has seen all that already; its only snapshot, 1-1, lists 2 turns of `m_g0_s1`."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    bench = Bench(cast(Any, None), tmp_path, Policy(calls=calls), {"groups": 1, "siblings": 2})
    bench.kills = kills
    bench.listed["1-1"] = {"m_g0_s1": 2}
    return bench


RESTARTED = {"event": "restarted", "snapshot": "1-1", "gyms": {"gym": "restored"}, "refused": []}
PUBLISHED = [{"event": "snapshot_published", "checkpoint_id": name, "gyms": ["gym"]} for name in ("1-1", "1-2")]
NOW = time.monotonic()


@pytest.mark.parametrize(("turn", "violations"), [(3, 0), (2, 1), (1, 1)])
def test_a_listed_turn_that_is_asked_for_again_is_found(tmp_path: Path, turn: int, violations: int) -> None:
    """I2: the turn after the listed ones is legal, a listed one is not."""
    call = Call("m_g0_s1", 1, turn, NOW + 1)
    bench = bench_with(tmp_path, [RESTARTED], [call], [Kill(NOW, ("all",), "x", 0, 1)])
    assert violations == len(judge.regenerated(bench))


def test_a_turn_asked_for_between_two_crashes_of_one_restart_is_found(tmp_path: Path) -> None:
    """I2: a restart that was itself cut short has no licence."""
    kills = [Kill(NOW, ("all",), "x", 0, 1), Kill(NOW + 2, ("rl",), "y", 0, 1)]
    bench = bench_with(tmp_path, [RESTARTED], [Call("m_g0_s1", 1, 2, NOW + 1)], kills)
    assert 1 == len(judge.regenerated(bench))


def test_a_rollout_that_failed_after_the_cut_may_begin_again(tmp_path: Path) -> None:
    """I2 excuses what failed by itself after the restore."""
    retried = {"event": "retried", "rollout_id": "m_g0_s1", "reason": "policy_unavailable"}
    call = Call("m_g0_s1", 2, 1, NOW + 1)
    bench = bench_with(tmp_path, [RESTARTED, retried], [call], [Kill(NOW, ("all",), "x", 0, 1)])
    assert [] == judge.regenerated(bench)


def test_a_rollout_that_the_trainer_takes_twice_is_found(tmp_path: Path) -> None:
    """I3: once for each time that the trainer went back, and no more."""
    trained = {"event": "trained", "rollouts": ["m_g0_s1"]}
    events = [trained, {"event": "rolled_back"}, trained]
    bench = bench_with(tmp_path, events, [], [])
    assert [] == judge.consumed_twice(bench)
    (tmp_path / "run" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*events, trained]))
    assert ["I3: the trainer took m_g0_s1 twice"] == judge.consumed_twice(bench)


def test_a_finished_turn_that_is_asked_for_again_is_found_without_any_restore(tmp_path: Path) -> None:
    """I2, C25: by the policy's log alone; behind a restore only what its snapshot does not list."""
    calls = [Call("m_g0_s1", 0, turn, NOW - 9 + turn) for turn in (1, 2, 3, 4)]
    again = [Call("m_g0_s1", 1, turn, NOW + turn) for turn in (3, 2)]
    kills = [Kill(NOW, ("all",), "x", 0, 1)]
    assert 2 == len(judge.gone_back(bench_with(tmp_path, [], calls + again, kills)))
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(RESTARTED) + "\n")
    bench = Bench(cast(Any, None), tmp_path, Policy(calls=calls + again), {})
    bench.kills, bench.listed["1-1"] = kills, {"m_g0_s1": 2}
    assert ["I2: turn 2 of m_g0_s1 was finished, and is asked for again"] == judge.gone_back(bench)


def test_an_older_snapshot_than_the_newest_is_found(tmp_path: Path) -> None:
    """I6: 1-2 was published, 1-1 was restored."""
    assert 1 == len(judge.newest_was_used(bench_with(tmp_path, [*PUBLISHED, RESTARTED], [], [])))


def test_a_snapshot_without_the_gym_is_not_missed(tmp_path: Path) -> None:
    """I6 looks for the newest one that holds the Gym: column 2 publishes others while a Gym is away."""
    events = [*PUBLISHED[:1], {**PUBLISHED[1], "gyms": []}, RESTARTED]
    assert [] == judge.newest_was_used(bench_with(tmp_path, events, [], []))


def test_lost_and_doubled_and_differing_samples_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I1, I3, I8, I10 and the accounts: each has its line."""
    bench = bench_with(tmp_path, [], [], [])
    row = {"group": 0, "sibling": 0, "rollout_id": "m_g0_s0", "attempt": 0, "body": {"turns": 5}}
    (tmp_path / "run" / "results.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    monkeypatch.setattr(judge, "_ledger", lambda bench: [])
    counts = dict.fromkeys(("admitted", *judge.PARTS), 0)
    good = {"counts": counts, "gate": "open", "phase": "idle"}
    bad = {"counts": {**counts, "admitted": 1}, "gate": "closed", "phase": "prepared"}
    yardstick = {(0, 0): {"turns": 4}, (0, 1): {"turns": 5}}
    found = judge.at_the_end(bench, {"good": good, "bad": bad}, yardstick)
    assert ["I3", "accounting", "I8", "I1", "I10"] == [text.partition(":")[0] for text in found]


def test_a_cell_that_was_not_run_is_no_success(tmp_path: Path) -> None:
    """Only a matrix in which every cell held has exit code 0; the record survives its process."""
    cells = every_cell()[:2]
    record = report.Record(tmp_path / "record.jsonl")
    out = cast(Any, SimpleNamespace(write=lambda text: None))
    record.add(Verdict(cells[0].name))
    assert 1 == report.write(cells, record.verdicts(), tmp_path, out)
    record.add(Verdict(cells[1].name, "not reached"))
    assert 1 == report.write(cells, record.verdicts(), tmp_path, out)
    record.add(Verdict(cells[1].name))
    assert 0 == report.write(cells, report.Record(tmp_path / "record.jsonl").verdicts(), tmp_path, out)
    assert 2 == (tmp_path / "crash-matrix.svg").read_text().count(": held</title>")
