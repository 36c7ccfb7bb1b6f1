# SPDX-License-Identifier: Apache-2.0
"""What the log says: all that survives the process, as a pure value that entries change one by one.

The writer's thread keeps one beside the log, so that it can begin a segment with a base; recovery reads one back. Bytes
of boundaries and results are only named by their places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from reference_gym.participant.log_format import FORMAT, Entry, LogDamaged, Place


@dataclass(frozen=True, slots=True)
class Life:
    """Whose log it is, and what decides whether it may be believed.

    ``boot`` names the life of the machine, ``synced`` says that every frame was synced before anybody was told of it,
    ``inode`` is that of the segment which this was read from.
    """

    participant: str
    owns: tuple[str, ...]
    environments: Mapping[str, str]
    incarnation: str
    boot: str | None
    synced: bool
    inode: int = 0


@dataclass(slots=True)
class LogState:
    """Everything that the log has recorded.

    ``results`` gives each unreleased result its number in the feed; ``begun`` holds the effects that reach outside and
    whose boundary is not recorded: rollout id to (request id, turn, whether it has ended). ``sizes`` counts the live
    bytes of each segment, ``ended`` says that another segment follows.
    """

    life: Life
    progress: int = 0
    machine: Mapping[str, Any] | None = None
    feed: str | None = None
    next_number: int = 1
    fences: dict[str, int] = field(default_factory=dict)
    tombstones: dict[str, list[Any]] = field(default_factory=dict)
    records: dict[str, Place] = field(default_factory=dict)
    results: dict[str, tuple[int, Place]] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)
    begun: dict[str, tuple[str, int, bool]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    ended: bool = False

    def apply(self, entry: Entry, place: Place) -> None:
        """Take one entry.

        Raises:
            LogDamaged: it is none that is known here.
        """
        try:
            _OPS[entry.op](self, entry.header, place)
        except (KeyError, TypeError, ValueError) as error:
            raise LogDamaged(f"segment {place.segment}, the entry at byte {place.offset}: {error!r}") from error

    def base(self, inode: int) -> list[Entry]:
        """Return the entries with which a segment begins: small ones, so that no single one holds up other threads.

        Args:
            inode: that of the new segment's file.
        """
        life = self.life
        head = {
            "op": "base",
            "format": FORMAT,
            "life": {
                "participant": life.participant,
                "owns": life.owns,
                "environments": life.environments,
                "incarnation": life.incarnation,
                "boot": life.boot,
                "synced": life.synced,
                "inode": inode,
            },
            "progress": self.progress,
            "machine": self.machine,
            "feed": self.feed,
            "next_number": self.next_number,
        }
        entries = [Entry(head)]
        for what in _TABLES:
            items = iter(getattr(self, what).items())
            while chunk := dict(islice(items, _CHUNK)):
                entries.append(Entry({"op": "has", "what": what, "items": chunk}))
        return entries

    @classmethod
    def of(cls, entries: Sequence[Entry], name: str) -> LogState:
        """Return the state that a base records.

        Raises:
            LogDamaged: it is no base that is known here.
        """
        base = entries[0].header
        try:
            if base["op"] != "base" or base["format"] != FORMAT:
                raise LogDamaged(f"{name} does not begin with a base of format {FORMAT}")
            told = dict(base["life"])
            state = cls(
                life=Life(**{**told, "owns": tuple(told["owns"])}),
                progress=base["progress"],
                machine=base["machine"],
                feed=base["feed"],
                next_number=base["next_number"],
            )
            for entry in entries[1:]:
                read = _TABLES[entry.header["what"]]
                table = getattr(state, entry.header["what"])
                table.update((key, read(value)) for key, value in entry.header["items"].items())
        except (KeyError, TypeError, ValueError) as error:
            raise LogDamaged(f"{name}, the base: {error!r}") from error
        for place in (*state.records.values(), *(place for _, place in state.results.values())):
            state._count(place, 1)
        return state

    def living(self, segment: int) -> list[Place]:
        """Return the live entries of a segment."""
        places = [place for place in self.records.values() if place.segment == segment]
        return sorted(places + [place for _, place in self.results.values() if place.segment == segment])

    # --- the operations -----------------------------------------------------------------------------------------------

    def _put(self, header: Mapping[str, Any], place: Place) -> None:
        rollout_id = header["rollout_id"]
        if (earlier := self.records.get(rollout_id)) is not None:
            self._count(earlier, -1)
        self.records[rollout_id] = place
        self._count(place, 1)
        begun = self.begun.get(rollout_id)
        if begun is not None and begun[2] and header["turns_done"] >= begun[1] and not header.get("same"):
            del self.begun[rollout_id]

    def _drop(self, header: Mapping[str, Any], _: Place) -> None:
        rollout_id = header["rollout_id"]
        if (earlier := self.records.pop(rollout_id, None)) is not None:
            self._count(earlier, -1)
        self.stopped.pop(rollout_id, None)
        self.begun.pop(rollout_id, None)

    def _clear(self, _header: Mapping[str, Any], _place: Place) -> None:
        for place in self.records.values():
            self._count(place, -1)
        self.records, self.stopped, self.begun = {}, {}, {}

    def _result(self, header: Mapping[str, Any], place: Place) -> None:
        rollout_id, number = header["receipt"]["rollout_id"], header["number"]
        if (earlier := self.results.pop(rollout_id, None)) is not None:
            self._count(earlier[1], -1)
        self.results[rollout_id] = number, place
        self.next_number = max(self.next_number, number + 1)
        self._count(place, 1)

    def _unresult(self, header: Mapping[str, Any], _: Place) -> None:
        if (earlier := self.results.pop(header["rollout_id"], None)) is not None:
            self._count(earlier[1], -1)

    def _feed(self, header: Mapping[str, Any], _: Place) -> None:
        for _number, place in self.results.values():
            self._count(place, -1)
        self.feed, self.results = header["id"], {}

    def _fence(self, header: Mapping[str, Any], _: Place) -> None:
        self.fences[header["key"]] = max(header["through"], self.fences.get(header["key"], -1))

    def _bury(self, header: Mapping[str, Any], _: Place) -> None:
        self.tombstones[header["key"]] = list(header["stone"])

    def _unbury(self, header: Mapping[str, Any], _: Place) -> None:
        self.tombstones.pop(header["key"], None)

    def _tombs(self, header: Mapping[str, Any], _: Place) -> None:
        self.tombstones = {key: list(stone) for key, stone in header["stones"].items()}

    def _machine(self, header: Mapping[str, Any], _: Place) -> None:
        self.machine = header["value"]

    def _stop(self, header: Mapping[str, Any], _: Place) -> None:
        self.stopped[header["rollout_id"]] = header["reason"]
        self.begun.pop(header["rollout_id"], None)

    def _begin(self, header: Mapping[str, Any], _: Place) -> None:
        self.begun[header["rollout_id"]] = header["request_id"], header["turn"], False

    def _ran(self, header: Mapping[str, Any], _: Place) -> None:
        request_id, turn, _ended = self.begun.get(header["rollout_id"], ("", 0, False))
        if request_id == header["request_id"]:
            self.begun[header["rollout_id"]] = request_id, turn, True

    def _progress(self, header: Mapping[str, Any], _: Place) -> None:
        self.progress = header["n"]

    def _end(self, _header: Mapping[str, Any], _place: Place) -> None:
        self.ended = True

    def _count(self, place: Place, sign: int) -> None:
        self.sizes[place.segment] = self.sizes.get(place.segment, 0) + sign * place.size


_CHUNK = 1_000
_TABLES: Mapping[str, Callable[[Any], Any]] = {
    "fences": int,
    "tombstones": list,
    "records": lambda value: Place(*value),
    "results": lambda value: (value[0], Place(*value[1])),
    "stopped": str,
    "begun": lambda value: (value[0], value[1], value[2]),
}
"""The tables of a base, and how one value of each is read."""

_OPS: Mapping[str, Callable[[LogState, Mapping[str, Any], Place], None]] = {
    "put": LogState._put,
    "drop": LogState._drop,
    "clear": LogState._clear,
    "result": LogState._result,
    "unresult": LogState._unresult,
    "feed": LogState._feed,
    "fence": LogState._fence,
    "bury": LogState._bury,
    "unbury": LogState._unbury,
    "tombs": LogState._tombs,
    "machine": LogState._machine,
    "stop": LogState._stop,
    "begin": LogState._begin,
    "ran": LogState._ran,
    "progress": LogState._progress,
    "end": LogState._end,
}
