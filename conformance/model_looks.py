# SPDX-License-Identifier: Apache-2.0
"""What a reader may see of a state of the model: status, counts, rows of rollouts, the feed, the index of a cut."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from conformance.model_rollouts import Receipt, Rollout, Rollouts, Stand, ended, index_state
from conformance.model_values import State


def sees(state: State, status: Mapping[str, Any], *, owns_rollouts: bool = True) -> bool:
    """Return whether a status response may have come from ``state``."""
    shown = state.open.id if state.open is not None else None
    pair = None if state.controller is None else {"id": state.controller.name, "epoch": state.controller.epoch}
    last = status.get("last")
    return (
        status["phase"] == state.phase
        and status["gate"] == state.gate
        and status["checkpoint_id"] == (None if shown is None else str(shown))
        and status["controller"] == pair
        and (None if last is None else (last["checkpoint_id"], last["ended_as"]))
        == (None if state.last is None else (str(state.last.id), state.last.ended_as))
        and status["captured"] == captured(state)
        and (not owns_rollouts or counts_fit(state.rollouts, status["counts"]))
    )


def feed_of(state: State, feed: str | None, seen: Collection[str]) -> State | None:
    """Return ``state`` made sharper by the feed that is named, or ``None`` if it cannot be that (CKPT-FEED-003 … 005).

    Args:
        state: any state.
        feed: the value in a status; ``None``: the participant has no feed.
        seen: every value that it has had before.
    """
    if feed is None or feed == state.feed:
        return state
    return replace(state, feed=feed) if state.feed is None and feed not in seen else None


def captured(state: State) -> bool | None:
    """Return the status field of that name (CKPT-STATUS-010, 011)."""
    if state.open is None or state.open.restore is not None:
        return None if state.open is None else False
    return state.open.cut is not None


def counts_fit(rollouts: Rollouts, counts: Mapping[str, int]) -> bool:
    """Return whether the counts of a status may have come from these rollouts (CKPT-STATUS-014 … 021)."""
    low = dict.fromkeys(("live", "restart", "finished_unreleased", "failed_unreleased", "released", "retired"), 0)
    high = dict(low)
    for rollout in rollouts.known.values():
        places = _places(rollout)
        for place in set().union(*places):
            high[place] += 1
            low[place] += all(place in one for one in places)
    fits = all(low[name] <= counts[name] <= high[name] for name in low)
    return fits and counts["admitted"] == len(rollouts.known)


def _places(rollout: Rollout) -> list[set[str]]:
    def of(one: Rollout) -> set[str]:
        names = {"finished": "finished_unreleased", "failed": "failed_unreleased"}
        return {names.get(one.state, one.state)} | ({"restart"} if one.state == "live" and one.uncertain else set())

    end = rollout.loose.end if rollout.state == "live" and rollout.loose is not None else None
    return [of(rollout)] if end is None else [of(rollout), of(ended(rollout, end))]


def row_of(state: State, row: Mapping[str, Any]) -> State | None:
    """Return ``state`` made sharper by a row of GET /rollouts, or ``None`` if that row cannot have come from it."""
    held = state.rollouts.get(row["rollout_id"])
    if held is None:
        return None
    sharper = _sharpened(held, row)
    return None if sharper is None else replace(state, rollouts=state.rollouts.put(row["rollout_id"], sharper))


def _sharpened(held: Rollout, row: Mapping[str, Any]) -> Rollout | None:
    if row["attempt"] != held.attempt:
        return None
    shown = row["state"]
    if held.state in ("finished", "failed", "released", "retired"):
        if shown != held.state or (held.state in ("finished", "failed") and not _receipt_fits(held, row)):
            return None
        return replace(held, digest=row["receipt"]["digest"]) if "receipt" in row else held
    if shown in ("finished", "failed", "restart"):
        wanted = {"finished": "success", "failed": "failure", "restart": "uncertain"}[shown]
        if shown == "restart" and held.uncertain:
            return held
        if held.loose is None or held.loose.end != wanted:
            return None
        done = ended(held, held.loose.end)
        return replace(done, digest=row["receipt"]["digest"]) if "receipt" in row else done
    if shown not in ("running", "parked", "waiting_policy") or held.uncertain:
        return None
    if held.loose is None:
        return held if row["turns_done"] == held.stand.turns else None
    if not held.stand.turns <= row["turns_done"] <= held.loose.turns:
        return None
    arrived = held.loose.end is None and row["turns_done"] == held.loose.turns and held.loose.busy == "no"
    if arrived and shown in ("waiting_policy", "parked"):
        return replace(held, stand=held.loose, loose=None)
    return replace(held, stand=Stand(row["turns_done"], held.stand.busy, None))


def _receipt_fits(held: Rollout, row: Mapping[str, Any]) -> bool:
    receipt = row.get("receipt")
    return receipt is not None and receipt["attempt"] == held.attempt and held.digest in (None, receipt["digest"])


def finished(state: State, receipt: Receipt, *, success: bool, terminal: bool) -> State | None:
    """Return ``state`` after the feed has served a result, or ``None`` if that result cannot have come from it."""
    held = state.rollouts.get(receipt.rollout_id)
    if held is None or held.attempt != receipt.attempt or held.state in ("released", "retired"):
        return None
    if held.state == "live":
        if held.loose is None or held.loose.end not in ("success", "failure"):
            return None
        held = ended(held, held.loose.end)
    wanted = "finished" if success else "failed"
    if held.state != wanted or held.digest not in (None, receipt.digest):
        return None
    seen = replace(held, digest=receipt.digest, terminal=success or terminal)
    return replace(state, rollouts=state.rollouts.put(receipt.rollout_id, seen))


def unserved(rollouts: Rollouts, seen: Iterable[str]) -> frozenset[str]:
    """Return the rollouts with a certain result which a complete read of the feed left out (CKPT-FEED-001)."""
    return frozenset(name for name, _ in rollouts.in_state("finished", "failed")) - frozenset(seen)


def indexed(cut: Rollouts, rows: Mapping[str, Mapping[str, Any]]) -> Rollouts | None:
    """Return a cut made exact by its index, or ``None`` if that index is not one of it (CKPT-DIR-009 … 015).

    Args:
        cut: what was captured, as far as that is known.
        rows: the index of the participant that owns rollouts, by rollout id.
    """
    exact = cut
    for name, rollout in cut.known.items():
        found = _line(rollout, rows.get(name))
        if found is None:
            return None
        exact = exact.put(name, found)
    return exact if set(rows) <= set(cut.known) else None


def _line(rollout: Rollout, row: Mapping[str, Any] | None) -> Rollout | None:
    ways = {rollout}
    if rollout.loose is not None and rollout.state == "live":
        ways = {replace(rollout, stand=replace(rollout.stand, turns=turns)) for turns in _between(rollout)}
        if rollout.loose.end is not None:
            ways.add(ended(rollout, rollout.loose.end))
    for way in ways:
        state = index_state(way)
        if row is None:
            if state is None:
                return way
            continue
        if row["state"] != state or row["attempt"] != way.attempt:
            continue
        if state == "finished":
            if way.digest in (None, row["receipt"]["digest"]):
                return replace(way, digest=row["receipt"]["digest"], loose=None)
        elif row["turns_done"] == way.stand.turns:
            return replace(way, loose=None)
    return None


def _between(rollout: Rollout) -> range:
    assert rollout.loose is not None
    return range(rollout.stand.turns, rollout.loose.turns + 1)
