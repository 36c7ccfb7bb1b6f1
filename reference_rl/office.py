# SPDX-License-Identifier: Apache-2.0
"""How a controller finds its Gyms, claims an epoch above theirs, and becomes the one that all of them obey."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from reference_rl import epochs, queries
from reference_rl.columns import Switches
from reference_rl.control import Tenure, abort_everywhere
from reference_rl.deployment import Deployment
from reference_rl.errors import GymError, Incompatible, RecoveryFailed, RlError, Superseded
from reference_rl.events import Events
from reference_rl.ledger import Ledger
from reference_rl.snapshots import SnapshotStore

CLAIMS: Final = 3
"""How often an epoch is picked again when a higher controller refused the first call."""

RETRY_S: Final = 0.2
"""How long a Gym that could not be reached is left alone, in seconds."""


class Office:
    """Takes office for one controller.

    Args:
        tenure: the controller's tenure; its claim is made here.
        gyms: the Gyms of the run.
        ledger: the run's ledger.
        store: the snapshots, beside which epochs are claimed.
        reach_s: how long a Gym may take to be found, in seconds.
        switches: what the column turns on.
        events: where what happened is written.
        environments: alias → the environments that the run needs there.

    Requirements: CKPT-CTRL-012…016.
    """

    def __init__(
        self,
        tenure: Tenure,
        gyms: Sequence[Deployment],
        ledger: Ledger,
        store: SnapshotStore,
        reach_s: float,
        switches: Switches,
        events: Events,
        environments: Mapping[str, set[str]],
    ) -> None:
        self._tenure = tenure
        self._gyms = gyms
        self._ledger = ledger
        self._store = store
        self._reach_s = reach_s
        self._switches = switches
        self._events = events
        self._environments = environments
        self._discovered: dict[str, dict[str, str]] = {}

    async def take(self) -> tuple[list[Deployment], set[str]]:
        """Discover every Gym and claim an epoch above theirs; whatever dies meanwhile is discovered again.

        Returns:
            The Gyms that are there, and the aliases of those that nobody has used yet.
        """
        end = time.monotonic() + self._reach_s
        while True:
            away = await self.discover_all()
            present = [gym for gym in self._gyms if gym.alias not in away]
            try:
                fresh = await self._fresh(present)
                await self._claim(present)
            except GymError as error:
                if time.monotonic() >= end or not error.retryable:
                    raise
                await asyncio.sleep(RETRY_S)
                continue
            return present, fresh

    async def discover_all(self) -> set[str]:
        """Find every Gym within the limit; return the optional ones that are away."""
        away: set[str] = set()

        async def one(gym: Deployment) -> None:
            try:
                await self.discover(gym)
            except (RecoveryFailed, Incompatible) as error:
                if not gym.optional:
                    raise
                away.add(gym.alias)
                self._events.emit("gym_away", gym=gym.alias, reason=str(error))

        await asyncio.gather(*(one(gym) for gym in self._gyms))
        return away

    async def discover(self, gym: Deployment, limit_s: float | None = None) -> Mapping[str, str]:
        """Discover a Gym within a limit, and judge whether the run can use it.

        Returns:
            The incarnations that the ledger knows, by participant.

        Raises:
            RecoveryFailed: it was not found in time.
            Incompatible: it cannot be used, or a known participant is none any more.
        """
        known = await self._reach(gym, limit_s)
        gym.check(self._switches, self._environments.get(gym.alias, ()))
        return known

    async def _reach(self, gym: Deployment, limit_s: float | None = None) -> Mapping[str, str]:
        known = self._ledger.read(queries.incarnations, gym.alias)
        await self.reached(gym, lambda: gym.discover(known), limit_s or self._reach_s)
        found = {p.name: p.incarnation for p in gym.participants}
        if self._discovered.get(gym.alias) != found:
            self._discovered[gym.alias] = found
            self._events.emit("discovered", gym=gym.alias, participants=found)
        return known

    async def reached(self, gym: Deployment, look: Callable[[], Awaitable[object]], limit_s: float) -> None:
        """Look for a Gym until a look succeeds.

        Raises:
            RecoveryFailed: none did within the limit.
            Incompatible: a required participant is none any more.
            Superseded: a higher controller has taken over.
        """
        end = time.monotonic() + limit_s
        while True:
            try:
                await look()
            except (Superseded, Incompatible):
                raise
            except (RlError, OSError, ValueError, KeyError) as error:
                if time.monotonic() >= end:
                    participant = getattr(error, "participant", None)
                    raise RecoveryFailed(gym.alias, f"it cannot be reached: {error}", participant) from error
                await asyncio.sleep(RETRY_S)
                continue
            return

    async def _fresh(self, gyms: Sequence[Deployment]) -> set[str]:
        """Return the Gyms that never heard of a controller and that the ledger never used: nothing to reset there."""
        found = set()
        for gym in gyms:
            statuses = [await participant.client.status() for participant in gym.participants]
            if all(status.fresh for status in statuses) and not self._ledger.read(queries.incarnations, gym.alias):
                found.add(gym.alias)
        return found

    async def _claim(self, gyms: Sequence[Deployment]) -> None:
        """Claim an epoch above every known one, durably, before anything is sent under it."""
        seen = max(self._ledger.read(queries.highest_epoch), await self._highest_epoch(gyms))
        directory, name = self._store.root.parent, self._tenure.controller.id
        self._tenure.take_office(await asyncio.to_thread(epochs.claim, directory, name, seen))

    async def become_known(self, gyms: Sequence[Deployment]) -> None:
        """Abort ``<epoch>-0`` everywhere; pick another epoch when a higher controller refuses it, at most 3 times.

        Raises:
            Superseded: refused after the last pick.

        Requirements: CKPT-CTRL-012, CKPT-CTRL-014…016.
        """
        picks_left = CLAIMS
        end = time.monotonic() + self._reach_s
        while True:
            try:
                await self.make_known(gyms)
            except Superseded:
                if not picks_left:
                    raise
                picks_left -= 1
                await self._claim(gyms)
                continue
            except RecoveryFailed:
                # One of them died since it was discovered: another incarnation of it comes, and is told as well.
                if time.monotonic() >= end:
                    raise
                await self._look_again(gyms)
                continue
            self._events.emit("in_office", epoch=self._tenure.epoch, controller=self._tenure.controller.id)
            return

    async def _look_again(self, gyms: Sequence[Deployment]) -> None:
        await asyncio.sleep(RETRY_S)
        for gym in gyms:
            await self._reach(gym)

    async def _highest_epoch(self, gyms: Sequence[Deployment]) -> int:
        highest = 0
        for gym in gyms:
            for participant in gym.participants:
                status = await participant.client.status()
                highest = max(highest, status.controller.epoch if status.controller else 0)
        return highest

    async def make_known(self, gyms: Sequence[Deployment]) -> None:
        """Abort the first id everywhere, so that every participant obeys this controller.

        Raises:
            Superseded: one of them obeys a higher controller.
            RecoveryFailed: one of them could not be told.
        """
        participants = [participant for gym in gyms for participant in gym.participants]
        outcomes = await abort_everywhere(participants, str(self._tenure.first_id()), 10_000)
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        for error in errors:
            if isinstance(error, Superseded):
                raise error
        stale = [e for e in errors if getattr(e, "code", None) == "stale_checkpoint"]
        # A participant that this controller has used before answers stale_checkpoint to its first id: it knows us.
        for error in errors:
            if error not in stale:
                raise RecoveryFailed(str(getattr(error, "participant", "a participant")), f"abort failed: {error}")
