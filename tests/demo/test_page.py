# SPDX-License-Identifier: Apache-2.0
"""The page: one file that loads nothing and says what the logs say."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

from reference_rl.demo.page import Facts, render
from reference_rl.demo.scenario import COLUMNS, Scenario
from reference_rl.demo.story import Column
from reference_rl.demo.suite import Suite
from reference_rl.demo.timeline import WIDTH, common_scale, draw
from tests.demo.synthetic import made_up_column

FACTS = Facts("make demo", "three", {"in all": 71.0}, "linux, 2 cores")
SUITE = Suite(0, "nothing failed", 17.0, "suite/report.html")


def all_columns(scenario: Scenario) -> list[Column]:
    """The four columns, made up."""
    return [made_up_column(scenario, column) for column in COLUMNS]


class Tags(HTMLParser):
    """Collects what a page would load, and checks that tags are closed."""

    VOID = frozenset({"meta", "br", "rect", "line", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note every reference; remember what must be closed."""
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "data", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """The innermost open tag is the one that closes."""
        if tag not in self.VOID:
            assert tag == self.open.pop()


def read(page: str) -> Tags:
    """The page, parsed."""
    tags = Tags()
    tags.feed(page)
    assert [] == tags.open
    return tags


def test_the_page_loads_nothing_and_links_the_report_only() -> None:
    """It works from disk, without a network."""
    page = render(all_columns(Scenario()), made_up_column(Scenario(), 0).bodies, SUITE, FACTS)
    assert {"suite/report.html"} == set(read(page).loads)
    assert "http" not in re.sub(r"<code>.*?</code>", "", page)
    assert "@import" not in page
    assert ["url(#stripes)"] == re.findall(r"url\([^)]*\)", page)


def test_the_page_shows_the_four_counts() -> None:
    """Six, six, six, none."""
    page = render(all_columns(Scenario()), made_up_column(Scenario(), 0).bodies, SUITE, FACTS)
    assert ["6", "6", "6", "0"] == re.findall(r'class="figure">(\d+)<', page)
    assert "B had 2 completed turns and C 4, so a restart at turn 1 throws 2 + 4 = 6 away." in page
    assert 'class="no"' not in page


def test_only_a_snapshot_with_a_gym_in_it_tells_of_a_pause() -> None:
    """Three columns save RL state only, and never close a gate."""
    page = render(all_columns(Scenario()), made_up_column(Scenario(), 0).bodies, SUITE, FACTS)
    assert 3 == page.count("snapshot 1-1, RL state only")
    assert 1 == page.count("gate closed for 6 ms, published after 40 ms, 15 kB of Gym state")


def test_a_body_that_differs_is_shown_as_a_failure() -> None:
    """The page does not claim what the comparison did not show."""
    columns = all_columns(Scenario())
    columns[3] = replace(columns[3], bodies={**columns[3].bodies, 1: {"outcome": "truncated"}})
    page = render(columns, columns[0].bodies, None, FACTS)
    assert 1 == page.count('<li class="no">')
    assert 1 == page.count("<td>differs</td>")


def test_a_page_of_one_column_and_a_page_of_many_siblings_are_whole() -> None:
    """Other sizes than the worked example."""
    many = Scenario(64, 20)
    read(render(all_columns(many), made_up_column(many, 0).bodies, None, FACTS))
    one = made_up_column(Scenario(), 3)
    assert "Everything was killed. No turn had to be paid for twice." in render([one], one.bodies, None, FACTS)


def test_every_block_of_the_timeline_lies_within_the_drawing() -> None:
    """The longest column fills the width, none runs out of it."""
    columns = all_columns(Scenario())
    for column in columns:
        svg = ElementTree.fromstring(draw(column, common_scale(columns)))  # noqa: S314
        blocks = [rect for rect in svg.iter("rect") if "block" in rect.attrib["class"]]
        assert len(column.calls) == len(blocks)
        for block in blocks:
            assert 0 <= float(block.attrib["x"])
            assert WIDTH >= float(block.attrib["x"]) + float(block.attrib["width"])


def test_the_timeline_draws_what_was_lost_as_lost() -> None:
    """Six blocks are lost and six drawn as generated again where the count says six."""
    for column in all_columns(Scenario()):
        drawn = draw(column, 100.0)
        assert column.thrown_away == drawn.count('"block lost"') == drawn.count('"block again"')
