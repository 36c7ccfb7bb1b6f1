# SPDX-License-Identifier: Apache-2.0
"""Says where the participants listen: one JSON line on standard output and, if asked for, a file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reference_gym.errors import SettingsError
from spec import durable


@dataclass(frozen=True, slots=True)
class Listening:
    """One participant that listens."""

    name: str
    role: str
    url: str
    pid: int


def announce(participants: Iterable[Listening], file: Path | None) -> None:
    """Write the file, then print the line, so that whoever has read the line finds the file.

    Raises:
        SettingsError: the file cannot be written.
    """
    message = {"pid": os.getpid(), "participants": [asdict(participant) for participant in participants]}
    line = json.dumps(message)
    if file is not None:
        try:
            durable.publish_file(file, line.encode() + b"\n")
        except OSError as error:
            raise SettingsError(f"the announcement {file} cannot be written: {error.strerror}") from error
    # Whoever started the Gym may have stopped reading; the file is what lasts.
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def parse(line: bytes) -> list[Listening]:
    """The participants that a line names; raises ValueError."""
    message: Any = json.loads(line)
    return [Listening(**participant) for participant in message["participants"]]
