# SPDX-License-Identifier: Apache-2.0
"""All participants of one Gym: who they are, in which order they are called, and calls to all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeVar

import httpx

from reference_rl.client import ClientSettings, Controller, GymClient
from reference_rl.columns import Switches
from reference_rl.errors import Incompatible, NotAParticipant, RlError, Superseded
from spec import messages, wire

T = TypeVar("T")

SPOKEN_VERSIONS: Final = (wire.PROTOCOL_VERSION,)
"""The protocol versions that this controller speaks, the highest last."""


@dataclass(frozen=True)
class Participant:
    """One participant as discovered."""

    client: GymClient
    capabilities: messages.Capabilities
    shares_files: bool = True

    @property
    def name(self) -> str:
        """Return its name."""
        return self.capabilities.name

    @property
    def stage(self) -> int:
        """Return its stage: callers have lower numbers than whom they call."""
        return self.capabilities.stage

    @property
    def incarnation(self) -> str:
        """Return the incarnation under which the controller calls it."""
        return self.client.expected_incarnation or self.capabilities.incarnation

    @property
    def by_file(self) -> bool:
        """Return whether its cuts go through a directory that it shares with the controller, not through HTTP."""
        return self.shares_files and "file" in self.capabilities.storage

    def owns(self, what: str) -> bool:
        """Return whether it owns rollouts, sessions or a ledger."""
        return what in self.capabilities.owns


@dataclass(frozen=True)
class Outcome:
    """What one participant answered: a value or an error."""

    participant: Participant
    value: object | None
    error: Exception | None


class Deployment:
    """One Gym under its alias.

    Args:
        alias: the controller's name for it.
        addresses: returns where discovery begins; called anew for each discovery, because addresses move.
        http: the shared pool.
        controller: who is calling.
        token: the control plane's bearer token.
        settings: limits and retries of single calls.
        optional: whether a snapshot may leave the Gym out.
        shares_files: whether it sees the directory of the snapshots; otherwise its cuts go through HTTP.
    """

    def __init__(
        self,
        alias: str,
        addresses: Callable[[], Sequence[str]],
        http: httpx.AsyncClient,
        controller: Controller,
        *,
        token: str | None = None,
        settings: ClientSettings | None = None,
        optional: bool = False,
        shares_files: bool = True,
    ) -> None:
        self.alias = alias
        self.optional = optional
        self._shares_files = shares_files
        self.participants: tuple[Participant, ...] = ()
        self._addresses = addresses
        self._http = http
        self._controller = controller
        self._token = token
        self._settings = settings or ClientSettings()

    async def discover(self, required: Iterable[str] = ()) -> tuple[Participant, ...]:
        """Take the Gym as it is found (:meth:`find`) for the present one.

        The incarnations found become the expected ones; whether they are the ledger's is the caller's question.
        """
        self.participants = await self.find(required)
        return self.participants

    async def find(self, required: Iterable[str] = ()) -> tuple[Participant, ...]:
        """Read the capabilities of every server that the settings or another server's ``participants`` name.

        Args:
            required: names that must be there, because they were participants before or a snapshot names them.

        Raises:
            Incompatible: a required participant is missing or answers 404, or a name appears twice.
            GymError: a server could not be asked.

        Requirements: CKPT-DISC-021…026.
        """
        found: dict[str, Participant] = {}
        waiting: list[tuple[str, str | None]] = [
            (url, None) for url in dict.fromkeys(u.rstrip("/") for u in self._addresses())
        ]
        asked: set[str] = set()
        only_address = len(waiting) == 1
        while waiting:
            url, named = waiting.pop(0)
            if url in asked:
                continue
            asked.add(url)
            client = GymClient(
                url, self._http, self._controller, token=self._token, settings=self._settings, name=named
            )
            try:
                capabilities = await client.capabilities()
            except NotAParticipant:
                if named is not None or only_address:
                    raise Incompatible(
                        self.alias, [f"{named or url} was named as a participant and answers 404 on /capabilities."]
                    ) from None
                continue  # one of several configured servers owns nothing: a judge, a stateless proxy
            if capabilities.name in found:
                known = found[capabilities.name]
                if known.capabilities.incarnation == capabilities.incarnation:
                    continue  # the same participant under a second address
                other = known.client.url
                raise Incompatible(self.alias, [f"{url} and {other} both call themselves {capabilities.name!r}."])
            client.name = f"{self.alias}/{capabilities.name}"
            client.expected_incarnation = capabilities.incarnation
            found[capabilities.name] = Participant(client, capabilities, self._shares_files)
            waiting += [(peer.url.rstrip("/"), peer.name) for peer in capabilities.participants or ()]
        missing = sorted(set(required) - found.keys())
        if missing:
            names = ", ".join(missing)
            raise Incompatible(self.alias, [f"{names}: participant before, and no server answers by that name now."])
        return tuple(sorted(found.values(), key=lambda p: (p.stage, p.name)))

    def check(self, switches: Switches, environments: Iterable[str], lease_ms: int | None = None) -> None:
        """Return when the Gym can be used as the column asks.

        Raises:
            Incompatible: one sentence for each thing that differs.

        Requirements: CKPT-VER-003, CKPT-VER-004, CKPT-ENV-024, CKPT-DISC-027.
        """
        reasons: list[str] = []
        for participant in self.participants:
            reasons += _why_unusable(participant, switches)
        if not reasons and self.participants and self.protocol_version is None:
            spoken = "; ".join(f"{p.name} {', '.join(p.capabilities.protocol_versions)}" for p in self.participants)
            reasons.append(f"Its participants have no protocol version in common: {spoken}.")
        owners = [p.name for p in self.participants if p.owns("rollouts")]
        if switches.tracks_rollouts and len(owners) != 1:
            reasons.append(f"Exactly one participant must own rollouts; here: {', '.join(owners) or 'none'}.")
        offered = {e.name for p in self.participants for e in p.capabilities.environments}
        missing = sorted(set(environments) - offered)
        if missing and switches.tracks_rollouts:
            reasons.append(f"It does not offer {', '.join(missing)}; it offers {', '.join(sorted(offered)) or 'none'}.")
        if reasons:
            raise Incompatible(self.alias, reasons)

    @property
    def owner(self) -> Participant:
        """Return the participant that owns the rollouts."""
        return next(p for p in self.participants if p.owns("rollouts"))

    @property
    def protocol_version(self) -> str | None:
        """Return the highest version that this controller and all participants speak, ``None`` when there is none.

        Requirements: CKPT-VER-003.
        """
        common = set(SPOKEN_VERSIONS)
        for participant in self.participants:
            common &= set(participant.capabilities.protocol_versions)
        return max(common, key=_version, default=None)

    def stages(self, *, descending: bool = False) -> list[list[Participant]]:
        """Return the participants by stage: ascending is callers before callees.

        Requirements: CKPT-STAGE-003, CKPT-STAGE-005, CKPT-STAGE-006.
        """
        ordered = sorted(self.participants, key=lambda p: p.stage, reverse=descending)
        return [list(members) for _, members in groupby(ordered, key=lambda p: p.stage)]

    def incarnations(self) -> dict[str, str]:
        """Return the incarnation of each participant as discovered."""
        return {p.name: p.incarnation for p in self.participants}

    def continuing_environments(self, participant: Participant) -> set[str]:
        """Return the ``export_restore`` environments of one participant."""
        environments = participant.capabilities.environments
        return {e.name for e in environments if e.continuation == "export_restore"}

    async def read_incarnations(self) -> dict[str, str]:
        """Ask every participant for its present incarnation, and whom it obeys.

        Raises:
            GymError: one could not be asked.
            Superseded: one obeys a higher controller. A controller that only reads would never be told otherwise.
        """

        async def ask(participant: Participant) -> str:
            self.check_controller(participant, await participant.client.status())
            return participant.client.seen_incarnation or participant.incarnation

        outcomes = await everywhere(self.participants, ask)
        raise_first(outcomes)
        return {o.participant.name: str(o.value) for o in outcomes}

    def check_controller(self, participant: Participant, status: messages.Status) -> None:
        """Return when a participant obeys this controller or a lower one.

        Raises:
            Superseded: it obeys a higher one.

        Requirements: CKPT-CTRL-016.
        """
        mine, theirs = self._controller, status.controller
        if theirs is None or mine.epoch is None:
            return
        if wire.ControllerPair.of(theirs.epoch, theirs.id) > wire.ControllerPair.of(mine.epoch, mine.id):
            raise Superseded(f"{participant.client.name} obeys controller {theirs.id} of epoch {theirs.epoch}")


def _why_unusable(participant: Participant, switches: Switches) -> list[str]:
    capabilities, name = participant.capabilities, participant.name
    reasons = []
    if not set(capabilities.protocol_versions) & set(SPOKEN_VERSIONS):
        theirs, ours = ", ".join(capabilities.protocol_versions), ", ".join(SPOKEN_VERSIONS)
        reasons.append(f"{name} speaks protocol {theirs}, this controller {ours}.")
    missing = sorted(switches.profiles - set(capabilities.profiles))
    if missing:
        reasons.append(f"{name} lacks the profile {' and '.join(missing)}.")
    workers = capabilities.workers
    if workers.count > 1 and not workers.coordinated:
        reasons.append(
            f"{name} runs {workers.count} workers without a coordinator: each would hold a part of the state, "
            "and no call could close, save or restore all of it."
        )
    if switches.captures_gyms and not capabilities.storage:
        reasons.append(f"{name} offers no storage to save its state in.")
    elif switches.captures_gyms and not participant.by_file and "http" not in capabilities.storage:
        reasons.append(f"{name} shares no files with this controller and does not serve its cuts over HTTP.")
    return reasons


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


async def everywhere(participants: Iterable[Participant], call: Callable[[Participant], Awaitable[T]]) -> list[Outcome]:
    """Call all participants at the same time, each with its own limit, and never stop at a failure.

    Returns:
        One outcome per participant, in their order; a cancellation is not kept back.

    Requirements: CKPT-STAGE-008…011.
    """

    async def one(participant: Participant) -> Outcome:
        try:
            return Outcome(participant, await call(participant), None)
        except (RlError, OSError) as error:
            return Outcome(participant, None, error)

    return list(await asyncio.gather(*(one(p) for p in participants)))


def raise_first(outcomes: Iterable[Outcome]) -> None:
    """Raise the first error, if any participant failed; :class:`Superseded` before every other."""
    errors = [o.error for o in outcomes if o.error is not None]
    errors.sort(key=lambda error: type(error).__name__ != "Superseded")
    if errors:
        raise errors[0]


def differences(saved: messages.SnapshotManifest, alias: str, deployment: Deployment) -> list[str]:
    """Return why the cuts of a snapshot cannot be restored into a Gym, one sentence each; empty when they can.

    What matters: the participants' names, their state schemas, the environments with state and their versions. URLs,
    worker counts, software versions and added features never matter.

    Requirements: CKPT-RESTART-021…023.
    """
    entry = next((gym for gym in saved.gyms if gym.alias == alias and gym.included), None)
    if entry is None:
        return [f"It holds no cut of {alias}."]
    present: Mapping[str, Participant] = {p.name: p for p in deployment.participants}
    reasons = []
    for cut in entry.participants:
        participant = present.get(cut.name)
        if participant is None:
            reasons.append(f"{cut.name} is in the snapshot and not in the Gym.")
            continue
        schema = participant.capabilities.state_schema
        if cut.state_schema.id != schema.id or cut.state_schema.version not in schema.reads:
            reads = ", ".join(str(v) for v in schema.reads)
            saved_as = f"{cut.state_schema.id} version {cut.state_schema.version}"
            reasons.append(f"{cut.name} was saved as {saved_as}; it reads {schema.id} version {reads}.")
        offered = {e.name: e.state_version for e in participant.capabilities.environments}
        for environment in cut.environments:
            if environment.name not in offered:
                reasons.append(f"{cut.name} no longer offers {environment.name}.")
            elif offered[environment.name] != environment.state_version:
                now = offered[environment.name]
                reasons.append(
                    f"{environment.name} of {cut.name} was saved in version {environment.state_version}, "
                    f"now it is {now}."
                )
    extra = sorted(set(present) - {cut.name for cut in entry.participants})
    reasons += [f"{name} is in the Gym and not in the snapshot." for name in extra]
    return reasons
