# SPDX-License-Identifier: Apache-2.0
"""The participant: its settings, its parts, and the operations that need no checkpoint."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.second_gym import cuts, sessions
from tests.second_gym.agent import Agent
from tests.second_gym.book import Book
from tests.second_gym.entries import Result, Rollout, Tombstone
from tests.second_gym.gate import Gate
from tests.second_gym.phases import Phases
from tests.second_gym.refusals import Refusal
from tests.second_gym.restoring import Restoring
from tests.second_gym.saving import Saving
from tests.second_gym.sessions import Effect, Session

Json = dict[str, Any]
AGENT = "tool-loop"
LIMITS = {
    "max_body_bytes": 16777216,
    "max_batch": 1000,
    "max_page_items": 1000,
    "max_page_bytes": 8388608,
    "max_wait_ms": 30000,
    "min_lease_ms": 1000,
    "max_lease_ms": 600000,
    "max_write_ms": 60000,
    "max_result_bytes": 4194304,
    "max_record_bytes": 16777216,
    "max_artifact_bytes": 1,
    "max_live_rollouts": 256,
    "shutdown_grace_ms": 10000,
    "policy_retry_ms": 60000,
}


@dataclass(frozen=True)
class Settings:
    """What the operator says.

    Args:
        name: how controllers call this participant.
        roots: directories inside which targets and sources lie, resolved.
        world_url: the conformance world; None: not started for conformance.
        limits: what differs from the limits above.
        policy_token: the credential for policy calls.
    """

    name: str
    roots: list[Path]
    world_url: str | None
    limits: Mapping[str, int]
    policy_token: str | None


class Gym:
    """One participant that owns rollouts and sessions. Nothing of it outlives the process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.limits = {**LIMITS, **settings.limits}
        self.incarnation = "i-" + secrets.token_hex(12)
        self.gate = Gate()
        self.book = Book(self.gate, self.limits)
        self.agent = Agent(self.gate, self.book, settings.policy_token)
        self.phases = Phases(self.gate, self.book, self.limits)
        self.saving = Saving(self.phases, settings.name, settings.roots)
        self.restoring = Restoring(self.phases, settings.name, settings.roots)
        self.environments = () if settings.world_url is None else sessions.ENVIRONMENTS
        threading.Thread(target=self._keep_time, daemon=True).start()

    def _keep_time(self) -> None:
        """Let leases and budgets end, and readiness come, without anybody asking."""
        with self.gate.lock:
            while True:
                self.phases.settle()
                due = [self.phases.next_deadline()]
                for rollout in self.book.live():
                    limit = rollout.start.get("limits", {}).get("episode_ms")
                    if limit is None or rollout.spent or not self.gate.open or rollout.down_since is not None:
                        continue
                    left = limit / 1000 - self.agent.used(rollout)
                    if left <= 0:
                        rollout.spend()
                    else:
                        due.append(time.monotonic() + left)
                soonest = min((moment for moment in due if moment is not None), default=None)
                self.gate.lock.wait(None if soonest is None else max(0.001, soonest - time.monotonic()))

    # --- reading ---

    def capabilities(self) -> Json:
        """Return what this participant is and can."""
        return {
            "name": self.settings.name,
            "role": "gym",
            "owns": ["rollouts", "sessions"],
            "incarnation": self.incarnation,
            "implementation": {"name": "second-gym", "version": "1.0.0"},
            "protocol_versions": ["1.0"],
            "profiles": ["results", "checkpoint"],
            "features": ["conformance"] if self.environments else [],
            "state_schema": {"id": cuts.SCHEMA, "version": cuts.VERSION, "reads": [cuts.VERSION]},
            "agents": [{"name": AGENT, "continuation": "restart_only"}],
            "environments": [
                {"name": name, "continuation": "restart_only", "verify": "wait", "state_version": "1"}
                for name in self.environments
            ],
            "storage": ["file"],
            "stage": 10,
            "workers": {"count": 1, "coordinated": True},
            "limits": self.limits,
        }

    def list_rollouts(self, after: str, most: int, state: str | None) -> Json:
        """Return a page of the rollouts that are live or unreleased, by id; the cursor is the last id of a page."""
        held = {e.rollout_id: e for e in self.book.entries.values() if not isinstance(e, Tombstone)}
        shown = (self.book.describe(name, held[name]) for name in sorted(held) if name > after)
        matching = [entry for entry in shown if state in (None, entry["state"])]
        page, more = self._page(matching, most)
        return {"rollouts": page, "next": page[-1]["rollout_id"] if more else None}

    def show_rollout(self, rollout_id: str) -> Json:
        """Return one rollout."""
        held = self.book.held(rollout_id)
        if held is None:
            raise Refusal("not_found", "This incarnation does not know that rollout.")
        return self.book.describe(rollout_id, held)

    def read_feed(self, after: str, most: int, deadline: float) -> Json:
        """Return a page of unreleased results; wait for one if there is none."""
        feed, _, place = after.rpartition(":")

        def unseen() -> list[Result]:
            known = feed == self.book.feed and place.isascii() and place.isdigit() and len(place) < 16
            seen = int(place) if known else 0
            return [result for result in self.book.results() if result.sequence > seen]

        self.gate.wait(lambda: bool(unseen()), deadline)
        found = unseen()
        page, more = self._page([{"receipt": result.receipt, "result": result.text} for result in found], most)
        if page:
            cursor = f"{self.book.feed}:{found[len(page) - 1].sequence}"
        else:
            cursor = after if feed == self.book.feed else f"{self.book.feed}:0"
        return {"feed": self.book.feed, "results": page, "next": cursor, "more": more}

    def _page(self, items: list[Json], most: int) -> tuple[list[Json], bool]:
        """Return as many items as fit into a page, at least one, and whether some are left."""
        room = self.limits["max_page_bytes"] - 512
        page: list[Json] = []
        for item in items[: min(most, self.limits["max_page_items"])]:
            room -= len(json.dumps(item)) + 2
            if page and room < 0:
                break
            page.append(item)
        return page, len(page) < len(items)

    # --- changing ---

    def start(self, body: Json, _: float) -> Json:
        """Start a batch; each item has an outcome of its own."""
        self.phases.fresh = False
        times = Counter(item["rollout_id"] for item in body["rollouts"])
        outcomes = []
        for item in body["rollouts"]:
            named = {"rollout_id": item["rollout_id"], "attempt": item["attempt"]}
            address = item.get("policy", body.get("policy"))
            outcome, receipt = self._outcome(item, address, repeated=times[item["rollout_id"]] > 1)
            held = self.book.held(item["rollout_id"])
            if outcome == "already_started" and isinstance(held, Rollout):
                held.policy = address
            elif outcome == "started":
                self._begin(item, address)
            outcomes.append({**named, "outcome": outcome, **({} if receipt is None else {"receipt": receipt})})
        return {"outcomes": outcomes}

    def _outcome(self, item: Json, address: Json | None, *, repeated: bool) -> tuple[str, Json | None]:
        """Return the first outcome that fits an item, and the receipt that goes with it."""
        environment, attempt = item["environment"], item["attempt"]
        known = environment in self.environments
        unfit = known and not sessions.task_fits(item["task"], self.settings.world_url)
        if repeated or address is None or item.get("agent", AGENT) != AGENT or unfit:
            return "invalid", None
        if not known:
            return "unknown_environment", None
        held = self.book.held(item["rollout_id"])
        if attempt <= self.book.fence(item["rollout_id"]) or (held is not None and attempt < held.attempt):
            return "stale_attempt", None
        if isinstance(held, Tombstone) and held.final:
            return "released", None
        settled = isinstance(held, Result) and (held.success or held.attempt == attempt)
        if isinstance(held, Rollout | Result) and (settled or held.attempt == attempt):
            if held.task_digest != item["task_digest"]:
                return "conflict", None
            return ("already_finished", held.receipt) if isinstance(held, Result) else ("already_started", None)
        if not self.gate.open or self.phases.draining:
            return "admission_closed", None
        room = self.limits["max_live_rollouts"] - sum(1 for _ in self.book.live())
        return ("started" if room > 0 or isinstance(held, Rollout) else "over_capacity"), None

    def _begin(self, item: Json, address: Json) -> None:
        task = item["task"]
        session = Session(rng=task["seed"], world_url=task["world_url"])
        rollout = Rollout(start=item, policy=address, session=session, began=self.gate.clock())
        self.book.admit(rollout)
        threading.Thread(target=self.agent.run, args=(rollout,), daemon=True).start()

    def acknowledge(self, body: Json, _: float) -> Json:
        """Release what the receipts name."""
        self.phases.fresh = False
        outcomes = []
        for receipt in body["receipts"]:
            named = {"rollout_id": receipt["rollout_id"], "attempt": receipt["attempt"]}
            outcomes.append({**named, "outcome": self.book.acknowledge(receipt)})
        return {"outcomes": outcomes}

    def retire(self, body: Json, _: float) -> Json:
        """Fence and give up attempts."""
        self.phases.fresh = False
        return {
            "outcomes": [self.book.retire(item["rollout_id"], item["through_attempt"]) for item in body["rollouts"]]
        }

    def probe(self, body: Json, _: float) -> Json:
        """Send one effect to the session of a live rollout, as if its agent had sent it."""
        effect = Effect(
            rollout_id=body["rollout_id"],
            attempt=body["attempt"],
            turn=body["turn"],
            request_id=body["request_id"],
            tool=body["tool"],
            arguments=body["args"],
            effects_done=body["effects_done"],
        )
        return {"observation": self.agent.border.effect(effect, lambda: self.gate.open)}
