# SPDX-License-Identifier: Apache-2.0
"""Prepare, commit, resume, abort and the lease, on one participant whose time, policy and effects the test holds."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import spec.durable
from reference_gym.participant import EffectCall, Limits, ProtocolError
from tests.gym.participant.kit import Gym, MovedClock, settle, until


class SlowDisk:
    """Durable steps that the test can hold, break and count."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.free = threading.Event()
        self.free.set()
        self.full = False

    def write_file(self, path: Path, data: bytes | Iterable[bytes]) -> int:
        """Write, when the test lets it."""
        self.steps.append(path.name)
        assert self.free.wait(10)
        if self.full:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "no space left")
        return spec.durable.write_file(path, data)

    def sync_dir(self, path: Path) -> None:
        """Sync."""
        self.steps.append("directory")
        spec.durable.sync_dir(path)

    def publish_file(self, path: Path, data: bytes, unnamed: Callable[[], None]) -> None:
        """Publish."""
        self.steps += [path.name, "directory"]
        spec.durable.publish_file(path, data, unnamed)


@pytest.fixture
def gym(tmp_path: Path) -> Gym:
    """A Gym that owns rollouts and sessions."""
    return Gym(tmp_path)


async def refused(call: Any) -> ProtocolError:
    """Return the refusal of a call."""
    with pytest.raises(ProtocolError) as refusal:
        await call
    return refusal.value


async def test_a_policy_that_never_answers_does_not_keep_prepare_waiting(gym: Gym) -> None:
    """C30, N1: ready at once; the reply that comes meanwhile is held and its turn goes on after resume."""
    await gym.start("a")
    await gym.waiting("a")
    assert (await gym.prepare("1-1"))["ready"]
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: gym.state("a") == "parked")
    before = gym.status["progress"]
    await gym.commit("1-1")
    assert (before, []) == (gym.status["progress"], gym.world.begun)
    await gym.resume("1-1")
    await until(lambda: ["a/1/1"] == gym.world.done)


async def test_a_tool_longer_than_the_limit_blocks_and_then_is_ready(tmp_path: Path) -> None:
    """C29, N4: not ready with one blocker and its age; the same prepare with a smaller limit is ready later."""
    clock = MovedClock()
    gym = Gym(tmp_path, clock=clock)
    gym.world.hold("a/1/1")
    await gym.start("a")
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: gym.world.begun)
    await clock.advance(3)
    preparing = asyncio.ensure_future(gym.prepare("1-1", timeout_ms=2_000))
    await settle()
    await clock.advance(2)
    reply = await preparing
    assert ("preparing", False, 1) == (reply["phase"], reply["ready"], reply["blocker_count"])
    (blocker,) = reply["blockers"]
    assert ("effect", "a", 0, 5_000) == tuple(blocker[k] for k in ("kind", "rollout_id", "attempt", "since_ms"))
    refusal = await refused(gym.commit("1-1"))
    assert ("not_ready", 1) == (refusal.code, len(refusal.extra["blockers"]))
    gym.world.release("a/1/1")
    await settle()
    reply = await gym.prepare("1-1", timeout_ms=1)
    assert ("prepared", True, 2_000) == (reply["phase"], reply["ready"], reply["wait_ms"])


async def test_an_open_turn_runs_all_its_effects_while_preparing(gym: Gym) -> None:
    """N1: the gate closes during the first of three effects; the turn reaches its boundary, the next does not open."""
    gym.world.hold("a/1/1")
    await gym.start("a")
    gym.loop.reply("a", [("add", 1), ("add", 2), ("add", 3)], [("add", 4)])
    await until(lambda: gym.world.begun)
    preparing = asyncio.ensure_future(gym.prepare("1-1"))
    await until(lambda: gym.status["phase"] == "preparing")
    gym.world.release("a/1/1")
    assert (await preparing)["ready"]
    assert ["a/1/1", "a/1/2", "a/1/3"] == gym.world.done
    await until(lambda: gym.state("a") == "parked")
    assert 1 == gym.participant.rollout("a")["turns_done"]


async def test_verifications_are_waited_for_only_where_the_environment_says_so(gym: Gym) -> None:
    """A begun verification with `wait` blocks; one with `repeat` does not, and its finish waits for the gate."""
    for name, environment in (("w", "counter"), ("r", "judged")):
        gym.loop.verifying[name] = asyncio.Event()
        await gym.start(name, environment=environment)
        gym.loop.reply(name, [])
    await until(lambda: {"w", "r"} == set(gym.loop.verifications))
    reply = await gym.prepare("1-1", timeout_ms=1)
    assert [("verification", "w")] == [(b["kind"], b["rollout_id"]) for b in reply["blockers"]]
    gym.loop.verifying["w"].set()
    assert (await gym.prepare("1-1"))["ready"]
    gym.loop.verifying["r"].set()
    await settle()
    assert (1, 1) == (gym.status["counts"]["finished_unreleased"], gym.status["counts"]["live"])
    await gym.abort("1-1")
    await until(lambda: gym.status["counts"]["live"] == 0)


async def test_fifty_prepares_commits_resumes_and_aborts_at_once(gym: Gym) -> None:
    """C31: one execution each, and 50 equal replies."""
    await gym.start("a")
    await gym.waiting("a")
    prepared = await asyncio.gather(*(gym.prepare("1-1") for _ in range(50)))
    assert all(reply["ready"] for reply in prepared)
    committed = await asyncio.gather(*(gym.commit("1-1") for _ in range(50)))
    assert 1 == len({json.dumps({k: v for k, v in reply.items() if k != "pause_ms"}) for reply in committed})
    assert {"rollouts.jsonl", "state.jsonl", "results.jsonl", "tombstones.jsonl", "manifest.json"} == {
        path.name for path in (gym.root / "1-1").iterdir()
    }
    resumed = await asyncio.gather(*(gym.resume("1-1") for _ in range(50)))
    assert 1 == len({json.dumps(reply) for reply in resumed})
    aborted = await asyncio.gather(*(gym.abort("1-1") for _ in range(50)))
    assert {"committed"} == {reply["ended_as"] for reply in aborted}
    assert 50 == len(await asyncio.gather(*(gym.abort("1-2") for _ in range(50))))


async def test_other_arguments_conflict_and_smaller_budgets_do_not(gym: Gym) -> None:
    """C31, N4: run_id, target and leave_out_blocked are compared; timeout_ms, lease_ms and wait are not."""
    await gym.prepare("1-1")
    assert "argument_conflict" == (await refused(gym.prepare("1-1", run_id="run-2"))).code
    assert (await gym.prepare("1-1", timeout_ms=0, lease_ms=1))["ready"]
    await gym.commit("1-1")
    other = gym.root / "other"
    other.mkdir()
    assert "argument_conflict" == (await refused(gym.commit("1-1", other))).code
    assert "argument_conflict" == (await refused(gym.commit("1-1", leave_out_blocked=True))).code
    assert (await gym.commit("1-1", wait="captured", timeout_ms=0, leave_out_blocked=False))["durable"]
    assert [] == list(other.iterdir())


async def test_resume_before_durable_and_the_record_of_the_outcome(tmp_path: Path) -> None:
    """Capture apart from writing: the gate opens after the capture, `last` tells the outcome."""
    disk = SlowDisk()
    gym = Gym(tmp_path, durable=disk)
    await gym.start("a")
    await gym.waiting("a")
    await gym.prepare("1-1")
    disk.free.clear()
    reply = await gym.commit("1-1", wait="captured")
    assert ("committing", True, False, None) == tuple(reply[k] for k in ("phase", "captured", "durable", "manifest"))
    assert gym.status["captured"] is True
    resumed = await gym.resume("1-1")
    assert ("committing", None) == (resumed["phase"], resumed["ended_as"])
    assert ("open", None) == tuple(gym.status[k] for k in ("gate", "lease_remaining_ms"))
    assert "invalid_phase" == (await refused(gym.prepare("1-1"))).code
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: gym.world.done)
    late = await refused(gym.commit("1-1", timeout_ms=1))
    assert ("deadline_exceeded", True, 504) == (late.code, late.extra["continues"], late.status)
    durable = asyncio.ensure_future(gym.commit("1-1"))
    await settle()
    disk.free.set()
    reply = await durable
    assert ("idle", True) == (reply["phase"], reply["durable"])
    assert reply["manifest"] == gym.status["last"]["manifest"]
    row = json.loads((tmp_path / "1-1" / "rollouts.jsonl").read_text())
    assert 0 == row["turns_done"], "the cut is that of the capture"
    assert reply | {"pause_ms": 0} == (await gym.commit("1-1")) | {"pause_ms": 0}
    assert "committed" == (await gym.resume("1-1"))["ended_as"]


async def test_a_full_disk_keeps_the_capture_for_the_same_commit(tmp_path: Path) -> None:
    """C44, N20: insufficient_storage, phase prepared; with room again the same cut is written, not a newer one."""
    disk = SlowDisk()
    gym = Gym(tmp_path, durable=disk)
    await gym.start("a", "b")
    (receipt,) = await gym.finish("a")
    await gym.prepare("1-1")
    disk.full = True
    refusal = await refused(gym.commit("1-1"))
    assert ("insufficient_storage", 507, True) == (refusal.code, refusal.status, refusal.retryable)
    status = gym.status
    assert ("prepared", "closed", True) == (status["phase"], status["gate"], status["captured"])
    assert [] == list((tmp_path / "1-1").iterdir()), "nothing half is left"
    assert ["released"] == await gym.acks(receipt)
    await gym.retire(("b", 0))
    assert "invalid_phase" == (await refused(gym.resume("1-1"))).code
    disk.full = False
    reply = await gym.commit("1-1")
    assert (1, 1) == (reply["counts"]["turn"], reply["counts"]["finished"]), "neither ACK nor retire altered the cut"
    disk.full = True
    await gym.resume("1-1")
    await gym.prepare("1-2")
    await refused(gym.commit("1-2"))
    assert "aborted" == (await gym.abort("1-2"))["ended_as"]
    assert "open" == gym.status["gate"]


async def test_a_write_that_fails_after_resume_ends_the_checkpoint_as_failed(tmp_path: Path) -> None:
    """The gate is open already, so nothing is kept; `last` names the error."""
    disk = SlowDisk()
    gym = Gym(tmp_path, durable=disk)
    await gym.prepare("1-1")
    disk.free.clear()
    disk.full = True
    await gym.commit("1-1", wait="captured")
    await gym.resume("1-1")
    waiting = asyncio.ensure_future(gym.commit("1-1"))
    await settle()
    disk.free.set()
    assert "insufficient_storage" == (await refused(waiting)).code
    last = gym.status["last"]
    assert ("failed", "insufficient_storage", None) == (last["ended_as"], last["error_code"], last["manifest"])
    assert "stale_checkpoint" == (await refused(gym.commit("1-1"))).code


async def test_a_write_longer_than_its_limit_fails(tmp_path: Path) -> None:
    """CKPT-COMMIT-030: max_write_ms passed counts as failed with deadline_exceeded; the capture is kept."""
    clock, disk = MovedClock(), SlowDisk()
    gym = Gym(tmp_path, clock=clock, durable=disk, limits=Limits(max_write_ms=2_000, max_wait_ms=60_000))
    await gym.prepare("1-1")
    disk.free.clear()
    committing = asyncio.ensure_future(gym.commit("1-1", timeout_ms=50_000))
    await until(lambda: disk.steps)
    await clock.advance(3)
    disk.free.set()
    refusal = await refused(committing)
    assert ("deadline_exceeded", "prepared") == (refusal.code, gym.status["phase"])
    assert (await gym.commit("1-1"))["durable"]


async def test_abort_during_a_slow_commit(tmp_path: Path) -> None:
    """C22: the gate opens at once, aborts join, a waiting commit is answered at once, no manifest appears later."""
    disk = SlowDisk()
    gym = Gym(tmp_path, durable=disk)
    await gym.prepare("1-1")
    disk.free.clear()
    committing = asyncio.ensure_future(gym.commit("1-1"))
    await until(lambda: disk.steps)
    late = await refused(gym.abort("1-1", timeout_ms=1))
    assert ("deadline_exceeded", True, "open") == (late.code, late.extra["continues"], gym.status["gate"])
    assert "stale_checkpoint" == (await refused(committing)).code
    for verb in (gym.prepare("1-1"), gym.commit("1-1"), gym.resume("1-1"), gym.renew("1-1", 1_000)):
        assert "stale_checkpoint" == (await refused(verb)).code
    aborts = [asyncio.ensure_future(gym.abort("1-1")) for _ in range(2)]
    await settle()
    disk.free.set()
    assert {"aborted"} == {reply["ended_as"] for reply in await asyncio.gather(*aborts)}
    assert [] == list((tmp_path / "1-1").iterdir())
    assert "open" == gym.status["gate"]


async def test_abort_while_prepare_polls_and_before_it_arrived(gym: Gym) -> None:
    """C22: the poll is answered at once; a prepare that comes after its abort is refused."""
    gym.world.hold("a/1/1")
    await gym.start("a")
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: gym.world.begun)
    preparing = asyncio.ensure_future(gym.prepare("1-1", timeout_ms=30_000))
    await until(lambda: gym.status["phase"] == "preparing")
    assert "aborted" == (await gym.abort("1-1"))["ended_as"]
    assert "stale_checkpoint" == (await refused(preparing)).code
    await gym.abort("1-5")
    assert "stale_checkpoint" == (await refused(gym.prepare("1-5"))).code
    assert "stale_checkpoint" == (await refused(gym.prepare("1-4"))).code
    gym.world.release("a/1/1")


async def test_the_lease_of_a_silent_controller_ends_and_status_does_not_renew_it(tmp_path: Path) -> None:
    """C26, N6: after the lease the gate is open and rollouts go on, however often status was asked for."""
    clock = MovedClock()
    gym = Gym(tmp_path, clock=clock)
    await gym.start("a")
    await gym.waiting("a")
    await gym.prepare("1-1", lease_ms=10_000)
    gym.loop.reply("a", [("add", 1)])
    for _ in range(9):
        await clock.advance(1)
        assert "closed" == gym.status["gate"]
    await gym.acks()
    await clock.advance(1)
    status = gym.status
    assert ("idle", "open", "expired") == (status["phase"], status["gate"], status["last"]["ended_as"])
    await until(lambda: gym.world.done)
    await gym.prepare("1-2", lease_ms=10_000)
    await gym.commit("1-2")
    await clock.advance(10)
    assert ("idle", "committed") == (gym.status["phase"], gym.status["last"]["ended_as"])


async def test_the_lease_does_not_run_while_a_call_is_served(tmp_path: Path) -> None:
    """A prepare that polls longer than the lease keeps it whole; renew never shortens it."""
    clock = MovedClock()
    gym = Gym(tmp_path, clock=clock)
    gym.world.hold("a/1/1")
    await gym.start("a")
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: gym.world.begun)
    preparing = asyncio.ensure_future(gym.prepare("1-1", timeout_ms=20_000, lease_ms=5_000))
    await settle()
    await clock.advance(19)
    assert 5_000 == gym.status["lease_remaining_ms"]
    await clock.advance(1)
    assert 5_000 == (await preparing)["lease_remaining_ms"]
    await clock.advance(1)
    assert 4_000 == (await gym.renew("1-1", 1_000))["lease_remaining_ms"]
    assert 50_000 == (await gym.renew("1-1", 50_000))["lease_remaining_ms"]
    gym.world.release("a/1/1")


@pytest.mark.parametrize("step_s", [-3_600, 3_600, 600])
async def test_steps_of_the_wall_clock_move_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    """C27: an hour behind, an hour ahead, a step while prepared: the budget is full and the lease does not jump."""
    clock = MovedClock()
    gym = Gym(tmp_path, clock=clock)
    await gym.prepare("1-1", lease_ms=10_000)
    await clock.advance(1)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    assert 9_000 == gym.status["lease_remaining_ms"]
    await clock.advance(8)
    assert "closed" == gym.status["gate"]
    await clock.advance(1)
    assert "open" == gym.status["gate"]


async def test_left_out_rollouts_wait_and_go_on_after_resume(gym: Gym) -> None:
    """N13: the cut is taken without the blocked rollout; its running effect ends, all else of it waits for resume."""
    gym.world.hold("slow/1/1")
    await gym.start("slow", "quick")
    gym.loop.reply("slow", [("add", 1), ("add", 2)])
    await gym.waiting("quick")
    await until(lambda: gym.world.begun)
    assert not (await gym.prepare("1-1", timeout_ms=1))["ready"]
    reply = await gym.commit("1-1", leave_out_blocked=True)
    assert (1, 1) == (reply["counts"]["turn"], reply["counts"]["restart"])
    rows = [json.loads(line) for line in (gym.root / "1-1" / "rollouts.jsonl").read_text().splitlines()]
    assert [("quick", "turn", None), ("slow", "restart", "blocked")] == [
        (row["rollout_id"], row["state"], row.get("reason")) for row in rows
    ]
    gym.world.release("slow/1/1")
    await until(lambda: ["slow/1/1"] == gym.world.done)
    await settle()
    assert ["slow/1/1"] == gym.world.begun
    await gym.resume("1-1")
    await until(lambda: ["slow/1/1", "slow/1/2"] == gym.world.done)


async def test_a_higher_controller_ends_what_a_lower_one_left_open(gym: Gym) -> None:
    """C13, C26: adoption aborts an open checkpoint, keeps a committed one usable; the old controller is refused."""
    await gym.prepare("1-1")
    assert "aborted" == (await gym.abort("2-0"))["ended_as"]
    for late in (gym.commit("1-1"), gym.abort("1-1"), gym.prepare("1-9")):
        refusal = await refused(late)
        assert ("stale_controller", {"id": "rl", "epoch": 2}) == (refusal.code, refusal.extra["controller"])
    await gym.prepare("2-1")
    assert (await gym.commit("2-1"))["durable"]


async def test_adoption_happens_also_when_the_call_itself_is_refused(gym: Gym) -> None:
    """CKPT-CTRL-003: committed ends as committed, although the adopting call is stale."""
    await gym.prepare("1-1")
    await gym.commit("1-1")
    assert "stale_checkpoint" == (await refused(gym.resume("2-1"))).code
    status = gym.status
    assert ({"id": "rl", "epoch": 2}, "idle", "open") == (status["controller"], status["phase"], status["gate"])
    assert ("1-1", "committed") == (status["last"]["checkpoint_id"], status["last"]["ended_as"])


async def test_the_target_must_be_an_own_empty_directory_inside_the_roots(gym: Gym, tmp_path: Path) -> None:
    """C45, C23: outside, through `..`, through a link, missing, a file, not empty: refused, nothing is written."""
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "file").write_text("")
    (tmp_path / "inside").mkdir()
    full = tmp_path / "full"
    full.mkdir()
    (full / "other").write_text("kept")
    await gym.prepare("1-1")
    for path in (
        outside,
        tmp_path / "link",
        tmp_path / "inside" / ".." / ".." / outside.name,
        "/",
        tmp_path / "missing",
    ):
        assert "forbidden_target" == (await refused(gym.commit("1-1", str(path)))).code, path
    assert "forbidden_target" == (await refused(gym.commit("1-1", tmp_path / "file"))).code
    assert "target_exists" == (await refused(gym.commit("1-1", full))).code
    assert ("prepared", False) == (gym.status["phase"], gym.status["captured"])
    assert ["other"] == [path.name for path in full.iterdir()]
    assert [] == list(outside.iterdir())
    assert (await gym.commit("1-1", tmp_path / "inside"))["durable"], "a refused commit has fixed no arguments"
    await gym.abort("1-1")
    gym.world.hold("a/1/1")
    await gym.start("a")
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: gym.world.begun)
    await gym.prepare("1-2", timeout_ms=1)
    assert "forbidden_target" == (await refused(gym.commit("1-2", outside))).code, "arguments come before the phase"


@pytest.mark.parametrize("rollouts", [0, 300])
async def test_the_order_and_number_of_syncs_do_not_depend_on_the_rollouts(tmp_path: Path, rollouts: int) -> None:
    """C48: data → directory → manifest → directory."""
    disk = SlowDisk()
    gym = Gym(tmp_path, durable=disk)
    await gym.start(*(f"r{number}" for number in range(rollouts)))
    await gym.prepare("1-1")
    await gym.commit("1-1")
    data = ["state.jsonl", "results.jsonl", "tombstones.jsonl", "rollouts.jsonl"]
    assert [*data, "directory", "manifest.json", "directory"] == disk.steps
    assert {0o600} == {path.stat().st_mode & 0o777 for path in (tmp_path / "1-1").iterdir()}


async def test_a_file_system_without_rename_gives_a_clear_refusal(tmp_path: Path) -> None:
    """C47: the manifest cannot be published, so the commit fails and nothing half is left."""
    disk = SlowDisk()

    def publish_file(path: Path, data: bytes, unnamed: Callable[[], None]) -> None:
        raise OSError(errno.EPERM, "no rename here")

    disk.publish_file = publish_file  # type: ignore[method-assign]  # a wrapper that raises
    gym = Gym(tmp_path, durable=disk)
    await gym.prepare("1-1")
    refusal = await refused(gym.commit("1-1"))
    assert ("internal", "prepared") == (refusal.code, gym.status["phase"])
    assert "EPERM" in refusal.detail
    assert [] == list((tmp_path / "1-1").iterdir())


async def test_a_record_beyond_the_limit_fails_the_commit_or_is_left_out(tmp_path: Path) -> None:
    """C49: the commit names the rollout and the limit; with leave_out_blocked the cut says so, the others are in it."""
    gym = Gym(tmp_path, limits=Limits(max_record_bytes=600))
    await gym.start("big", task={"text": "x" * 1_000})
    await gym.start("small")
    await gym.prepare("1-1")
    refusal = await refused(gym.commit("1-1"))
    assert ("payload_too_large", [{"rollout_id": "big"}]) == (refusal.code, refusal.extra["rollouts"])
    assert "max_record_bytes" in refusal.detail
    assert ("prepared", False) == (gym.status["phase"], gym.status["captured"])
    reply = await gym.commit("1-1", leave_out_blocked=True)
    assert (1, 1) == (reply["counts"]["turn"], reply["counts"]["restart"])
    rows = [json.loads(line) for line in (tmp_path / "1-1" / "rollouts.jsonl").read_text().splitlines()]
    assert ["record_too_large", None] == [row.get("reason") for row in rows]


async def test_every_mutating_operation_refuses_what_is_stale_and_changes_nothing(gym: Gym) -> None:
    """C11: a stale incarnation, epoch or checkpoint id, a foreign epoch in the id: the right code, the same status."""
    await gym.start("live", "old")
    await gym.waiting("live", "old")
    await gym.start("old", attempt=2)
    snapshot = await gym.snapshot("1-1")
    await gym.abort("2-3")
    await gym.waiting("live", "old")
    digest = snapshot["manifest"]["digest"]

    def calls(checkpoint_id: str, **who: Any) -> list[Any]:
        return [
            gym.prepare(checkpoint_id, **who),
            gym.commit(checkpoint_id, **who),
            gym.resume(checkpoint_id, **who),
            gym.abort(checkpoint_id, **who),
            gym.renew(checkpoint_id, 1_000, **who),
            gym.restore(checkpoint_id, "1-1", digest, **who),
        ]

    before = gym.status
    table = [
        ("stale_incarnation", calls("2-9", incarnation="another")),
        ("stale_controller", calls("1-9")),
        ("stale_controller", calls("2-9", controller="aa")),
        ("stale_checkpoint", calls("2-2")),
        ("invalid_request", calls("3-1", epoch=2)),
        ("stale_checkpoint", [gym.commit("2-9"), gym.resume("2-9"), gym.renew("2-9", 1)]),
        ("stale_attempt", [gym.restore("2-9", "1-1", digest, [("old", 2, 2, 0)])]),
        ("stale_attempt", [gym.restore("2-9", "1-1", digest, [("live", 0, 0, 0)])]),
    ]
    for code, stale in table:
        for call in stale:
            assert code == (await refused(call)).code
            assert before == gym.status
    assert ["stale_attempt"] == await gym.start("old", attempt=1, epoch=2)
    assert before == gym.status
    refusal = await refused(gym.restore("2-9", "1-1", digest, [("old", 2, 2, 0), ("live", 0, 0, 0)]))
    assert [("old", 2), ("live", 0)] == [(r["rollout_id"], r["through_attempt"]) for r in refusal.extra["rollouts"]]


async def test_progress_rises_with_what_a_cut_holds_and_with_nothing_else(gym: Gym) -> None:
    """CKPT-STATUS-006, CKPT-STATUS-008: start, boundary, finish, ACK, retire; never prepare, commit, resume, abort."""
    seen = [gym.status["progress"]]

    def rose() -> bool:
        seen.append(gym.status["progress"])
        return seen[-1] > seen[-2]

    await gym.start("a", "b")
    await gym.waiting("a", "b")
    assert rose()
    await gym.snapshot("1-1")
    await gym.prepare("1-2")
    await gym.renew("1-2", 1_000)
    await gym.abort("1-2")
    assert not rose()
    gym.loop.reply("a", [("add", 1)])
    await until(lambda: gym.participant.rollout("a")["turns_done"] == 1)
    assert rose()
    (receipt,) = await gym.finish("a")
    assert rose()
    await gym.acks(receipt)
    assert rose()
    await gym.retire(("b", 0))
    assert rose()


async def test_unmanaged_rollouts_are_counted_and_block_nothing(gym: Gym) -> None:
    """CKPT-GATE-022: they stand outside of every other count, and the gate does not know them."""
    with gym.participant.unmanaged():
        assert (1, 0) == (gym.status["counts"]["unmanaged"], gym.status["counts"]["admitted"])
        assert (await gym.prepare("1-1"))["ready"]
    assert 0 == gym.status["counts"]["unmanaged"]


async def test_a_higher_controllers_prepare_waits_for_what_it_ends(tmp_path: Path) -> None:
    """CKPT-CTRL-004: the slow commit of the lower one has stopped before the call itself is judged."""
    disk = SlowDisk()
    gym = Gym(tmp_path, durable=disk)
    await gym.prepare("1-1")
    disk.free.clear()
    committing = asyncio.ensure_future(gym.commit("1-1"))
    await until(lambda: disk.steps)
    preparing = asyncio.ensure_future(gym.prepare("2-1"))
    assert "stale_checkpoint" == (await refused(committing)).code
    assert not preparing.done()
    disk.free.set()
    assert (await preparing)["ready"]
    assert "2-1" == gym.status["checkpoint_id"]


async def test_where_rollouts_are_owned_a_closed_turn_stays_closed(gym: Gym) -> None:
    """CKPT-GATE-001: an effect that comes from elsewhere, for a turn that the agent has closed, is held at the gate."""
    gym.world.hold("b/1/1")
    await gym.start("a", "b")
    gym.loop.reply("a", [("add", 1)])
    gym.loop.reply("b", [("add", 1)])
    await until(lambda: gym.participant.rollout("a")["turns_done"] == 1 and "b/1/1" in gym.world.begun)
    assert not (await gym.prepare("1-1", timeout_ms=1))["ready"]
    late = EffectCall("a", 0, 1, "a/1/9", "add", {"n": 1}, None)
    held = asyncio.ensure_future(gym.sessions.effect(late))
    await settle()
    assert "a/1/9" not in gym.world.begun
    await gym.abort("1-1")
    assert {"value": 2} == await held
    gym.world.release("b/1/1")


async def test_a_blocked_rollout_is_listed_as_blocked_whatever_else_it_is(gym: Gym) -> None:
    """CKPT-COMMIT-032: also one that could not continue anyway."""
    gym.world.hold("o/1/1")
    await gym.start("o", environment="once")
    gym.loop.reply("o", [("add", 1)])
    await until(lambda: gym.world.begun)
    await gym.prepare("1-1", timeout_ms=1)
    await gym.commit("1-1", leave_out_blocked=True)
    row = json.loads((gym.root / "1-1" / "rollouts.jsonl").read_text())
    assert ("restart", "blocked") == (row["state"], row["reason"])
    gym.world.release("o/1/1")
