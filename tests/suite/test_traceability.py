# SPDX-License-Identifier: Apache-2.0
"""Requirements and checks know each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from conformance import checks, traceability
from conformance.registry import MACHINE, PROFILES, all_checks, every_check
from spec import load

_ID = re.compile(r"CKPT-[A-Z]+-[0-9]{3}")

FILE = """# a comment stays
- id: CKPT-A-001
  text: >-
    One
    two.
  planned: "a check
    over two lines"

- id: CKPT-A-002
  checks: [old, test_beside]
  error: x

- id: CKPT-A-003
  excluded: "nobody sees it"
"""


def test_requirements_and_registry_agree() -> None:
    """Each lists the other; `python -m conformance.traceability --write` mends what differs."""
    assert traceability.disagreements(every_check()) == []


def test_the_runner_calls_no_check_of_the_machine() -> None:
    """Its judgements are the machine's own; a call of their stand-ins would pass without having looked."""
    every = every_check()
    assert {MACHINE} == {every[name].chapter for name in every.keys() - all_checks().keys()}


def test_every_check_names_a_requirement_that_binds_a_gym() -> None:
    """Its first requirement is its main subject."""
    requirements = load().requirements
    wrong = {
        (check.name, key)
        for check in every_check().values()
        for key in check.requirements
        if key not in requirements or requirements[key].binds != "gym"
    }
    assert wrong == set()
    assert all(check.requirements for check in every_check().values())


JUDGED_EVERYWHERE = {"CKPT-ERR-039", "CKPT-ID-017", "CKPT-ERR-009", "CKPT-ERR-010", "CKPT-ERR-011", "CKPT-ERR-012"}
"""The transport judges these on every response."""


def test_every_check_judges_by_name_what_it_claims() -> None:
    """A requirement in a decorator is named by a judgement too: nothing is claimed that nothing would show."""
    sources = {path: path.read_text() for path in sorted(Path(checks.__file__).parent.glob("*.py"))}
    helpers = {key for text in sources.values() for key in _ID.findall(_without_decorators(text))}
    unjudged = {
        (check.name, key)
        for check in all_checks().values()
        for key in check.requirements
        if key not in helpers | JUDGED_EVERYWHERE and check.body.__module__.startswith("conformance.checks.")
    }
    assert unjudged == set()


def _without_decorators(text: str) -> str:
    tree = ast.parse(text)
    lines = text.splitlines()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                for place in range(decorator.lineno - 1, decorator.end_lineno or decorator.lineno):
                    lines[place] = ""
    return "\n".join(lines)


def test_every_check_has_a_sentence_and_a_profile() -> None:
    """The first line of its docstring is shown in the reports."""
    for check in every_check().values():
        assert check.body.__doc__, check.name
        assert check.sentence.endswith("."), check.name
        assert check.profile in PROFILES


def test_a_file_is_edited_line_by_line() -> None:
    """Comments and order stay; a planned entry becomes checked, one that lost its check says so, tests are kept."""
    edited = traceability.edit(FILE, {"CKPT-A-001": ["one", "two"]})
    assert "# a comment stays\n" in edited
    assert "    two.\n  checks: [one, two]\n\n- id: CKPT-A-002\n  checks: [test_beside]\n  error: x\n" in edited
    assert edited.endswith('  excluded: "nobody sees it"\n')
    assert traceability.edit(edited, {"CKPT-A-001": ["one", "two"]}) == edited


def test_an_entry_that_loses_its_last_check_is_planned_again() -> None:
    """It is never left without one of the three."""
    edited = traceability.edit("- id: CKPT-A-001\n  checks: [gone]\n", {})
    assert edited.startswith("- id: CKPT-A-001\n  planned: ")
