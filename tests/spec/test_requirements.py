# SPDX-License-Identifier: Apache-2.0
"""The requirements as data, and the chapters that show them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import spec

SPECIFICATION = spec.load("1.0")
REQUIREMENTS = SPECIFICATION.requirements
CHAPTERS = (
    "overview",
    "discovery",
    "identity",
    "lifecycle",
    "results",
    "snapshots",
    "environments",
    "controller",
    "errors",
    "security",
    "versions",
    "conformance",
)
SCOPES = {"results", "checkpoint", "turn-recovery", "artifacts_http", "conformance"}
LEVELS = {"MUST", "MUST NOT", "SHOULD", "SHOULD NOT", "MAY"}
# The other key words of BCP 14 are not levels here, but neither prose nor a requirement may use them.
KEYWORD = re.compile(
    r"\b(MUST NOT|MUST|SHALL NOT|SHALL|SHOULD NOT|SHOULD|NOT RECOMMENDED|RECOMMENDED|REQUIRED|MAY|OPTIONAL)\b"
)
BOX = re.compile(r"\{req\}`([^`]*)`")
FENCE = re.compile(r"^ *(```+|~~~+|:::+)")
CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
# A full stop, question or exclamation mark that is followed by the beginning of another sentence.
SENTENCE_BREAK = re.compile(r"[.!?]\s+[A-Z`]")

by_chapter = pytest.mark.parametrize("chapter", CHAPTERS)


def without_fences(text: str) -> str:
    """Return Markdown without its fenced blocks; their lines stay as empty lines."""
    kept: list[str] = []
    closing: str | None = None
    for line in text.splitlines():
        fence = FENCE.match(line)
        if closing is None and fence:
            closing = fence[1]
        elif closing is not None and line.strip() == closing:
            closing = None
        elif closing is None:
            kept.append(line)
            continue
        kept.append("")
    return "\n".join(kept)


def prose(text: str) -> str:
    """Return Markdown without its fenced blocks and code spans."""
    return CODE_SPAN.sub("", without_fences(text))


def boxes(text: str) -> Iterator[str]:
    """Yield the ids of the requirements that stand on a line of their own, outside fenced blocks."""
    for line in without_fences(text).splitlines():
        alone = BOX.fullmatch(line.strip())
        if alone:
            yield alone[1]


def read(chapter: str) -> str:
    """Return the source of a chapter."""
    path: Path = SPECIFICATION.root / f"{chapter}.md"
    return path.read_text(encoding="utf-8")


def test_the_chapters_are_exactly_the_known_ones() -> None:
    """No chapter is missing and none stands outside the list."""
    assert sorted(CHAPTERS) == sorted(path.stem for path in SPECIFICATION.root.glob("*.md"))


def offenders(rule: Callable[[spec.Requirement], bool]) -> list[str]:
    """Return the ids of the requirements that break a rule."""
    return [requirement.id for requirement in REQUIREMENTS.values() if not rule(requirement)]


def test_there_are_requirements_for_both_sides() -> None:
    """The rules below are about something."""
    assert {"gym", "controller"} == {requirement.binds for requirement in REQUIREMENTS.values()}


def test_ids_are_well_formed() -> None:
    """An id is CKPT, an area and three digits."""
    assert [] == offenders(lambda r: re.fullmatch(r"CKPT-[A-Z]+-[0-9]{3}", r.id) is not None)


def test_ids_are_unique() -> None:
    """No id is given twice."""
    text = (SPECIFICATION.root / "requirements.yaml").read_text(encoding="utf-8")
    ids = Counter(re.findall(r"^- id: (\S+)", text, re.MULTILINE))
    assert len(REQUIREMENTS) == ids.total()
    assert [] == [id for id, times in ids.items() if times > 1]


def test_an_area_belongs_to_one_chapter() -> None:
    """Who reads an id knows where to look."""
    chapters: dict[str, set[str]] = defaultdict(set)
    for requirement in REQUIREMENTS.values():
        chapters[requirement.area].add(requirement.chapter)
    assert {} == {area: found for area, found in chapters.items() if len(found) > 1}


def test_levels_binds_scopes_and_chapters_come_from_closed_lists() -> None:
    """A misspelled value would drop a requirement out of every report."""
    assert [] == offenders(lambda r: r.level in LEVELS)
    assert [] == offenders(lambda r: r.binds in {"gym", "controller"})
    assert [] == offenders(lambda r: r.scope in SCOPES)
    assert [] == offenders(lambda r: r.chapter in CHAPTERS)


def test_each_requirement_has_exactly_one_of_checks_plan_and_reason() -> None:
    """A requirement has checks, or a plan for one, or the reason why nobody can observe it."""
    assert [] == offenders(lambda r: 1 == sum(map(bool, (r.checks, r.planned, r.excluded))))


def test_a_plan_is_short_and_names_who_shows_it() -> None:
    """A plan is a check of the suite for a Gym and a test for a controller, in at most 12 words."""
    starts = {"gym": "check: ", "controller": "test: "}
    planned = [r for r in REQUIREMENTS.values() if r.planned is not None]
    assert [] == [r.id for r in planned if not (r.planned or "").startswith(starts[r.binds])]
    assert [] == [r.id for r in planned if not 2 <= len((r.planned or "").split()) <= 13]


def test_the_level_is_the_one_keyword_of_the_text() -> None:
    """A requirement has one keyword in capitals, and it is its level."""
    assert [] == offenders(lambda r: [r.level] == KEYWORD.findall(CODE_SPAN.sub("", r.text)))


def test_a_requirement_is_one_sentence() -> None:
    """A requirement begins like a sentence, ends like one, and holds no second one."""
    plain = {r.id: CODE_SPAN.sub("`x`", r.text) for r in REQUIREMENTS.values()}
    assert [] == [id for id, text in plain.items() if not re.match(r"[A-Z`]", text)]
    assert [] == [id for id, text in plain.items() if not text.endswith(".") or text.endswith("..")]
    assert [] == [id for id, text in plain.items() if SENTENCE_BREAK.search(text) or "\n" in text]


def test_the_error_of_a_refusal_is_in_the_catalogue() -> None:
    """A refusal names a code of the catalogue."""
    assert [] == offenders(lambda r: r.error is None or r.error in SPECIFICATION.errors)


def test_no_two_requirements_say_the_same() -> None:
    """No text is there twice, however it is spelled."""
    seen = Counter(re.sub(r"[^a-z0-9]+", " ", r.text.lower()).strip() for r in REQUIREMENTS.values())
    assert [] == [text for text, times in seen.items() if times > 1]


def test_every_requirement_is_shown_once_and_in_its_chapter() -> None:
    """Each requirement has its box in one chapter, the one that it names."""
    due = Counter((r.id, r.chapter) for r in REQUIREMENTS.values())
    shown = Counter((id, chapter) for chapter in CHAPTERS for id in boxes(read(chapter)))
    assert [] == sorted((due - shown).elements()), "not shown"
    assert [] == sorted((shown - due).elements()), "shown twice, elsewhere, or unknown"


@by_chapter
def test_a_chapter_mentions_only_requirements_that_exist(chapter: str) -> None:
    """A mention in a sentence, too, leads somewhere."""
    assert set() == set(BOX.findall(without_fences(read(chapter)))) - set(REQUIREMENTS)


@by_chapter
def test_the_prose_of_a_chapter_has_no_keyword_in_capitals(chapter: str) -> None:
    """A rule stands in a requirement or nowhere."""
    assert [] == KEYWORD.findall(prose(read(chapter)))


@by_chapter
def test_a_chapter_has_one_title_and_closes_its_fences(chapter: str) -> None:
    """The licence line comes first, one heading of the first level follows, every fenced block ends."""
    text = read(chapter)
    assert text.startswith("<!-- SPDX-License-Identifier: Apache-2.0 -->\n")
    assert 1 == len(re.findall(r"^# ", without_fences(text), re.MULTILINE))
    assert 0 == len(re.findall(r"^ *```", text, re.MULTILINE)) % 2


def test_the_helpers_see_what_they_are_for() -> None:
    """Keywords in code are skipped and others found; a box counts only on a line of its own outside a block."""
    text = "You MUST.\n\n`MUST` and ``a ` MAY`` are quoted.\n\n```text\nSHOULD\n{req}`CKPT-A-002`\n```\n\n"
    text += "{req}`CKPT-A-001`\n\nSee {req}`CKPT-A-003`, please.\n"
    assert ["MUST"] == KEYWORD.findall(prose(text))
    assert ["CKPT-A-001"] == list(boxes(text))
    assert SENTENCE_BREAK.search("One. Two.") is not None
    assert SENTENCE_BREAK.search("It is 1.0, e.g. so.") is None
