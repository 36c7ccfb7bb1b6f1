# SPDX-License-Identifier: Apache-2.0
"""Draw the phase machine from ``state-machine.yaml``: a diagram, a table of operations and a table of events."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import spec

WIDTH, HEIGHT = 1080, 470
BOX_W, BOX_H = 132, 50
# Where each phase stands; everything else about the drawing is read from the data.
PLACES = {
    "idle": (90, 250),
    "preparing": (320, 90),
    "prepared": (530, 90),
    "committing": (750, 90),
    "committed": (985, 90),
    "restoring": (420, 400),
    "restored": (760, 400),
}


@dataclass(frozen=True)
class Arrow:
    """One change of phase and everything that causes it."""

    source: str
    target: str
    causes: tuple[str, ...]


def arrows() -> tuple[list[Arrow], tuple[str, ...]]:
    """Return the arrows of the machine, and the causes that lead from every open phase to idle."""
    machine = spec.load("1.0").machine
    causes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell in machine.cells:
        if cell.next != cell.phase:
            causes[cell.phase, cell.next].append(cell.operation + condition(cell.when))
    for event in machine.events:
        if event.next != event.phase and event.impossible is None:
            causes[event.phase, event.next].append(event.event.replace("_", " ") + condition(event.when))
    still_open = [name for name, phase in machine.phases.items() if phase["open_id"]]
    words = [{cause.split(" (")[0] for cause in causes[phase, "idle"]} for phase in still_open]
    everywhere = tuple(sorted(set.intersection(*words)))
    found = []
    for (source, target), names in causes.items():
        kept = dict.fromkeys(n for n in names if target != "idle" or n.split(" (")[0] not in everywhere)
        if kept:
            found.append(Arrow(source, target, tuple(kept)))
    return found, everywhere


def condition(when: spec.Condition) -> str:
    """Return a condition in words, or nothing."""
    facts = [f"{name.replace('_', ' ')} {value(values)}" for name, values in when.facts.items()]
    return f" ({', '.join(facts)})" if facts else ""


def value(values: tuple[str | bool, ...]) -> str:
    """Return the values of one fact in words."""
    return "/".join({True: "yes", False: "no"}.get(v, str(v)) if isinstance(v, bool) else v for v in values)


def diagram() -> str:
    """Return the machine as SVG; colours come from the page's style sheet."""
    found, everywhere = arrows()
    missing = set(spec.load("1.0").machine.phases) - set(PLACES)
    if missing:
        raise ValueError(f"the diagram has no place for {', '.join(sorted(missing))}")
    parts = [
        f'<svg class="phases" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="The phases of a participant">',
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z"/></marker></defs>',
    ]
    parts += [draw(arrow) for arrow in found]
    for name, (x, y) in PLACES.items():
        gate = "-".join(spec.load("1.0").machine.phases[name]["gate"])
        parts.append(
            f'<g class="phase gate-{gate}"><rect x="{x - BOX_W / 2}" y="{y - BOX_H / 2}" width="{BOX_W}" '
            f'height="{BOX_H}" rx="12"/><text x="{x}" y="{y + 5}">{name}</text></g>'
        )
    note = "from every open phase to idle: " + ", ".join(everywhere)
    parts.append(f'<text class="everywhere" x="{WIDTH / 2}" y="{HEIGHT - 12}">{escape(note)}</text></svg>')
    return "".join(parts)


def draw(arrow: Arrow) -> str:
    """Return one arrow with its causes beside it."""
    (x1, y1), (x2, y2) = PLACES[arrow.source], PLACES[arrow.target]
    bend = 0.0
    if y1 == y2:
        back = x2 < x1
        start, end = (x1 + (-BOX_W if back else BOX_W) / 2, y1), (x2 + (BOX_W if back else -BOX_W) / 2, y2)
        if (arrow.target, arrow.source) in {(a.source, a.target) for a in arrows()[0]} and back:
            bend, start, end = 62, (x1, y1 + BOX_H / 2), (x2, y2 + BOX_H / 2)
        elif abs(x2 - x1) > 260:
            bend, start, end = -70, (x1, y1 - BOX_H / 2), (x2, y2 - BOX_H / 2)
    elif arrow.target == "idle":
        up = y1 < y2
        start = (x1, y1 + (BOX_H / 2 if up else -BOX_H / 2))
        end = (x2 + BOX_W / 2, y2 + (-4 if up else 4))
        bend = 0
    else:
        up = y2 < y1
        start = (x1 + 20, y1 + (-BOX_H / 2 if up else BOX_H / 2))
        end = (x2 - BOX_W / 2, y2)
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + bend)
    if arrow.target == "idle" and y1 != y2:
        # Returns to idle leave straight down (or up) and arrive from the right, so that they do not cross the boxes.
        path = f"M{start[0]} {start[1]}C{start[0]} {(start[1] + end[1]) / 2} {start[0] - 60} {end[1]} {end[0]} {end[1]}"
        middle = (start[0] * 0.72 + end[0] * 0.28, end[1] - 8 if y1 < y2 else end[1] + 16)
    else:
        path = f"M{start[0]} {start[1]}Q{middle[0]} {middle[1] + bend} {end[0]} {end[1]}"
    lines = "".join(
        f'<tspan x="{middle[0]}" dy="{0 if i == 0 else 13}">{escape(cause)}</tspan>'
        for i, cause in enumerate(arrow.causes)
    )
    lift = 8 + 13 * (len(arrow.causes) - 1) if bend <= 0 and y1 == y2 else -14 if bend > 0 else 0
    return (
        f'<path class="change" d="{path}" marker-end="url(#tip)"/>'
        f'<text class="cause" x="{middle[0]}" y="{middle[1] - lift}">{lines}</text>'
    )


def operations_table() -> str:
    """Return the table of operations: a row per operation and relation of its id, a column per phase."""
    machine = spec.load("1.0").machine
    phases = list(machine.phases)
    rows = []
    for operation, shape in machine.operations.items():
        ids = [*machine.ids] if shape["id"] else [None]
        for number, id in enumerate(ids):
            head = f'<th rowspan="{len(ids)}" scope="rowgroup">{operation}</th>' if number == 0 else ""
            cells = "".join(f"<td>{cell(operation, phase, id)}</td>" for phase in phases)
            rows.append(
                f'<tr class="{"first" if number == 0 else ""}">{head}<th scope="row">{id or "–"}</th>{cells}</tr>'
            )
    columns = "".join(f"<th>{phase}</th>" for phase in phases)
    return (
        '<div class="phase-table"><table class="docutils"><thead><tr><th>operation</th><th>id</th>'
        f"{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def cell(operation: str, phase: str, id: str | None) -> str:
    """Return what one operation does in one phase."""
    machine = spec.load("1.0").machine
    found = [c for c in machine.cells if (c.operation, c.phase, c.id) == (operation, phase, id)]
    lines = []
    for one in found:
        if one.error:
            text = f'<a class="code" href="errors.html#error-{one.error}">{one.error}</a>'
        else:
            text = f"→ {one.next}" if one.next != one.phase else (one.item or one.answer).replace("_", " ")
            ends = f" <small>ends {one.ends}</small>" if one.ends else ""
            state = f" <small>{one.state.replace('_', ' ')}</small>" if one.state else ""
            text = f'<span class="answer-{one.answer}">{text}</span>{ends}{state}'
        lines.append(f"{text}<small>{condition(one.when)}</small>")
    return "<br>".join(lines) or '<span class="none">–</span>'


def events_table() -> str:
    """Return the table of events: a row per event, a column per phase."""
    machine = spec.load("1.0").machine
    rows = []
    for name in dict.fromkeys(e.event for e in machine.events):
        cells = []
        for phase in machine.phases:
            lines = []
            for event in (e for e in machine.events if (e.event, e.phase) == (name, phase)):
                move = event.impossible or (
                    f"→ {event.next}" if event.next != phase else f"gate {event.gate or 'as it was'}"
                )
                extra = [f"ends {event.ends}"] if event.ends else []
                extra += [event.state.replace("_", " ")] if event.state else []
                lines.append(f"{move}<small> {', '.join(extra)}{condition(event.when)}</small>")
            cells.append(f"<td>{'<br>'.join(lines) or '<span class=none>–</span>'}</td>")
        rows.append(f'<tr class="first"><th scope="row">{name.replace("_", " ")}</th>{"".join(cells)}</tr>')
    columns = "".join(f"<th>{phase}</th>" for phase in machine.phases)
    return (
        f'<div class="phase-table"><table class="docutils"><thead><tr><th>event</th>{columns}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


class PhaseDiagram(SphinxDirective):
    """The directive ``phase-diagram``."""

    def run(self) -> list[nodes.Node]:
        """Return the drawing."""
        return [nodes.raw("", f'<figure class="phases">{diagram()}</figure>', format="html")]


class PhaseTable(SphinxDirective):
    """The directive ``phase-table``."""

    def run(self) -> list[nodes.Node]:
        """Return both tables."""
        return [nodes.raw("", operations_table() + events_table(), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("phase-diagram", PhaseDiagram)
    app.add_directive("phase-table", PhaseTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
