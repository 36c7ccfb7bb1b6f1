# SPDX-License-Identifier: Apache-2.0
"""`events.jsonl`: one JSON line per event of a run, written as it happens."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from reference_rl.tally import Tally
from spec import durable

LOUD: Final = frozenset(
    {
        "snapshot_mode",
        "snapshot_failed",
        "gym_away",
        "gym_lost",
        "gym_left_out",
        "rows_missing",
        "snapshot_refused",
        "invariant_violated",
    }
)
"""Events that also go to the log: what somebody who only looks at the terminal must not miss."""

SAID_AGAIN_S: Final = 60.0
"""After so many seconds an ongoing trouble is reported again, then after twice as many, and so on."""


_REASONS: Final = 16


@dataclass
class _Ongoing:
    next_at: float
    wait_s: float = SAID_AGAIN_S
    times: int = 0
    reasons: set[str] = field(default_factory=set)


_log = logging.getLogger("reference_rl")


class Events:
    """The event log of a run, and the counters that follow from it.

    Args:
        path: the file; lines are added to what is there. ``None`` keeps the counters alone.

    Attributes:
        mirror: when set, is given every event as it is written.
        tally: what the events of this process add up to.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self.tally = Tally()
        self._ongoing: dict[tuple[str, str], _Ongoing] = {}
        self.mirror: Callable[[Mapping[str, Any]], None] | None = None
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY
        self._file = os.fdopen(os.open(path, flags, durable.FILE_MODE), "ab", buffering=0) if path else None

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event with the present time (``t``, seconds since 1970) and count it."""
        self.counters[event] += 1
        if event in LOUD:
            said = ", ".join(f"{name} {fields[name]}" for name in ("gym", "mode", "reason") if fields.get(name))
            _log.warning("%s: %s", event, said)
        content = {"event": event, "t": time.time(), **fields}
        self.tally.take(content)
        if self.mirror is not None:
            self.mirror(content)
        if self._file is not None:
            line = json.dumps(content, default=str)
            # One write per line: a reader never sees half of one.
            self._file.write(line.encode() + b"\n")

    def trouble(self, event: str, where: str, **fields: Any) -> None:
        """Write what may go on for hours: each reason once, then after 1, 3, 7, 15 … minutes how often it was.

        Args:
            event: its name.
            where: what it concerns; :meth:`over` with the same words ends it.
            fields: as for :meth:`emit`.
        """
        now, reason = time.monotonic(), str(fields.get("reason"))
        ongoing = self._ongoing.setdefault((event, where), _Ongoing(now + SAID_AGAIN_S))
        if reason not in ongoing.reasons and len(ongoing.reasons) < _REASONS:
            ongoing.reasons.add(reason)
            self.emit(event, **fields)
            return
        ongoing.times += 1
        if now >= ongoing.next_at:
            ongoing.wait_s *= 2
            ongoing.next_at = now + ongoing.wait_s
            self.emit(event, **fields, times=ongoing.times)

    def over(self, where: str) -> None:
        """Say that what was wrong there is not wrong any more: the next trouble there is written at once."""
        for key in [key for key in self._ongoing if key[1] == where]:
            del self._ongoing[key]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
