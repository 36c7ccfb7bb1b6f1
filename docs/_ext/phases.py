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

WIDTH, HEIGHT = 1180, 500
BOX_W, BOX_H = 132, 50
# Where each phase stands and how each arrow runs (SVG path, place of its label). What the arrows are and what causes
# them is read from the data; a change of phase that has no route here fails the build.
PLACES = {
    "idle": (90, 270),
    "preparing": (330, 120),
    "prepared": (560, 120),
    "committing": (800, 120),
    "committed": (1090, 120),
    "restoring": (450, 410),
    "restored": (800, 410),
}
ROUTES = {
    ("idle", "preparing"): ("M110 245Q160 130 264 120", (150, 165)),
    ("preparing", "prepared"): ("M396 120L494 120", (445, 110)),
    ("prepared", "committing"): ("M626 120L734 120", (680, 110)),
    ("preparing", "committing"): ("M340 95C400 20 720 20 785 95", (565, 28)),
    ("committing", "committed"): ("M866 120L1024 120", (945, 110)),
    ("committing", "prepared"): ("M770 145Q680 205 585 145", (680, 196)),
    ("committing", "idle"): ("M810 145C800 240 700 255 156 260", (560, 236)),
    ("committed", "idle"): ("M1090 145C1080 290 760 285 156 272", (900, 272)),
    ("idle", "restoring"): ("M110 295Q180 410 384 410", (170, 385)),
    ("restoring", "restored"): ("M516 410L734 410", (625, 400)),
    ("restoring", "idle"): ("M440 385C420 320 320 300 156 292", (330, 336)),
    ("restored", "idle"): ("M800 385C780 300 500 290 156 282", (640, 318)),
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
    """Return one arrow with its causes beside it.

    Raises:
        ValueError: the drawing has no route for this change of phase.
    """
    if (arrow.source, arrow.target) not in ROUTES:
        raise ValueError(f"the diagram has no route from {arrow.source} to {arrow.target}")
    path, (x, y) = ROUTES[arrow.source, arrow.target]
    lines = "".join(
        f'<tspan x="{x}" dy="{0 if i == 0 else 14}">{escape(cause)}</tspan>' for i, cause in enumerate(arrow.causes)
    )
    return (
        f'<path class="change" d="{path}" marker-end="url(#tip)"/>'
        f'<text class="cause" x="{x}" y="{y - 14 * (len(arrow.causes) - 1)}">{lines}</text>'
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
