# SPDX-License-Identifier: Apache-2.0
"""Progress on the terminal: a live table where there is one, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from reference_rl.demo.calls import Call, completions, kind_of, turns_thrown_away
from reference_rl.demo.scenario import COLUMN_NAMES, Scenario
from reference_rl.demo.story import Column

STYLES = {"kept": "green", "lost": "red", "again": "yellow", "held": "dim"}
CELLS = {"kept": "■", "lost": "▨", "again": "■", "held": "□"}
MANY = 8
REDRAW_S = 0.1


class Show(Protocol):
    """Takes what happens and shows it."""

    def begin(self, part: str, column: int | None = None) -> None:
        """A part of the demo begins."""

    def say(self, line: str) -> None:
        """One line about what is being done."""

    def look(self, calls: Callable[[], Sequence[Call]]) -> None:
        """A moment to draw the policy's calls of the current part so far."""

    def column_done(self, column: Column) -> None:
        """A column has been told to its end."""

    def print(self, line: str) -> None:
        """One line that stays."""


class PlainShow:
    """Plain lines, each with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._part = ""

    def __enter__(self) -> PlainShow:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def begin(self, part: str, column: int | None = None) -> None:
        """A part of the demo begins."""
        self._part = part

    def say(self, line: str) -> None:
        """One line about what is being done."""
        self.print(f"[{time.monotonic() - self._began:5.1f} s] {self._part}: {line}")

    def look(self, calls: Callable[[], Sequence[Call]]) -> None:
        """Nothing: a log is no place for a picture that changes."""

    def column_done(self, column: Column) -> None:
        """A column has been told to its end."""
        self.say(outcome(column))

    def print(self, line: str) -> None:
        """One line that stays."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class LiveShow:
    """A table that changes in place: a row per column, a strip of turns per sibling."""

    def __init__(self, scenario: Scenario, columns: Sequence[int], console: Console) -> None:
        self._scenario = scenario
        self._strips: dict[int, Text] = {column: Text("") for column in columns}
        self._results: dict[int, Text] = {column: Text("") for column in columns}
        self._current: int | None = None
        self._drawn = 0.0
        self._spinner = Spinner("dots", text="")
        self._part = ""
        self._live = Live(self._picture(), console=console, refresh_per_second=10, transient=False)

    def __enter__(self) -> LiveShow:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.update(self._table())
        self._live.stop()

    def begin(self, part: str, column: int | None = None) -> None:
        """A part of the demo begins."""
        self._part, self._current = part, column
        self.say("starting")

    def say(self, line: str) -> None:
        """One line about what is being done."""
        self._spinner.update(text=f"{self._part}: {line}")
        self._live.update(self._picture())

    def look(self, calls: Callable[[], Sequence[Call]]) -> None:
        """Redraw the strips of the current column, a few times a second."""
        if self._current is not None and time.monotonic() - self._drawn > REDRAW_S:
            self._drawn = time.monotonic()
            self._strips[self._current] = strips(calls(), self._scenario)
            self._live.update(self._picture())

    def column_done(self, column: Column) -> None:
        """A column has been told to its end."""
        style = "bold green" if column.as_promised else "bold red"
        self._strips[column.column] = strips(column.calls, self._scenario)
        self._results[column.column] = Text(str(column.thrown_away), style=style)
        self._live.update(self._picture())

    def print(self, line: str) -> None:
        """One line that stays."""
        self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 1, 0))
        for heading in ("column", "turns per sibling", "thrown away"):
            table.add_column(heading, header_style="dim", vertical="middle")
        for column, strip in self._strips.items():
            name = Text(f"{column}  ", style="bold") + Text(COLUMN_NAMES[column], style="dim")
            table.add_row(name, strip, self._results[column])
        return table

    def _picture(self) -> Group:
        return Group(self._table(), self._spinner)


def strips(calls: Sequence[Call], scenario: Scenario) -> Text:
    """The turns so far as a line of squares per sibling, or as numbers where there are many siblings."""
    if scenario.siblings > MANY:
        done = len(completions(calls))
        return Text(f"{done} of {scenario.siblings * scenario.turns} turns, {turns_thrown_away(calls)} generated twice")
    text = Text()
    for sibling in range(scenario.siblings):
        text.append(f"{scenario.name(sibling)} ", style="bold")
        text.append_text(_strip([call for call in calls if call.sibling == sibling]))
        text.append("   ")
    return text


def _strip(calls: Sequence[Call]) -> Text:
    done = completions(calls)
    text = Text()
    for call in calls:
        copies = done.get((call.sibling, call.turn), [])
        kind = kind_of(call, copies)
        text.append(CELLS[kind], style=STYLES[kind])
    return text


def outcome(column: Column) -> str:
    """A column's outcome in one line."""
    bodies = (
        "bodies equal to the uninterrupted run" if column.bodies_equal else "BODIES DIFFER from the uninterrupted run"
    )
    return f"{column.thrown_away} turns thrown away (expected {column.scenario.expected(column.column)}), {bodies}"
