# SPDX-License-Identifier: Apache-2.0
"""What is known of the matrix: the record of cells, `crash-matrix.json`, a table, a picture."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TextIO

from spec import durable
from tests.crash_matrix.cells import NOT_HERE, VICTIMS, Cell, left_out, point_of, role_of
from tests.crash_matrix.story import Verdict

COLOURS: Final = {"held": "#2e7d4f", "not run": "#c9ccd1", "not reached": "#e0702a", "violated": "#b3261e"}
"""Outcome → colour, the worst one last."""

SIZE: Final = 10


class Record:
    """The cells that were run, one JSON line each; several parts may add lines at the same time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Forget every cell."""
        self._path.unlink(missing_ok=True)

    def add(self, verdict: Verdict) -> None:
        """Add one cell."""
        file = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, durable.FILE_MODE)
        with os.fdopen(file, "ab", buffering=0) as stream:
            stream.write(json.dumps(asdict(verdict)).encode() + b"\n")

    def verdicts(self) -> dict[str, Verdict]:
        """Return the last verdict on each cell."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return {content["name"]: Verdict(**content) for content in map(json.loads, lines)}


def write(cells: Sequence[Cell], verdicts: Mapping[str, Verdict], output: Path, out: TextIO, **facts: Any) -> int:
    """Write report and picture, print the tables; return 0 when every cell has held.

    Args:
        cells: of the whole matrix.
        verdicts: by name of the cell.
        output: a directory.
        out: where the tables go.
        facts: further entries of the report.
    """
    known = {cell.name: verdicts.get(cell.name) for cell in cells}
    outcomes = Counter(verdict.outcome if verdict else "not run" for verdict in known.values())
    content = {
        "cells": len(cells),
        "outcomes": dict(outcomes),
        "by_victim": {victim: _held(cells, verdicts, victim) for victim in VICTIMS},
        "pairs_not_drawn": left_out(),
        "points_not_visited": dict(NOT_HERE),
        **facts,
        "verdicts": [asdict(verdict) for verdict in known.values() if verdict],
        "not_run": [name for name, verdict in known.items() if not verdict],
    }
    durable.publish_file(output / "crash-matrix.json", json.dumps(content, indent=1).encode() + b"\n")
    durable.publish_file(output / "crash-matrix.svg", picture(cells, verdicts).encode())
    out.write(table(cells, verdicts))
    counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    out.write(f"{len(cells)} cells: {counted}; {output / 'crash-matrix.json'}, {output / 'crash-matrix.svg'}\n")
    out.write(f"{left_out()} more pairs were not drawn; {', '.join(f'{k}: {v}' for k, v in NOT_HERE.items())}\n")
    return 0 if outcomes == {"held": len(cells)} else 1


def _held(cells: Iterable[Cell], verdicts: Mapping[str, Verdict], victim: str) -> str:
    """Return how many cells of a victim have held, of how many."""
    own = [verdicts.get(cell.name) for cell in cells if cell.victim == victim]
    return f"{sum(1 for verdict in own if verdict and verdict.outcome == 'held')}/{len(own)}" if own else ""


def table(cells: Sequence[Cell], verdicts: Mapping[str, Verdict]) -> str:
    """Return how many cells held, of how many, by victim: a line for each operation, then one for each single step."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        whose = " and ".join("the Gym" if role_of(step) else "RL" for step in (cell.first, cell.second) if step)
        groups.setdefault(f"{cell.kind}, {whose}{', log' if cell.log else ''}", []).append(cell)
    for cell in cells:
        if cell.second is None:
            whose = " (Gym)" if role_of(cell.first) else ""
            groups.setdefault(f"  {cell.kind:7} {point_of(cell.first)}{whose}", []).append(cell)
    lines = [f"{'':44}" + "".join(f"{victim:>11}" for victim in VICTIMS)]
    for name, group in groups.items():
        lines.append(f"{name:44}" + "".join(f"{_held(group, verdicts, victim):>11}" for victim in VICTIMS))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _row(cell: Cell) -> str:
    begins = cell.kind.partition("+")[0]
    return f"{begins}: {point_of(cell.first)}" if role_of(cell.first) else cell.first


def _column(cell: Cell) -> str:
    log = ", log" if cell.log else ""
    if cell.second is None:
        return f"one crash{' while adopting' if cell.kind == 'adopt' else ''}{log}"
    goes_on = cell.kind.partition("+")[2]
    step = "a point of the Gym" if role_of(cell.second) else cell.second.partition(".")[2]
    return f"{step} ({goes_on}{log})"


def picture(cells: Sequence[Cell], verdicts: Mapping[str, Verdict]) -> str:
    """Return the matrix as SVG: a row for each first step, a square for each second step and victim.

    A square that stands for several cells has the colour of the worst.
    """
    rows = list(dict.fromkeys(_row(cell) for cell in sorted(cells, key=lambda cell: bool(role_of(cell.first)))))
    columns = list(dict.fromkeys(_column(cell) for cell in cells))
    squares: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        squares.setdefault((_row(cell), _column(cell), cell.victim), []).append(cell)
    left, top, gap, line = 190, 170, 8, SIZE + 5
    group = len(VICTIMS) * SIZE + gap
    width, height = left + len(columns) * group + 90, top + len(rows) * line + 60
    found = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="10">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, label in enumerate(columns):
        x = left + number * group + 20
        found.append(f'<text transform="translate({x},{top - 8}) rotate(-50)">{label}</text>')
    for number, name in enumerate(rows):
        found.append(f'<text x="10" y="{top + number * line + SIZE - 1}">{name}</text>')
    for (row, column, victim), those in squares.items():
        outcomes = [verdict.outcome if (verdict := verdicts.get(cell.name)) else "not run" for cell in those]
        worst = max(outcomes, key=list(COLOURS).index)
        x = left + columns.index(column) * group + VICTIMS.index(victim) * SIZE
        y = top + rows.index(row) * line
        names = " ".join(f"{cell.name}: {outcome}" for cell, outcome in zip(those, outcomes, strict=True))
        found.append(
            f'<rect x="{x}" y="{y}" width="{SIZE - 2}" height="{SIZE - 2}" fill="{COLOURS[worst]}">'
            f"<title>{names}</title></rect>"
        )
    bottom = height - 35
    found.append(f'<text x="10" y="{bottom}">Squares from left to right: {", ".join(VICTIMS)}.</text>')
    for number, (outcome, colour) in enumerate(COLOURS.items()):
        x = 10 + number * 110
        found.append(f'<rect x="{x}" y="{bottom + 10}" width="12" height="12" fill="{colour}"/>')
        found.append(f'<text x="{x + 17}" y="{bottom + 20}">{outcome}</text>')
    return "\n".join([*found, "</svg>"]) + "\n"
