# SPDX-License-Identifier: Apache-2.0
"""The Gym under test: all its participants, found from the URLs that the suite was given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from conformance.controller import Controller, Participant
from conformance.errors import Lost, ResponseViolation, SuiteFault, TargetUnreachable
from conformance.wire import Wire

CONFORMANCE = "conformance"
RESTART_ONLY = "conformance-restart"


class Gym:
    """All participants of one Gym, in ascending order of their stage.

    Args:
        wire: the transport.
        participants: at least one.
    """

    def __init__(self, wire: Wire, participants: Sequence[Participant]) -> None:
        self.wire = wire
        self.participants = sorted(participants, key=lambda p: (p.stage, p.name))
        self._claimed = 0

    @classmethod
    def discover(cls, wire: Wire, urls: Iterable[str]) -> Gym:
        """Ask every URL, and every participant that an answer lists, for its capabilities.

        Raises:
            ResponseViolation: a participant answers, and its answer does not fit openapi.yaml.
            TargetUnreachable: no URL answers, or none of them is a participant.
        """
        waiting, seen, found = list(urls), set[str](), dict[str, Participant]()
        while waiting:
            url = waiting.pop(0).rstrip("/")
            if url in seen:
                continue
            seen.add(url)
            try:
                reply = wire.call("getCapabilities", url, judged=False)
            except Lost as error:
                raise TargetUnreachable(f"{url} does not answer: {error}") from error
            if reply.status == 404:
                continue
            try:
                wire.judge_reply(reply, "getCapabilities")
            except ResponseViolation as error:
                if reply.incarnation is None:
                    said = f"{reply.status} {reply.headers.get('content-type', 'without a media type')}"
                    text = f"{url} answers discovery, but not as a participant of this protocol: {said}, {reply.brief}"
                    raise TargetUnreachable(text) from error
                raise
            if not reply.ok:
                raise TargetUnreachable(f"{url} refuses discovery: {reply.brief}")
            participant = Participant(wire, url, reply.json)
            found.setdefault(participant.name, participant)
            waiting += [row["url"] for row in reply.json.get("participants", ())]
        if not found:
            raise TargetUnreachable("none of the URLs is a participant (404 on /capabilities)")
        return cls(wire, list(found.values()))

    def refresh(self) -> None:
        """Ask every participant for its capabilities again; one that refuses keeps those that it has told before."""
        for participant in self.participants:
            reply = participant.get_capabilities()
            if reply.ok:
                participant.capabilities = reply.json

    def owner(self, what: str) -> Participant | None:
        """Return the participant that owns `rollouts`, `sessions` or `ledger`, or None."""
        return next((p for p in self.participants if p.owns(what)), None)

    @property
    def agent(self) -> Participant:
        """The participant that owns rollouts."""
        found = self.owner("rollouts")
        if found is None:
            raise SuiteFault("no participant owns rollouts")
        return found

    @property
    def descending(self) -> list[Participant]:
        """The participants in descending order of their stage (resume, restore)."""
        return self.participants[::-1]

    @property
    def profiles(self) -> set[str]:
        """The profiles that every participant has."""
        return set.intersection(*(set(p.capabilities["profiles"]) for p in self.participants))

    @property
    def features(self) -> set[str]:
        """The features that any participant has."""
        return set().union(*(set(p.capabilities["features"]) for p in self.participants))

    def environments(self) -> dict[str, str]:
        """Return the continuation of every environment that the owner of rollouts has, by name."""
        return {row["name"]: row["continuation"] for row in self.agent.capabilities["environments"]}

    def limit(self, name: str) -> int:
        """Return the lowest value of a limit over all participants."""
        return min(p.limit(name) for p in self.participants)

    def controller(self, controller_id: str) -> Controller:
        """Return a controller with an epoch above all that were used; nothing is sent but status.

        A participant that has lost what it knew counts from nothing; a checkpoint id names something else all the same.
        """
        highest = self._claimed
        for participant in self.participants:
            status = participant.status()
            if status["controller"] is not None:
                highest = max(highest, int(status["controller"]["epoch"]))
        self._claimed = highest + 1
        return Controller(controller_id, self._claimed)
