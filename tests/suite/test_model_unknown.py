# SPDX-License-Identifier: Apache-2.0
"""What a walk cannot know for sure: whether a restore has installed, whether uploads are there, who holds a session."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest

from conformance import model, model_looks
from conformance import model_rollouts as book
from conformance.controller import Participant
from conformance.errors import Failed
from conformance.machine_items import after_retire
from conformance.machine_watch import Watch
from conformance.model_rollouts import Retire, Rollouts
from conformance.model_values import Call, Last, State
from conformance.process_walk import may_fail
from spec.wire import CheckpointId, ControllerPair

PAIR = ControllerPair.of(7, "trainer")
FIRST, SECOND, THIRD = (CheckpointId(7, sequence) for sequence in (1, 2, 3))
EMPTY = State(last=Last(FIRST, "aborted"), controller=PAIR, feed="old")


def restore(id: CheckpointId, **fields: Any) -> Call:
    """Return a restore of nothing."""
    return replace(Call("restore", PAIR, checkpoint_id=id, run_id="run", arguments="lists"), **fields)


def abort(id: CheckpointId) -> Call:
    """Return an abort."""
    return Call("abort", PAIR, checkpoint_id=id)


def told(states: frozenset[State], phase: str, feed: str) -> frozenset[State]:
    """Return what remains after a status has shown a phase and a feed."""
    there = {state for state in model.unfold(states) if state.phase == phase}
    found = {model_looks.feed_of(state, feed, {"old"}) for state in there}
    return frozenset(state for state in found if state is not None)


# --- the feed of a restore whose end nobody was told ---


def test_a_restore_that_was_not_waited_for_may_install_later_and_then_has_another_feed() -> None:
    """After a 504 the feed is the old one while it is restoring, and a new one as soon as it is restored."""
    begun = model.filter_by({EMPTY}, restore(SECOND, patient=False), 504, {"code": "deadline_exceeded"})
    looked = told(begun, "restoring", "old")
    assert looked
    assert {"new"} == {state.feed for state in told(looked, "restored", "new")}
    assert frozenset() == told(looked, "restoring", "new")
    assert frozenset() == told(looked, "restored", "old")


def test_a_feed_that_was_there_before_is_no_new_one() -> None:
    """A restore that serves an earlier feed again has not given a new one."""
    installed = replace(EMPTY, feed=None)
    assert None is model_looks.feed_of(installed, "earlier", {"earlier", "old"})
    assert None is model_looks.feed_of(replace(EMPTY, feed="now"), "new", {"now"})


@pytest.mark.parametrize(
    ("feeds", "requirement"), [(("one", "two"), "CKPT-FEED-005"), (("one", "one"), "CKPT-FEED-004")]
)
def test_a_watch_tells_a_feed_that_moves_from_one_that_stays(feeds: tuple[str, str], requirement: str) -> None:
    """Without a restore another feed is red, and after one the same feed is."""
    watch = Watch(cast(Participant, _Feeds(feeds)), frozenset({replace(EMPTY, feed=None)}), Counter(), lambda _: None)
    watch.look()
    if requirement == "CKPT-FEED-004":
        watch.change(lambda state: replace(state, feed=None))
    with pytest.raises(Failed) as caught:
        watch.look()
    assert (requirement,) == caught.value.requirements


class _Feeds:
    """A participant in idle whose feed is each of some in turn."""

    name = "gym"

    def __init__(self, feeds: tuple[str, ...]) -> None:
        self.feeds = iter(feeds)

    def owns(self, what: str) -> bool:
        return True

    def status(self) -> dict[str, Any]:
        parts = ("admitted", "live", "restart", "finished_unreleased", "failed_unreleased", "released", "retired")
        return {
            "phase": "idle", "gate": "open", "checkpoint_id": None, "captured": None, "lease_remaining_ms": None,
            "controller": {"id": PAIR.name, "epoch": PAIR.epoch}, "progress": 0, "feed": next(self.feeds),
            "last": {"checkpoint_id": str(FIRST), "ended_as": "aborted"}, "counts": dict.fromkeys(parts, 0),
        }  # fmt: skip


# --- rows that are read after the status ---


def test_a_listing_may_be_of_a_moment_after_the_status() -> None:
    """Between a status that says `restoring` and the listing after it the restore may have installed."""
    live = Rollouts().put("r", book.Rollout(0, "task"))
    begun = model.filter_by(
        {replace(EMPTY, rollouts=live)}, restore(SECOND, patient=False), 504, {"code": "deadline_exceeded"}
    )
    watch = Watch(cast(Participant, None), begun, Counter(), lambda _: None)
    watch.rows({}, lambda _: True)
    assert {"restored"} == {state.phase for state in watch.states}


# --- uploads ---


def test_a_restore_of_what_was_uploaded_finds_it() -> None:
    """Uploads are kept until a restore ended (CKPT-ART-009), so that the first one is not corrupt."""
    there = replace(EMPTY, uploads=frozenset({FIRST}))
    asked = restore(SECOND, source=FIRST, uploaded=True)
    assert {200} == {outcome.status for outcome in model.step(there, asked)}
    assert {None, "checkpoint_corrupt"} == {outcome.code for outcome in model.step(EMPTY, asked)}


def test_uploads_are_gone_when_a_restore_has_ended_and_not_when_a_prepare_has() -> None:
    """An abort of a restored checkpoint may free them; the end of one that a prepare opened does not."""
    there = replace(EMPTY, uploads=frozenset({FIRST}))
    (restored,) = model.step(there, restore(SECOND, source=FIRST, uploaded=True))
    assert {frozenset()} == {one.after.uploads for one in model.step(restored.after, abort(SECOND))}
    (prepared,) = model.step(there, Call("prepare", PAIR, checkpoint_id=SECOND, run_id="run"))
    assert {there.uploads} == {one.after.uploads for one in model.step(prepared.after, abort(SECOND))}


def test_an_abort_and_the_restore_that_comes_after_it_at_the_same_time() -> None:
    """The abort ends the restore before, and frees what the new one needs; alone the new one is not corrupt."""
    there = replace(EMPTY, uploads=frozenset({FIRST}))
    (restored,) = model.step(there, restore(SECOND, source=FIRST, uploaded=True))
    again = restore(THIRD, source=FIRST, uploaded=True)
    corrupt = 422, {"code": "checkpoint_corrupt"}
    assert model.together({restored.after}, abort(SECOND), again, (_ended(), corrupt))
    assert not model.together({there}, abort(FIRST), again, (_ended(), corrupt))
    assert not model.together({restored.after}, abort(SECOND), replace(again, uploaded=False), (_ended(), corrupt))


def _ended() -> model.Answer:
    return 200, {"phase": "idle", "ended_as": "aborted"}


def test_two_restores_that_share_their_work_fail_alike() -> None:
    """CKPT-PHASE-002: who joins gets the outcome of the work, also where that is a failure."""
    corrupt = 422, {"code": "checkpoint_corrupt"}
    damaged = restore(SECOND, deserves="checkpoint_corrupt")
    assert {"failed"} == {
        state.last.ended_as
        for state in model.together({EMPTY}, damaged, damaged, (corrupt, corrupt))
        if state.last is not None
    }
    assert not model.together({EMPTY}, damaged, replace(damaged, checkpoint_id=THIRD), (corrupt, (200, {})))
    sound = restore(SECOND)
    assert not model.together({EMPTY}, sound, sound, (corrupt, corrupt))


# --- sessions apart from their rollouts ---


def test_what_holds_a_session_may_take_a_while_to_free_it() -> None:
    """CKPT-RETIRE-010: `pending` is an outcome of a participant that may hold a session, and of no stranger."""
    asked = Call("retire", PAIR, items=(Retire("r", 0),))
    assert {"retired"} == _outcomes(EMPTY, asked)
    assert {"retired", "pending"} == _outcomes(replace(EMPTY, sessions=frozenset({"r"})), asked)


def _outcomes(state: State, asked: Call) -> set[str]:
    return {name for outcome in model.step(state, asked) for one in outcome.outcomes or () for name in one}


@pytest.mark.parametrize(
    ("above", "guests", "sessions"),
    [(True, {"r": "effect"}, {"r"}), (None, {"r": "verification"}, {"r"}), (False, {}, set())],
)
def test_a_retire_leaves_what_is_above_it(above: bool | None, guests: dict[str, str], sessions: set[str]) -> None:
    """A rollout that lives as a higher attempt still keeps its participant busy; perhaps, where that is not known."""
    hosting = replace(EMPTY, guests={"r": "effect"}, sessions=frozenset({"r"}))
    left = after_retire(hosting, "r", above=above, freed=True)
    assert (guests, sessions) == (dict(left.guests), set(left.sessions))


def test_no_handler_outlives_its_process() -> None:
    """After a restart nothing blocks until it has come again."""
    hosting = replace(EMPTY, guests={"r": "effect"})
    assert all(not state.perhaps_blocked for state in model.restarts(hosting))
    assert not model.loses_everything(hosting).perhaps_blocked


@pytest.mark.parametrize(("live", "failed"), [(1, 0), (0, 1)])
def test_a_rollout_whose_session_is_gone_goes_on_or_has_failed(live: int, failed: int) -> None:
    """N8: it fails with its next effect, and nobody outside knows when that is."""
    without = replace(EMPTY, rollouts=Rollouts().put("r", book.Rollout(0, "task")))
    parts = ("admitted", "restart", "finished_unreleased", "failed_unreleased", "released", "retired", "live")
    counts = {**dict.fromkeys(parts, 0), "admitted": 1, "live": live, "failed_unreleased": failed}
    assert model_looks.counts_fit(may_fail(without).rollouts, counts)
    assert (live == 1) is model_looks.counts_fit(without.rollouts, counts)


# --- calls that are under way at the same time ---


def test_a_prepare_during_a_retire_may_count_what_the_retire_ends() -> None:
    """CKPT-PREP-012 at the time of the answer, which is before or after the other call; nothing else is believed."""
    live = Rollouts().put("r", book.Rollout(0, "task", restart_only=True))
    before = frozenset({replace(EMPTY, phase="prepared", rollouts=live)})
    watch = Watch(cast(Participant, _Feeds(("old",))), {replace(EMPTY, phase="prepared")}, Counter(), lambda _: None)
    ready = {"blockers": [], "blocker_count": 0, "ready": True}
    watch.readiness({**ready, "restart_count": 0}, before)
    watch.readiness({**ready, "restart_count": 1}, before)
    with pytest.raises(Failed):
        watch.readiness({**ready, "restart_count": 2}, before)
    with pytest.raises(Failed):
        watch.readiness({**ready, "restart_count": 1})


def test_a_participant_that_blocked_before_a_call_at_the_same_time_may_say_so() -> None:
    """Who is named as a blocker fits the state before the other call or the one after it."""
    busy = Rollouts().put("r", book.Rollout(0, "task", stand=replace(book.START, busy="effect")))
    before = frozenset({replace(EMPTY, phase="preparing", rollouts=busy)})
    watch = Watch(cast(Participant, _Feeds(("old",))), before, Counter(), lambda _: None)
    waits = {"blocker_count": 1, "ready": False, "restart_count": 0}
    watch.readiness({**waits, "blockers": [{"rollout_id": "r"}]})
    with pytest.raises(Failed):
        watch.readiness({**waits, "blockers": [{"rollout_id": "other"}]})
    watch.readiness({**waits, "blockers": [{"rollout_id": "other"}]}, frozenset({EMPTY}))
