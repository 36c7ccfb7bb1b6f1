# SPDX-License-Identifier: Apache-2.0
"""The rollouts of one participant as a pure value: starts, results, ACKs, retiring, restoring.

Everything here is what the specification lets a caller see. `Rollouts` is immutable; every operation returns a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

RolloutState = Literal["live", "finished", "failed", "released", "fenced"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """Names one finished result exactly."""

    rollout_id: str
    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class Start:
    """One item of a start.

    ``unfit`` is the outcome that the item deserves before its rollout is even looked at: ``invalid`` or
    ``unknown_environment``. ``policy`` is where its policy calls go.
    """

    rollout_id: str
    attempt: int
    task: str
    policy: str = ""
    unfit: Literal["invalid", "unknown_environment"] | None = None


@dataclass(frozen=True, slots=True)
class Retire:
    """One item of a retire."""

    rollout_id: str
    through_attempt: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """One rollout that a restore continues."""

    rollout_id: str
    attempt: int
    next_attempt: int
    task: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The lists of one restore."""

    rollouts: tuple[Resumed, ...] = ()
    results: tuple[Receipt, ...] = ()
    fences: tuple[Retire, ...] = ()


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout at its highest attempt.

    Args:
        state: ``fenced`` is a rollout of which nothing but the fence is left: retired, or a released failure that a
            higher attempt may follow.
        terminal: of a failure, whether no attempt may follow.
        may_end: whether the outside lets it reach its end: no generation, effect or verification of it is held.
        digest: of its result; ``None`` until it has been seen.
    """

    attempt: int
    task: str
    state: RolloutState
    policy: str = ""
    terminal: bool = True
    may_end: bool = False
    digest: str | None = None


@dataclass(frozen=True)
class Rollouts:
    """All rollouts that one participant knows, and its fences."""

    known: Mapping[str, Rollout] = field(default_factory=lambda: MappingProxyType({}))
    fences: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __hash__(self) -> int:
        return hash((frozenset(self.known.items()), frozenset(self.fences.items())))

    def get(self, rollout_id: str) -> Rollout | None:
        """Return what is known of a rollout."""
        return self.known.get(rollout_id)

    def put(self, rollout_id: str, rollout: Rollout) -> Rollouts:
        """Return the value with one rollout replaced."""
        return replace(self, known=MappingProxyType({**self.known, rollout_id: rollout}))

    def fence(self, rollout_id: str, through: int) -> Rollouts:
        """Return the value with one fence raised to at least ``through``; a fence never falls."""
        raised = max(through, self.fences.get(rollout_id, -1))
        return replace(self, fences=MappingProxyType({**self.fences, rollout_id: raised}))

    def without(self, rollout_ids: frozenset[str]) -> Rollouts:
        """Return the value without some rollouts; their fences stay."""
        kept = {name: rollout for name, rollout in self.known.items() if name not in rollout_ids}
        return replace(self, known=MappingProxyType(kept))

    def in_state(self, *states: RolloutState) -> Iterator[tuple[str, Rollout]]:
        """Yield the rollouts in one of the states."""
        return ((name, rollout) for name, rollout in self.known.items() if rollout.state in states)


def start(rollouts: Rollouts, item: Start, gate: str, room: int) -> tuple[str, Rollouts]:
    """Return the outcome of one item of a start and what it leaves (CKPT-ROLL-004 … 027).

    Args:
        rollouts: what the participant knows.
        item: the item.
        gate: ``open`` or ``closed``.
        room: how many rollouts more may be live.
    """
    held = rollouts.get(item.rollout_id)
    if item.unfit:
        return item.unfit, rollouts
    if item.attempt <= rollouts.fences.get(item.rollout_id, -1) or (held and item.attempt < held.attempt):
        return "stale_attempt", rollouts
    if held and held.state != "fenced":
        same_attempt, same_task = item.attempt == held.attempt, item.task == held.task
        if held.state == "released":
            return "released", rollouts
        if not same_task and (same_attempt or held.state == "finished"):
            return "conflict", rollouts
        if held.state == "finished" or (held.state == "failed" and same_attempt):
            return "already_finished", rollouts
        if same_attempt:
            return "already_started", rollouts.put(item.rollout_id, replace(held, policy=item.policy))
    if gate == "closed":
        return "admission_closed", rollouts
    if room <= 0 and not (held and held.state == "live"):
        return "over_capacity", rollouts
    return "started", rollouts.put(item.rollout_id, Rollout(item.attempt, item.task, "live", item.policy))


def acknowledge(rollouts: Rollouts, receipt: Receipt) -> tuple[str, Rollouts]:
    """Return the outcome of one receipt and what it leaves (CKPT-ACK-003 … 014)."""
    held = rollouts.get(receipt.rollout_id)
    if held is None or held.attempt != receipt.attempt or held.state == "live":
        return "unknown", rollouts
    if held.state == "fenced" and held.digest is None:
        return "unknown", rollouts
    if held.digest != receipt.digest:
        return "mismatch", rollouts
    if held.state in ("released", "fenced"):
        return "already_released", rollouts
    if held.state == "failed" and not held.terminal:
        left = rollouts.put(receipt.rollout_id, replace(held, state="fenced"))
        return "released", left.fence(receipt.rollout_id, held.attempt)
    return "released", rollouts.put(receipt.rollout_id, replace(held, state="released"))


def retire(rollouts: Rollouts, item: Retire) -> tuple[frozenset[str], Rollouts]:
    """Return the outcomes that one item of a retire may have and what it leaves (CKPT-RETIRE-001 … 013)."""
    held = rollouts.get(item.rollout_id)
    fenced = rollouts.fence(item.rollout_id, item.through_attempt)
    if held is None or held.attempt > item.through_attempt or held.state in ("released", "fenced"):
        return frozenset({"retired"}), fenced
    if held.state == "finished":
        return frozenset({"finished"}), fenced
    gone = fenced.put(item.rollout_id, replace(held, state="fenced", digest=None, may_end=False))
    return frozenset({"retired", "pending"} if held.state == "live" else {"retired"}), gone


def stale_in(rollouts: Rollouts, plan: Plan) -> bool:
    """Return whether a restore lists a ``next_attempt`` not above fence and held attempt (CKPT-RESTORE-029, 053)."""
    return any(
        item.next_attempt <= max(rollouts.fences.get(item.rollout_id, -1), _attempt(rollouts, item.rollout_id))
        for item in plan.rollouts
    )


def install(rollouts: Rollouts, source: Rollouts, plan: Plan, policy: str | None) -> Rollouts:
    """Return what the installing step of a restore makes current (CKPT-RESTORE-015 … 031).

    Args:
        rollouts: what was current before; all of it is dropped and leaves its attempt as a fence.
        source: what the cut holds; its tombstones replace the present ones. Empty for ``source: null``.
        plan: the lists of the request.
        policy: where the restored rollouts call from now on; ``None``: their saved one.
    """
    kept = {receipt.rollout_id for receipt in plan.results}
    new = Rollouts(fences=rollouts.fences)
    for name, rollout in rollouts.known.items():
        # A result that is kept is current again at its own attempt, which a fence at that attempt would make unusable.
        new = new.fence(name, rollout.attempt - 1 if name in kept else rollout.attempt)
    for name, rollout in source.in_state("released", "fenced"):
        new = new.put(name, rollout)
    for item in plan.rollouts:
        saved = source.get(item.rollout_id)
        address = policy if policy is not None else saved.policy if saved else ""
        new = new.put(item.rollout_id, Rollout(item.next_attempt, item.task, "live", address))
        new = new.fence(item.rollout_id, item.next_attempt - 1)
    for receipt in plan.results:
        saved = source.get(receipt.rollout_id)
        if saved is not None:
            new = new.put(receipt.rollout_id, saved)
    for fence in plan.fences:
        new = new.fence(fence.rollout_id, fence.through_attempt)
    return new


def discard(installed: Rollouts) -> Rollouts:
    """Return what is left when a restored state is given up: tombstones and fences (CKPT-ABORT-007, 008)."""
    left = Rollouts(fences=installed.fences)
    for name, rollout in installed.known.items():
        tombstone = rollout.state in ("released", "fenced")
        left = left.put(name, rollout) if tombstone else left.fence(name, rollout.attempt)
    return left


def finished(rollouts: Rollouts, receipt: Receipt, terminal: bool, success: bool) -> Rollouts:
    """Return the value after a result was seen: its rollout has ended, and its receipt is this one from now on."""
    held = rollouts.get(receipt.rollout_id)
    if held is None or held.attempt != receipt.attempt:
        return rollouts
    state: RolloutState = "finished" if success else "failed"
    return rollouts.put(receipt.rollout_id, replace(held, state=state, terminal=terminal, digest=receipt.digest))


def servable(rollouts: Rollouts, receipt: Receipt) -> bool:
    """Return whether the feed may serve this receipt: the rollout could have ended at this attempt, so."""
    held = rollouts.get(receipt.rollout_id)
    if held is None or held.attempt != receipt.attempt:
        return False
    if held.state == "live":
        return held.may_end
    return held.state in ("finished", "failed") and held.digest in (None, receipt.digest)


def unserved(rollouts: Rollouts, seen: Iterable[Receipt]) -> frozenset[str]:
    """Return the rollouts whose result is known and which a complete read of the feed left out (CKPT-FEED-001)."""
    served = {receipt.rollout_id for receipt in seen}
    known = (name for name, rollout in rollouts.in_state("finished", "failed") if rollout.digest is not None)
    return frozenset(name for name in known if name not in served)


def _attempt(rollouts: Rollouts, rollout_id: str) -> int:
    held = rollouts.get(rollout_id)
    return held.attempt if held else -1
