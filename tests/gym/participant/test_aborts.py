# SPDX-License-Identifier: Apache-2.0
"""An abort at every instant of a commit and of a restore: no half state, no late manifest, the Gym goes on.

The instants are counted, not slept for: turns of the event loop, with what else runs on threads run in line; and on the
writer's and the reader's thread the places where they look whether they are to stop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from reference_gym.participant import ProtocolError
from reference_gym.participant import restorer as restorer_module
from reference_gym.participant.committing import Commit
from tests.gym.participant.kit import Gym, until

ROWS = [(f"r{number}", 0, 1, 1) for number in range(4)]
NAMES = [name for name, *_ in ROWS]


class InLine(Executor):
    """Runs everything at once, where it is asked for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run it."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@pytest.fixture
def in_line(monkeypatch: pytest.MonkeyPatch) -> Callable[[Gym], Gym]:
    """Make a Gym's work take the same turns of the event loop each time: nothing of it runs on a thread."""

    async def to_thread(function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0)
        result = function(*arguments)
        await asyncio.sleep(0)
        return result

    monkeypatch.setattr(asyncio, "to_thread", to_thread)

    def make(gym: Gym) -> Gym:
        gym.participant._writer._thread = InLine()  # type: ignore[assignment]
        return gym

    return make


async def laden(gym: Gym) -> str:
    """Four rollouts after one turn each and a finished one, saved as 1-1; then one more turn of each. The digest."""
    await gym.start(*NAMES, "done")
    await gym.finish("done")
    for name in NAMES:
        gym.loop.reply(name, [("add", 1)])
    await until(lambda: {(name, 0, 2) for name in NAMES} <= set(gym.loop.asked))
    digest = str((await gym.snapshot("1-1"))["manifest"]["digest"])
    for name in NAMES:
        gym.loop.reply(name, [("add", 10)])
    await until(lambda: {(name, 0, 3) for name in NAMES} <= set(gym.loop.asked))
    return digest


def picture(gym: Gym) -> Any:
    """What an abort must leave as it was: rows, results, sessions, counts."""
    rows = [gym.participant.rollout(name) for name in NAMES]
    told = [(row["rollout_id"], row["attempt"], row["turns_done"], row["state"]) for row in rows]
    values = {name: session.state.value for name, session in gym.sessions._sessions.items()}  # type: ignore[attr-defined]
    return told, gym.status["feed"], len(gym.participant.feed), values, gym.status["counts"]


async def turns(count: int) -> None:
    """Let the event loop turn so often."""
    for _ in range(count):
        await asyncio.sleep(0)


async def ended(call: asyncio.Future[Any]) -> Any:
    """Return the reply of a call, or the code of its refusal."""
    try:
        return await call
    except ProtocolError as refusal:
        return refusal.code


async def goes_on(gym: Gym, number: int) -> None:
    """Require an open gate, and that a checkpoint still works."""
    status = gym.status
    assert ("idle", "open", None) == tuple(status[key] for key in ("phase", "gate", "checkpoint_id"))
    assert (await gym.snapshot(f"1-{number}"))["durable"]


async def test_an_abort_at_any_turn_of_the_loop_of_a_restore(tmp_path: Path, in_line: Callable[[Gym], Gym]) -> None:
    """C22, N12, CKPT-ABORT-006 to -008: as before, or discarded whole; every instant until the restore is over."""
    at = installed = 0
    while installed < 3:
        root = tmp_path / str(at)
        root.mkdir()
        gym = in_line(Gym(root))
        digest = await laden(gym)
        before = picture(gym)
        restoring = asyncio.ensure_future(gym.restore("1-2", "1-1", digest, ROWS))
        await turns(at)
        phase = gym.status["phase"]
        seen = picture(gym) if phase != "restored" else None
        assert seen in (None, before), f"turn {at}: nobody sees a part of it"
        assert "aborted" == (await gym.abort("1-2"))["ended_as"]  # Not as a task: that would be a turn later.
        reply = await ended(restoring)
        if phase == "restored":
            installed += 1
            assert ({"retired"}, 0) == ({gym.state(name) for name in NAMES}, len(gym.sessions))
            assert 4 == gym.status["counts"]["retired"]
            assert ["stale_attempt"] * 4 == await gym.start(*NAMES, attempt=1)
            assert ["started"] * 4 == await gym.start(*NAMES, attempt=2)
        else:
            assert "stale_checkpoint" == reply, f"turn {at}: {reply}"
            assert before == picture(gym), f"turn {at}: everything is as before"
            gym.loop.reply("r0", [("add", 100)])
            await until(lambda gym=gym: ("r0", 0, 4) in gym.loop.asked)
        await goes_on(gym, 3)
        await gym.participant.close()
        at += 1
    assert at > 15, "the abort came at many instants"


async def test_an_abort_at_any_turn_of_the_loop_of_a_commit(tmp_path: Path, in_line: Callable[[Gym], Gym]) -> None:
    """C22: aborted before it was durable, no manifest is there, nor appears; afterwards the cut is never published."""
    at = durable = 0
    while durable < 3:
        root = tmp_path / str(at)
        root.mkdir()
        gym = in_line(Gym(root))
        await laden(gym)
        await gym.prepare("1-2")
        committing = asyncio.ensure_future(gym.commit("1-2"))
        await turns(at)
        phase = gym.status["phase"]
        assert "aborted" == (await gym.abort("1-2"))["ended_as"]
        reply = await ended(committing)
        durable += phase == "committed"
        await turns(20)
        if isinstance(reply, str):
            assert "stale_checkpoint" == reply, f"turn {at}"
        if phase != "committed":
            left = list((root / "1-2").iterdir())
            assert [] == left or "manifest.json" in {path.name for path in left}, f"turn {at}: nothing half is left"
        assert ("aborted", None) == tuple(gym.status["last"][key] for key in ("ended_as", "manifest"))
        await goes_on(gym, 3)
        await gym.participant.close()
        at += 1
    assert at > 6, "the abort came at many instants"


class Looks(threading.Event):
    """An event whose n-th look waits until the test has done what it wants to do then."""

    def __init__(self, nth: int, reached: Callable[[], None]) -> None:
        super().__init__()
        self.count, self._nth, self._reached = 0, nth, reached
        self.go = threading.Event()

    def is_set(self) -> bool:
        """Look."""
        self.count += 1
        if self.count == self._nth:
            self._reached()
            assert self.go.wait(10)
        return super().is_set()


def looks(monkeypatch: pytest.MonkeyPatch, of: str) -> Iterator[tuple[Looks, asyncio.Event]]:
    """Yield, for each number of a look, an event that stops there, until one is never reached."""
    for nth in range(1, 200):
        reached = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop = Looks(nth, lambda loop=loop, reached=reached: loop.call_soon_threadsafe(reached.set))
        with monkeypatch.context() as patch:
            if of == "writer":
                renew = Commit.renew

                def again(self: Commit, stop: Looks = stop, renew: Any = renew) -> None:
                    renew(self)
                    self.stop = stop

                patch.setattr(Commit, "renew", again)
            else:
                made = type("Made", (), {"Event": staticmethod(lambda stop=stop: stop)})
                patch.setattr(restorer_module, "threading", made)
            yield stop, reached
        if stop.count < nth:
            return
    raise AssertionError("there is no end of looks")


async def test_an_abort_between_any_two_records_of_a_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C22: the writer stops where it is, what it wrote is gone, and abort returns after that."""
    gym = Gym(tmp_path)
    await laden(gym)
    number = 2
    for stop, reached in looks(monkeypatch, "writer"):
        id, number = f"1-{number}", number + 1
        await gym.prepare(id)
        committing = asyncio.ensure_future(gym.commit(id))
        await asyncio.wait([asyncio.ensure_future(reached.wait()), committing], return_when=asyncio.FIRST_COMPLETED)
        if committing.done():
            await gym.resume(id)
            continue
        aborting = asyncio.ensure_future(gym.abort(id))
        await until(lambda: gym.status["gate"] == "open")
        assert not aborting.done(), "it waits for the writer"
        stop.go.set()
        assert "aborted" == (await aborting)["ended_as"]
        assert "stale_checkpoint" == await ended(committing)
        assert [] == list((tmp_path / id).iterdir())
    assert number > 12, "at least one look per record of every file"


async def test_an_abort_between_any_two_records_of_a_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N12: cancelled wherever the reader stands, and all is as before; then the same source is restored."""
    gym = Gym(tmp_path)
    digest = await laden(gym)
    before = picture(gym)
    number = 2
    for stop, reached in looks(monkeypatch, "reader"):
        id, number = f"1-{number}", number + 1
        rows = [(name, 0, number, 1) for name in NAMES]
        restoring = asyncio.ensure_future(gym.restore(id, "1-1", digest, rows))
        await asyncio.wait([asyncio.ensure_future(reached.wait()), restoring], return_when=asyncio.FIRST_COMPLETED)
        if restoring.done():
            assert 4 == (await restoring)["restored_count"]
            continue
        assert "aborted" == (await asyncio.wait_for(gym.abort(id), 5))["ended_as"], "not even the reader is waited for"
        stop.go.set()
        assert "stale_checkpoint" == await ended(restoring)
        assert before == picture(gym)
    assert number > 12, "at least one look per record of every file"
