# SPDX-License-Identifier: Apache-2.0
"""Keeps `checks:` and `planned:` of the requirement files in step with the registry of checks.

`python -m conformance.traceability` says where they disagree; `--write` edits the files line by line, so that order,
comments and everything else stay as they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from conformance.registry import Check, every_check
from spec import load

_ENTRY = re.compile(r"^- id: (?P<id>\S+)")
_FIELD = re.compile(r"^  (?P<name>checks|planned|excluded):(?P<rest>.*)$")


def exercised(checks: Mapping[str, Check]) -> dict[str, tuple[str, ...]]:
    """Return the names of the checks by the requirement that they exercise, sorted."""
    found: dict[str, set[str]] = {}
    for check in checks.values():
        for key in check.requirements:
            found.setdefault(key, set()).add(check.name)
    return {key: tuple(sorted(names)) for key, names in found.items()}


def disagreements(checks: Mapping[str, Check]) -> list[str]:
    """Return a sentence for each requirement on which the files and the registry disagree."""
    requirements = load().requirements
    registry = exercised(checks)
    found = [
        f"{key} is exercised by {', '.join(registry[key])}, and is no requirement"
        for key in registry
        if key not in requirements
    ]
    for key, requirement in requirements.items():
        if requirement.binds != "gym":
            continue
        wanted = registry.get(key, ())
        mine = tuple(sorted(name for name in requirement.checks if not _is_test(name)))
        if wanted != mine:
            found.append(f"{key} lists {', '.join(mine) or 'no check'}, the registry has {', '.join(wanted) or 'none'}")
    return found


def _is_test(name: str) -> bool:
    """Say whether a name is that of a test beside the suite, which the registry does not know."""
    return name.startswith("test_")


def edit(text: str, registry: Mapping[str, Sequence[str]]) -> str:
    """Return the text of a requirement file with `checks:` as the registry has it.

    An entry that gains its first check loses `planned:`; one that loses its last gets `planned:` with the reason to
    look at it. `excluded:` entries that a check exercises become checked.
    """
    lines, out = text.splitlines(keepends=True), list[str]()
    place = 0
    while place < len(lines):
        entry = _ENTRY.match(lines[place])
        out.append(lines[place])
        place += 1
        if entry is None:
            continue
        end = next((n for n in range(place, len(lines)) if _ENTRY.match(lines[n])), len(lines))
        out += _edit_entry(lines[place:end], tuple(registry.get(entry["id"], ())))
        place = end
    return "".join(out)


def _edit_entry(lines: list[str], names: tuple[str, ...]) -> list[str]:
    start = next((n for n, line in enumerate(lines) if _FIELD.match(line)), None)
    if start is None:
        return lines
    match = _FIELD.match(lines[start])
    end = start + 1
    while end < len(lines) and lines[end].startswith("   "):
        end += 1
    before = _names("".join(lines[start:end])) if match and match["name"] == "checks" else ()
    tests = tuple(name for name in before if _is_test(name))
    if names or tests:
        field = [f"  checks: [{', '.join([*names, *tests])}]\n"]
    elif match and match["name"] == "checks":
        field = ['  planned: "check: its check was removed; write another"\n']
    else:
        field = lines[start:end]
    return [*lines[:start], *field, *lines[end:]]


def _names(text: str) -> tuple[str, ...]:
    inside = text.partition("[")[2].partition("]")[0]
    return tuple(name.strip() for name in inside.split(",") if name.strip())


def main(arguments: Sequence[str]) -> int:
    """Say where files and registry disagree; with `--write`, edit the file first."""
    checks = every_check()
    if "--write" in arguments:
        registry = {
            key: names
            for key, names in exercised(checks).items()
            if key in load().requirements and load().requirements[key].binds == "gym"
        }
        controller = {k: v.checks for k, v in load().requirements.items() if v.binds != "gym" and v.checks}
        path = load().root / "requirements.yaml"
        path.write_text(edit(path.read_text(encoding="utf-8"), {**registry, **controller}), encoding="utf-8")
        load.cache_clear()
    found = disagreements(checks)
    for sentence in found:
        print(sentence)  # noqa: T201 - this is a command line tool
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
