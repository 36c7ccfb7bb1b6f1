# SPDX-License-Identifier: Apache-2.0
"""What everybody outside of a Gym knows for certain, because it was acknowledged; its next life is judged by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.gym.crash.lives import MortalGym
from tests.gym.stubs import PolicyStub

RUN_TURNS = 5


@dataclass
class Known:
    """What was acknowledged: nothing of it may be missing afterwards.

    ``proved`` is what the policy's log proved when the last life ended; ``replaced`` says that a restore was sent, so
    that the live work may be that of either side.
    """

    policy: PolicyStub
    incarnations: dict[str, str] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    released: dict[str, dict[str, Any]] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    fenced: dict[str, int] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=dict)
    proved: dict[str, int] = field(default_factory=dict)
    replaced: bool = False

    def turns(self) -> dict[str, int]:
        """The finished turns of each rollout on which a later policy call depended, by attempt 0."""
        proved: dict[str, int] = {}
        for asked in self.policy.asked:
            if asked.rollout_id is not None and asked.turn is not None and asked.attempt == "0":
                proved[asked.rollout_id] = max(proved.get(asked.rollout_id, 0), int(asked.turn) - 1)
        return proved

    def held_turn(self) -> bool:
        """Whether an unfinished rollout holds a finished turn."""
        gone = self.results.keys() | self.released.keys() | self.doubtful | self.fenced.keys()
        return any(done >= 1 and rollout not in gone for rollout, done in self.turns().items())


async def begin(gym: MortalGym, known: Known, rollout: str, task: Any, *, held_at: int | None = None) -> None:
    """Start one rollout, whose policy is perhaps held at a turn."""
    if held_at is not None:
        known.policy.hold(rollout, held_at)
    gym.watched["agent"].allow(rollout, RUN_TURNS if held_at is None else held_at - 1, ends=held_at is None)
    await gym.begin_rollout(rollout, task, known.policy.address)
    known.started.add(rollout)


async def see_results(gym: MortalGym, known: Known) -> None:
    """Read the feed: what was seen once is known."""
    for rollout, found in (await gym.results()).items():
        gym.watched["agent"].result(found)
        known.results[rollout] = found["receipt"]


async def see_progress(gym: MortalGym, known: Known) -> None:
    """Read every status."""
    for role in gym.roles:
        status = await gym.raw(role, "GET", "/checkpoint")
        gym.watched[role].status(status)
        known.progress[role] = status["progress"]


async def release(gym: MortalGym, known: Known, rollout: str) -> None:
    """Acknowledge one result."""
    receipt = known.results[rollout]
    known.doubtful.add(rollout)
    reply = await gym.post("agent", "/acks", {"receipts": [receipt]})
    assert "released" == reply["outcomes"][0]["outcome"], reply
    known.released[rollout] = receipt


async def retire(gym: MortalGym, known: Known, rollout: str, through: int) -> None:
    """Retire one rollout everywhere."""
    known.doubtful.add(rollout)
    body = {"rollouts": [{"rollout_id": rollout, "through_attempt": through}], "timeout_ms": 5_000}
    for role in gym.roles:
        await gym.post(role, "/retire", body)
    known.fenced[rollout] = through


async def judge(gym: MortalGym, known: Known) -> bool:
    """Compare a new life with what was acknowledged, and with the model; whether every incarnation is kept."""
    statuses = {role: await gym.raw(role, "GET", "/checkpoint") for role in gym.roles}
    for role, status in statuses.items():
        kept = gym.incarnations[role] == known.incarnations[role]
        gym.watched[role].restarted(kept=kept)
        gym.watched[role].status(status, counted=not known.replaced)
        if kept:
            assert known.progress.get(role, 0) <= status["progress"], (role, known.progress, status)
    if gym.incarnations["agent"] != known.incarnations["agent"]:
        return False
    counts = statuses["agent"]["counts"]
    assert counts["admitted"] == sum(
        counts[key] for key in ("live", "finished_unreleased", "failed_unreleased", "released", "retired")
    )
    await _judge_rollouts(gym, known)
    return gym.incarnations == known.incarnations


async def _judge_rollouts(gym: MortalGym, known: Known) -> None:
    live = await gym.rollouts()  # Unreleased results are among them.
    results = await gym.results()
    if not known.replaced:
        gym.watched["agent"].rows(live.values())
        for result in results.values():
            gym.watched["agent"].result(result)
    for rollout, through in known.fenced.items():
        assert "stale_attempt" == await outcome(gym, known, rollout, through)
    reply = await gym.post("agent", "/acks", {"receipts": [*known.released.values()]})
    outcomes = {each["outcome"] for each in reply["outcomes"]}
    assert outcomes <= {"already_released"} or known.replaced, reply
    if known.replaced:
        return
    for rollout, receipt in known.results.items():
        if rollout not in known.doubtful:
            assert receipt == results[rollout]["receipt"], rollout
    for rollout in known.started - known.doubtful - known.results.keys():
        assert rollout in live, f"{rollout} was started and is gone"
        assert known.proved.get(rollout, 0) <= live[rollout]["turns_done"], (rollout, known.proved, live[rollout])


async def outcome(gym: MortalGym, known: Known, rollout: str, attempt: int) -> str:
    """What a start of this attempt is answered."""
    item = {
        "rollout_id": rollout,
        "attempt": attempt,
        "environment": "conformance",
        "task": {"seed": 7, "world_url": None, "verify_in_world": False},
        "task_digest": "sha256:" + "0" * 64,
        "policy": known.policy.address,
    }
    reply = await gym.post("agent", "/rollouts", {"rollouts": [item]})
    return str(reply["outcomes"][0]["outcome"])
