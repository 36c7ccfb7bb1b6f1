# SPDX-License-Identifier: Apache-2.0
"""Running again exactly what failed: the command line for one check, and the settings of a report's failures."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.errors import UsageError

if TYPE_CHECKING:
    from conformance.runner import Settings


def command(settings: Settings, check: str) -> str:
    """Return the command line that runs one check again under the same settings."""
    words = ["gym-conformance", "run"]
    if settings.target_file is not None:
        words += ["--target", str(settings.target_file)]
    for url in settings.urls:
        words += ["--url", url]
    if settings.shared_dir is not None and settings.target_file is None:
        words += ["--shared-dir", str(settings.shared_dir)]
    if settings.world_known and settings.target_file is None:
        words += ["--world-url", f"http://127.0.0.1:{settings.world_port}"]
    if settings.time_scale != 1.0:
        words += ["--time-scale", f"{settings.time_scale:g}"]
    return shlex.join([*words, "--seed", str(settings.seed), "--only", check])


def failures_of(report: Path, settings: Settings) -> Settings:
    """Return settings that run again what failed in a report, with its seed.

    Raises:
        UsageError: the file is no report, or nothing failed in it.
    """
    try:
        data: Mapping[str, Any] = json.loads(report.read_text())
        names = [row["name"] for row in data["checks"] if row["status"] in {"failed", "flaky", "fault"}]
        seed = int(data["suite"]["seed"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{report} is not a report of this suite: {error}") from error
    if not names:
        raise UsageError(f"nothing failed in {report}")
    return replace(settings, only=tuple(dict.fromkeys(names)), seed=seed)
