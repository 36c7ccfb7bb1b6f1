# SPDX-License-Identifier: Apache-2.0
"""The rollouts of one participant as a pure value: starts, results, ACKs, retiring, restoring.

Everything here is what the specification lets a caller see. `Rollouts` is immutable; every operation returns new ones.
A rollout that moves by itself is not followed step by step: it is `loose` until somebody has looked, which means that
it may stand anywhere between what is known of it and where the outside lets it get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

RolloutState = Literal["live", "finished", "failed", "released", "retired"]
Busy = Literal["no", "effect", "verification"]
End = Literal["success", "failure", "uncertain"]


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
    restart_only: bool = False
    unfit: Literal["invalid", "unknown_environment"] | None = None


@dataclass(frozen=True, slots=True)
class Retire:
    """One item of a retire, or one fence of a restore."""

    rollout_id: str
    through_attempt: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """One rollout that a restore continues."""

    rollout_id: str
    attempt: int
    next_attempt: int
    turns: int
    task: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The lists of one restore."""

    rollouts: tuple[Resumed, ...] = ()
    results: tuple[Receipt, ...] = ()
    fences: tuple[Retire, ...] = ()


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a rollout stands, or where the outside lets it get.

    Args:
        turns: its boundaries.
        busy: what of it is begun and kept from its end by the outside.
        end: how it has ended; ``uncertain``: the handler of an effect died. ``None``: it goes on.
    """

    turns: int = 0
    busy: Busy = "no"
    end: End | None = None


START = Stand()


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout at its highest attempt.

    Args:
        terminal: of a failure, whether no attempt may follow.
        digest: of its result; ``None`` until it has been seen.
        stand: where it stood for sure.
        loose: it may have moved from there as far as this by itself; ``None``: it has not.
        left_out: a cut was taken without it, or, in a cut, this is so.
    """

    attempt: int
    task: str
    state: RolloutState = "live"
    policy: str = ""
    restart_only: bool = False
    terminal: bool = True
    digest: str | None = None
    stand: Stand = START
    loose: Stand | None = None
    left_out: bool = False

    @property
    def uncertain(self) -> bool:
        """Whether it has stopped for good in state `restart`."""
        return self.stand.end == "uncertain"

    @property
    def blocks(self) -> bool:
        """Whether it certainly keeps its participant from `prepared`."""
        return self.state == "live" and self.loose is None and self.stand.busy != "no"

    @property
    def may_block(self) -> bool:
        """Whether it possibly does."""
        stands = (self.stand,) if self.loose is None else (self.stand, self.loose)
        return self.state == "live" and any(stand.busy != "no" for stand in stands)


@dataclass(frozen=True)
class Rollouts:
    """All rollouts that one participant knows, and its fences.

    Args:
        known: live, unreleased, and the tombstones of released and retired ones.
        fences: the highest attempt that is certainly refused.
        soft: the highest attempt that is possibly refused.
    """

    known: Mapping[str, Rollout] = field(default_factory=lambda: MappingProxyType({}))
    fences: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    soft: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __hash__(self) -> int:
        return hash((frozenset(self.known.items()), frozenset(self.fences.items()), frozenset(self.soft.items())))

    def get(self, rollout_id: str) -> Rollout | None:
        """Return what is known of a rollout."""
        return self.known.get(rollout_id)

    def put(self, rollout_id: str, rollout: Rollout) -> Rollouts:
        """Return the value with one rollout replaced."""
        return replace(self, known=MappingProxyType({**self.known, rollout_id: rollout}))

    def fence(self, rollout_id: str, through: int) -> Rollouts:
        """Return the value with one fence raised to at least ``through``; a fence never falls (CKPT-FENCE-005)."""
        raised = max(through, self.fenced(rollout_id))
        return replace(self, fences=MappingProxyType({**self.fences, rollout_id: raised}))

    def fenced(self, rollout_id: str) -> int:
        """Return the fence of a rollout; -1: none."""
        return self.fences.get(rollout_id, -1)

    def only(self, keep: Callable[[Rollout], bool]) -> Rollouts:
        """Return the value without the rollouts that ``keep`` says no to; their fences stay."""
        return replace(self, known=MappingProxyType({name: one for name, one in self.known.items() if keep(one)}))

    def each(self, change: Callable[[str, Rollout], Rollout]) -> Rollouts:
        """Return the value with every rollout changed."""
        return replace(self, known=MappingProxyType({name: change(name, one) for name, one in self.known.items()}))

    def in_state(self, *states: RolloutState) -> Iterator[tuple[str, Rollout]]:
        """Yield the rollouts in one of the states."""
        return ((name, rollout) for name, rollout in self.known.items() if rollout.state in states)


def possible(rollout: Rollout) -> frozenset[Rollout]:
    """Return what a rollout may be at this moment: as it is known, or ended, if the outside let it."""
    end = rollout.loose.end if rollout.state == "live" and rollout.loose is not None else None
    return frozenset({rollout} if end is None else {rollout, ended(rollout, end)})


def ended(rollout: Rollout, end: End) -> Rollout:
    """Return a live rollout after it has come to its end."""
    stand = replace(rollout.loose or rollout.stand, busy="no", end=end)
    if end == "uncertain":
        return replace(rollout, stand=stand, loose=None)
    state: RolloutState = "finished" if end == "success" else "failed"
    return replace(rollout, state=state, terminal=end == "success", stand=stand, loose=None)


def start(rollouts: Rollouts, item: Start, gate: str, room: int) -> frozenset[tuple[str, Rollouts]]:
    """Return the outcomes that one item of a start may have, each with what it leaves (CKPT-ROLL-004 … 027).

    Args:
        rollouts: what the participant knows.
        item: the item.
        gate: ``open`` or ``closed``.
        room: how many rollouts more may be live.
    """
    if item.unfit:
        return frozenset({(item.unfit, rollouts)})
    name = item.rollout_id
    held = rollouts.get(name)
    if item.attempt <= rollouts.fenced(name) or (held is not None and item.attempt < held.attempt):
        return frozenset({("stale_attempt", rollouts)})
    found = {_start_over(rollouts.put(name, one) if one else rollouts, one, item, gate, room) for one in _each(held)}
    if item.attempt <= rollouts.soft.get(name, -1):
        found.add(("stale_attempt", rollouts.fence(name, item.attempt)))
    return frozenset(found)


def _each(held: Rollout | None) -> Iterable[Rollout | None]:
    return (None,) if held is None else possible(held)


def _start_over(rollouts: Rollouts, held: Rollout | None, item: Start, gate: str, room: int) -> tuple[str, Rollouts]:
    if held is not None and held.state != "retired":
        same_attempt, same_task = item.attempt == held.attempt, item.task == held.task
        if held.state == "released" and held.terminal:
            return "released", rollouts
        if held.state in ("live", "failed", "finished"):
            if not same_task and (same_attempt or held.state == "finished"):
                return "conflict", rollouts
            if held.state == "finished" or (held.state == "failed" and same_attempt):
                return "already_finished", rollouts
            if same_attempt:
                return "already_started", rollouts.put(item.rollout_id, replace(held, policy=item.policy))
    if gate == "closed":
        return "admission_closed", rollouts
    if room <= 0 and not (held is not None and held.state == "live"):
        return "over_capacity", rollouts
    new = Rollout(item.attempt, item.task, policy=item.policy, restart_only=item.restart_only)
    return "started", rollouts.put(item.rollout_id, new).fence(item.rollout_id, item.attempt - 1)


def acknowledge(rollouts: Rollouts, receipt: Receipt) -> frozenset[tuple[str, Rollouts]]:
    """Return the outcomes that one receipt may have, each with what it leaves (CKPT-ACK-003 … 014, 032)."""
    held = rollouts.get(receipt.rollout_id)
    return frozenset(_acknowledge(rollouts, one, receipt) for one in _each(held))


def _acknowledge(rollouts: Rollouts, held: Rollout | None, receipt: Receipt) -> tuple[str, Rollouts]:
    if held is None or held.attempt != receipt.attempt or held.state in ("live", "retired"):
        return "unknown", rollouts
    if held.digest != receipt.digest:
        return "mismatch", rollouts
    if held.state == "released":
        return "already_released", rollouts
    left = rollouts.put(receipt.rollout_id, replace(held, state="released"))
    return "released", left if held.terminal else left.fence(receipt.rollout_id, held.attempt)


def retire(rollouts: Rollouts, item: Retire, *, hosted: bool = False) -> frozenset[tuple[str, Rollouts]]:
    """Return the outcomes that one item of a retire may have, each with what it leaves (CKPT-RETIRE-001 … 019).

    Args:
        rollouts: what the participant knows.
        item: the item.
        hosted: whether the participant may hold a session of it, as one that owns sessions and no rollouts.
    """
    held = rollouts.get(item.rollout_id)
    fenced = rollouts.fence(item.rollout_id, item.through_attempt)
    found = frozenset(outcome for one in _each(held) for outcome in _retire(fenced, one, item))
    return found | {("pending", fenced)} if hosted and held is None else found


def _retire(fenced: Rollouts, held: Rollout | None, item: Retire) -> Iterator[tuple[str, Rollouts]]:
    if held is None or held.attempt > item.through_attempt or held.state == "released":
        yield "retired", fenced
    elif held.state == "finished":
        yield "finished", fenced.put(item.rollout_id, held)
    else:
        gone = replace(held, state="retired", digest=None, loose=None)
        left = fenced.put(item.rollout_id, gone)
        yield "retired", left
        # What an attempt left behind may take a while to be freed; nobody but the participant can tell.
        if held.state in ("live", "retired"):
            yield "pending", left


def stale_in(rollouts: Rollouts, plan: Plan) -> bool:
    """Return whether a restore lists a ``next_attempt`` not above fence and held attempt (CKPT-RESTORE-029, 053)."""
    return any(
        item.next_attempt <= max(rollouts.fenced(item.rollout_id), _attempt(rollouts, item.rollout_id))
        for item in plan.rollouts
    )


def mismatched(source: Rollouts, plan: Plan) -> bool:
    """Return whether the lists of a restore disagree with its source (CKPT-RESTORE-024 … 028)."""
    return not all(_holds_rollout(source, item) for item in plan.rollouts) or not all(
        _holds_result(source, receipt) for receipt in plan.results
    )


def _holds_rollout(source: Rollouts, item: Resumed) -> bool:
    saved = source.get(item.rollout_id)
    return (
        saved is not None
        and index_state(saved) == "turn"
        and ((saved.attempt, saved.stand.turns, saved.task) == (item.attempt, item.turns, item.task))
    )


def _holds_result(source: Rollouts, receipt: Receipt) -> bool:
    saved = source.get(receipt.rollout_id)
    return (
        saved is not None
        and index_state(saved) == "finished"
        and ((saved.attempt, saved.digest) == (receipt.attempt, receipt.digest))
    )


def index_state(rollout: Rollout) -> str | None:
    """Return the state that the index of a cut gives to a rollout that has not moved; ``None``: it has no line."""
    if rollout.state in ("finished", "failed"):
        return "finished"
    if rollout.state != "live":
        return None
    return "restart" if rollout.restart_only or rollout.uncertain or rollout.left_out else "turn"


def install(rollouts: Rollouts, source: Rollouts, plan: Plan, policy: str | None) -> Rollouts:
    """Return what the installing step of a restore makes current (CKPT-RESTORE-015 … 031).

    Args:
        rollouts: what was current before; all of it is dropped and leaves its attempt as a fence.
        source: what the cut holds; its tombstones replace the present ones. Empty for ``source: null``.
        plan: the lists of the request.
        policy: where the restored rollouts call from now on; ``None``: their saved one.
    """
    kept = {receipt.rollout_id: receipt.attempt for receipt in plan.results}
    new = Rollouts(fences=rollouts.fences)
    for name, rollout in rollouts.known.items():
        # Whether the attempt of a result that is current again counts as fenced is left open by the specification.
        new = new.fence(name, min(rollout.attempt, kept.get(name, rollout.attempt + 1) - 1))
    new = replace(new, soft=MappingProxyType(kept))
    for name, rollout in source.in_state("released", "retired"):
        new = new.put(name, rollout)
    for item in plan.rollouts:
        saved = source.get(item.rollout_id)
        address = policy if policy is not None else saved.policy if saved else ""
        one = Rollout(item.next_attempt, item.task, policy=address, stand=Stand(item.turns))
        new = new.put(item.rollout_id, one).fence(item.rollout_id, item.next_attempt - 1)
    for receipt in plan.results:
        saved = source.get(receipt.rollout_id)
        if saved is not None:
            new = new.put(receipt.rollout_id, saved)
    for fence in plan.fences:
        new = new.fence(fence.rollout_id, fence.through_attempt)
    return new


def discard(installed: Rollouts) -> frozenset[Rollouts]:
    """Return what may be left when a restored state is given up: fences, and perhaps tombstones (CKPT-ABORT-007, 008).

    Whether the tombstones that the restore installed stay, and whether what it discards counts as retired, is not said.
    """
    fenced = installed
    for name, rollout in installed.known.items():
        fenced = fenced.fence(name, rollout.attempt)
    tombs = fenced.only(lambda rollout: rollout.state in ("released", "retired"))
    counted = fenced.each(
        lambda _, one: one if one.state in ("released", "retired") else replace(one, state="retired", digest=None)
    )
    return frozenset({fenced.only(lambda rollout: False), tombs, counted})


def _attempt(rollouts: Rollouts, rollout_id: str) -> int:
    held = rollouts.get(rollout_id)
    return held.attempt if held else -1
