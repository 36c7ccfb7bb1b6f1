# SPDX-License-Identifier: Apache-2.0
"""The cuts that a walk has taken, and what it restores from them: lists that agree with the files, or disagree once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from conformance.controller import Json, Participant
from conformance.cuts import Part, put_part, read_part, size, target_for
from conformance.machine_items import ANOTHER_DIGEST, How, ItemCalls
from conformance.model_rollouts import Plan, Receipt, Resumed, Retire
from conformance.model_values import Call
from conformance.wire import Reply
from spec import wire as names
from spec.wire import CheckpointId

RUN = "machine"


@dataclass(frozen=True)
class Snapshot:
    """A committed cut of the whole Gym.

    Args:
        parts: what each participant wrote, by name.
    """

    id: CheckpointId
    parts: Mapping[str, Part] = field(repr=False)


@dataclass(frozen=True)
class Restoration:
    """What one checkpoint id restores; a repeat sends it again.

    Args:
        bodies: `source`, `rollouts`, `results`, `fences` and `policy` of the request, by participant.
        source: the checkpoint whose cut it is, or None.
        deserves: what its source earns by itself.
    """

    bodies: Mapping[str, Json] = field(repr=False)
    source: CheckpointId | None = None
    deserves: str | None = None
    words: str = " (source null)"


class Plans(ItemCalls):
    """A walk that keeps what was written and can plan restores of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.snapshots: list[Snapshot] = []
        self.restorations: dict[CheckpointId, Restoration] = {}
        self._parts: dict[CheckpointId, dict[str, Part]] = {}

    # --- restores ---

    def plan(
        self,
        snapshot: Snapshot,
        *,
        only: Sequence[str] | None = None,
        keep: Sequence[str] | None = None,
        policy: str | None = None,
        wrong: Literal["turns", "attempt", "task", "unknown", "digest", "checkpoint"] | None = None,
        used: bool = False,
    ) -> CheckpointId:
        """Reserve attempts and a checkpoint id for a restore, and return the id.

        Args:
            snapshot: what is restored.
            only: continue these alone; None: all that can be continued.
            keep: keep the results of these alone; None: all.
            policy: the address that is given; None: none.
            wrong: what disagrees with the files.
            used: take attempt numbers that were used before.
        """
        rows = {name: part.rows for name, part in snapshot.parts.items()}
        restarts = {key for part in rows.values() for key, row in part.items() if row["state"] == "restart"}
        turns = {key for key, row in rows[self.gym.agent.name].items() if row["state"] == "turn"}
        chosen = sorted(key for key in turns - restarts if only is None or key in only)
        following = {key: self.pieces[key].attempt + (0 if used else 1) for key in chosen}
        kept = [row["receipt"] for key, row in rows[self.gym.agent.name].items() if row["state"] == "finished"]
        kept = [receipt for receipt in kept if keep is None or receipt["rollout_id"] in keep]
        done = set(chosen) | {receipt["rollout_id"] for receipt in kept}
        fences = [
            {"rollout_id": key, "through_attempt": piece.attempt}
            for key, piece in self.pieces.items()
            if key not in done and self.agent.any(lambda state, key=key: _unfinished(state, key))  # type: ignore[misc]  # a lambda with a bound default
        ]
        bodies = {
            name: self._body(snapshot.parts[name], snapshot.id, following, fences, wrong) for name in snapshot.parts
        }
        bodies[self.gym.agent.name]["results"] = kept
        if policy is not None:
            for body in bodies.values():
                body["policy"] = self.case.witness.policy(policy)
        id = names.parse_checkpoint_id(self.controller.next_id())
        fetched = any(part.target["scheme"] == "http" for part in snapshot.parts.values())
        # Under another id there is nothing where files travel by http; with a shared directory the manifest is there.
        another = "checkpoint_corrupt" if fetched else "state_mismatch"
        deserves = {"digest": "checkpoint_corrupt", "checkpoint": another}.get(wrong or "")
        self.restorations[id] = Restoration(
            bodies, snapshot.id, deserves, _words(snapshot, following, kept, policy, wrong)
        )
        if wrong is None:
            for key, attempt in following.items():
                self._used(key, attempt)
                self.floors[key, attempt] = rows[self.gym.agent.name][key]["turns_done"]
        return id

    def _body(
        self, part: Part, id: CheckpointId, following: Mapping[str, int], fences: list[Json], wrong: str | None
    ) -> Json:
        lists = [self._line(key, row, following[key]) for key, row in part.rows.items() if key in following]
        if wrong in ("turns", "attempt", "task") and lists:
            line = lists[-1]
            changed = {
                "turns": {"turns_done": line["turns_done"] + 1},
                "attempt": {"attempt": line["attempt"] + 1, "next_attempt": line["next_attempt"] + 1},
                "task": {"task_digest": ANOTHER_DIGEST},
            }
            lists[-1] = {**line, **changed[wrong]}
        elif wrong == "unknown":
            digest = names.bytes_digest(b"unknown")
            key = f"{self.case.prefix}nobody"
            lists.append({"rollout_id": key, "attempt": 0, "next_attempt": 1, "turns_done": 0, "task_digest": digest})
        source = part.source(str(id))
        if wrong == "digest":
            source["manifest_digest"] = ANOTHER_DIGEST
        elif wrong == "checkpoint":
            source["checkpoint_id"] = f"{id.epoch}-{id.sequence + 99}"
        return {"source": source, "rollouts": lists, "results": [], "fences": fences}

    def _line(self, key: str, row: Json, next_attempt: int) -> Json:
        return {
            "rollout_id": key,
            "attempt": row["attempt"],
            "next_attempt": next_attempt,
            "turns_done": row["turns_done"],
            "task_digest": row["task_digest"] or self.pieces[key].item["task_digest"],
        }

    def _restoration(self, participant: Participant, id: CheckpointId, how: How, call: Call) -> tuple[Json, Call]:
        found = self.restorations.setdefault(id, Restoration({p.name: _nothing() for p in self.everyone}))
        body = dict(found.bodies[participant.name])
        if how.other:
            body["policy"] = self.case.witness.policy("elsewhere")
        plan = Plan(
            tuple(
                Resumed(r["rollout_id"], r["attempt"], r["next_attempt"], r["turns_done"], r["task_digest"])
                for r in body["rollouts"]
            ),
            tuple(Receipt(r["rollout_id"], r["attempt"], r["digest"]) for r in body["results"]),
            tuple(Retire(r["rollout_id"], r["through_attempt"]) for r in body["fences"]),
        )
        given = body.get("policy")
        address = None if given is None else self._address(given)
        call = replace(
            call,
            run_id=RUN,
            arguments=json.dumps(body, sort_keys=True),
            source=found.source,
            uploaded=found.source is not None and body["source"]["scheme"] == "http",
            plan=plan,
            policy=address,
            deserves=found.deserves,
        )
        return body, call

    def upload(self, participant: Participant, id: CheckpointId) -> None:
        """PUT the files of what a restore names, where they travel so and the participant takes them (it is idle)."""
        found = self.restorations.get(id)
        if found is None or found.source is None or self.watches[participant.name].phase != "idle":
            return
        part, source, watch = self._parts[found.source][participant.name], found.source, self.watches[participant.name]
        if part.target["scheme"] != "http":
            return
        late = watch.any(lambda state: state.late is not None)
        if late and watch.look()["phase"] != "idle":
            return
        put_part(self.case, self.controller, participant, str(source), part)
        watch.change(lambda state: replace(state, uploads=state.uploads | {source}))

    def may_upload(self) -> bool:
        """Return whether one more cut like those that travel by http could be uploaded beside all of them."""
        return all(self._has_room(participant) for participant in self.everyone)

    def _has_room(self, participant: Participant) -> bool:
        parts = [parts[participant.name] for parts in self._parts.values() if participant.name in parts]
        sizes = [size(part) for part in parts if part.target["scheme"] == "http"]
        return has_room(sizes, participant.capabilities["limits"])

    def _address(self, policy: Json) -> str:
        for name in ("main", "second", "elsewhere"):
            if self.case.witness.address(name) == policy["base_url"]:
                return name
        raise AssertionError(f"no address of the witness is {policy}")

    # --- what was written ---

    def _written(self, participant: Participant, call: Call, reply: Reply) -> None:
        id = call.id
        parts = self._parts.setdefault(id, {})
        if participant.name in parts:
            return
        # Which of several targets the first commit named is not known where a reply was lost.
        target, directory = target_for(self.case, participant, str(id))
        for label, http in ((f"{id}-other", False), (str(id), True)):
            if target["scheme"] == "file" and not (directory / reply["manifest"]["name"]).exists():
                target, directory = target_for(self.case, participant, label, http=http)
        part = parts[participant.name] = read_part(self.case, participant, str(id), target, directory, reply)
        watch = self.watches[participant.name]
        ours = {key: row for key, row in part.rows.items() if key in self.pieces}
        if watch is self.agent:
            watch.indexed(id, ours)
            self._count_rows(reply, part)
        else:
            watch.taken(id, ours, {key: piece.item["task_digest"] for key, piece in self.pieces.items()})
        if len(parts) == len(self.watches):
            self.snapshots.append(Snapshot(id, dict(parts)))

    def _count_rows(self, reply: Reply, part: Part) -> None:
        counts = reply["counts"]
        for state in ("turn", "finished", "restart"):
            number = sum(1 for row in part.rows.values() if row["state"] == state)
            self.case.equal(number, counts[state], f"counts.{state} of a commit", "CKPT-COMMIT-020")


def _words(
    snapshot: Snapshot, following: Mapping[str, int], kept: list[Json], policy: str | None, wrong: str | None
) -> str:
    lists = [f"{key} as a{attempt}" for key, attempt in following.items()]
    lists += [f"result of {receipt['rollout_id']}" for receipt in kept]
    extra = (f", policy {policy}" if policy else "") + (f", wrong {wrong}" if wrong else "")
    return f" (of {snapshot.id}: {', '.join(lists) or 'nothing'}{extra})"


def _nothing() -> Json:
    return {"source": None, "rollouts": [], "results": [], "fences": []}


def _unfinished(state: Any, key: str) -> bool:
    held = state.rollouts.get(key)
    return held is not None and held.state in ("live", "retired", "failed")


def has_room(sizes: Sequence[tuple[int, int]], limits: Mapping[str, int]) -> bool:
    """Return whether a further cut can be uploaded beside some that are there, twice as large as the largest of them.

    Args:
        sizes: files and bytes of each.
        limits: of the participant; what it does not declare has no bound.
    """
    for which, name in enumerate(("max_artifacts", "max_artifacts_bytes")):
        room = limits.get(name)
        kept = [one[which] for one in sizes]
        if room is not None and kept and sum(kept) + 2 * max(kept) > room:
            return False
    return True
