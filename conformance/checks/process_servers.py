# SPDX-License-Identifier: Apache-2.0
"""Level 1: two servers from one snapshot, servers that own nothing, and what older routes answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from conformance.case import Case
from conformance.checks.process import older, reborn
from conformance.cuts import prepared_at, restore_cut, restored_at, take_cut, target_for
from conformance.errors import NotOffered
from conformance.registry import check
from conformance.script import add, script
from conformance.wire import Reply
from spec import wire as names

COMMON = ("conformance",)
STEPS = script(*[add(n) for n in range(20)], "done")
CHANGING = frozenset({"date", "content-length"})
"""Headers that say when, and how long, an answer is."""


@check(
    "CKPT-ENV-004",
    "CKPT-ENV-003",
    "CKPT-ENV-006",
    "CKPT-RESTORE-044",
    "CKPT-INV-002",
    "CKPT-ID-020",
    "CKPT-ID-026",
    "CKPT-FEED-004",
    profile="turn-recovery",
    level=1,
    features=COMMON,
    storage=True,
)
def two_servers_from_one_snapshot(case: Case) -> None:
    """C16, C60, N15: 10 of 20 random steps, and 10 more in a living and in a fresh server: equal, no id in common."""
    expected = case.baseline(STEPS, seed=20260202)
    rollout = case.start_at(10, STEPS, seed=20260202)
    cut = take_cut(case)
    lives: list[set[str]] = []
    feeds: list[str] = []
    for server in ("the living one", "a fresh one"):
        if server == "a fresh one":
            reborn(case, fresh=True)
        lives.append({p.capabilities["incarnation"] for p in case.gym.participants})
        feed = case.agent.status()["feed"]
        restore_cut(case, cut)
        case.release(rollout)
        case.equal(
            expected,
            case.body(rollout, "CKPT-RESTORE-044"),
            f"what {server} went on with",
            "CKPT-ENV-003",
            "CKPT-ENV-006",
        )
        new = case.agent.status()["feed"]
        case.true(new != feed, f"a new feed of {server}", "CKPT-FEED-004", got=new)
        feeds.append(new)
    case.equal(set(), lives[0] & lives[1], "incarnations that both have", "CKPT-ID-020", "CKPT-ID-026")
    case.true(feeds[0] != feeds[1], "the ids of their feeds differ", "CKPT-ENV-004", got=feeds)


@check("CKPT-DISC-005")
def who_owns_nothing_is_no_participant(case: Case) -> None:
    """A server of the Gym that owns nothing answers 404 on `/capabilities`; whoever answers 200 owns something."""
    for p in case.gym.participants:
        case.true(p.capabilities["owns"], f"{p.name} owns something", "CKPT-DISC-005", got=p.capabilities["owns"])
    for url in getattr(case.bench.target, "bystanders", []):
        reply = case.wire.raw("GET", url.rstrip("/") + names.PREFIX + "/capabilities")
        what = f"GET /capabilities of {url}, which was announced as a bystander that owns nothing"
        case.equal(404, reply.status, what, "CKPT-DISC-005")


@check("CKPT-DISC-028", profile="checkpoint", level=1, storage=True)
def an_older_route_answers_alike(case: Case) -> None:
    """N14: before, while prepared, committed and restored, and after: the older route's answer is the same."""
    route = case.process.file.unmanaged
    if route is None:
        raise NotOffered("target.yaml names no older route")
    a, c = case.agent, case.controller
    first, second = older(case, route), older(case, route)
    own = _differences(first, second)  # Ids and times that the route itself makes anew for each call.
    case.equal(None, first.incarnation, f"the header {names.HEADER_INCARNATION} of its answer", "CKPT-DISC-028")

    def alike(when: str) -> None:
        differing = _differences(first, older(case, route)) - own
        case.equal(set(), differing, f"what differs in its answer {when}", "CKPT-DISC-028")

    open_id = prepared_at(case, a)
    alike("while prepared")
    target, _ = target_for(case, a, open_id)
    case.accepted(c.commit(a, open_id, target), "commit")
    alike("while committed")
    case.accepted(c.resume(a, open_id), "resume")
    alike("after a snapshot")
    restore_id = restored_at(case, a)
    alike("while restored")
    case.accepted(c.resume(a, restore_id), "resume")
    alike("after a restore")


def _differences(one: Reply, other: Reply) -> set[str]:
    """Return where two answers differ: status, headers, and places in the JSON, or `body` where it is none."""
    found = {"status"} if one.status != other.status else set()
    headers = [{k.lower(): v for k, v in reply.headers.items() if k.lower() not in CHANGING} for reply in (one, other)]
    found |= {f"header {k}" for k in {*headers[0], *headers[1]} if headers[0].get(k) != headers[1].get(k)}
    try:
        leaves = [dict(_leaves(json.loads(reply.content))) for reply in (one, other)]
    except ValueError:
        return found | ({"body"} if one.content != other.content else set())
    missing = object()
    places = {*leaves[0], *leaves[1]}
    return found | {place for place in places if leaves[0].get(place, missing) != leaves[1].get(place, missing)}


def _leaves(value: Any, place: str = "$") -> list[tuple[str, Any]]:
    """Return every value that holds no other, with its place."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    if not inner:
        return [(place, value)]
    return [leaf for key, part in inner for leaf in _leaves(part, f"{place}.{key}")]
