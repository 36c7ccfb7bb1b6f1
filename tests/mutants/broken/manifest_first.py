# SPDX-License-Identifier: Apache-2.0
"""The manifest of a cut is written before the files that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from reference_gym.participant import artifacts
from tests.mutants.seam import wrap

TARGETS = "durability"
SHOWS = "race"
BREAKS = ("CKPT-DIR-001",)


class WriteBehind:
    """Durable file steps in a quicker order."""

    def __init__(self, durable: artifacts.Durable) -> None:
        self._durable = durable
        self._behind: list[tuple[Path, bytes]] = []

    def write_file(self, path: Path, data: bytes | Iterable[bytes]) -> int:
        """Keep it for later."""
        self._behind.append((path, data if isinstance(data, bytes) else b"".join(data)))
        return len(self._behind[-1][1])

    def sync_dir(self, path: Path) -> None:
        """Sync it."""
        self._durable.sync_dir(path)

    def publish_file(self, path: Path, data: bytes, unnamed: Callable[[], None]) -> None:
        """Publish the manifest, then write what it names."""
        self._durable.publish_file(path, data, unnamed)
        for behind, content in self._behind:
            self._durable.write_file(behind, content)


def apply() -> None:
    """Break it."""

    @wrap(artifacts, "_write")
    def write(original: Any, *arguments: Any) -> Any:
        *most, durable, stop = arguments
        return original(*most, WriteBehind(durable), stop)
