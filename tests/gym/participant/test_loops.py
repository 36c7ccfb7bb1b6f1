# SPDX-License-Identifier: Apache-2.0
"""What becomes of loops that fail, misbehave or swallow their cancellation; and the other kinds of participant."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from reference_gym.participant import (
    Captured,
    Encoded,
    Participant,
    ParticipantConfig,
    Restored,
    Rollout,
    RolloutFailure,
    SessionUncertain,
    Success,
    Usage,
)
from reference_gym.participant.clock import within
from reference_gym.participant.errors import SessionLost, StaleAttempt
from tests.gym.participant.kit import Gym, MovedClock, settle, until

Body = Callable[[Rollout], Awaitable[Success]]
DONE = Success("completed", 1.0, [])


@pytest.fixture
def gym(tmp_path: Path) -> Gym:
    """A Gym that owns rollouts and sessions."""
    return Gym(tmp_path)


async def run(gym: Gym, body: Body) -> Any:
    """Run one rollout with this loop to its end; return the result's content, or its state if it has none."""
    gym.loop.run = body  # type: ignore[method-assign, assignment]  # the test is the author
    await gym.start("a")
    await until(lambda: gym.state("a") in ("finished", "failed", "restart", "retired"))
    served = (await gym.results()).results
    return json.loads(served[0].result) if served else gym.state("a")


async def in_a_turn(rollout: Rollout, error: Exception | None) -> Success:
    """Leave a turn by an error, or without closing it."""
    async with rollout.turn():
        if error is not None:
            raise error
    return DONE


async def in_a_verification(rollout: Rollout, error: Exception) -> Success:
    """Leave a verification by an error."""
    async with rollout.verification():
        raise error


@pytest.mark.parametrize(
    ("error", "kind", "terminal"),
    [
        (RolloutFailure("policy_unavailable", "no answer", terminal=False), "policy_unavailable", False),
        (RolloutFailure("task_hopeless", "never", terminal=True, stage="effect"), "task_hopeless", True),
        (SessionLost("gone"), "session_lost", False),
        (ValueError("a secret detail"), "internal", False),
        (None, "internal", False),
    ],
    ids=str,
)
async def test_a_turn_left_by_an_error_is_a_failure(gym: Gym, error: Any, kind: str, *, terminal: bool) -> None:
    """The failure says what it is, no boundary is crossed, nothing of a foreign error is told."""
    content = await run(gym, lambda rollout: in_a_turn(rollout, error))
    assert (kind, terminal, 0) == tuple(content["failure"][key] for key in ("kind", "terminal", "turns"))
    assert "secret" not in json.dumps(content)


async def test_other_ways_to_end(gym: Gym, tmp_path: Path) -> None:
    """Uncertain: state restart; stale elsewhere: retired; an error of the verification: its failure."""
    assert "restart" == await run(gym, lambda rollout: in_a_turn(rollout, SessionUncertain()))
    stale = StaleAttempt.of("a", 0)
    assert "retired" == await run(Gym(tmp_path), lambda rollout: in_a_turn(rollout, stale))
    failure = RolloutFailure("verification_failed", "the judge is away", terminal=False)
    content = await run(Gym(tmp_path), lambda rollout: in_a_verification(rollout, failure))
    assert "verification_failed" == content["failure"]["kind"]


async def test_a_loop_that_gives_no_outcome_is_told_what_it_forgot(gym: Gym, caplog: pytest.LogCaptureFixture) -> None:
    """A verification that is left without a result ends its rollout, and the log says what is missing."""

    async def body(rollout: Rollout) -> Success:
        async with rollout.verification() as verification:
            pass
        return verification.success  # type: ignore[return-value]  # what an author may forget

    content = await run(gym, body)
    assert ("internal", "the agent raised TypeError") == (content["failure"]["kind"], content["failure"]["reason"])
    assert "verification.finish(success)" in caplog.text


async def test_a_state_that_is_no_json_fails_its_rollout_alone(gym: Gym) -> None:
    """Nothing that cannot be captured is ever recorded as a boundary."""

    async def body(rollout: Rollout) -> Success:
        async with rollout.turn() as turn:
            turn.close({"bad": object()})
        return DONE

    content = await run(gym, body)
    assert ("state_not_representable", True, 0) == tuple(content["failure"][k] for k in ("kind", "terminal", "turns"))


@pytest.mark.parametrize(
    "usage",
    [Usage(data_ref={"neither": 1}), Usage(usage={"tokens": -1}), Usage(version=-3), Usage(data_ref=object())],
    ids=["a reference of neither form", "negative tokens", "a negative version", "no JSON"],
)
async def test_what_a_loop_notes_cannot_break_the_feed(gym: Gym, usage: Usage) -> None:
    """A reference, a count or a version that does not fit the schema becomes a failure that does."""

    async def body(rollout: Rollout) -> Success:
        rollout.note_policy(usage)
        async with rollout.turn() as turn:
            turn.close({})
        return DONE

    content = await run(gym, body)
    assert content["failure"]["kind"] in ("result_not_representable", "state_not_representable")


async def test_notes_count_from_the_boundary_of_their_turn(gym: Gym) -> None:
    """Versions each once in the order of first use, references in the order of turns, usage summed."""

    async def body(rollout: Rollout) -> Success:
        for version, key in ((7, "t1"), (9, "t2"), (7, "t3")):
            rollout.note_policy(Usage(version=3, data_ref={"key": "regenerated"}))
            rollout.note_policy(Usage(version=version, usage={"tokens": 2}, data_ref={"key": key}))
            async with rollout.turn() as turn:
                turn.close({})
        rollout.note_policy(Usage(version=11, data_ref={"key": "never used"}))
        return DONE

    content = await run(gym, body)
    info = content["info"]
    assert ([7, 9], {"tokens": 6}) == (info["policy_versions"], info["usage"])
    assert ["t1", "t2", "t3"] == [reference["key"] for reference in info["data_refs"]]


async def test_a_loop_that_swallows_its_cancellation_changes_nothing(gym: Gym) -> None:
    """CKPT-FENCE-003: whatever it calls afterwards is stale; the higher attempt runs on."""
    refusals: list[str] = []
    wait = asyncio.Event()

    async def body(rollout: Rollout) -> Success:
        if rollout.attempt == 1:
            return await asyncio.Future[Success]()
        try:
            await wait.wait()
        except asyncio.CancelledError:
            for call in (rollout.record({}), rollout.finish(DONE), in_a_turn(rollout, None)):
                try:
                    await call
                except StaleAttempt as refusal:
                    refusals.append(refusal.code)
        return DONE

    gym.loop.run = body  # type: ignore[method-assign]  # the test is the author
    await gym.start("a")
    await settle()
    await gym.start("a", attempt=1)
    before = gym.status
    await until(lambda: len(refusals) == 3)
    assert before == gym.status
    assert 1 == gym.participant.rollout("a")["attempt"]


async def test_a_client_with_an_old_cursor_gets_all_results_of_a_restored_gym(gym: Gym, tmp_path: Path) -> None:
    """N2: 10 results were served and 15 rollouts live at the cut; after the restore 5 other results come: all 15."""
    done, live = [f"d{number}" for number in range(10)], [f"l{number}" for number in range(15)]
    await gym.start(*done, *live)
    receipts = await gym.finish(*done)
    cursor = (await gym.results()).next
    digest = (await gym.snapshot("1-1"))["manifest"]["digest"]
    other = Gym(tmp_path)
    await other.restore("2-1", "1-1", digest, [(name, 0, 1, 0) for name in live], receipts)
    await other.resume("2-1")
    await other.finish(*live[:5])
    page = await other.results(cursor)
    assert {*done, *live[:5]} == {result.receipt.rollout_id for result in page.results}
    assert page.feed != cursor.partition(".")[0]


class Ledger:
    """A store of rows that a model server might have."""

    name = "rows"
    owns = "ledger"

    def __init__(self) -> None:
        self.rows: dict[str, tuple[int, list[str]]] = {}

    def capture(self, rollout_id: str) -> Captured | None:
        """Return the rows of one rollout, encoded once."""
        if rollout_id not in self.rows:
            return None
        attempt, rows = self.rows[rollout_id]
        return Captured(attempt, len(rows), Encoded(json.dumps(rows).encode()), policy_version=4)

    async def build(self, rollouts: Sequence[Restored]) -> Any:
        """Keep the rows up to the turns that are done."""
        return {r.rollout_id: (r.attempt, list(r.data)[: r.turns_done]) for r in rollouts}

    def install(self, built: Any) -> None:
        """Replace everything."""
        self.rows = built

    async def discard(self, built: Any) -> None:
        """Nothing to free."""

    def drop(self, rollout_id: str) -> None:
        """Forget one."""
        self.rows.pop(rollout_id, None)


def ledger_gym(root: Path) -> tuple[Gym, Ledger]:
    """Return a participant that owns a ledger alone, behind the same test face."""
    gym = Gym(root, rollouts=False)
    gym.participant = Participant(ParticipantConfig("model", "model", 20, storage_roots=[root]))
    ledger = Ledger()
    gym.participant.add(ledger)
    return gym, ledger


async def test_an_owner_of_a_ledger_alone(tmp_path: Path) -> None:
    """CKPT-ENV-018 to -022, CKPT-DIR-033: ready at once; each rollout with a row is in the index and comes back."""
    gym, ledger = ledger_gym(tmp_path)
    assert ("ledger",) == gym.participant.owns
    for name, attempt, rows in (("a", 0, ["1", "2"]), ("b", 2, ["x"])):
        gym.participant.observe(name, attempt)
        ledger.rows[name] = (attempt, rows)
        gym.participant.changed(name)
    assert (await gym.prepare("1-1"))["ready"]
    reply = await gym.commit("1-1")
    await gym.resume("1-1")
    found = [json.loads(line) for line in (tmp_path / "1-1" / "rollouts.jsonl").read_text().splitlines()]
    assert [("a", 0, 2, None, {}, 4), ("b", 2, 1, None, {}, 4)] == [
        tuple(row[key] for key in ("rollout_id", "attempt", "turns_done", "environment", "effects", "policy_version"))
        for row in found
    ]
    with pytest.raises(StaleAttempt):
        gym.participant.observe("b", 1)
    gym.participant.observe("b", 3)
    assert {"a"} == set(ledger.rows), "the rows of a lower attempt go when a higher one calls"
    other, restored = ledger_gym(tmp_path)
    digest = reply["manifest"]["digest"]
    await other.restore("2-1", "1-1", digest, [("a", 0, 1, 2)], fences=[("b", 4)])
    await other.resume("2-1")
    assert {"a": (1, ["1", "2"])} == restored.rows
    for stale in (("a", 0), ("b", 4)):
        with pytest.raises(StaleAttempt):
            other.participant.observe(*stale)
    second = await other.snapshot("2-2")
    assert 1 == second["counts"]["turn"], "what was restored is in the next cut as it is"


async def test_one_participant_may_own_all_three(tmp_path: Path) -> None:
    """CKPT-DISC-008: one index, and each part gets back what it held at the boundary."""
    gym, other = Gym(tmp_path), Gym(tmp_path)
    ledgers = Ledger(), Ledger()
    for one, ledger in zip((gym, other), ledgers, strict=True):
        one.participant.add(ledger)
    assert ("ledger", "rollouts", "sessions") == gym.participant.owns
    await gym.start("a")
    ledgers[0].rows["a"] = (0, ["row 1"])
    gym.loop.reply("a", [("add", 4)])
    await until(lambda: gym.participant.rollout("a")["turns_done"] == 1)
    ledgers[0].rows["a"][1].append("row of a turn that never opened")
    gym.participant.changed("a")
    await gym.waiting("a")
    digest = (await gym.snapshot("1-1"))["manifest"]["digest"]
    await other.restore("2-1", "1-1", digest, [("a", 0, 1, 1)])
    assert {"a": (1, ["row 1"])} == ledgers[1].rows
    assert [4] == [counter.value for counter in other.counters]


async def test_a_deadline_on_a_clock_that_moves() -> None:
    """The wait ends at the deadline or with the work, and never cancels the work."""
    clock = MovedClock()
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(within(clock, clock.now() + 5, work))
    await settle()
    await clock.advance(4.9)
    assert not waiting.done()
    await clock.advance(0.2)
    assert await waiting is False
    assert not work.done()
    work.set_result(1)
    assert await within(clock, clock.now() - 1, work) is True
