# SPDX-License-Identifier: Apache-2.0
"""Requirements and checks know each other."""

from __future__ import annotations

from conformance import traceability
from conformance.registry import PROFILES, all_checks
from spec import load

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
    assert traceability.disagreements(all_checks()) == []


def test_every_check_names_a_requirement_that_binds_a_gym() -> None:
    """Its first requirement is its main subject."""
    requirements = load().requirements
    wrong = {
        (check.name, key)
        for check in all_checks().values()
        for key in check.requirements
        if key not in requirements or requirements[key].binds != "gym"
    }
    assert wrong == set()
    assert all(check.requirements for check in all_checks().values())


def test_every_check_has_a_sentence_and_a_profile() -> None:
    """The first line of its docstring is shown in the reports."""
    for check in all_checks().values():
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
