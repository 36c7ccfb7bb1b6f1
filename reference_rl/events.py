# SPDX-License-Identifier: Apache-2.0
"""`events.jsonl`: one JSON line per event of a run, written as it happens."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from spec import durable

LOUD: Final = frozenset(
    {
        "snapshot_mode",
        "snapshot_failed",
        "gym_away",
        "gym_lost",
        "gym_left_out",
        "snapshot_refused",
        "invariant_violated",
    }
)
"""Events that also go to the log: what somebody who only looks at the terminal must not miss."""

_log = logging.getLogger("reference_rl")


class Events:
    """The event log of a run, and the counters that follow from it.

    Args:
        path: the file; lines are added to what is there. ``None`` keeps the counters alone.

    Attributes:
        mirror: when set, is given every event as it is written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.counters: Counter[str] = Counter()
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
        if self.mirror is not None:
            self.mirror(content)
        if self._file is not None:
            line = json.dumps(content, default=str)
            # One write per line: a reader never sees half of one.
            self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
