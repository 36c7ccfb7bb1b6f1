# SPDX-License-Identifier: Apache-2.0
"""What can be read of a participant: capabilities, status, rollouts and results."""

from __future__ import annotations

import asyncio
from typing import Any

from reference_gym.participant.clock import within
from reference_gym.participant.errors import NotFound
from reference_gym.participant.feed import page_text
from reference_gym.participant.judging import Judging
from spec.wire import PROTOCOL_VERSION

_COUNTS = (
    "admitted",
    "live",
    "restart",
    "finished_unreleased",
    "failed_unreleased",
    "released",
    "retired",
    "unmanaged",
)


class Reads(Judging):
    """The operations that change nothing."""

    def capabilities(self) -> dict[str, Any]:
        """Return the capabilities.

        Raises:
            NotFound: it owns nothing and is no participant (CKPT-DISC-005).
        """
        config = self.config
        if not self.owns:
            raise NotFound("this server owns nothing and is not a participant")
        schema = config.state_schema
        told: dict[str, Any] = {
            "name": config.name,
            "role": config.role,
            "owns": list(self.owns),
            "incarnation": self.incarnation,
            "implementation": {"name": config.implementation, "version": config.version},
            "protocol_versions": [PROTOCOL_VERSION],
            "profiles": list(config.profiles),
            "features": self.features,
            "state_schema": {"id": schema.id, "version": schema.version, "reads": list(schema.reads)},
            "agents": [{"name": agent.name, "continuation": agent.continuation} for agent in config.agents],
            "environments": [
                {
                    "name": environment.name,
                    "continuation": environment.continuation,
                    "verify": environment.verify,
                    "state_version": environment.state_version,
                }
                for environment in config.environments
            ],
            "storage": self.storage,
            "stage": config.stage,
            "workers": {"count": config.workers, "coordinated": config.coordinated},
            "limits": config.limits.as_json(),
        }
        if config.participants:
            told["participants"] = [{"name": peer.name, "url": peer.url} for peer in config.participants]
        return told

    def status(self) -> dict[str, Any]:
        """Return the status, all of one instant (CKPT-STATUS-027)."""
        machine, now = self.machine, self.clock.now()
        controller, registry = machine.controller, self.registry
        counts = dict.fromkeys(_COUNTS, 0)
        if registry is not None:
            counts |= registry.counts()
            counts["unmanaged"] = self.unmanaged_count
        told: dict[str, Any] = {
            "phase": machine.phase.value,
            "gate": "open" if machine.gate_open else "closed",
            "checkpoint_id": None if machine.open is None else str(machine.open.checkpoint_id),
            "controller": None if controller is None else {"id": controller.name, "epoch": controller.epoch},
            "lease_remaining_ms": machine.lease_remaining_ms(now),
            "progress": self.progress,
            "fresh": machine.fresh,
            "draining": self.draining,
            "captured": None if machine.open is None else machine.open.captured,
            "counts": counts,
            "last": self._last(),
        }
        if registry is not None:
            told["feed"] = self.feed.id
        return told

    def rollouts_page(self, after: str, limit: int | None, state: str | None) -> bytes:
        """Return one page of the rollouts, encoded."""
        page = self._rollouts().page(after, self._page_items(limit), self.config.limits.max_page_bytes, state)
        return page_text(page.items, {"next": page.next if page.more else None}, "rollouts")

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """Return one rollout.

        Raises:
            NotFound: this incarnation does not know it (CKPT-ROLL-042).
        """
        described = self._rollouts().describe(rollout_id)
        if described is None:
            raise NotFound(f"there is no rollout {rollout_id}")
        return described

    async def results(self, after: str, limit: int | None, wait_ms: int) -> bytes:
        """Return one page of the feed, encoded, waiting for something to serve (CKPT-FEED-009)."""
        self._rollouts()
        deadline = self._deadline(wait_ms)
        while True:
            page = await self.feed.page(after, self._page_items(limit), self.config.limits.max_page_bytes)
            if page.items or self.draining or self.clock.now() >= deadline:
                return page_text(page.items, {"feed": self.feed.id, "next": page.next, "more": page.more}, "results")
            waiting = asyncio.ensure_future(self.feed.wait())
            try:
                await within(self.clock, deadline, waiting)
            finally:
                waiting.cancel()

    def _last(self) -> dict[str, Any] | None:
        last = self.machine.last
        if last is None:
            return None
        return {
            "checkpoint_id": str(last.checkpoint_id),
            "ended_as": last.ended_as.value,
            "manifest": last.manifest,
            "error_code": last.error_code,
            "pause_ms": last.pause_ms,
        }

    def _blockers(self) -> list[dict[str, object]]:
        return [blocker.as_json() for blocker in self.gate.blockers()]
