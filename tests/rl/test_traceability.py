# SPDX-License-Identifier: Apache-2.0
"""What binds a controller names the tests that show it, and these exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import spec

ROOT = Path(__file__).resolve().parents[2]
CONTROLLER = [requirement for requirement in spec.load().requirements.values() if requirement.binds == "controller"]
NAME = re.compile(r"(?P<file>tests/(?:rl|crash_matrix|demo)/test_[a-z_]+\.py)::(?P<test>test_\w+)")


@cache
def names_in(file: str) -> frozenset[str]:
    """Return the names of the tests in a file."""
    nodes = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    return frozenset(n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))


def ids_in(text: str) -> set[str]:
    """Return the ids that a text names, the short forms `CKPT-ACK-030, -031` and `CKPT-ACK-028…031` included."""
    found = set()
    for area, numbers in re.findall(r"CKPT-([A-Z]+)-(\d{3}(?:…\d{3}|, -\d{3})*)", text):
        last = 0
        for upto, digits in re.findall(r"(…?)(\d{3})", numbers):
            first, last = (last, int(digits)) if upto else (int(digits), int(digits))
            found |= {f"CKPT-{area}-{number:03d}" for number in range(first, last + 1)}
    return found


def test_short_forms_of_ids_are_read() -> None:
    """A list and a range of one area, and what follows in another."""
    said = "C41, CKPT-A-007, -009…011: and CKPT-BC-001…003"
    assert {*(f"CKPT-A-{n:03d}" for n in (7, 9, 10, 11)), *(f"CKPT-BC-{n:03d}" for n in (1, 2, 3))} == ids_in(said)


def test_nothing_that_binds_a_controller_is_only_planned() -> None:
    """Each sentence has a test, or says why nobody could see it."""
    assert [] == [r.id for r in CONTROLLER if not r.checks and not r.excluded]


def test_every_check_of_a_controller_is_a_test_that_exists() -> None:
    """The form is `tests/rl/test_x.py::test_y`; a test that was renamed is noticed."""
    unknown = []
    for requirement in CONTROLLER:
        for name in requirement.checks:
            match = NAME.fullmatch(name)
            if match is None or not (ROOT / match["file"]).is_file() or match["test"] not in names_in(match["file"]):
                unknown.append(f"{requirement.id}: {name}")
    assert [] == unknown


def test_a_test_that_names_a_controllers_requirement_is_named_by_it() -> None:
    """Both directions: who claims in a docstring to show a requirement stands in its checks."""
    listed = {(requirement.id, check) for requirement in CONTROLLER for check in requirement.checks}
    ids = {requirement.id for requirement in CONTROLLER}
    missing = []
    for path in sorted(p for place in ("rl", "crash_matrix") for p in (ROOT / "tests" / place).glob("test_*.py")):
        file = str(path.relative_to(ROOT))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                claims = ids_in(ast.get_docstring(node) or "") & ids
                missing += [
                    f"{key}: {file}::{node.name}" for key in claims if (key, f"{file}::{node.name}") not in listed
                ]
    assert [] == missing
