# SPDX-License-Identifier: Apache-2.0
"""The lists of a restore: judged against what the source holds, and turned into what is built.

No I/O and no waiting; ``service`` does both around it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reference_gym.participant.config import ParticipantConfig
from reference_gym.participant.encoding import Saved, read_payload
from reference_gym.participant.errors import CheckpointCorrupt, InvalidRequest, StaleAttempt, StateMismatch
from reference_gym.participant.jsontext import NotJson
from reference_gym.participant.reading import ReadStopped, Source
from reference_gym.participant.result import Finished, Receipt
from reference_gym.participant.slices import Rests, Slices, free
from reference_gym.participant.state import Restored
from spec.messages import RestoreRequest


@dataclass(frozen=True, slots=True)
class Plan:
    """What a restore installs.

    ``payloads`` gives each continued rollout's payload and its new attempt, ``restarts`` the listed rollouts that
    are not made current, with the reason.
    """

    payloads: Mapping[str, tuple[bytes, int]] = field(default_factory=dict)
    saved: Mapping[str, Saved] = field(default_factory=dict)
    restored: Mapping[str, Restored] = field(default_factory=dict)
    results: tuple[Finished, ...] = ()
    restarts: Mapping[str, str] = field(default_factory=dict)

    def without(self, reasons: Mapping[str, str]) -> Plan:
        """Return the plan without some rollouts, which become restarts."""
        return Plan(
            payloads={key: value for key, value in self.payloads.items() if key not in reasons},
            saved={key: value for key, value in self.saved.items() if key not in reasons},
            restored={key: value for key, value in self.restored.items() if key not in reasons},
            results=self.results,
            restarts={**self.restarts, **reasons},
        )

    def tables(self) -> list[Mapping[Any, Any]]:
        """Return what takes long to free."""
        return [self.payloads, self.saved, self.restored]

    def for_part(self, name: str) -> list[Restored]:
        """Return what one part is to build."""
        rests, found = Rests(), []
        for restored in self.restored.values():
            rests.rest()
            parts = self.saved[restored.rollout_id].parts
            if name in parts:
                found.append(replace(restored, data=parts[name]))
        return found


def compared(request: RestoreRequest) -> str:
    """Return what is compared between a restore and its repeat: source, lists as sets, policy (CKPT-REPEAT-008).

    A digest, because it is kept for as long as the checkpoint is open; of long lists it is made on a thread.

    Raises:
        InvalidRequest: a list says two things of one rollout, which is named (CKPT-RESTORE-056).
    """
    rests = Rests()
    digest = hashlib.sha256(repr((request.run_id, request.source, request.policy)).encode())
    for name, items in (("rollouts", request.rollouts), ("results", request.results), ("fences", request.fences)):
        texts: set[str] = set()
        said: dict[str, str] = {}
        for item in items:
            rests.rest()
            text = repr(item)
            texts.add(text)
            if name != "fences" and said.setdefault(item.rollout_id, text) != text:
                raise InvalidRequest(f"{name} lists {item.rollout_id} twice, differently")
        for text in sorted(texts):
            rests.rest()
            digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()


async def require_above_fences(request: RestoreRequest, highest: Callable[[str], int]) -> None:
    """Refuse a ``next_attempt`` that is not above what is fenced, held or saved (CKPT-RESTORE-029, -053, -055).

    In slices: what is fenced meanwhile is not seen by all of it.

    Args:
        request: the restore.
        highest: the highest attempt that is fenced or held here, -1 if none is.

    Raises:
        StaleAttempt: naming each such rollout and its fence.
    """
    named, slices = [], Slices()
    for rollout in request.rollouts:
        if rollout.next_attempt <= (through := max(highest(rollout.rollout_id), rollout.attempt)):
            named.append({"rollout_id": rollout.rollout_id, "through_attempt": through})
        await slices.give_way()
    if named:
        first = named[0]["rollout_id"]
        raise StaleAttempt(f"next_attempt of {first} is not above its fence ({len(named)} in all)", rollouts=named)


def make_plan(
    request: RestoreRequest, source: Source, config: ParticipantConfig, owns: Iterable[str], stop: threading.Event
) -> Plan:
    """Judge the lists against the source; on a thread.

    Args:
        request: the restore.
        source: what was read.
        config: the participant's.
        owns: what it owns.
        stop: when set, judging ends at the next rollout.

    Raises:
        ReadStopped: ``stop`` was set.
        StateMismatch: naming every rollout on which they disagree (CKPT-RESTORE-024 to CKPT-RESTORE-028).
        CheckpointCorrupt: a payload cannot be read.
    """
    problems: list[tuple[str, str]] = []
    payloads: dict[str, tuple[bytes, int]] = {}
    restored: dict[str, Restored] = {}
    saved: dict[str, Saved] = {}
    restarts: dict[str, str] = {}
    rests = Rests()
    for rollout in request.rollouts:
        rests.rest()
        if stop.is_set():
            free(saved, payloads, restored)
            raise ReadStopped
        row = source.index.get(rollout.rollout_id)
        if row is None or row.state != "turn":
            problems.append((rollout.rollout_id, "the source does not hold it in state turn"))
        elif row.attempt != rollout.attempt:
            problems.append((rollout.rollout_id, f"saved as attempt {row.attempt}, listed as {rollout.attempt}"))
        elif row.turns_done != rollout.turns_done:
            problems.append(
                (rollout.rollout_id, f"saved with {row.turns_done} turns, listed with {rollout.turns_done}")
            )
        elif row.task_digest not in (None, rollout.task_digest):
            problems.append((rollout.rollout_id, "saved with another task_digest than listed"))
        elif rollout.rollout_id not in source.payloads:
            raise CheckpointCorrupt(f"the payload has no record of {rollout.rollout_id}")
        else:
            payload = source.payloads[rollout.rollout_id]
            try:
                saved[rollout.rollout_id] = read_payload(payload)
            except NotJson as error:
                raise CheckpointCorrupt(f"the payload, the record of {rollout.rollout_id}: {error}") from error
            payloads[rollout.rollout_id] = (payload, rollout.next_attempt)
            restored[rollout.rollout_id] = Restored(
                rollout_id=rollout.rollout_id,
                attempt=rollout.next_attempt,
                saved_attempt=rollout.attempt,
                turns_done=rollout.turns_done,
                data=None,
                task_digest=rollout.task_digest,
                environment=row.environment,
            )
    results: dict[str, Finished] = {}
    for receipt in request.results:
        held = source.results.get(receipt.rollout_id)
        if held is None or held.receipt != Receipt(receipt.rollout_id, receipt.attempt, receipt.digest):
            problems.append((receipt.rollout_id, "the source does not hold this receipt"))
        else:
            results[receipt.rollout_id] = held
    if problems:
        raise StateMismatch.of(problems)
    plan = Plan(payloads, saved, restored, tuple(results.values()), restarts)
    return plan.without(_cannot_continue(plan, source, config, frozenset(owns)))


def _cannot_continue(plan: Plan, source: Source, config: ParticipantConfig, owns: frozenset[str]) -> dict[str, str]:
    """Return the listed rollouts whose environment or agent cannot go on here any more (CKPT-RESTORE-039)."""
    if owns == {"ledger"}:
        return {}
    reasons = {}
    for rollout_id, restored in plan.restored.items():
        start = plan.saved[rollout_id].start
        if restored.environment is None:
            continue
        known = config.environment(restored.environment)
        if known is None or known.state_version != source.environments.get(restored.environment, known.state_version):
            reasons[rollout_id] = "other"
        elif "rollouts" in owns and config.restart_only(known.name, None if start is None else start.agent):
            reasons[rollout_id] = "restart_only"
    return reasons
