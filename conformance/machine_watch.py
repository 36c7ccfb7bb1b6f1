# SPDX-License-Identifier: Apache-2.0
"""What may be true of each participant, call after call: every answer and every look filters it.

A `Watch` is told each call and its answer; it fails as soon as no state of the model allows what came.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from conformance import model, model_looks
from conformance.controller import Json, Participant
from conformance.errors import Failed, LostReply, LostRequest
from conformance.model_rollouts import Receipt, Rollout, Rollouts, Stand
from conformance.model_values import Call, State
from conformance.wire import Reply
from spec.wire import CheckpointId

MAX_STATES = 4000
_CUT_FIELDS = ("attempt", "turns_done", "receipt")

REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "status": ("CKPT-PHASE-001", "CKPT-STATUS-001"),
    "counts": ("CKPT-STATUS-014", "CKPT-INV-001"),
    "rollouts": ("CKPT-ROLL-041",),
    "results": ("CKPT-FEED-001",),
    "index": ("CKPT-DIR-009",),
    "start": ("CKPT-ROLL-004",),
    "ack": ("CKPT-ACK-003",),
    "retire": ("CKPT-RETIRE-001",),
}
"""What is broken when the model does not allow an answer, by what was asked; every other call: CKPT-PHASE-001."""


@dataclass
class Watch:
    """The possible states of one participant.

    Args:
        participant: who is watched.
        states: what may be true of it.
        visits: how often each cell of the phase table was tried, shared between watches.
        note: takes each step as a sentence.
    """

    participant: Participant
    states: frozenset[State]
    visits: Counter[str]
    note: Callable[[str], None]
    progress: int = 0
    feeds: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Begin with what a new incarnation begins with."""
        self.forget_progress()

    def forget_progress(self) -> None:
        """Begin with what a new incarnation begins with."""
        self.progress = 0
        self._listed = 0
        self._moved: int | None = None
        self._shape: dict[str, tuple[Any, ...]] | None = None

    @property
    def name(self) -> str:
        """The participant's name."""
        return self.participant.name

    # --- what is known ---

    def all(self, fact: Callable[[State], Any]) -> Any:
        """Return a fact that all possible states agree on, or ``None``."""
        found = {fact(state) for state in self.states}
        return found.pop() if len(found) == 1 else None

    def any(self, fact: Callable[[State], bool]) -> bool:
        """Return whether a fact holds in some possible state."""
        return any(fact(state) for state in self.states)

    @property
    def phase(self) -> str | None:
        """The phase, or ``None`` while several are possible."""
        found: str | None = self.all(lambda state: state.phase)
        return found

    @property
    def gate(self) -> str | None:
        """The gate, or ``None`` while both are possible."""
        found: str | None = self.all(lambda state: state.gate)
        return found

    def open_id(self) -> CheckpointId | None:
        """Return the open checkpoint's id, if it is certain that one is open."""
        found: CheckpointId | None = self.all(lambda state: state.open.id if state.open else None)
        return found

    def last_id(self) -> CheckpointId | None:
        """Return the id of `last`, if it is certain."""
        found: CheckpointId | None = self.all(lambda state: state.last.id if state.last else None)
        return found

    def rollout(self, rollout_id: str) -> Rollout | None:
        """Return a rollout on which all possible states agree."""
        found: Rollout | None = self.all(lambda state: state.rollouts.get(rollout_id))
        return found

    # --- calls ---

    def call(
        self,
        call: Call,
        send: Callable[[], Reply],
        words: str,
        lost: Callable[[Iterable[State], Call], frozenset[State]] = model.unknown,
    ) -> Reply | None:
        """Send a call and keep the states that allow its answer; ``None``: no answer came.

        Args:
            call: what is sent, as the model's value.
            send: sends it.
            words: what it is called in the story.
            lost: what may be true when the reply is lost.
        """
        before = model.unfold(self.states)
        try:
            reply = send()
        except LostRequest:
            self.note(f"{words} → request lost")
            return None
        except LostReply:
            self.note(f"{words} → reply lost")
            self._keep(lost(before, call), "")
            return None
        self.note(f"{words} → {reply.brief if reply.code else reply.status}")
        self.answered(before, call, reply, words)
        return reply

    def answered(self, before: Iterable[State], call: Call, reply: Reply, words: str) -> None:
        """Keep the states that allow an answer, and count the cells of the phase table that it came from."""
        kept: set[State] = set()
        expected: set[str] = set()
        for state in before:
            for outcome in model.step(state, call):
                expected.add(outcome.brief)
                if outcome.fits(reply.status, reply.json):
                    kept.add(outcome.after)
                    self.visits[cell(state, call)] += 1
        if not kept:
            self.fail(words, expected, reply.brief, REQUIREMENTS.get(call.operation, ("CKPT-PHASE-001",)))
        self._keep(kept, words)

    def together(self, calls: tuple[Call, Call], replies: tuple[Reply, Reply], words: str) -> None:
        """Keep the states that allow the answers to two calls that were under way at the same time."""
        first, second = calls
        said, replied = (((reply.status, reply.json)) for reply in replies)
        for state in model.unfold(self.states):
            self.visits[cell(state, first)] += 1
            for middle in model.done_by(state, first):
                self.visits[cell(middle, second)] += 1
        kept = model.together(self.states, first, second, (said, replied))
        if not kept:
            ways = {" then ".join(pair) for pair in self._orders(first, second)}
            self.fail(
                words, ways, " and ".join(reply.brief for reply in replies), ("CKPT-PHASE-002", "CKPT-REPEAT-014")
            )
        self._keep(kept, words)

    def _orders(self, first: Call, second: Call) -> Iterable[tuple[str, str]]:
        for state in self.states:
            for one in model.step(state, first):
                for other in model.step(one.after, second):
                    yield f"{first.operation} {one.brief}", f"{second.operation} {other.brief}"

    def readiness(self, body: Json, before: frozenset[State] = frozenset()) -> None:
        """Judge what an accepted prepare lists: who blocks, and how many rollouts could not be continued.

        Args:
            body: of the answer.
            before: states in which it may have been made as well as in the present ones.
        """
        states = self.states | before
        named = {row.get("rollout_id") for row in body["blockers"]}
        if body["blocker_count"] < len(body["blockers"]) or body["ready"] != (body["blocker_count"] == 0):
            got = f"ready {body['ready']}, blocker_count {body['blocker_count']}, {len(body['blockers'])} blockers"
            self.fail(
                "the blockers of a prepare", {"their number, 0 when ready"}, got, ("CKPT-PREP-006", "CKPT-PREP-007")
            )
        blocked = [state.blocked for state in states]
        if not body["ready"] and not any(names <= named for names in blocked):
            ways = {", ".join(names) for names in blocked}
            self.fail("the blockers of a prepare", ways, str(named), ("CKPT-PREP-005", "CKPT-PREP-009"))
        if self.participant.owns("rollouts"):
            expected = {_restart_count(state) for state in states}
            if None not in expected and body["restart_count"] not in expected:
                got = str(body["restart_count"])
                self.fail("restart_count of a prepare", {str(count) for count in expected}, got, ("CKPT-PREP-012",))

    # --- looks ---

    def look(self) -> Json:
        """Read the status and keep the states that it may have come from."""
        before = model.unfold(self.states)
        status = self.participant.status()
        owner = self.participant.owns("rollouts")
        kept = {state for state in before if model_looks.sees(state, status, owns_rollouts=owner)}
        if not kept:
            near = {state for state in before if model_looks.sees(state, status, owns_rollouts=False)}
            what = "counts" if near else "status"
            self.fail(
                "GET /checkpoint", {_shown(state) for state in near or before}, _status(status), REQUIREMENTS[what]
            )
        self._keep(self._named_feed(kept, status.get("feed")), "GET /checkpoint")
        self.visits[f"{status['phase']} × read"] += 1
        self._look_twice(status)
        return status

    def _look_twice(self, status: Json) -> None:
        counts = status["counts"]
        parts = ("live", "finished_unreleased", "failed_unreleased", "released", "retired")
        if counts["admitted"] != sum(counts[part] for part in parts):
            self.fail("the counts of a status", {"admitted = the sum of its parts"}, str(counts), ("CKPT-INV-001",))
        if status["progress"] < self.progress:
            self.fail("progress", {f"at least {self.progress}"}, str(status["progress"]), ("CKPT-STATUS-007",))
        if self._moved is not None and status["progress"] <= self._moved:
            expected, got = {f"more than {self._moved}: rollouts have changed since"}, str(status["progress"])
            self.fail("progress", expected, got, ("CKPT-STATUS-006",))
        self.progress = status["progress"]
        if (status["lease_remaining_ms"] is None) != (status["gate"] == "open") and status["phase"] != "restoring":
            got = f"gate {status['gate']}, lease_remaining_ms {status['lease_remaining_ms']}"
            self.fail(
                "the lease in a status", {"a lease runs exactly while the gate is closed"}, got, ("CKPT-STATUS-005",)
            )

    def _named_feed(self, states: Iterable[State], feed: str | None) -> set[State]:
        """The feed is the same until a restore has installed, and is then one that was never seen."""
        states = set(states)
        kept = {found for one in states if (found := model_looks.feed_of(one, feed, self.feeds)) is not None}
        if not kept and any(one.feed is None for one in states):
            self.fail("the feed after a restore", {"a value never seen"}, str(feed), ("CKPT-FEED-004",))
        if not kept:
            self.fail("the feed in a status", {str(one.feed) for one in states}, str(feed), ("CKPT-FEED-005",))
        self.feeds |= {feed} if feed is not None else set()
        return kept

    def rows(self, rows: Mapping[str, Json], ours: Callable[[str], bool]) -> None:
        """Keep the states that a complete listing of rollouts may have come from."""
        shape = {name: tuple(row.get(key) for key in _CUT_FIELDS) for name, row in rows.items() if ours(name)}
        # What changed between two listings was after the status before the first of them.
        self._moved = self._listed if self._shape is not None and shape != self._shape else None
        self._shape, self._listed = shape, self.progress
        self.go_on()
        for rollout_id, row in rows.items():
            if ours(rollout_id):
                sharper = functools.partial(model_looks.row_of, row=row)
                self.sharpen(sharper, f"the row of {rollout_id}", _row(row), rollout_id)
        kept = {state for state in self.states if _unreleased(state) <= set(rows)}
        if not kept:
            self.fail("GET /rollouts", {"every live or unreleased rollout"}, ", ".join(rows), ("CKPT-ROLL-038",))
        self._keep(kept, "GET /rollouts")

    def sharpen(self, sharper: Callable[[State], State | None], words: str, got: str, rollout_id: str) -> None:
        """Replace each state by what it is after something was seen; fail if none could have shown it."""
        kept = {found for state in self.states if (found := sharper(state)) is not None}
        if not kept:
            expected = {str(state.rollouts.get(rollout_id)) for state in self.states}
            self.fail(words, expected, got, REQUIREMENTS["rollouts"])
        self._keep(kept, words)

    def served(self, entry: Json, *, success: bool, terminal: bool) -> None:
        """Keep the states in which the feed may serve this result."""
        row = entry["receipt"]
        receipt = Receipt(row["rollout_id"], row["attempt"], row["digest"])

        def sharper(state: State) -> State | None:
            return model_looks.finished(state, receipt, success=success, terminal=terminal)

        got = f"{'success' if success else 'failure'} of attempt {receipt.attempt}"
        self.sharpen(sharper, f"the feed serves {receipt.rollout_id}", got, receipt.rollout_id)

    def indexed(self, id: CheckpointId, rows: Mapping[str, Json]) -> None:
        """Make the cut of a checkpoint exact by the index that was written for it."""
        kept: set[State] = set()
        for state in self.states:
            cut = state.cuts.get(id)
            exact = model_looks.indexed(cut, rows) if cut is not None else None
            if exact is not None:
                kept.add(replace(state, cuts=MappingProxyType({**state.cuts, id: exact})))
        if not kept:
            cuts = {str(sorted(state.cuts[id].known.items())) for state in self.states if id in state.cuts}
            self.fail(f"the index of {id}", cuts, str(rows), REQUIREMENTS["index"])
        self._keep(kept, f"index of {id}")

    def taken(self, id: CheckpointId, rows: Mapping[str, Json], tasks: Mapping[str, str]) -> None:
        """Take over the index of a participant that does not own rollouts, whose boundaries nobody else sees."""

        def saved(name: str, row: Json) -> Rollout:
            only, task = row["state"] == "restart", row["task_digest"] or tasks[name]
            return Rollout(row["attempt"], task, restart_only=only, stand=Stand(row["turns_done"]))

        cut = Rollouts(MappingProxyType({name: saved(name, row) for name, row in rows.items() if name in tasks}))
        self.change(lambda state: replace(state, cuts=MappingProxyType({**state.cuts, id: cut})))

    # --- inside ---

    def go_on(self) -> None:
        """Add what the participant may have done by itself since the last answer."""
        self.states = model.unfold(self.states)

    def change(self, change: Callable[[State], State]) -> None:
        """Replace every possible state."""
        self.states = frozenset(change(state) for state in self.states)

    def _keep(self, states: Iterable[State], words: str) -> None:
        self.states = frozenset(states)
        if len(self.states) > MAX_STATES:
            raise AssertionError(f"{len(self.states)} states are possible after {words}; a look is missing")

    def fail(self, words: str, expected: Iterable[str], got: str, requirements: tuple[str, ...]) -> None:
        """Fail with what was possible and what came."""
        possible = sorted(set(expected))
        shown = " · or · ".join(possible[:8]) + (f" · or {len(possible) - 8} more" if len(possible) > 8 else "")
        states = "; ".join(sorted({_shown(state) for state in self.states})[:4])
        where = "" if words.endswith(f" at {self.name}") else f" at {self.name}"
        raise Failed(
            f"{words}{where}, in {states}",
            expected=shown or "nothing that the model knows",
            got=got,
            requirements=requirements,
        )


def cell(state: State, call: Call) -> str:
    """Return the name of the cell of the phase table that a call meets."""
    if call.checkpoint_id is None:
        return f"{state.phase} × {call.operation}"
    return f"{state.phase} × {call.operation} × {model.relation(state, call.id)}"


def _restart_count(state: State) -> int | None:
    """Return how many live rollouts a cut could not continue; ``None`` while some are moving (CKPT-PREP-012)."""
    live = [rollout for _, rollout in state.rollouts.in_state("live")]
    if any(rollout.loose is not None for rollout in live):
        return None
    # What blocks now would be listed for that reason, whatever else it is (CKPT-COMMIT-032).
    return sum(1 for rollout in live if (rollout.restart_only or rollout.uncertain) and not rollout.blocks)


def _unreleased(state: State) -> set[str]:
    return {name for name, _ in state.rollouts.in_state("live", "finished", "failed")}


def _shown(state: State) -> str:
    opened = f" of {state.open.id}" if state.open else ""
    ending = f" (ending {state.open.ending})" if state.open and state.open.ending else ""
    last = f", last {state.last.id} {state.last.ended_as}" if state.last else ""
    own = ", ".join(f"{n}/a{r.attempt} {r.state}" for n, r in sorted(state.rollouts.known.items()))
    return f"{state.phase}{opened}{ending}, gate {state.gate}{last} [{own}]"


def _status(status: Json) -> str:
    last = status["last"] and f"{status['last']['checkpoint_id']} {status['last']['ended_as']}"
    return (
        f"{status['phase']} of {status['checkpoint_id']}, gate {status['gate']}, captured {status['captured']}, "
        f"controller {status['controller']}, last {last}, counts {status['counts']}"
    )


def _row(row: Json) -> str:
    shown = {key: row[key] for key in ("attempt", "state", "turns_done", "open_turn") if key in row}
    return " ".join(f"{key} {value}" for key, value in shown.items())
