# SPDX-License-Identifier: Apache-2.0
"""Draws one column as an inline SVG: a lane per sibling, a block per policy call, the crash across all lanes.

Colours come from the page's style sheet (classes only here), so one drawing serves light and dark. The time from the
SIGKILL to the first call afterwards is drawn with a fixed width and labelled: nothing happens in it but processes
starting, and it would push the turns, which are the point, into a corner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from reference_rl.demo.calls import Call, completions, kind_of
from reference_rl.demo.scenario import Scenario
from reference_rl.demo.story import Column

WIDTH = 1000.0
LEFT = 46.0
RIGHT = 134.0
TOP = 34.0
BOTTOM = 26.0
GAP = 92.0
MANY = 12
LEAD_S = 0.08

KINDS = {
    "kept": "completed once, kept",
    "lost": "completed, then thrown away",
    "again": "the same turn generated again",
    "held": "asked and held by the policy, not completed",
}


@dataclass(frozen=True)
class Axis:
    """Time in seconds → x, in two parts with the down time between them.

    Args:
        start: first moment shown.
        kill: the SIGKILL.
        back: first call after it.
        scale: units of x per second, the same in all columns of a page.
    """

    start: float
    kill: float
    back: float
    scale: float

    def x(self, t: float) -> float:
        """The place of a moment."""
        if t <= self.kill:
            return LEFT + (t - self.start) * self.scale
        if t < self.back:
            return self.x(self.kill) + GAP * (t - self.kill) / (self.back - self.kill)
        return self.x(self.kill) + GAP + (t - self.back) * self.scale


def kill_time(column: Column) -> float:
    """The moment of the SIGKILL."""
    return next(mark.t for mark in column.marks if mark.kind == "kill")


def shown_spans(column: Column) -> tuple[float, float, float, float]:
    """(first moment, kill, first call afterwards, end) of a column."""
    kill = kill_time(column)
    start = min(call.asked for call in column.calls) - LEAD_S
    back = min([call.asked for call in column.calls if call.asked > kill], default=kill + 1) - LEAD_S
    end = max(call.completed or call.dropped or call.asked for call in column.calls) + LEAD_S
    return start, kill, back, max(end, back + LEAD_S)


def common_scale(columns: Sequence[Column]) -> float:
    """Units of x per second with which the longest column fills the width."""
    spans = [shown_spans(column) for column in columns]
    longest = max(kill - start + end - back for start, kill, back, end in spans)
    return (WIDTH - LEFT - _right(columns[0].scenario) - GAP) / longest


def _right(scenario: Scenario) -> float:
    """Room at the right end of the lanes; many lanes are too thin for words."""
    return RIGHT if scenario.siblings <= MANY else 16.0


def draw(column: Column, scale: float) -> str:
    """The SVG of one column.

    Args:
        column: what happened.
        scale: units of x per second, from `common_scale`.
    """
    start, kill, back, _ = shown_spans(column)
    axis = Axis(start, kill, back, scale)
    siblings = column.scenario.siblings
    lane = 36.0 if siblings <= 4 else max(7.0, min(28.0, 420.0 / siblings))
    height = TOP + lane * siblings + BOTTOM
    parts = [
        f'<svg class="timeline" viewBox="0 0 {WIDTH:g} {height:.0f}" role="img" aria-label="{_label(column)}">',
        _crash(axis, TOP - 6, TOP + lane * siblings + 4, back - kill),
        *[_lane(column, sibling, TOP + lane * sibling, lane) for sibling in range(siblings)],
        *_reused(column, axis, lane),
        *_blocks(column, axis, lane),
        *_marks(column, axis, lane * siblings),
        "</svg>",
    ]
    return "\n".join(parts)


def _label(column: Column) -> str:
    return escape(f"Timeline of column {column.column}: {column.thrown_away} completed turns were generated again.")


def _lane(column: Column, sibling: int, y: float, height: float) -> str:
    count = column.counts[sibling]
    middle = y + height / 2
    text = f"{count.thrown_away} thrown away" if count.thrown_away else "nothing lost"
    end = WIDTH - _right(column.scenario)
    line = f'<line class="lane" x1="{LEFT:g}" x2="{end:g}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
    if column.scenario.siblings > MANY:
        return line
    mood = "bad" if count.thrown_away else "good"
    return (
        f'<text class="name" x="{LEFT - 18:g}" y="{middle + 5:.1f}">{column.scenario.name(sibling)}</text>{line}'
        f'<text class="tally {mood}" x="{WIDTH - RIGHT + 14:g}" y="{middle + 4.5:.1f}">{text}</text>'
    )


def _reused(column: Column, axis: Axis, lane: float) -> list[str]:
    """A word where a lane stays empty after the crash, so that the gap is not read as a loss."""
    if column.scenario.siblings > MANY:
        return []
    again = {call.sibling for call in column.calls if call.asked > axis.kill}
    x = axis.x(axis.back) + 12
    text = "finished before: its result is reused"
    return [
        f'<text class="reused" x="{x:.1f}" y="{TOP + lane * (sibling + 0.5) + 4.5:.1f}">{text}</text>'
        for sibling in range(column.scenario.siblings)
        if sibling not in again
    ]


def _blocks(column: Column, axis: Axis, lane: float) -> list[str]:
    done = completions(column.calls)
    drawn = []
    for call in column.calls:
        copies = done.get((call.sibling, call.turn), [])
        y = TOP + lane * call.sibling + lane * 0.14
        drawn += _block(column, call, kind_of(call, copies), axis, y, lane * 0.72)
    return drawn


def _block(column: Column, call: Call, kind: str, axis: Axis, y: float, height: float) -> list[str]:
    """A call as one block, with a dashed one before it for the time in which it was held."""
    title = f"{column.scenario.name(call.sibling)}, turn {call.turn}: {KINDS[kind]}"
    end = call.completed or call.dropped or axis.kill
    if call.completed is None and call.asked < axis.kill:
        end = min(end, axis.kill)
    begin = call.asked
    drawn = []
    if call.completed is not None and call.released is not None:
        drawn.append(_rect("held", axis.x(begin), axis.x(call.released), y, height, "", "held by the policy"))
        begin = call.released
    drawn.append(_rect(kind, axis.x(begin), axis.x(end), y, height, str(call.turn), title))
    return drawn


def _rect(kind: str, x1: float, x2: float, y: float, height: float, number: str, title: str) -> str:
    width = max(x2 - x1 - 2.0, 1.0)
    radius = min(5.0, height / 4, width / 3)
    text = ""
    if number and height >= 16 and width >= 11:
        text = (
            f'<text class="number {kind}" x="{x1 + 1 + width / 2:.1f}" y="{y + height / 2 + 4.5:.1f}">{number}</text>'
        )
    if kind == "held" and height < 12:
        y, height, radius = y + height / 2 - 0.6, 1.2, 0.6
    thin = " thin" if height < 2 else ""
    return (
        f'<g><title>{escape(title)}</title><rect class="block {kind}{thin}" x="{x1 + 1:.1f}" y="{y:.1f}" '
        f'width="{width:.1f}" height="{height:.1f}" rx="{radius:.1f}"/>{text}</g>'
    )


def _crash(axis: Axis, top: float, bottom: float, down_s: float) -> str:
    """The band in which nothing lives."""
    left, middle = axis.x(axis.kill), axis.x(axis.kill) + GAP / 2
    return (
        f'<rect class="down" x="{left:.1f}" y="{top:.1f}" width="{GAP:g}" height="{bottom - top:.1f}"/>'
        f'<text class="note" x="{middle:.1f}" y="{bottom + 15:.1f}">down {down_s:.1f} s</text>'
    )


def _marks(column: Column, axis: Axis, lanes: float) -> list[str]:
    bottom = TOP + lanes + 4
    drawn = []
    for mark in column.marks:
        if mark.kind == "snapshot":
            x = axis.x(mark.t)
            drawn.append(_upright("snapshot", x, bottom, f"snapshot {mark.text}", "end", -6.0))
        elif mark.kind == "kill":
            drawn.append(_upright("kill", axis.x(mark.t), bottom, "SIGKILL", "start", 6.0))
    drawn.append(_upright("back", axis.x(axis.back), bottom, "first call again", "start", 6.0))
    return drawn


def _upright(kind: str, x: float, bottom: float, text: str, anchor: str, offset: float) -> str:
    return (
        f'<line class="upright {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{bottom:.1f}"/>'
        f'<text class="flag {kind}" x="{x + offset:.1f}" y="20" text-anchor="{anchor}">{escape(text)}</text>'
    )
