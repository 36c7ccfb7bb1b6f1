# SPDX-License-Identifier: Apache-2.0
"""What happens while a restore builds its state aside counts after the installing step: fences only ever rise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from reference_gym.model.ledger import Ledger, Row
from reference_gym.participant import Participant, ParticipantConfig, failpoints, fences
from reference_gym.participant.errors import StaleAttempt
from reference_gym.participant.feed import Feed
from reference_gym.participant.fences import Fences
from reference_gym.participant.policy_call import TurnId
from reference_gym.participant.slices import Slices
from tests.gym.participant.kit import Gym

Act = Callable[[], Awaitable[Any]]
MOMENTS = ("tombstones", "feed", "rising", "risen", "built")


def meanwhile(monkeypatch: pytest.MonkeyPatch, moment: str, act: Act) -> list[str]:
    """Do something once at a moment of every restore that builds; return where it was done.

    Args:
        monkeypatch: of the test.
        moment: ``tombstones``: those of the present are in what is built; ``feed``: all that is dropped is fenced
            aside; ``rising``: fences are compared with the present ones; ``risen``: they have been; ``built``: nothing
            but the installing step is left.
        act: what is done, as anybody could who is served in between.
    """
    done: list[str] = []
    build, rise, feed, held = Fences.build, Fences.rise, Feed.build, failpoints.held

    async def once(here: str) -> None:
        if here == moment and not done:
            done.append(here)
            await act()

    async def built(self: Fences, *arguments: Any) -> Fences:
        found = await build(self, *arguments)
        await once("tombstones")
        return found

    async def fed(self: Feed, *arguments: Any) -> Feed:
        await once("feed")
        return await feed(self, *arguments)

    class Sliced(Slices):
        async def give_way(self) -> None:
            await once("rising")

    async def risen(self: Fences, *arguments: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(fences, "Slices", Sliced)
            await rise(self, *arguments)
        await once("risen")

    async def before_install(name: str) -> None:
        if name == "restore.built":
            await once("built")
        await held(name)

    monkeypatch.setattr(Fences, "build", built)
    monkeypatch.setattr(Fences, "rise", risen)
    monkeypatch.setattr(Feed, "build", fed)
    monkeypatch.setattr(failpoints, "held", before_install)
    return done


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_retire_while_a_restore_builds_is_not_lowered_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """What the restore fences lower itself, what it does not know, and what it had fenced already stay as high."""
    gym = Gym(tmp_path)
    await gym.start("live", "other")
    await gym.waiting("live", "other")
    done = meanwhile(monkeypatch, moment, lambda: gym.retire(("live", 7), ("unknown", 4), ("named", 6)))
    await gym.restore("1-1", None, fences=[("named", 2), ("higher", 9)])
    await gym.resume("1-1")
    assert [moment] == done
    through = gym.participant.fences.through
    assert (7, 4, 6, 9, 0) == tuple(through(name) for name in ("live", "unknown", "named", "higher", "other"))
    assert ["stale_attempt"] == await gym.start("live", attempt=7)
    assert ["started"] == await gym.start("live", attempt=8)
    await gym.participant.close()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_result_that_is_released_while_a_restore_builds_leaves_its_attempt_as_a_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """CKPT-FENCE-011: its tombstone is replaced like all others, and the same attempt never runs a second time."""
    gym = Gym(tmp_path)
    await gym.start("a", "b")
    await gym.waiting("a", "b")
    receipt, _ = await gym.finish("a", "b")
    outcomes: list[str] = []

    async def release() -> None:
        outcomes.extend(await gym.acks(receipt))

    done = meanwhile(monkeypatch, moment, release)
    await gym.restore("1-1", None)
    await gym.resume("1-1")
    assert ([moment], ["released"]) == (done, outcomes)
    assert (0, 0) == (gym.participant.fences.through("a"), gym.participant.fences.through("b"))
    assert ["stale_attempt"] == await gym.start("a")
    assert ["started"] == await gym.start("a", attempt=1)
    await gym.participant.close()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_kept_result_that_is_released_while_a_restore_builds_is_served_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """What the controller lists is current afterwards, at its own attempt, and can be released again."""
    gym = Gym(tmp_path)
    await gym.start("a", "b")
    await gym.waiting("a", "b")
    (receipt,) = await gym.finish("a")
    digest = (await gym.snapshot("1-1"))["manifest"]["digest"]
    done = meanwhile(monkeypatch, moment, lambda: gym.acks(receipt))
    await gym.restore("1-2", "1-1", digest, results=[receipt])
    await gym.resume("1-2")
    assert [moment] == done
    assert -1 == gym.participant.fences.through("a")
    served = [(item.receipt.rollout_id, item.receipt.digest) for item in (await gym.results()).results]
    assert [("a", receipt["digest"])] == served
    assert ["released"] == await gym.acks(receipt)
    await gym.participant.close()


class Rows:
    """A participant whose only part is a ledger, as a server of the policy is; it records while its gate is closed."""

    def __init__(self, root: Path) -> None:
        self.gym = Gym(root, rollouts=False)
        config = ParticipantConfig("rows", "model", 20, storage_roots=[root], limits=self.gym.config.limits)
        self.participant = self.gym.participant = Participant(config)
        self.ledger = Ledger(self.participant.changed)
        self.participant.add(self.ledger)

    def record(self, rollout_id: str, attempt: int, turn: int = 1) -> None:
        """Record a row, as a completed policy call of an attempt does."""
        self.participant.observe(rollout_id, attempt)
        self.ledger.add(TurnId(rollout_id, attempt, turn), Row(turn, "sha256:0", 1, {}, None))

    def through(self, *rollout_ids: str) -> Sequence[int]:
        """Return what is fenced."""
        return [self.participant.fences.through(rollout_id) for rollout_id in rollout_ids]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_what_a_ledger_records_while_a_restore_builds_is_fenced_when_it_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """New rollouts and higher attempts of known ones; what was there before is fenced in any case."""
    rows = Rows(tmp_path)
    rows.record("old", 2)
    rows.record("known", 0)

    async def record() -> None:
        rows.record("new", 3)
        rows.record("known", 5)

    done = meanwhile(monkeypatch, moment, record)
    await rows.gym.restore("1-1", None)
    await rows.gym.resume("1-1")
    assert [moment] == done
    assert [2, 5, 3] == rows.through("old", "known", "new")
    assert [] == rows.ledger.rows("new") + rows.ledger.rows("known") + rows.ledger.rows("old")
    await rows.participant.close()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_row_of_the_next_attempt_that_comes_while_a_restore_builds_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """CKPT-RESTORE-053: two attempts of one number never exist; everything is as before."""
    rows = Rows(tmp_path)
    rows.record("a", 0)
    digest = (await rows.gym.snapshot("1-1"))["manifest"]["digest"]

    async def record() -> None:
        rows.record("a", 1)

    done = meanwhile(monkeypatch, moment, record)
    with pytest.raises(StaleAttempt):
        await rows.gym.restore("1-2", "1-1", digest, [("a", 0, 1, 1)])
    assert [moment] == done
    assert [1] == [row.turn for row in rows.ledger.rows("a")]
    assert [0] == rows.through("a")
    await rows.gym.restore("1-3", "1-1", digest, [("a", 0, 2, 1)])
    await rows.gym.resume("1-3")
    assert [1] == rows.through("a")
    await rows.participant.close()


async def test_what_a_ledger_records_of_a_restore_that_nobody_resumes_is_fenced_with_it(tmp_path: Path) -> None:
    """CKPT-ABORT-008: higher attempts and new rollouts are dropped with what was installed, and fenced like it."""
    rows = Rows(tmp_path)
    rows.record("a", 0)
    rows.record("b", 0)
    digest = (await rows.gym.snapshot("1-1"))["manifest"]["digest"]
    await rows.gym.restore("1-2", "1-1", digest, [("a", 0, 1, 1), ("b", 0, 1, 1)])
    rows.record("a", 3)
    rows.record("new", 4)
    await rows.gym.abort("1-2")
    assert [] == rows.ledger.rows("new") + rows.ledger.rows("a") + rows.ledger.rows("b")
    assert [3, 1, 4] == rows.through("a", "b", "new")
    with pytest.raises(StaleAttempt):
        await rows.gym.restore("1-3", "1-1", digest, [("a", 0, 3, 1)])
    await rows.participant.close()
