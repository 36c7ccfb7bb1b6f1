# SPDX-License-Identifier: Apache-2.0
"""Large state: many rollouts with one that blocks, one huge record, and work that is done in slices."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import spec.durable
from reference_gym.participant import Limits, ParticipantConfig, collecting, serve_aiohttp
from reference_gym.participant.artifacts import Target, write_cut
from reference_gym.participant.collecting import EVERY_S, LITTLE, SWITCH_S, FullCollections
from reference_gym.participant.gate import Gate, Position
from reference_gym.participant.journal import LogJournal
from reference_gym.participant.log import LogFile
from reference_gym.participant.log_state import Life
from reference_gym.participant.records import Cut, MemoryStore, Record
from reference_gym.participant.result import validator
from reference_gym.participant.slices import SLICE_S, STEPS, Remains, Steps
from tests.gym.participant.kit import Gym, MovedClock, settle, until


async def test_one_long_tool_among_two_thousand_rollouts_is_left_out(tmp_path: Path) -> None:
    """N13: the cut of the 1,999 others is durable in bounded time, the agent and its sessions agree in each of them."""
    gym = Gym(tmp_path, limits=Limits(max_batch=2_000))
    names = [f"r{number:04}" for number in range(1_999)]
    gym.world.hold("slow/1/1")
    for name in ("slow", *names):
        gym.loop.reply(name, [("add", 1)])
    await gym.start("slow", *names)
    await until(lambda: len(gym.world.done) == 1_999 and gym.world.begun.count("slow/1/1") == 1, 20)
    prepared = await gym.prepare("1-1", timeout_ms=1)
    assert (False, 1, "slow") == (prepared["ready"], prepared["blocker_count"], prepared["blockers"][0]["rollout_id"])
    async with asyncio.timeout(20):  # It does not wait for the tool, which never ends by itself.
        reply = await gym.commit("1-1", leave_out_blocked=True, timeout_ms=20_000)
        await gym.resume("1-1")
    assert (1_999, 1, 0) == tuple(reply["counts"][key] for key in ("turn", "restart", "finished"))
    rows = [json.loads(line) for line in (tmp_path / "1-1" / "rollouts.jsonl").read_text().splitlines()]
    assert [("slow", "blocked")] == [(row["rollout_id"], row["reason"]) for row in rows if row["state"] == "restart"]
    others = [row for row in rows if row["state"] == "turn"]
    assert {(1, 1)} == {(row["turns_done"], row["effects"]["counter"]) for row in others}
    for line in (tmp_path / "1-1" / "state.jsonl").read_text().splitlines():
        record = json.loads(line)["record"]
        session = record["parts"]["sessions"]
        assert (record["effects"], record["state"]) == (session["effects"], session["state"])
    gym.world.release("slow/1/1")
    await until(lambda: ("slow", 0, 2) in gym.loop.asked)
    await gym.participant.close()


async def test_a_record_of_64_megabytes_is_byte_exact_after_a_restore(tmp_path: Path) -> None:
    """C49: written whole, verified, and the same text again."""
    gym, text = Gym(tmp_path), "0123456789abcde\\" * 4_000_000
    await gym.start("big", "small")
    await gym.waiting("big", "small")
    gym.sessions.get("big", 0).value = text  # type: ignore[attr-defined]
    registry = gym.participant.registry
    assert registry is not None
    registry.boundary(registry.live["big"].rollout)
    reply = await gym.snapshot("1-1")
    assert reply["counts"]["bytes"] > 64_000_000
    other = Gym(tmp_path)
    rows = [("big", 0, 1, 0), ("small", 0, 1, 0)]
    await other.restore("2-1", "1-1", reply["manifest"]["digest"], rows, timeout_ms=30_000)
    assert text == other.sessions.get("big", 1).value  # type: ignore[attr-defined]
    await gym.participant.close()
    await other.participant.close()


async def test_thousands_who_wait_at_the_gate_are_woken_in_slices() -> None:
    """Nobody else waits for all of them; whoever waits for no rollout is woken at once, a nudge wakes only its own."""
    gate, woken = Gate(MovedClock()), list[str]()
    gate.move(Position.SEALED)

    async def wait(name: str) -> None:
        await gate.wait_change(name)
        woken.append(name)

    waiting = [asyncio.create_task(wait(name)) for name in ["", *(f"r{number}" for number in range(10 * STEPS))]]
    await settle()
    gate.nudge("r3")
    await settle()
    assert ["r3"] == woken
    gate.move(Position.OPEN)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "" in woken
    assert len(woken) <= 3 * STEPS, "not all in one turn of the loop"
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert 10 * STEPS + 1 == len(set(woken))


async def test_what_closes_again_before_all_were_woken_holds_them() -> None:
    """A waiter that is woken late looks at the gate as it is then."""
    gate, through = Gate(MovedClock()), list[str]()
    gate.move(Position.SEALED)

    async def wait(name: str) -> None:
        await gate.wait_open(name)
        through.append(name)

    waiting = [asyncio.create_task(wait(f"r{number}")) for number in range(10 * STEPS)]
    await settle()
    gate.move(Position.OPEN)
    await asyncio.sleep(0)
    gate.move(Position.SEALED)
    await settle()
    few = len(through)
    assert few < 10 * STEPS
    gate.move(Position.OPEN)
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert 10 * STEPS == len(through)


@pytest.mark.parametrize(
    ("took", "expected"),
    [
        ([0.1] * 12, [3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10, 10, 10]),
        ([0.1, 0.1, 0.1, 2, 0.1, 2, 2, 2], [3, 4, 5, 6, 3, 4, 3, 3, 3]),
    ],
    ids=["they take next to nothing", "some take long"],
)
def test_how_many_tasks_follow_depends_on_what_the_last_ones_took(took: list[float], expected: list[int]) -> None:
    """As many as the event loop runs within a slice, each of whose lengths is given here in slices."""
    times = [SLICE_S * sum(took[:number]) for number in range(len(took) + 1)]
    steps = Steps(iter(times).__next__)
    assert expected == [steps.next() for _ in times]


def test_a_pause_says_nothing_about_how_long_tasks_take() -> None:
    """What the event loop does while there is nothing to wake is not counted."""
    times = iter([0.0, SLICE_S / 10, 1000.0, 1000.0 + SLICE_S / 10])
    steps = Steps(times.__next__)
    assert [3, 4] == [steps.next(), steps.next()]
    steps.pause()
    assert [4, 5] == [steps.next(), steps.next()]


async def test_what_nobody_needs_is_freed_while_others_are_served() -> None:
    """A table of many is empty some turns of the loop later, not at once."""
    remains, table = Remains(), {number: [number] * 10 for number in range(50_000)}
    remains.take(table)
    await asyncio.sleep(0)
    assert table, "not in one step"
    await until(lambda: not table)


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        ([(0, 0), (10, 10_000), (20, 10_000)], [False, False, False]),
        ([(10, 10_000), (20, LITTLE), (30, LITTLE), (40, LITTLE)], [False, False, True, False]),
        ([(10, 10_000), (20, LITTLE), (30, 10_000)], [False, False, False]),
        ([(10, 10_000), (EVERY_S, 10_000), (EVERY_S + 10, 10_000)], [False, True, False]),
    ],
    ids=["much is held", "little is left", "little was left for a moment", "an hour has passed"],
)
async def test_full_collections_come_when_little_is_held_or_once_an_hour(
    story: list[tuple[float, int]], expected: list[bool]
) -> None:
    """Never at a time of the collector's own choosing; young collections stay, and the end leaves all as it was."""
    now: dict[str, Any] = {"s": 0.0, "held": 0}
    collections = FullCollections(lambda: now["held"], lambda: False, lambda: now["s"])
    before = gc.get_threshold()
    following = asyncio.create_task(collections.follow())
    await settle()
    assert gc.isenabled()
    assert before[:2] == gc.get_threshold()[:2]
    assert gc.get_threshold()[2] > 1_000_000_000
    assert gc.get_freeze_count() > 10_000
    looks: Callable[[], bool] = collections.look
    found = []
    for seconds, held in story:
        now |= {"s": seconds, "held": held}
        found.append(looks())
    assert expected == found
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert before == gc.get_threshold()
    assert 0 == gc.get_freeze_count()


async def test_no_full_collection_comes_while_much_is_built_that_nobody_holds_yet() -> None:
    """A restore into an emptied Gym: it holds nothing, and ten thousand rollouts are looked through all the same."""
    now: dict[str, Any] = {"s": 0.0, "held": 10_000, "busy": False}
    collections = FullCollections(lambda: now["held"], lambda: now["busy"], lambda: now["s"])
    following = asyncio.create_task(collections.follow())
    await settle()
    found = []
    for seconds, held, busy in [(10, 10_000, False), (20, 0, False), (30, 0, True), (40, 0, False), (50, 0, False)]:
        now |= {"s": seconds, "held": held, "busy": busy}
        found.append(collections.look())
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert [False, False, False, False, True] == found


async def test_a_busy_thread_keeps_the_lock_for_a_short_time_only() -> None:
    """The event loop gives the lock away several times within one call; the end leaves all as it was."""
    before = sys.getswitchinterval()
    following = asyncio.create_task(FullCollections(lambda: 0, lambda: False).follow())
    await settle()
    during = sys.getswitchinterval()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert during <= SWITCH_S < before == sys.getswitchinterval()


async def test_young_collections_come_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself the collector waits while much is freed, and then looks at all that has come meanwhile."""
    monkeypatch.setattr(collecting, "YOUNG_S", 0.01)
    found: list[int] = []

    def collected(phase: str, told: dict[str, int]) -> None:
        if phase == "stop":
            found.append(told["generation"])

    following = asyncio.create_task(FullCollections(lambda: 0, lambda: False).follow())
    await settle()
    gc.callbacks.append(collected)
    try:
        await until(lambda: found.count(1) >= 3)
    finally:
        gc.callbacks.remove(collected)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert 2 not in found


async def test_those_who_waited_for_one_write_are_woken_in_slices() -> None:
    """Each of them goes on at once with work of its own, so not all of them run in one turn of the event loop."""
    journal = LogJournal()
    journal.open(lambda *_, **told: Mock(**told), Mock())
    journal.note("progress", n=1)
    waiting = [asyncio.create_task(journal.settled()) for _ in range(10 * STEPS)]
    await settle()
    journal._told(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    few = sum(task.done() for task in waiting)
    assert 0 < few < 5 * STEPS
    await asyncio.wait_for(asyncio.gather(*waiting), 5)


async def test_no_call_is_the_one_that_compiles_its_schema(tmp_path: Path) -> None:
    """What takes long once was done before the first call came."""
    validator.cache_clear()
    serve_aiohttp.create_app(Gym(tmp_path).participant, control_token=None)
    compiled = validator.cache_info().misses
    for name in ("start-request", "restore-request", "retire-request", "acks-request", "result"):
        validator(name)
    assert compiled == validator.cache_info().misses


@pytest.mark.parametrize("linked", [False, True])
async def test_a_commit_takes_little_memory_while_it_writes(linked: bool, tmp_path: Path) -> None:
    """At most 2.5 times the live state is allowed; what is written is referred to, and passes by piece by piece."""
    journal = LogJournal()
    if linked:
        log = LogFile.claim(tmp_path / "log")
        assert log is not None
        log.open(journal, Life("gym", ("rollouts",), {"e": "1"}, "i1", "boot-1", synced=False), None)
    store = MemoryStore(10**9, journal)
    for number in range(500):
        store.put(
            Record(
                f"r{number}",
                0,
                1,
                None,
                "e",
                {"e": 1},
                (b'{"rollout_id":"r%d",' % number, b'"x":"%s"}' % bytes(64_000)),
            )
        )
    await journal.settled()
    payload = 500 * 64_000
    target = tmp_path / "target"
    target.mkdir()
    tracemalloc.start()
    try:
        cut = Cut(*store.cut(), mark=journal.seal() if linked else None)
        config = ParticipantConfig("gym", "agent", 10)
        write = partial(
            write_cut, cut, Target(target), config, ["rollouts"], "run", "1-1", spec.durable, threading.Event()
        )
        await asyncio.to_thread(write)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        await journal.close()
    written = sum(path.stat().st_size for path in target.iterdir())
    assert written > payload
    assert peak < payload / 2
