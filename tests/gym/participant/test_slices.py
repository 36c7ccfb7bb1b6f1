# SPDX-License-Identifier: Apache-2.0
"""The rota of slices: one of them in each turn of an event loop, whoever is cancelled, on each loop by itself."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from reference_gym.participant import slices
from reference_gym.participant.slices import Slices

WORKS = ("a", "b", "c", "d")
BOUND_S = 3


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every slice be over at once."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)


class Watched:
    """Works on the running loop, and in which turn of the loop each of their slices came."""

    def __init__(self) -> None:
        self.turn = 0
        self.came: list[tuple[int, str]] = []
        self._ended = False
        self._count()

    def _count(self) -> None:
        self.turn += 1
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._count)

    async def work(self, name: str, count: int) -> None:
        """Work for a number of slices."""
        own = Slices()
        for _ in range(count):
            await own.give_way()
            self.came.append((self.turn, name))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, looking in each turn."""
        async with asyncio.timeout(BOUND_S):
            while not condition():  # noqa: ASYNC110 - each turn is looked at
                await asyncio.sleep(0)

    def end(self) -> None:
        """Count no more turns."""
        self._ended = True

    @property
    def most(self) -> int:
        """How many slices the fullest turn had."""
        return max(Counter(turn for turn, _ in self.came).values())


async def test_each_turn_of_the_loop_has_one_slice_however_many_works_there_are() -> None:
    """Four works side by side hold up a call no longer in each turn than one alone does, and none is left behind."""
    watched = Watched()
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*(watched.work(name, 20) for name in WORKS))
    watched.end()
    assert 1 == watched.most
    assert dict.fromkeys(WORKS, 20) == Counter(name for _, name in watched.came)
    first = [name for _, name in watched.came[: 4 * 19]]
    assert [*WORKS] * 19 == first, "each in its turn"


async def test_works_that_join_one_that_goes_on_already_have_no_turn_of_their_own() -> None:
    """Whether somebody waits when they come or nobody does, a turn has one slice."""
    watched = Watched()
    works: list[asyncio.Task[None]] = []
    for name in WORKS:
        works.append(asyncio.create_task(watched.work(name, 40)))
        begun = watched.turn
        await watched.until(lambda begun=begun: watched.turn >= begun + 5)  # type: ignore[misc]
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*works)
    watched.end()
    assert 1 == watched.most
    assert 4 * 40 == len(watched.came)


async def test_a_work_alone_has_a_slice_in_every_turn() -> None:
    """It is not slower than where it only let the others go first."""
    watched = Watched()
    async with asyncio.timeout(BOUND_S):
        await watched.work("a", 50)
    watched.end()
    turns = [turn for turn, _ in watched.came]
    assert turns[-1] - turns[0] <= 50


@pytest.mark.parametrize("turns", range(12))
async def test_who_is_cancelled_while_it_waits_stops_nobody_else(turns: int) -> None:
    """In whichever turn that is: while it waits, and in the very turn in which it is let go on."""
    watched = Watched()
    works = {name: asyncio.create_task(watched.work(name, 10)) for name in WORKS}
    await watched.until(lambda: watched.turn >= turns)
    works["b"].cancel()
    works["d"].cancel()
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*works.values(), return_exceptions=True)
        await watched.work("later", 3)
    watched.end()
    done = Counter(name for _, name in watched.came)
    assert (10, 10, 3) == (done["a"], done["c"], done["later"])
    assert 1 == watched.most
    assert works["b"].cancelled()
    assert works["d"].cancelled()


async def test_when_all_are_cancelled_the_next_one_still_has_its_turn() -> None:
    """Also when the whole rota was woken and cancelled in one turn."""
    watched = Watched()
    for turns in range(6):
        works = [asyncio.create_task(watched.work(name, 100)) for name in WORKS]
        begun = watched.turn
        await watched.until(lambda begun=begun, turns=turns: watched.turn >= begun + turns)  # type: ignore[misc]
        for work in works:
            work.cancel()
        async with asyncio.timeout(BOUND_S):
            await watched.work("next", 2)
        assert all(work.cancelled() for work in works)
    watched.end()


def test_two_loops_in_two_threads_have_a_rota_each() -> None:
    """Neither waits for the other, and nobody is woken from a foreign thread."""
    most: dict[str, int] = {}
    both = threading.Barrier(2, timeout=BOUND_S)

    async def run(name: str) -> None:
        both.wait()
        watched = Watched()
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*(watched.work(work, 200) for work in WORKS))
        watched.end()
        assert 4 * 200 == len(watched.came)
        most[name] = watched.most

    threads = [threading.Thread(target=lambda name=name: asyncio.run(run(name))) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * BOUND_S)
    assert {"one": 1, "two": 1} == most


def test_a_loop_that_ended_with_works_waiting_holds_up_no_later_one() -> None:
    """A work that its loop never came back to is forgotten with that loop."""

    async def leave() -> None:
        for name in WORKS:
            asyncio.get_running_loop().create_task(Watched().work(name, 1_000_000), name=name)
        for _ in range(5):
            await asyncio.sleep(0)

    async def run() -> int:
        watched = Watched()
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*(watched.work(name, 5) for name in WORKS))
        watched.end()
        return len(watched.came)

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(leave())
        left = asyncio.all_tasks(loop)
    finally:
        loop.close()
    assert 4 == len(left)
    assert 4 * 5 == asyncio.run(run())
    for task in left:  # Nobody comes back to it, and that is meant.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
