# SPDX-License-Identifier: Apache-2.0
"""The suite against a Gym that was written from the specification alone: it is fitted to no code base."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECOND_GYM = ROOT / "tests" / "second_gym"
OFFERED = ("results", "checkpoint")


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the quick budget says about the second Gym; on a loaded machine its bounds are stretched."""
    report = tmp_path_factory.mktemp("second-gym") / "report.json"
    suite = Path(sys.executable).with_name("gym-conformance")
    run = [
        suite,
        "run",
        "--target",
        SECOND_GYM / "target.yaml",
        "--budget",
        "quick",
        "--seed",
        "7",
        "--time-scale",
        "2",
    ]
    done = subprocess.run([*run, "--json", report], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    told: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["verdict"]
    return told | {"output": done.stdout}


def test_nothing_fails_against_a_gym_that_shares_no_code(verdict: dict[str, Any]) -> None:
    """The quick budget is green against a second implementation, in another style of concurrency."""
    assert 0 == verdict["exit_code"], verdict["output"][-8000:]
    assert (0, 0) == (verdict["requirements"]["failed"], verdict["requirements"]["flaky"])


def test_the_profiles_that_it_offers_are_judged_and_the_other_is_not(verdict: dict[str, Any]) -> None:
    """A Gym may stop at `checkpoint`; what it does not offer is no fault of it."""
    judged = {profile: verdict["profiles"][profile] for profile in (*OFFERED, "turn-recovery")}
    assert "not_offered" == judged.pop("turn-recovery")
    assert {"conformant", "partial"} >= set(judged.values())
    assert 300 <= verdict["requirements"]["passed"]


def test_it_imports_nothing_but_the_standard_library() -> None:
    """The specification is all that an implementer needs: no schema, no catalogue and no package is imported."""
    foreign = []
    for path in SECOND_GYM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                named = [node.module or ""]
            own = "tests.second_gym"
            foreign += [
                f"{path.name}: {name}"
                for name in named
                if name.split(".")[0] not in sys.stdlib_module_names and name != own and not name.startswith(f"{own}.")
            ]
    assert [] == foreign
