# SPDX-License-Identifier: Apache-2.0
"""The ledger: durable, shared, and strict about which results it lets in."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reference_rl import queries, settling, transitions
from reference_rl.errors import EpochTaken, InvariantViolated, LedgerVersion, Superseded
from reference_rl.ledger import Ledger, open_copy
from reference_rl.records import PlannedGroup, PlannedRollout, Receipt, Reservation, ServedResult
from spec import wire


def planned(group: int = 0, siblings: int = 3, granularity: Any = "sibling") -> PlannedGroup:
    """Return one group of a Gym `gym`."""
    rollouts = tuple(
        PlannedRollout(f"r_g{group}_s{s}", group, s, "gym", "taxi", {"seed": 7}, "digest", s, {"max_turns": 5})
        for s in range(siblings)
    )
    return PlannedGroup(group, "tasks", "gym", granularity, rollouts)


def success(rollout_id: str, attempt: int = 0, reward: float = 1.0, versions: tuple[int, ...] = ()) -> ServedResult:
    """Return a served success."""
    return _served(rollout_id, attempt, versions, body={"reward": reward, "turns": 5})


def failure(rollout_id: str, attempt: int = 0, kind: str = "broken", terminal: bool = False) -> ServedResult:
    """Return a served failure."""
    return _served(rollout_id, attempt, (), failure={"kind": kind, "terminal": terminal, "turns": 1})


def _served(rollout_id: str, attempt: int, versions: tuple[int, ...], **outcome: Any) -> ServedResult:
    info = {"attempt": attempt, "policy_versions": list(versions), "data_refs": []}
    text = json.dumps({"rollout_id": rollout_id, "info": info, **outcome})
    return ServedResult(Receipt(rollout_id, attempt, wire.result_digest(text)), text, json.loads(text))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """An open ledger with one group of three."""
    opened = Ledger(tmp_path / "ledger.sqlite", "r1")
    opened.call(transitions.plan, [planned()])
    yield opened
    opened.close()


def settle(ledger: Ledger, *served: ServedResult) -> list[str]:
    """Settle a page and return the decisions."""
    return [s.decision for s in ledger.call(settling.settle, "gym", served, 3)]


def test_planning_twice_adds_nothing(ledger: Ledger) -> None:
    """The same settings after a restart give the same groups, once."""
    assert 0 == ledger.call(transitions.plan, [planned()])
    assert 3 == ledger.read(queries.counts)["unfinished"]


def test_a_result_and_its_debt_are_one_transaction(ledger: Ledger) -> None:
    """CKPT-ACK-017, CKPT-ACK-024: the current attempt's result is saved, with its debt; the answer clears that."""
    served = success("r_g0_s0")
    assert ["saved"] == settle(ledger, served)
    assert [served.receipt] == ledger.read(queries.debts, "gym")
    ledger.call(settling.clear_debts, "gym", [(served.receipt, "released")])
    assert [] == ledger.read(queries.debts, "gym")


def test_a_result_that_is_served_again_counts_once(ledger: Ledger) -> None:
    """C07, CKPT-FEED-015: the feed's reply was lost; the same result comes again and is trained once."""
    served = success("r_g0_s0")
    assert ["saved", "again"] == settle(ledger, served, served)
    assert [["r_g0_s0"]] == ledger.read(queries.ready)
    ledger.call(transitions.record_step, 1, 0, ["r_g0_s0"])
    assert ["again"] == settle(ledger, served)
    assert [] == ledger.read(queries.ready)


def test_one_rollout_is_never_consumed_twice(ledger: Ledger) -> None:
    """I3, CKPT-ID-007: a second consumption of the same rollout is refused by the ledger itself."""
    settle(ledger, success("r_g0_s0"))
    ledger.call(transitions.record_step, 1, 0, ["r_g0_s0"])
    with pytest.raises(sqlite3.IntegrityError):
        ledger.call(transitions.record_step, 2, 0, ["r_g0_s0"])
    assert (1, 0) == ledger.read(queries.trainer)


def test_another_result_of_a_finished_rollout_is_surplus(ledger: Ledger) -> None:
    """I3, CKPT-ACK-030, CKPT-ACK-031, CKPT-INV-004: the second result is noted, acknowledged, and never trained."""
    settle(ledger, success("r_g0_s0"))
    other = success("r_g0_s0", attempt=1, reward=2.0)
    assert ["surplus"] == settle(ledger, other)
    assert other.receipt in ledger.read(queries.debts, "gym")
    assert ["r_g0_s0"] == [s["rollout_id"] for s in ledger.read(queries.surplus)]


def test_a_straggler_is_trained_while_its_next_attempt_is_unconfirmed(ledger: Ledger) -> None:
    """N24: its next attempt is reserved, its first result comes before the new start was answered: saved."""
    ledger.call(transitions.reserve, [Reservation("r_g0_s0", "test")], 1)
    assert ["saved"] == settle(ledger, success("r_g0_s0", attempt=0))


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_lower_attempt_is_surplus_once_the_current_one_runs_or_a_restore_is_open(
    ledger: Ledger, confirmed: bool
) -> None:
    """CKPT-ACK-028, CKPT-ACK-029: the two conditions under which N24 does not hold."""
    ledger.call(transitions.reserve, [Reservation("r_g0_s0", "test")], 1)
    if confirmed:
        ledger.call(transitions.mark_answered, [("r_g0_s0", 1)])
    else:
        ledger.call(transitions.open_restore, "gym", 1, [], [])
    assert ["surplus"] == settle(ledger, success("r_g0_s0", attempt=0))


def test_a_kept_receipt_is_saved_whatever_the_current_attempt_is(ledger: Ledger) -> None:
    """CKPT-ACK-025: a receipt on the keep list lets its result in, also while a restore is open."""
    served = success("r_g0_s0", attempt=0)
    ledger.call(
        transitions.open_restore,
        "gym",
        1,
        [Reservation("r_g0_s0", "test"), Reservation("r_g0_s1", "x")],
        [served.receipt],
    )
    assert ["saved", "surplus"] == settle(ledger, served, success("r_g0_s1", attempt=0))
    assert [] == ledger.read(queries.kept, "gym")


def test_a_surplus_receipt_is_never_kept(ledger: Ledger) -> None:
    """A start that names a result which was settled as surplus must not wait for it."""
    ledger.call(transitions.reserve, [Reservation("r_g0_s0", "test")], 1)
    ledger.call(transitions.mark_answered, [("r_g0_s0", 1)])
    served = success("r_g0_s0", attempt=0)
    settle(ledger, served)
    assert not ledger.call(settling.keep_receipt, "gym", served.receipt)


def test_failures_lead_to_a_next_attempt_until_there_are_too_many(ledger: Ledger) -> None:
    """A non-terminal failure is retried under a higher attempt; the third one ends the rollout."""
    decisions = [settle(ledger, failure("r_g0_s0", attempt=n)) for n in range(3)]
    assert [["retry"], ["retry"], ["saved_failure"]] == decisions
    assert 1 == ledger.read(queries.counts)["failed"]


def test_a_terminal_failure_ends_the_rollout(ledger: Ledger) -> None:
    """CKPT-RESULT-018: an unknown kind is treated by `terminal` alone."""
    assert ["saved_failure"] == settle(ledger, failure("r_g0_s0", kind="never_heard_of", terminal=True))


def test_session_lost_waits_for_the_incarnations(ledger: Ledger) -> None:
    """N23, CKPT-RESTART-056, -057: no fact by itself; with a lost participant it is ACKed and the attempt stays."""
    served = failure("r_g0_s0", kind="session_lost")
    assert ["session_lost"] == settle(ledger, served)
    ledger.call(settling.settle_session_lost, "gym", served, 3, fact=False)
    row = ledger.read(queries.rollout, "r_g0_s0")
    assert row is not None
    assert (0, "unfinished") == (row.attempt, row.state)
    assert [served.receipt] == ledger.read(queries.debts, "gym")


def test_session_lost_as_a_fact_is_a_failure_like_others(ledger: Ledger) -> None:
    """Every incarnation is the known one: the session was lost by itself, the next attempt is reserved."""
    served = failure("r_g0_s0", kind="session_lost")
    settled = ledger.call(settling.settle_session_lost, "gym", served, 3, fact=True)
    assert "retry" == settled.decision


def test_a_mismatch_stops_with_its_evidence(ledger: Ledger) -> None:
    """CKPT-ACK-021: a mismatch violates an invariant."""
    served = success("r_g0_s0")
    settle(ledger, served)
    with pytest.raises(InvariantViolated) as caught:
        ledger.call(settling.clear_debts, "gym", [(served.receipt, "mismatch")])
    assert served.receipt._asdict() == caught.value.evidence["receipt"]
    assert [served.receipt] == ledger.read(queries.debts, "gym")


def test_reserved_attempts_only_rise(ledger: Ledger) -> None:
    """N9, CKPT-RESTART-026, -028, -029: never used again, above what a participant showed; the origin is stored."""
    first = ledger.call(transitions.reserve, [Reservation("r_g0_s0", "test", above=4, continues=4)], 1)
    second = ledger.call(transitions.reserve, [Reservation("r_g0_s0", "test", continues=4)], 1)
    stored = ledger.read(queries.rollout, "r_g0_s0")
    assert stored is not None
    assert (6, 4) == (stored.attempt, stored.continues)
    third = ledger.call(transitions.reserve, [Reservation("r_g0_s0", "test")], 1)
    assert [5, 6, 7] == [r["r_g0_s0"] for r in (first, second, third)]
    row = ledger.read(queries.rollout, "r_g0_s0")
    assert row is not None
    assert row.continues is None, "a start at turn 1 clears what the reservation before continued"


def test_a_group_is_ready_when_all_its_siblings_are(tmp_path: Path) -> None:
    """CKPT-RESTART-059: with granularity prompt_group training never sees half a group."""
    ledger = Ledger(tmp_path / "l.sqlite", "r1")
    ledger.call(transitions.plan, [planned(granularity="prompt_group")])
    settle(ledger, success("r_g0_s0"), success("r_g0_s1"))
    assert [] == ledger.read(queries.ready)
    settle(ledger, failure("r_g0_s2", terminal=True))
    assert [["r_g0_s0", "r_g0_s1"]] == ledger.read(queries.ready)
    ledger.close()


def test_epochs_only_rise(ledger: Ledger) -> None:
    """A lower or equal epoch is refused."""
    ledger.call(transitions.claim_epoch, 3, "a")
    with pytest.raises(EpochTaken):
        ledger.call(transitions.claim_epoch, 3, "b")


def test_a_superseded_writer_changes_nothing(ledger: Ledger) -> None:
    """C13, CKPT-CTRL-019: frozen through a takeover, a controller can neither save nor train when it wakes."""
    ledger.call(transitions.claim_epoch, 3, "old")
    ledger.bind(3)
    other = Ledger(ledger.path, "r1")
    other.call(transitions.claim_epoch, 4, "new")
    other.close()
    with pytest.raises(Superseded):
        settle(ledger, success("r_g0_s0"))
    assert 0 == ledger.read(queries.counts)["finished"]


def test_rolling_back_keeps_facts_and_drops_what_is_too_new(ledger: Ledger) -> None:
    """CKPT-RESTART-044…046: consumption goes back, results stay unless newer weights made them."""
    settle(ledger, success("r_g0_s0", versions=(1,)), success("r_g0_s1", versions=(1, 3)))
    ledger.call(transitions.record_step, 1, 1, ["r_g0_s0"])
    assert ["r_g0_s1"] == ledger.read(queries.results_newer_than, 1)
    ledger.call(transitions.roll_back_training, 0, 1, {}, ["r_g0_s1"])
    assert {"unfinished": 2, "finished": 1, "failed": 0, "trained": 0} == ledger.read(queries.counts)


def test_a_failed_transition_takes_no_other_with_it(ledger: Ledger) -> None:
    """Transitions that share a commit stand alone: one is rolled back, the others are durable."""

    def broken(con: sqlite3.Connection) -> None:
        con.execute("UPDATE rollouts SET attempt = 99")
        raise ValueError("broken")

    async def together() -> list[Any]:
        good = [ledger.do(transitions.mark_sent, [f"r_g0_s{n}"]) for n in range(3)]
        return await asyncio.gather(good[0], ledger.do(broken), *good[1:], return_exceptions=True)

    results = asyncio.run(together())
    assert ["ValueError"] == [type(r).__name__ for r in results if r is not None]
    assert [(0, True)] * 3 == [(r.attempt, r.sent) for r in ledger.read(queries.rollouts)]


def test_the_revision_moves_with_the_content_only(ledger: Ledger) -> None:
    """A snapshot may be skipped exactly when nothing has changed."""
    before = ledger.revision()
    ledger.call(transitions.mark_sent, [])
    assert before == ledger.revision()
    ledger.call(transitions.mark_sent, ["r_g0_s0"])
    assert before < ledger.revision()


_HOLD = """
import sqlite3, sys, time
con = sqlite3.connect(sys.argv[1], isolation_level=None)
con.execute("BEGIN IMMEDIATE")
print("held", flush=True)
time.sleep(2)
con.execute("COMMIT")
"""


async def test_writers_wait_for_a_foreign_lock(ledger: Ledger) -> None:
    """C72: 25 concurrent writers while another process holds the write lock for 2 s: none is lost, none fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOLD, str(ledger.path), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert b"held\n" == await process.stdout.readline()
    await asyncio.gather(
        *(ledger.do(transitions.reserve, [Reservation(f"r_g0_s{n % 3}", f"writer {n}")], 1) for n in range(25))
    )
    assert 25 == len(ledger.read(queries.attempts))
    assert 0 == await process.wait()


def test_a_second_process_reads_while_the_run_writes(ledger: Ledger) -> None:
    """The ledger can be looked at while it is in use."""
    query = "SELECT count(*) FROM rollouts"
    code = f"import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('{query}').fetchone()[0])"
    ledger.call(transitions.mark_sent, ["r_g0_s0"])
    seen = subprocess.run([sys.executable, "-c", code, str(ledger.path)], capture_output=True, text=True, check=True)
    assert "3" == seen.stdout.strip()


def test_a_copy_is_one_private_file_and_consistent(ledger: Ledger, tmp_path: Path) -> None:
    """A snapshot holds one plain file, readable without its log, mode 0600."""
    settle(ledger, success("r_g0_s0"))
    revision = ledger.copy_to(tmp_path / "copy.sqlite")
    settle(ledger, success("r_g0_s1"))
    assert ["copy.sqlite"] == sorted(p.name for p in tmp_path.glob("copy*"))
    assert 0o600 == (tmp_path / "copy.sqlite").stat().st_mode & 0o777
    con = open_copy(tmp_path / "copy.sqlite")
    assert 1 == queries.counts(con)["finished"]
    assert revision == int(con.execute("SELECT value FROM meta WHERE key = 'revision'").fetchone()[0])
    con.close()


def test_a_newer_or_foreign_ledger_is_refused(tmp_path: Path) -> None:
    """The file of a newer program, or of another run, is not touched."""
    Ledger(tmp_path / "l.sqlite", "r1").close()
    with pytest.raises(LedgerVersion, match="belongs to run 'r1'"):
        Ledger(tmp_path / "l.sqlite", "r2")
    con = sqlite3.connect(tmp_path / "l.sqlite")
    con.execute("PRAGMA user_version = 99")
    con.close()
    with pytest.raises(LedgerVersion, match="version 99"):
        Ledger(tmp_path / "l.sqlite", "r1")


def test_the_ledger_syncs_every_commit(ledger: Ledger) -> None:
    """WAL with synchronous FULL: what a transition returned for is on the disk."""

    def pragmas(con: sqlite3.Connection) -> tuple[str, int]:
        return con.execute("PRAGMA journal_mode").fetchone()[0], con.execute("PRAGMA synchronous").fetchone()[0]

    assert ("wal", 2) == ledger.call(pragmas)
