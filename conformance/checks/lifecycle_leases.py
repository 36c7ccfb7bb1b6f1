# SPDX-License-Identifier: Apache-2.0
"""Lifecycle: how long a lease is, what renews it, and what its end does."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from conformance.case import Case
from conformance.controller import Controller, Participant
from conformance.cuts import admits, ready_at, target_for
from conformance.errors import Failed, NotOffered
from conformance.registry import check

COMMON = ("conformance",)
CLOCK_SLACK_MS = 60
A_DAY_MS = 86_400_000


@check(
    "CKPT-LEASE-009",
    "CKPT-LEASE-005",
    "CKPT-LEASE-006",
    "CKPT-LEASE-007",
    "CKPT-LEASE-011",
    "CKPT-LEASE-012",
    "CKPT-LEASE-013",
    "CKPT-GATE-015",
    profile="checkpoint",
    storage=True,
    budget="default",
)
def a_lease_ends_by_itself(case: Case) -> None:
    """C26, N6: without word from the controller the gate opens: expired, or committed; polling renews nothing."""
    lease_ms = max(p.limit("min_lease_ms") for p in case.gym.participants)
    if lease_ms > case.patience.ms(10_000):
        raise NotOffered(f"the shortest lease is {lease_ms} ms")
    lower = Controller("aaa", max(1, case.controller.epoch - 1))
    knocking: dict[str, Callable[[Participant], object]] = {
        "CKPT-LEASE-005": lambda p: (lower.abort(p, f"{lower.epoch}-0"), case.controller.adopt(p)),
        "CKPT-LEASE-006": _read_everything,
        "CKPT-LEASE-007": lambda p: case.controller.retire(p, {}),
    }
    for phase, ended_as, key, knocks in (
        ("restored", "expired", "CKPT-LEASE-013", "CKPT-LEASE-006"),
        ("prepared", "expired", "CKPT-LEASE-009", "CKPT-LEASE-005"),
        ("committed", "committed", "CKPT-LEASE-012", "CKPT-LEASE-007"),
    ):
        open_id = case.controller.next_id()
        asked = {}
        for p in case.gym.participants:
            if phase == "restored":
                asked[p.name] = time.monotonic()
                case.accepted(case.controller.restore(p, open_id, None, lease_ms=lease_ms), "a reset")
            else:
                ready_at(case, p, open_id, lease_ms=lease_ms)
                asked[p.name] = time.monotonic()
                if phase == "committed":
                    target, _ = target_for(case, p, open_id)
                    case.accepted(case.controller.commit(p, open_id, target), "commit")
        case.step(f"in phase {phase} poll the status, and {KNOCKS[knocks]}")
        for p in case.gym.participants:
            _await_lease_end(case, p, lease_ms, functools.partial(knocking[knocks], p), knocks, key)
            passed = (time.monotonic() - asked[p.name]) * 1000
            got = f"{passed:.0f} of {lease_ms} ms"
            case.true(passed >= lease_ms - CLOCK_SLACK_MS, "not before its end", key, got=got)
            status = p.status()
            case.equal("open", status["gate"], "the gate is open", key, "CKPT-LEASE-011")
            last = (status["last"]["checkpoint_id"], status["last"]["ended_as"])
            case.equal((open_id, ended_as), last, "how it ended", key)
            admits(case, p, f"after the lease of a {phase} checkpoint has ended")


KNOCKS = {
    "CKPT-LEASE-005": "send calls that are refused: of a lower controller, and with a lower id",
    "CKPT-LEASE-006": "read everything else that can be read",
    "CKPT-LEASE-007": "send an empty retire, which names no checkpoint",
}


def _read_everything(p: Participant) -> None:
    """Send every GET; what it answers is judged elsewhere."""
    p.get_capabilities()
    if p.owns("rollouts"):
        p.get_rollouts()
        p.get_rollout("nobody")
        p.get_results()


def _await_lease_end(
    case: Case, p: Participant, lease_ms: int, knock: Callable[[], object], knocks: str, key: str
) -> None:
    """Knock until the lease has ended; if it has not in time, see whether it ends in silence, and blame accordingly."""

    def over() -> bool:
        knock()
        return bool(p.status()["phase"] == "idle")

    bound = lease_ms / 1000 / case.patience.scale + 3
    try:
        case.until(over, f"the gate of {p.name} opens when the lease ends", within_s=bound)
    except Failed as error:
        case.step("say nothing for one and a half leases")
        case.patience.pause(1.5 * lease_ms / 1000)
        error.requirements = (knocks,) if p.status()["phase"] == "idle" else (key,)
        raise


@check(
    "CKPT-RENEW-001",
    "CKPT-RENEW-003",
    "CKPT-LEASE-002",
    "CKPT-LEASE-003",
    "CKPT-LEASE-004",
    "CKPT-LEASE-016",
    "CKPT-REPEAT-011",
    "CKPT-STATUS-005",
    profile="checkpoint",
    each="participant",
)
def leases_are_clamped_and_renewed(case: Case) -> None:
    """A lease outside the limits counts as the nearer limit; renew extends it and never shortens it."""
    c, p = case.controller, case.p
    low, high = p.limit("min_lease_ms"), p.limit("max_lease_ms")
    open_id = case.controller.next_id()
    case.step("prepare with a lease of 1 ms")
    reply = ready_at(case, p, open_id, lease_ms=1)
    left = reply["lease_remaining_ms"]
    case.true(low - 2000 < left <= low and left > 1, "counts as the minimum", "CKPT-LEASE-002", got=left)
    case.step("renew with a lease of a day")
    left = case.accepted(c.renew(p, open_id, lease_ms=A_DAY_MS), "renew", "CKPT-RENEW-001")["lease_remaining_ms"]
    case.true(high - 2000 < left <= high, "counts as the maximum", "CKPT-LEASE-003", "CKPT-RENEW-003", got=left)
    shown = p.status()["lease_remaining_ms"]
    case.true(high - 4000 < shown <= high, "status shows it", "CKPT-STATUS-005", got=shown)
    case.step("renew with a lease of 1 ms")
    left = case.accepted(c.renew(p, open_id, lease_ms=1), "renew", "CKPT-RENEW-001")["lease_remaining_ms"]
    case.true(left > low or low == high, "a renew never shortens", "CKPT-REPEAT-011", got=left)
    case.step("let 300 ms pass, prepare again with the same lease")
    case.patience.pause(0.3)
    again = ready_at(case, p, open_id, lease_ms=high)["lease_remaining_ms"]
    full = high - 250 < again <= high
    case.true(full, "the full length again", "CKPT-LEASE-004", "CKPT-LEASE-016", got=[again, high])
    case.accepted(c.abort(p, open_id), "abort")
    open_id = c.next_id()
    case.step("prepare with a lease of a day")
    left = ready_at(case, p, open_id, lease_ms=A_DAY_MS)["lease_remaining_ms"]
    case.true(high - 2000 < left <= high, "that of a prepare counts as the maximum", "CKPT-LEASE-003", got=left)
    case.accepted(c.abort(p, open_id), "abort")
    open_id = c.next_id()
    case.step("restore with a lease of a day")
    case.accepted(c.restore(p, open_id, None, lease_ms=A_DAY_MS), "a reset")
    left = p.status()["lease_remaining_ms"]
    case.true(high - 4000 < left <= high, "that of a restore counts as the maximum", "CKPT-LEASE-003", got=left)
    case.accepted(c.abort(p, open_id), "abort")
