# SPDX-License-Identifier: Apache-2.0
"""Taking a cut of the whole Gym and restoring it, the way a controller does: stages, indexes, attempts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conformance.case import Case
from conformance.controller import Controller, Json, Participant
from conformance.errors import Failed, NotOffered
from conformance.wire import Reply
from spec import wire as names

ONE_LINE = {"rollouts": "CKPT-DIR-009", "sessions": "CKPT-DIR-010", "ledger": "CKPT-DIR-033"}
"""What asks for one line for each rollout in an index, by what its participant owns; the first of these counts."""


@dataclass(frozen=True)
class Part:
    """What one participant wrote for a cut.

    Args:
        participant: its name.
        target: where it was told to write.
        directory: where the suite can read its files.
        manifest: the manifest reference of its commit.
        rows: its index, by rollout id.
    """

    participant: str
    target: Json
    directory: Path
    manifest: Json
    rows: Mapping[str, Json] = field(repr=False)

    def source(self, checkpoint_id: str) -> Json:
        """Return the `source` of a restore from this part."""
        found = {**self.target, "checkpoint_id": checkpoint_id, "manifest_digest": self.manifest["digest"]}
        return found

    def manifest_json(self) -> Json:
        """Return the participant's manifest."""
        return dict(json.loads((self.directory / self.manifest["name"]).read_bytes()))


def forged(part: Part, name: str, content: bytes) -> Part:
    """Replace a file of a part as if it had been saved like that: every size and digest fits; return the new part.

    The old file is not written into: others may be linked to it.
    """
    manifest = part.manifest_json()
    path = part.directory / name
    path.unlink()
    path.write_bytes(content)
    digest = names.bytes_digest(content)
    for row in manifest["files"]:
        if row["name"] == name:
            row.update(bytes=len(content), digest=digest)
    if manifest["index"]["name"] == name:
        manifest["index"]["digest"] = digest
    raw = json.dumps(manifest).encode()
    path = part.directory / part.manifest["name"]
    path.unlink()
    path.write_bytes(raw)
    return replace(part, manifest={**part.manifest, "digest": names.bytes_digest(raw), "bytes": len(raw)})


@dataclass(frozen=True)
class Cut:
    """The boundaries captured together over all participants.

    Args:
        checkpoint_id: its id.
        parts: by participant name.
        pauses_ms: the pause that each participant reported.
    """

    checkpoint_id: str
    parts: Mapping[str, Part]
    pauses_ms: Mapping[str, int]

    def row(self, case: Case, rollout_id: str) -> Json:
        """Return the row of a rollout in the index of the owner of rollouts."""
        rows = self.parts[case.agent.name].rows
        if rollout_id not in rows:
            raise Failed(f"the index has a row of {rollout_id}", expected="one row", got=f"rows of {sorted(rows)[:8]}")
        return dict(rows[rollout_id])

    def continued(self, owner: str) -> set[str]:
        """Return the rollouts that can be continued.

        A session may be in an index although its rollout has ended elsewhere (the owner of rollouts has lost it in a
        kill, the owner of sessions has not): nobody continues that.

        Args:
            owner: the name of the owner of rollouts; its index says `turn`, and no index says `restart`.
        """
        restarts = {key for part in self.parts.values() for key, row in part.rows.items() if row["state"] == "restart"}
        return {key for key, row in self.parts[owner].rows.items() if row["state"] == "turn"} - restarts


def target_for(case: Case, participant: Participant, label: str, *, http: bool = False) -> tuple[Json, Path]:
    """Return a commit target for a participant, its directory created, and the directory.

    Args:
        case: whose namespace it lies in.
        participant: who writes there.
        label: names the directory.
        http: the target is to be fetched, where the participant can do that, although there is a shared directory.

    Raises:
        NotOffered: neither a shared directory nor http artifacts are there.
    """
    shared = case.bench.target.shared_dir
    storage = participant.capabilities["storage"]
    fetched = "http" in storage and "artifacts_http" in participant.capabilities["features"]
    if shared is not None and "file" in storage and not (http and fetched):
        directory = shared / f"{case.prefix}{case.name}"[:100] / label / participant.name
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return {"scheme": "file", "path": str(directory.resolve())}, directory
    if fetched:
        directory = case.bench.work_dir / "fetched" / f"{case.prefix}{label}" / participant.name
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return {"scheme": "http"}, directory
    raise NotOffered("neither a directory that both sides see nor http artifacts are there")


def prepare_everywhere(case: Case, checkpoint_id: str, *, controller: Controller | None = None, **kwargs: Any) -> None:
    """Prepare every participant in ascending order of stages, until each is ready."""
    owner = controller or case.controller
    case.step(f"prepare {checkpoint_id} everywhere, in ascending order of stages")
    for participant in case.gym.participants:
        ready_at(case, participant, checkpoint_id, controller=owner, **kwargs)


def ready_at(
    case: Case, participant: Participant, checkpoint_id: str, *, controller: Controller | None = None, **kwargs: Any
) -> Reply:
    """Prepare one participant and judge that it becomes ready."""
    reply = (controller or case.controller).prepare(participant, checkpoint_id, **kwargs)
    case.accepted(reply, f"{participant.name} accepts prepare")
    what = f"{participant.name} is ready (blockers {reply['blockers'][:3]})"
    case.equal(True, reply["ready"], what, "CKPT-PREP-002")
    return reply


def prepared_at(case: Case, participant: Participant | None = None, **kwargs: Any) -> str:
    """Open a fresh checkpoint at one participant (default: the one under study), ready; return its id."""
    participant = participant or case.p
    checkpoint_id = case.controller.next_id()
    case.step(f"prepare {checkpoint_id} at {participant.name}, ready")
    ready_at(case, participant, checkpoint_id, **kwargs)
    return checkpoint_id


def committed_at(case: Case, participant: Participant | None = None, **kwargs: Any) -> tuple[str, Json, Reply]:
    """Prepare and commit, durable, at one participant; return the id, the target and the commit's reply."""
    participant = participant or case.p
    checkpoint_id = prepared_at(case, participant, **kwargs)
    target, _ = target_for(case, participant, checkpoint_id)
    case.step(f"commit {checkpoint_id} at {participant.name}, wait: durable")
    reply = case.accepted(case.controller.commit(participant, checkpoint_id, target), "commit is accepted")
    case.equal("committed", reply["phase"], "a durable commit with the gate closed is in phase committed")
    return checkpoint_id, target, reply


def restored_at(case: Case, participant: Participant | None = None) -> str:
    """Reset one participant (source null) and leave it restored; return the id of the restore."""
    participant = participant or case.p
    checkpoint_id = case.controller.next_id()
    case.step(f"restore source null at {participant.name} as {checkpoint_id}")
    reply = case.accepted(case.controller.restore(participant, checkpoint_id, None), "a reset is accepted")
    case.equal("restored", reply["phase"], "after a restore the phase is restored")
    return checkpoint_id


def admits(case: Case, participant: Participant, when: str, *requirements: str) -> None:
    """Judge that a participant whose gate is open admits a new rollout; nothing is asked of one that owns none."""
    if participant.owns("rollouts"):
        outcome = case.outcome(case.item(case.new_id()))["outcome"]
        case.equal("started", outcome, f"the outcome of a start {when}", "CKPT-GATE-015", *requirements)


def commit_everywhere(
    case: Case, checkpoint_id: str, *, wait: str = "durable", **kwargs: Any
) -> dict[str, tuple[Json, Path, Reply]]:
    """Commit every participant at once and return target, directory and reply by name."""
    case.step(f"commit {checkpoint_id} everywhere, wait: {wait}")
    targets = {p.name: target_for(case, p, checkpoint_id) for p in case.gym.participants}

    def commit(participant: Participant) -> Callable[[], Reply]:
        target, _ = targets[participant.name]
        return lambda: case.controller.commit(participant, checkpoint_id, target, wait=wait, **kwargs)

    replies = case.wire.together([commit(participant) for participant in case.gym.participants])
    done = {}
    for participant, reply in zip(case.gym.participants, replies, strict=True):
        case.accepted(reply, f"{participant.name} commits {checkpoint_id}")
        done[participant.name] = (*targets[participant.name], reply)
    return done


def resume_everywhere(case: Case, checkpoint_id: str) -> None:
    """Resume every participant in descending order of stages."""
    case.step(f"resume {checkpoint_id} everywhere, in descending order of stages")
    for participant in case.gym.descending:
        case.accepted(case.controller.resume(participant, checkpoint_id), f"{participant.name} resumes")


def take_cut(case: Case, *, resume: bool = True, checkpoint_id: str | None = None, **kwargs: Any) -> Cut:
    """Prepare, commit until durable, read what was written, and (by default) resume."""
    checkpoint_id = checkpoint_id or case.controller.next_id()
    prepare_everywhere(case, checkpoint_id)
    done = commit_everywhere(case, checkpoint_id, **kwargs)
    parts = {p.name: read_part(case, p, checkpoint_id, *done[p.name]) for p in case.gym.participants}
    if resume:
        resume_everywhere(case, checkpoint_id)
    return Cut(checkpoint_id, parts, {name: reply["pause_ms"] for name, (_, _, reply) in done.items()})


def read_part(
    case: Case, participant: Participant, checkpoint_id: str, target: Json, directory: Path, reply: Reply
) -> Part:
    """Judge that a durable commit names what is there, and return it."""
    case.equal(True, reply["durable"], f"{participant.name} is durable when commit with wait: durable is answered 200")
    manifest, index = reply["manifest"], reply["index"]
    if target["scheme"] == "http":
        _fetch(case, participant, checkpoint_id, directory, manifest["name"])
    raw = (directory / manifest["name"]).read_bytes()
    case.equal(manifest["digest"], names.bytes_digest(raw), "commit states the digest of the manifest")
    case.equal(manifest["bytes"], len(raw), "commit states the size of the manifest")
    lines = (directory / index["name"]).read_bytes()
    case.equal(index["digest"], names.bytes_digest(lines), "commit states the digest of the index")
    rows = [json.loads(line) for line in lines.splitlines()]
    case.equal(index["records"], len(rows), "commit states the number of records of the index")
    kind = next(what for what in ONE_LINE if participant.owns(what))
    twice = sorted(key for key, count in Counter(row["rollout_id"] for row in rows).items() if count > 1)
    case.equal([], twice, "rollouts with more than one line in the index", ONE_LINE[kind])
    return Part(participant.name, target, directory, manifest, {row["rollout_id"]: row for row in rows})


def _fetch(case: Case, participant: Participant, checkpoint_id: str, directory: Path, manifest_name: str) -> None:
    manifest = case.accepted(participant.get_artifact(checkpoint_id, manifest_name), "a committed manifest is served")
    (directory / manifest_name).write_bytes(manifest.content)
    for file in json.loads(manifest.content)["files"]:
        found = case.accepted(participant.get_artifact(checkpoint_id, file["name"]), "a committed file is served")
        (directory / file["name"]).write_bytes(found.content)


@dataclass(frozen=True)
class Plan:
    """What a controller restores: lists per participant, made from the indexes and the attempts it reserved.

    Args:
        rollouts: by participant name.
        results: receipts to keep; sent to the owner of rollouts.
        fences: for every unfinished rollout that is not continued.
        next_attempts: by rollout id.
    """

    rollouts: Mapping[str, list[Json]]
    results: list[Json]
    fences: list[Json]
    next_attempts: Mapping[str, int]


def plan(
    case: Case,
    cut: Cut,
    *,
    only: Collection[str] | None = None,
    keep: Collection[str] | None = None,
) -> Plan:
    """Make the lists of a restore.

    Args:
        case: whose book of attempts is used.
        cut: what is restored.
        only: continue these rollouts alone; default: all of this check that can be continued.
        keep: keep the results of these rollouts alone; default: all that the cut holds.
    """
    # What an earlier check left behind is fenced: this one's book knows nothing of its attempts.
    chosen = cut.continued(case.agent.name) & set(case.attempts if only is None else only)
    next_attempts = {key: case.next_attempt(key) for key in sorted(chosen)}
    lists: dict[str, list[Json]] = {}
    for name, part in cut.parts.items():
        lists[name] = [
            {
                "rollout_id": key,
                "attempt": row["attempt"],
                "next_attempt": next_attempts[key],
                "turns_done": row["turns_done"],
                "task_digest": row["task_digest"] or case.rollouts[key].item["task_digest"],
            }
            for key, row in part.rows.items()
            if key in chosen and row["state"] == "turn"
        ]
    rows = cut.parts[case.agent.name].rows
    finished = {key: row["receipt"] for key, row in rows.items() if row["state"] == "finished"}
    results = [receipt for key, receipt in finished.items() if keep is None or key in keep]
    fences = [
        {"rollout_id": key, "through_attempt": case.attempts.get(key, row["attempt"])}
        for key, row in rows.items()
        if row["state"] != "finished" and key not in chosen
    ]
    return Plan(lists, results, fences, next_attempts)


def upload(case: Case, participant: Participant, cut: Cut) -> None:
    """PUT the files of a part whose scheme is http; the manifest last."""
    part = cut.parts[participant.name]
    if part.target["scheme"] == "http":
        put_part(case, case.controller, participant, cut.checkpoint_id, part)


def size(part: Part) -> tuple[int, int]:
    """Return how many files a part has, its manifest among them, and their bytes."""
    files = part.manifest_json()["files"]
    return len(files) + 1, part.manifest["bytes"] + sum(row["bytes"] for row in files)


def put_part(case: Case, controller: Controller, participant: Participant, checkpoint_id: str, part: Part) -> None:
    """PUT the files of a part, the manifest last."""
    files = [row["name"] for row in part.manifest_json()["files"]]
    for name in [*files, part.manifest["name"]]:
        reply = controller.put_artifact(participant, checkpoint_id, name, (part.directory / name).read_bytes())
        case.true(reply.ok, f"{participant.name} takes the artifact {name}", "CKPT-ART-005", got=reply.brief)


def restore_at(case: Case, participant: Participant, cut: Cut, lists: Plan, checkpoint_id: str, **kwargs: Any) -> Reply:
    """Send the restore of one participant."""
    upload(case, participant, cut)
    return case.controller.restore(
        participant,
        checkpoint_id,
        cut.parts[participant.name].source(cut.checkpoint_id),
        rollouts=lists.rollouts[participant.name],
        results=lists.results if participant.owns("rollouts") else [],
        fences=lists.fences,
        **kwargs,
    )


def restore_cut(
    case: Case,
    cut: Cut,
    *,
    only: Collection[str] | None = None,
    keep: Collection[str] | None = None,
    resume: bool = True,
    policy: Json | None = None,
    **kwargs: Any,
) -> Plan:
    """Restore every participant in descending order of stages, and (by default) resume them.

    The rollouts of this check continue in the suite's own book as their next attempts.
    """
    checkpoint_id = case.controller.next_id()
    lists = plan(case, cut, only=only, keep=keep)
    case.step(f"restore {cut.checkpoint_id} everywhere as {checkpoint_id}, in descending order of stages")
    for participant in case.gym.descending:
        reply = restore_at(case, participant, cut, lists, checkpoint_id, policy=policy, **kwargs)
        case.accepted(reply, f"{participant.name} restores {cut.checkpoint_id}")
        case.equal("restored", reply["phase"], f"{participant.name} stays restored until resume")
    for key, attempt in lists.next_attempts.items():
        if key in case.rollouts:
            case.rollouts[key].attempt = attempt
    if resume:
        resume_everywhere(case, checkpoint_id)
    return lists


def reset(case: Case) -> None:
    """Reset every participant (restore of `source: null`): no rollout, no result; counts start from nothing."""
    checkpoint_id = case.controller.next_id()
    case.step("reset every participant: restore source null, resume")
    for participant in case.gym.descending:
        reply = case.controller.restore(participant, checkpoint_id, None)
        case.accepted(reply, f"{participant.name} resets")
    resume_everywhere(case, checkpoint_id)
