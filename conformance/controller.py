# SPDX-License-Identifier: Apache-2.0
"""The controller's verbs as the checks speak them: raw JSON in, raw JSON and status out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.errors import Failed
from conformance.wire import Fault, Plane, Reply, Wire
from spec import wire as names

PREPARE_MS = 5_000
LEASE_MS = 60_000
WORK_MS = 10_000

Json = dict[str, Any]


@dataclass
class Participant:
    """One participant of the Gym under test; its reading verbs need no controller.

    Args:
        wire: the transport.
        url: its URL, without a path.
        capabilities: what it answered at discovery.
    """

    wire: Wire
    url: str
    capabilities: Json = field(repr=False)

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.capabilities["name"])

    @property
    def stage(self) -> int:
        """Its stage."""
        return int(self.capabilities["stage"])

    def owns(self, what: str) -> bool:
        """Say whether it owns `rollouts`, `sessions` or `ledger`."""
        return what in self.capabilities["owns"]

    def limit(self, name: str) -> int:
        """Return one of its `limits`."""
        return int(self.capabilities["limits"][name])

    def call(self, operation: str, **kwargs: Any) -> Reply:
        """Send an operation to this participant; see `Wire.call`."""
        return self.wire.call(operation, self.url, **kwargs)

    def get_capabilities(self) -> Reply:
        """GET /capabilities."""
        return self.call("getCapabilities")

    def get_status(self) -> Reply:
        """GET /checkpoint."""
        return self.call("getCheckpoint")

    def status(self) -> Json:
        """Return the status as JSON; a status that is not 200 is a failure of the Gym."""
        return dict(_there(self.get_status(), "a status can be read", "CKPT-STATUS-001").json)

    def get_rollouts(self, *, after: str | None = None, limit: int | None = None, state: str | None = None) -> Reply:
        """GET /rollouts, one page."""
        return self.call("listRollouts", query={"after": after, "limit": limit, "state": state})

    def rollouts(self) -> dict[str, Json]:
        """Return every rollout of the listing by id, over all pages."""
        found: dict[str, Json] = {}
        after: str | None = None
        while True:
            page = _there(self.get_rollouts(after=after), "rollouts can be listed", "CKPT-ROLL-041")
            found.update({row["rollout_id"]: row for row in page["rollouts"]})
            after = page["next"]
            if after is None:
                return found

    def get_rollout(self, rollout_id: str) -> Reply:
        """GET /rollouts/{rollout_id}."""
        return self.call("getRollout", path={"rollout_id": rollout_id})

    def get_results(self, *, after: str | None = None, limit: int | None = None, wait_ms: int | None = None) -> Reply:
        """GET /results, one page."""
        return self.call("getResults", query={"after": after, "limit": limit, "wait_ms": wait_ms})

    def results(self) -> dict[str, Json]:
        """Return every unreleased result (receipt and result) by rollout id, over all pages."""
        found: dict[str, Json] = {}
        after: str | None = None
        while True:
            page = _there(self.get_results(after=after), "the feed can be read", "CKPT-FEED-001")
            found.update({row["receipt"]["rollout_id"]: row for row in page["results"]})
            after = page["next"]
            if not page["more"]:
                return found

    def get_artifact(self, checkpoint_id: str, name: str) -> Reply:
        """GET one artifact."""
        return self.call("getArtifact", path={"checkpoint_id": checkpoint_id, "name": name})

    def probe(
        self,
        rollout_id: str,
        attempt: int,
        turn: int,
        request_id: str,
        tool: str,
        args: Json,
        *,
        effects_done: int | None = None,
        fault: Fault | None = None,
        within_s: float = 15.0,
    ) -> Reply:
        """POST an effect to the conformance probe of a participant that owns sessions."""
        body = {
            "rollout_id": rollout_id,
            "attempt": attempt,
            "turn": turn,
            "request_id": request_id,
            "tool": tool,
            "args": args,
            "effects_done": effects_done,
        }
        return self.call("probeEffect", body=body, plane="data", fault=fault, within_s=within_s)


def _there(reply: Reply, what: str, requirement: str) -> Reply:
    if reply.status != 200:
        raise Failed(what, expected="200", got=reply.brief, requirements=(requirement,))
    return reply


class Controller:
    """One life of a controller: id and epoch in every mutating call, and the incarnation that it expects.

    Args:
        controller_id: `Gym-Controller-Id`.
        epoch: `Gym-Controller-Epoch`.

    The incarnation expected of a participant is the one of its capabilities at discovery unless `expect` says
    otherwise. Each verb takes `headers` that replace its own, to be stale in one way at a time; a value of None
    leaves a header out (and is then sent unvalidated).
    """

    def __init__(self, controller_id: str, epoch: int) -> None:
        self.controller_id = controller_id
        self.epoch = epoch
        self.expected: dict[str, str] = {}
        self._sequence = 0

    def next_id(self) -> str:
        """Return a fresh checkpoint id of this epoch."""
        self._sequence += 1
        return f"{self.epoch}-{self._sequence}"

    def expect(self, participant: Participant, incarnation: str) -> None:
        """Expect this incarnation of a participant from now on."""
        self.expected[participant.name] = incarnation

    def headers(self, participant: Participant) -> dict[str, str]:
        """Return the headers of a mutating call."""
        expected = self.expected.get(participant.name, str(participant.capabilities["incarnation"]))
        return {
            names.HEADER_CONTROLLER_ID: self.controller_id,
            names.HEADER_CONTROLLER_EPOCH: str(self.epoch),
            names.HEADER_EXPECT_INCARNATION: expected,
        }

    def send(
        self,
        participant: Participant,
        operation: str,
        body: Json,
        *,
        headers: Mapping[str, str] | None = None,
        fault: Fault | None = None,
        within_s: float = 15.0,
        plane: Plane = "control",
    ) -> Reply:
        """Send a mutating operation; `headers` replace single ones of the controller's own."""
        sent = {**self.headers(participant), **(headers or {})}
        return participant.call(operation, body=body, headers=sent, fault=fault, within_s=within_s, plane=plane)

    # --- verbs; every keyword that is not named goes to `send` ---

    def adopt(self, participant: Participant, **kwargs: Any) -> Reply:
        """Abort `<epoch>-0`: what a controller calls first."""
        return self.abort(participant, f"{self.epoch}-0", **kwargs)

    def prepare(
        self,
        participant: Participant,
        checkpoint_id: str,
        *,
        run_id: str = "conformance",
        timeout_ms: int = PREPARE_MS,
        lease_ms: int = LEASE_MS,
        **kwargs: Any,
    ) -> Reply:
        """POST prepare."""
        body = {"checkpoint_id": checkpoint_id, "run_id": run_id, "timeout_ms": timeout_ms, "lease_ms": lease_ms}
        return self.send(participant, "prepare", body, **kwargs)

    def commit(
        self,
        participant: Participant,
        checkpoint_id: str,
        target: Json,
        *,
        wait: str = "durable",
        timeout_ms: int = WORK_MS,
        leave_out_blocked: bool | None = None,
        **kwargs: Any,
    ) -> Reply:
        """POST commit."""
        body: Json = {"checkpoint_id": checkpoint_id, "target": target, "wait": wait, "timeout_ms": timeout_ms}
        if leave_out_blocked is not None:
            body["leave_out_blocked"] = leave_out_blocked
        return self.send(participant, "commit", body, **kwargs)

    def resume(
        self, participant: Participant, checkpoint_id: str, *, timeout_ms: int = WORK_MS, **kwargs: Any
    ) -> Reply:
        """POST resume."""
        return self.send(participant, "resume", {"checkpoint_id": checkpoint_id, "timeout_ms": timeout_ms}, **kwargs)

    def abort(self, participant: Participant, checkpoint_id: str, *, timeout_ms: int = WORK_MS, **kwargs: Any) -> Reply:
        """POST abort."""
        return self.send(participant, "abort", {"checkpoint_id": checkpoint_id, "timeout_ms": timeout_ms}, **kwargs)

    def renew(self, participant: Participant, checkpoint_id: str, *, lease_ms: int = LEASE_MS, **kwargs: Any) -> Reply:
        """POST renew."""
        return self.send(participant, "renew", {"checkpoint_id": checkpoint_id, "lease_ms": lease_ms}, **kwargs)

    def restore(
        self,
        participant: Participant,
        checkpoint_id: str,
        source: Json | None,
        *,
        rollouts: Sequence[Json] = (),
        results: Sequence[Json] = (),
        fences: Sequence[Json] = (),
        policy: Json | None = None,
        run_id: str = "conformance",
        timeout_ms: int = WORK_MS,
        lease_ms: int = LEASE_MS,
        **kwargs: Any,
    ) -> Reply:
        """POST restore."""
        body: Json = {
            "checkpoint_id": checkpoint_id,
            "run_id": run_id,
            "source": source,
            "rollouts": list(rollouts),
            "results": list(results),
            "fences": list(fences),
            "timeout_ms": timeout_ms,
            "lease_ms": lease_ms,
        }
        if policy is not None:
            body["policy"] = policy
        return self.send(participant, "restore", body, **kwargs)

    def retire(
        self, participant: Participant, through: Mapping[str, int], *, timeout_ms: int = WORK_MS, **kwargs: Any
    ) -> Reply:
        """POST retire; `through` gives the highest attempt to retire by rollout id."""
        rows = [{"rollout_id": key, "through_attempt": attempt} for key, attempt in through.items()]
        return self.send(participant, "retire", {"rollouts": rows, "timeout_ms": timeout_ms}, **kwargs)

    def start(
        self, participant: Participant, rollouts: Sequence[Json], *, policy: Json | None = None, **kwargs: Any
    ) -> Reply:
        """POST /rollouts."""
        body: Json = {"rollouts": list(rollouts)}
        if policy is not None:
            body["policy"] = policy
        return self.send(participant, "startRollouts", body, **kwargs)

    def ack(self, participant: Participant, receipts: Sequence[Json], **kwargs: Any) -> Reply:
        """POST /acks."""
        return self.send(participant, "ackResults", {"receipts": list(receipts)}, **kwargs)

    def put_artifact(self, participant: Participant, checkpoint_id: str, name: str, content: bytes) -> Reply:
        """PUT one artifact."""
        return participant.call(
            "putArtifact",
            path={"checkpoint_id": checkpoint_id, "name": name},
            content=content,
            headers=self.headers(participant),
        )
