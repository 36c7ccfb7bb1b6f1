# SPDX-License-Identifier: Apache-2.0
"""One restore: verify → close the gate → wait for handlers → build aside → install in one step.

It runs as a task of its own. Until the installing step, which does not await, an abort cancels it and everything
is as it was before; each failure leaves everything as before as well.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reference_gym.participant import failpoints, installing
from reference_gym.participant.committing import shared_future
from reference_gym.participant.encoding import continued
from reference_gym.participant.errors import Internal, NotReady, ProtocolError, StaleCheckpoint
from reference_gym.participant.gate import MAX_BLOCKERS
from reference_gym.participant.live import BuiltRollouts
from reference_gym.participant.machine import Step
from reference_gym.participant.reading import ReadStopped, Source, read_source
from reference_gym.participant.records import Record
from reference_gym.participant.restoring import Plan, make_plan, require_above_fences
from reference_gym.participant.state import CannotContinue, Part, Policy
from spec.messages import RestoreRequest

if TYPE_CHECKING:
    from reference_gym.participant.core import Core

logger = logging.getLogger(__name__)

Tables = TypeVar("Tables", Source, Plan)


class Restorer:
    """The work of one restore; ``outcome`` is done when it has been decided.

    Args:
        core: the participant.
        request: what the controller asks for.
        directory: the confined source, or None for ``source: null``.
        deadline: until when it waits for handlers, in the participant's monotonic seconds.
    """

    def __init__(self, core: Core, request: RestoreRequest, directory: Path | None, deadline: float) -> None:
        self.outcome: asyncio.Future[None] = shared_future()
        self._core = core
        self._request = request
        self._directory = directory
        # A moment before the call itself would time out, so that it is answered with the failure (CKPT-RESTORE-009).
        self._deadline = deadline - 0.001
        self._stop = threading.Event()
        self._built: list[tuple[Part, Any]] = []
        self._empty: list[tuple[Part, Any]] = []
        self._used: list[Mapping[Any, Any]] = []
        loop, name = asyncio.get_running_loop(), f"restore {request.checkpoint_id}"
        # Only the work is ever cancelled, perhaps before its first step; the end that follows it always comes.
        self._work = loop.create_task(self._restore(), name=name)
        self._task = loop.create_task(self._finish(), name=f"end of {name}")

    def abandon(self) -> None:
        """Cancel the work before its installing step, and answer at once whoever waits for it (CKPT-ABORT-006)."""
        self._stop.set()
        self._work.cancel()
        if not self.outcome.done():
            self.outcome.set_exception(StaleCheckpoint(f"checkpoint {self._request.checkpoint_id} has ended"))

    async def _finish(self) -> None:
        """Wait for the work and bring the restore to its end, whatever became of it."""
        core = self._core
        error: ProtocolError = StaleCheckpoint(f"checkpoint {self._request.checkpoint_id} has ended")
        try:
            await self._work
        except ProtocolError as refusal:
            error = refusal
        except (asyncio.CancelledError, ReadStopped):
            pass
        except Exception as failure:
            logger.exception("restore %s failed", self._request.checkpoint_id)
            error = Internal(f"building the state failed with {type(failure).__name__}")
        else:
            self.outcome.set_result(None)
            core.remains.take(*self._used)
            return
        core.remains.take(*self._used)
        await self._discard()
        machine, now = core.machine, core.clock.now()
        if machine.open is not None and machine.open.ending is not None:
            core.move(Step(machine.stopped(now)))
        else:
            core.move(Step(machine.restore_failed(error.code, now)))
        if not self.outcome.done():
            self.outcome.set_exception(error)

    async def _restore(self) -> None:
        core = self._core
        source = await self._read()
        failpoints.reach("restore.read")
        plan = await self._on_thread(make_plan, self._request, source, core.config, core.owns, self._stop)
        core.move(Step(core.machine.verified(core.clock.now())))
        await failpoints.held("restore.verified")
        failpoints.reach("restore.verified")
        await self._quiesce()
        failpoints.reach("restore.quiesced")
        plan = await self._build_parts(plan)
        failpoints.reach("restore.parts")
        built = await self._build(plan, source)
        await failpoints.held("restore.built")
        failpoints.reach("restore.built")
        await self._require_above_fences()
        opened = core.machine.open
        if opened is None or opened.ending is not None:
            raise asyncio.CancelledError
        self._install(plan, built)

    async def _read(self) -> Source:
        if self._directory is None or self._request.source is None:
            return Source()
        return await self._on_thread(
            read_source,
            self._directory,
            self._request.source.manifest_digest,
            self._core.config,
            self._request.run_id,
            self._request.source.checkpoint_id,
            (rollout.rollout_id for rollout in self._request.rollouts),
            self._stop,
        )

    async def _on_thread(self, work: Callable[..., Tables], *arguments: Any) -> Tables:
        """Return what a function makes on a thread; it is freed in slices in the end, also if nobody waits for it."""
        running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
        running.add_done_callback(self._note)
        return await asyncio.shield(running)

    def _note(self, done: asyncio.Future[Tables]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        self._used += done.result().tables()
        if self._task.done():
            self._core.remains.take(*self._used)

    async def _require_above_fences(self) -> None:
        """Judge the attempts once more, in slices: what was fenced or recorded while the state was built counts."""
        core = self._core
        while True:
            changes = core.changes
            await require_above_fences(self._request, core.highest)
            if changes == core.changes:
                return

    async def _quiesce(self) -> None:
        """Wait for the handlers that run in this participant, not for turns (CKPT-RESTORE-007, CKPT-RESTORE-008).

        Raises:
            NotReady: they still run when the time limit has passed, naming them.
        """
        while self._core.gate.handlers:
            if not await self._core.wait_move(self._deadline):
                blockers = [blocker.as_json() for blocker in self._core.gate.blockers(handlers_only=True)]
                raise NotReady(
                    f"{len(blockers)} handlers still run here",
                    checkpoint_id=self._request.checkpoint_id,
                    blockers=blockers[:MAX_BLOCKERS],
                )

    async def _build_parts(self, plan: Plan) -> Plan:
        """Build every part aside; rollouts that one of them cannot continue are left out of all."""
        while True:
            try:
                for part in self._core.parts:
                    self._empty.append((part, await part.build([])))
                    rollouts = await asyncio.to_thread(plan.for_part, part.name)
                    self._built.append((part, await part.build(rollouts)))
            except CannotContinue as refusal:
                await self._discard()
                plan = await asyncio.to_thread(plan.without, refusal.reasons)
            else:
                return plan

    async def _build(self, plan: Plan, source: Source) -> installing.Built:
        registry, rollouts = self._core.registry, BuiltRollouts()
        if registry is not None:
            continuing = ((plan.saved[key], attempt) for key, (_, attempt) in plan.payloads.items())
            rollouts = await registry.build(continuing, self._policy())
        records = self._records(plan, source)
        return await installing.build(self._core, self._request, plan, source, rollouts, records)

    def _records(self, plan: Plan, source: Source) -> Iterator[Record]:
        """Yield the first boundary of everything that continues: what was saved, under its new attempt."""
        given, owns_rollouts = self._policy(), self._core.registry is not None
        for rollout_id, (payload, attempt) in plan.payloads.items():
            row = source.index[rollout_id]
            policy = (given or plan.saved[rollout_id].policy) if owns_rollouts else None
            yield Record(
                rollout_id=rollout_id,
                attempt=attempt,
                turns_done=row.turns_done,
                task_digest=row.task_digest,
                environment=row.environment,
                effects=dict(row.effects),
                payload=continued(payload, rollout_id, attempt, policy),
                policy_version=row.policy_version,
                data_refs=tuple(reference.to_object() for reference in row.data_refs),
            )

    def _policy(self) -> Policy | None:
        given = self._request.policy
        return None if given is None else Policy(given.base_url, given.model, given.api)

    def _install(self, plan: Plan, built: installing.Built) -> None:
        """Make what was built current, in one step: nothing in here awaits (CKPT-RESTORE-014)."""
        core = self._core
        parts, self._built = self._built, []
        built.undo.parts, self._empty = self._empty, []
        installing.install(core, built, parts)
        outcome = {
            "restored_count": len(plan.payloads),
            "restarts": [{"rollout_id": key, "reason": reason} for key, reason in sorted(plan.restarts.items())],
            "results_count": len(plan.results),
        }
        core.move(Step(core.machine.installed(outcome)))
        failpoints.reach("restore.installed")

    async def _discard(self) -> None:
        built, self._built, self._empty = [*self._built, *self._empty], [], []
        for part, state in built:
            try:
                await part.discard(state)
            except asyncio.CancelledError:
                pass
            except Exception:
                logger.exception("part %s could not discard what it had built", part.name)
