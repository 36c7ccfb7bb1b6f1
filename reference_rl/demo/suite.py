# SPDX-License-Identifier: Apache-2.0
"""The short run of the conformance suite against a second Gym of the same build."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from reference_rl.demo.errors import WaitedTooLongError
from reference_rl.demo.processes import Processes, wait_until
from reference_rl.demo.stage import CONTROL_ENV, DATA_ENV, script

BOUND_S = 60.0
# Shorter waits than a Gym at work would have, so that the suite can see their ends.
LIMITS = {
    "min_lease_ms": 600,
    "policy_retry_ms": 1500,
    "shutdown_grace_ms": 3000,
    "max_wait_ms": 3000,
    "max_live_rollouts": 150,
}
VERDICTS = {
    2: "the suite could not be called",
    3: "the suite itself failed",
    4: "flaky",
    5: "the Gym could not be reached",
}


@dataclass(frozen=True)
class Suite:
    """What the suite said.

    Args:
        exit_code: of `gym-conformance`.
        verdict: one phrase.
        seconds: how long it took.
        report: its HTML report, or its log if there is none, relative to the page.
    """

    exit_code: int
    verdict: str
    seconds: float
    report: str

    @property
    def passed(self) -> bool:
        """True if no requirement failed."""
        return self.exit_code == 0

    @property
    def what_is_linked(self) -> str:
        """What the link leads to."""
        return "log" if self.report.endswith(".log") else "report"

    def summary(self) -> dict[str, Any]:
        """Its part of `summary.json`."""
        return asdict(self) | {"seconds": round(self.seconds, 2)}


def run_suite(processes: Processes, directory: Path, gym_form: str, secrets: dict[str, str]) -> Suite:
    """Run `gym-conformance --budget demo`; the suite starts and ends the Gym itself.

    Args:
        processes: starts it.
        directory: `build/demo`, absolute.
        gym_form: `one` or `three` processes.
        secrets: environment variables with the tokens.
    """
    home = directory / "suite"
    shared = home / "snapshots"
    shared.mkdir(parents=True, mode=0o700)
    _write_gym(home / "gym.yaml", shared, gym_form)
    _write_target(home / "target.yaml", home / "gym.yaml", shared, secrets)
    argv = [script("gym-conformance"), "run", "--target", str(home / "target.yaml"), "--budget", "demo"]
    argv += ["--json", str(home / "report.json"), "--html", str(home / "report.html")]
    began = time.monotonic()
    suite = processes.start("the conformance suite", argv, home / "suite.log", secrets)
    try:
        wait_until(suite.ended, "the conformance suite", BOUND_S, logs=home)
    except WaitedTooLongError as error:
        processes.stop([suite])
        return Suite(3, str(error), time.monotonic() - began, "suite/suite.log")
    code, seconds = suite.process.returncode, time.monotonic() - began
    if not all((home / name).exists() for name in ("report.json", "report.html")):
        # What the columns showed is worth its page all the same; the demo still ends with an error.
        return Suite(code or 3, VERDICTS.get(code, "it ended without a report"), seconds, "suite/suite.log")
    report = json.loads((home / "report.json").read_text(encoding="utf-8"))
    return Suite(code, verdict_of(report, code), seconds, "suite/report.html")


def verdict_of(report: Any, exit_code: int) -> str:
    """The suite's verdict as a phrase.

    Args:
        report: its JSON report.
        exit_code: of `gym-conformance`.
    """
    counts = report["verdict"]["requirements"]
    if exit_code == 0:
        unjudged = sum(counts.get(name, 0) for name in ("planned", "not_applicable", "not_run"))
        left = f"; {unjudged} not judged" if unjudged else ""
        return f"{counts['passed']} requirements passed, none failed{left}"
    if exit_code == 1:
        return f"{counts['failed']} of {counts['failed'] + counts['passed']} judged requirements failed"
    return VERDICTS.get(exit_code, f"exit code {exit_code}")


def _write_gym(path: Path, shared: Path, gym_form: str) -> None:
    settings = {
        "name": "gym",
        "processes": gym_form,
        "storage_roots": [str(shared)],
        "environments": ["taxi", "frozen_lake"],
        "conformance": {"world_url": None},
        "limits": LIMITS,
        "tokens": {
            "control": {"env": CONTROL_ENV},
            "data": {"env": DATA_ENV},
            "policy": {"env": "GYM_POLICY_TOKEN"},
        },
    }
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def _write_target(path: Path, gym: Path, shared: Path, secrets: dict[str, str]) -> None:
    target = {
        "start": [script("reference-gym"), "serve", "--config", str(gym), "--announce", "{announce}"],
        "env": {"GYM_CONFORMANCE_WORLD_URL": "{world_url}"},
        "tokens": {"control_env": CONTROL_ENV, "data_env": DATA_ENV},
        "shared_dir": str(shared),
    }
    path.write_text(yaml.safe_dump(target, sort_keys=False), encoding="utf-8")
