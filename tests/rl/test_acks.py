# SPDX-License-Identifier: Apache-2.0
"""From a served result to a settled debt: what is saved, in which order, and what no ACK is sent for."""

import asyncio
import contextlib
import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from reference_rl import queries, settling, transitions
from reference_rl.batching import batches
from reference_rl.errors import InvariantViolated
from reference_rl.ledger import Ledger
from reference_rl.managed import ManagedSession
from reference_rl.records import Reservation
from spec import wire
from spec.messages import ParticipantLimits
from tests.rl.harness import dispatched, running, settings, until
from tests.rl.scripted import Fault, ScriptedParticipant, calls_of, one_gym, serving
from tests.rl.test_ledger import planned, settle, success

A, B, C = "r1_g0_s0", "r1_g0_s1", "r1_g0_s2"
SURVIVES = {"trainer": {"survives": True}}


async def test_no_ack_is_sent_before_the_result_is_durable(tmp_path: Path) -> None:
    """CKPT-ACK-016: while another process holds the ledger's write lock a served result is neither saved nor ACKed."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym, recovery={"health_s": 60})) as run:
        await dispatched(run, gym)
        with contextlib.closing(sqlite3.connect(tmp_path / "run/ledger.sqlite", isolation_level=None)) as con:
            con.execute("BEGIN IMMEDIATE")
            gym.finish(A)
            await until(lambda: gym.hits["results served"], "it is served")
            await asyncio.sleep(0.3)
            assert "acks" not in calls_of(gym)
            assert {} == run.session.ledger.read(queries.result_receipts)
        await until(lambda: A in gym.released, "saved, then acknowledged")


async def test_an_ack_is_owed_until_it_is_answered(tmp_path: Path) -> None:
    """CKPT-ACK-018, CKPT-ACK-020: acted on and never answered: owed, sent again, cleared by `already_released`."""
    gym = one_gym()
    gym.faults["acks"] = Fault("reset_after")
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        await dispatched(run, gym)
        gym.finish(A)
        await until(lambda: A in gym.released and gym.hits["acks"] >= 2, "released, and the answer lost")
        assert [A] == [r.rollout_id for r in run.session.ledger.read(queries.debts, "gym")]
        gym.faults.clear()
        acked = await run.event("acked")
        assert 1 == acked["already_released"]
        assert [] == run.session.ledger.read(queries.debts, "gym")


@pytest.mark.parametrize("outcome", ["released", "already_released", "unknown"])
def test_each_settled_outcome_clears_the_debt(tmp_path: Path, outcome: str) -> None:
    """CKPT-ACK-020: whichever of the three it is, nothing is owed any more."""
    ledger = Ledger(tmp_path / "l.sqlite", "r1")
    ledger.call(transitions.plan, [planned()])
    served = success("r_g0_s0")
    settle(ledger, served)
    ledger.call(settling.clear_debts, "gym", [(served.receipt, outcome)])
    assert [] == ledger.read(queries.debts, "gym")
    ledger.close()


async def test_the_end_of_a_run_repeats_no_ack_that_is_on_its_way(tmp_path: Path) -> None:
    """CKPT-ACK-018: everything is trained while the last ACK is not answered yet: its answer is awaited."""
    gym = one_gym()
    gym.hold["acks"] = asyncio.Event()
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        await dispatched(run, gym)
        for rollout_id in (A, B, C):
            gym.finish(rollout_id)
        await until((run.run_dir / "results.jsonl").exists, "the run is at its end")
        gym.hold["acks"].set()
        assert 0 == await run.done()
    assert {A: 1, B: 1, C: 1} == acks_of(gym)


async def test_a_snapshot_that_does_not_wait_for_an_ack_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CKPT-SNAP-003, CKPT-ACK-018: the snapshot goes on without the answer; that comes later, and no second ACK."""
    monkeypatch.setattr("reference_rl.checkpointer.SETTLE_S", 0.01)
    gym = one_gym()
    gym.hold["acks"] = asyncio.Event()
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        await dispatched(run, gym)
        gym.page_gate = asyncio.Event()
        for rollout_id in (A, B):
            gym.finish(rollout_id)
        gym.page_gate.set()
        await run.event("trained", 2)
        assert "published" == (await run.snapshot()).outcome
        assert "published" == (await run.session.checkpointer.take(only_if_moved=False)).outcome  # type: ignore[union-attr] # it is there
        assert 2 == run.session.ledger.read(queries.debt_count)
        gym.hold["acks"].set()
        await until(lambda: {A, B} <= gym.released.keys(), "both are released")
        gym.finish(C)
        assert 0 == await run.done()
    assert {A: 1, B: 1, C: 1} == acks_of(gym)


def acks_of(gym: ScriptedParticipant) -> Counter[str]:
    """Return how often each rollout was acknowledged."""
    return Counter(receipt["rollout_id"] for body in calls_of(gym)["acks"] for receipt in body["receipts"])


async def test_released_for_an_unfinished_rollout_stops_the_run(tmp_path: Path) -> None:
    """CKPT-ACK-022: the ledger calls it unfinished, the Gym calls it released: no result would ever come."""
    gym = one_gym()
    gym.released[B] = (0, "sha256:x")
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        with pytest.raises(InvariantViolated, match=f"{B} released, the ledger calls it unfinished") as caught:
            await run.done()
        assert {"call", "answer", "ledger"} <= caught.value.evidence.keys()


async def test_siblings_are_acknowledged_one_by_one(tmp_path: Path) -> None:
    """CKPT-ACK-023: with granularity prompt_group each is ACKed when it is saved, while its siblings still run."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym, granularity="prompt_group")) as run:
        await dispatched(run, gym)
        gym.finish(A)
        await until(lambda: A in gym.released, "the first is released")
        assert {B, C} == gym.runs.keys()
        assert [] == run.session.ledger.read(queries.ready)


async def test_a_result_that_a_start_names_is_saved(tmp_path: Path) -> None:
    """CKPT-ACK-026: attempt 1 is started over a finished attempt 0: its receipt is kept, its result counts."""
    gym = one_gym()
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym, **SURVIVES)) as run:
            await dispatched(run, gym)
            gym.page_gate = asyncio.Event()
            gym.finish(A)
            await run.session.ledger.do(transitions.reserve, [Reservation(A, "a start that was never sent")], 1)
        async with running(settings(tmp_path / "run", gym, **SURVIVES)) as run:
            kept = await until(lambda: run.session.ledger.read(queries.kept, "gym"), "the receipt is kept")
            assert [(A, 0)] == [(r.rollout_id, r.attempt) for r in kept]
            gym.page_gate.set()
            finished = await run.event("finished")
            assert (A, 0, "on the keep list") == tuple(finished[n] for n in ("rollout_id", "attempt", "reason"))


async def test_a_result_that_a_retire_names_is_saved(tmp_path: Path) -> None:
    """CKPT-ACK-027: what finished before it could be retired is kept, and its result comes and counts."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        await dispatched(run, gym)
        gym.page_gate = asyncio.Event()
        gym.finish(A)
        assert isinstance(run.session, ManagedSession)
        manager = run.session.managers["gym"]
        await manager._living.retire_everywhere(manager.gym, [(A, 0)])
        assert [(A, 0)] == [(r.rollout_id, r.attempt) for r in run.session.ledger.read(queries.kept, "gym")]
        await run.session.ledger.do(transitions.reserve, [Reservation(A, "retired")], 1)
        gym.page_gate.set()
        finished = await run.event("finished")
        assert (A, 0) == (finished["rollout_id"], finished["attempt"])


async def test_a_result_that_is_not_its_receipts_is_neither_saved_nor_acknowledged(tmp_path: Path) -> None:
    """CKPT-RESULT-017: one damaged string: the run stops with the two digests, nothing of it is saved or ACKed."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        await dispatched(run, gym)
        gym.finish(A)
        assert gym.runs[A].result is not None
        gym.runs[A].served_as = gym.runs[A].result.replace("1.0", "9.0")
        with pytest.raises(InvariantViolated, match="not the one that its receipt names"):
            await run.done()
        assert {} == run.session.ledger.read(queries.result_receipts)
        assert "acks" not in calls_of(gym)


async def test_a_result_is_kept_as_the_string_that_it_was(tmp_path: Path) -> None:
    """CKPT-RESULT-019: odd spacing, doubled keys and escapes are hashed, stored and acknowledged as they came."""
    odd = '{ "rollout_id" :"r1_g0_s0","body":{"turns":0 , "reward":1.50,"x":1,"x":2,"s":"\\u00e9é"},"info":{}}\n'
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        await dispatched(run, gym)
        gym.runs[A].result, gym.runs[A].state = odd, "finished"
        gym.touch()
        await until(lambda: A in gym.released, "released by its digest")
        row = next(r for r in run.session.ledger.read(queries.result_rows) if r["rollout_id"] == A)
        assert (odd, wire.result_digest(odd)) == (row["result"], row["digest"])


async def test_a_cursor_is_handed_back_as_it_came(tmp_path: Path) -> None:
    """CKPT-FEED-014: a cursor of any text comes back unchanged, and nothing else is made of it."""
    gym = one_gym()
    gym.cursor = "ü%2F&a=b#?+ \"'/é~"
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        await dispatched(run, gym)
        await until(lambda: any("after" in q for q in calls_of(gym)["results"]), "a second page was asked for")
        assert {gym.cursor} == {q["after"] for q in calls_of(gym)["results"] if "after" in q}
        gym.finish(A)
        await run.event("finished")


async def test_a_page_of_another_feed_is_discarded(tmp_path: Path) -> None:
    """N19, CKPT-FEED-013: the page names a feed that is not the current one: none of it counts, all is read anew."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        await dispatched(run, gym)
        before = gym.feed
        gym.feed = "f-after-a-restore"
        gym.finish(A)
        discarded = await run.event("page_discarded")
        assert ("f-after-a-restore", before) == (discarded["feed"], discarded["expected"])
        finished = await run.event("finished")
        assert finished["t"] > discarded["t"], "read again, from the beginning of the present feed"


async def test_batches_keep_within_the_limits_of_the_participant(tmp_path: Path) -> None:
    """CKPT-ROLL-059: starts, ACKs and retires of three rollouts at a participant that takes two at a time."""
    gym = one_gym()
    gym.limits = {"max_batch": 2}
    async with serving(gym):
        async with running(settings(tmp_path / "run", gym, **SURVIVES)) as run:
            await dispatched(run, gym)
            await run.session.ledger.do(transitions.reserve, [Reservation(r, "lost") for r in (A, B, C)], 1)
        async with running(settings(tmp_path / "run", gym, **SURVIVES)) as run:
            await until(lambda: 3 == len([r for r in gym.runs.values() if r.attempt]), "all started anew")
            gym.page_gate = asyncio.Event()
            for rollout_id in (A, B, C):
                gym.finish(rollout_id)
            gym.page_gate.set()
            assert 0 == await run.done()
    sizes = {op: [len(next(v for v in b.values() if isinstance(v, list))) for b in calls_of(gym)[op]] for op in BATCHED}
    assert all(size <= 2 for found in sizes.values() for size in found), sizes
    assert {"start": 6, "retire": 3, "acks": 3}.items() <= {op: sum(found) for op, found in sizes.items()}.items()


BATCHED = ("start", "retire", "acks")


def test_batches_keep_within_bytes() -> None:
    """CKPT-ROLL-059: items are split by their bytes too; one that is too long alone goes alone."""
    fields: dict[str, Any] = dict.fromkeys(ParticipantLimits.model_fields, 1000)
    limits = ParticipantLimits.model_construct(**fields | {"max_batch": 10, "max_body_bytes": 4096 + 100})
    items = ["x" * 40, "y" * 40, "z" * 40, "w" * 400, "v"]
    found = list(batches(items, limits, str))
    assert [["x" * 40, "y" * 40], ["z" * 40], ["w" * 400], ["v"]] == found
    assert all(len(json.dumps(batch)) <= 104 for batch in found if len(batch) > 1)
