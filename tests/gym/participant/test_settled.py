# SPDX-License-Identifier: Apache-2.0
"""CKPT-DIR-023: nothing that depends on a change leaves before the log has written it, place by place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from reference_gym.participant.journal import NoJournal
from tests.gym.participant.kit import Gym, settle, until
from tests.gym.participant.test_http import DATA_TOKEN, WORLDS, Client


class Held(NoJournal):
    """A journal whose writes return only as often as the test says; ``waiting`` counts who waits for one."""

    def __init__(self) -> None:
        self.written: int | None = None
        self.waiting = 0
        self._more = asyncio.Event()

    async def settled(self) -> None:
        """Return when another write has returned."""
        self.waiting += 1
        while self.written == 0:
            await self._more.wait()
        self.waiting -= 1
        if self.written is not None:
            self.written -= 1

    def write(self, count: int | None) -> None:
        """Let so many waits return from now on; None: all."""
        self.written = count
        self._more.set()
        self._more = asyncio.Event()


def held_by(gym: Gym) -> Held:
    """Give a Gym that nobody has called yet a journal that is held from now on."""
    journal = gym.participant.journal = Held()
    journal.write(0)
    return journal


STEPS = ("started", "opened", "asked", "ran", "crossed", "ended")


@pytest.mark.parametrize("writes", range(6), ids=STEPS)
async def test_a_rollout_goes_no_further_than_what_is_written_of_it(tmp_path: Path, writes: int) -> None:
    """Its start before its loop, its first state before the policy, an effect's begin before the outside, its turn."""
    gym = Gym(tmp_path)
    journal = held_by(gym)
    journal.write(writes)
    gym.loop.reply("a", [("add", 1)], [])
    await gym.start("a")
    await until(lambda: journal.waiting == 1)
    await settle()
    stands = (len(gym.sessions), len(gym.loop.asked), len(gym.world.begun), len(gym.loop.verifications))
    assert {0: (0, 0, 0, 0), 1: (1, 0, 0, 0), 2: (1, 1, 0, 0), 3: (1, 1, 1, 0), 4: (1, 2, 1, 0), 5: (1, 2, 1, 1)}[
        writes
    ] == stands
    journal.write(None)
    await until(lambda: gym.state("a") == "finished")
    await gym.participant.close()


async def test_no_manifest_appears_before_what_it_vouches_for_is_written(tmp_path: Path) -> None:
    """The cut of a log that does not know it yet would be there after a kill, and its boundaries would not."""
    gym = Gym(tmp_path)
    await gym.prepare("1-1")
    journal = held_by(gym)
    committing = asyncio.ensure_future(gym.commit("1-1"))
    await until(lambda: journal.waiting == 1)
    await settle()
    assert [] == list((tmp_path / "1-1").iterdir())
    journal.write(None)
    assert (await committing)["durable"]
    assert (tmp_path / "1-1" / "manifest.json").exists()
    await gym.participant.close()


CALLS: dict[str, tuple[str, str, Any]] = {
    "a change": ("POST", "/retire", {"rollouts": [{"rollout_id": "a", "through_attempt": 3}], "timeout_ms": 1_000}),
    "a refusal": ("POST", "/checkpoint/commit", {"checkpoint_id": "1-1"}),
    "a status": ("GET", "/checkpoint", None),
    "a page": ("GET", "/results", None),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("what", CALLS)
async def test_no_reply_leaves_before_what_it_tells_of_is_written(tmp_path: Path, world: str, what: str) -> None:
    """Replies, refusals and what is only read: all of them tell of what a kill would otherwise undo."""
    gym = Gym(tmp_path)
    journal = held_by(gym)
    async with await WORLDS[world](gym) as server, aiohttp.ClientSession(server.url) as session:
        calling = asyncio.ensure_future(Client(gym, session, server).call(*CALLS[what]))
        await until(lambda: journal.waiting == 1)
        assert not calling.done()
        journal.write(None)
        status, _ = await calling
        assert (status >= 400) == (what == "a refusal")


@pytest.mark.parametrize("world", WORLDS)
async def test_no_reply_of_the_data_plane_leaves_before_what_it_tells_of_is_written(tmp_path: Path, world: str) -> None:
    """An effect's reply, for one: its caller goes on from it."""
    gym = Gym(tmp_path)
    journal = held_by(gym)
    headers = {"Authorization": f"Bearer {DATA_TOKEN}"}
    async with await WORLDS[world](gym) as server, aiohttp.ClientSession(server.url) as session:
        calling = asyncio.ensure_future(session.post("/data", json={"x": 1}, headers=headers))
        await until(lambda: journal.waiting == 1)
        assert not calling.done()
        journal.write(None)
        assert 200 == (await calling).status
