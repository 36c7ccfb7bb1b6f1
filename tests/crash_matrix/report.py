# SPDX-License-Identifier: Apache-2.0
"""What is known of the matrix: the record of cells, `crash-matrix.json`, a table, a picture."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, TextIO

from spec import durable
from tests.crash_matrix.cells import IN_PLACE, RESTART, SAVE, VICTIMS, WORK, Cell
from tests.crash_matrix.story import Verdict

COLOURS: Final = {"held": "#2e7d4f", "violated": "#b3261e", "not reached": "#e0702a", "not run": "#c9ccd1"}
SIZE: Final = 14


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


def write(cells: Sequence[Cell], verdicts: Mapping[str, Verdict], output: Path, out: TextIO) -> int:
    """Write report and picture, print the table; return 0 when every cell has held."""
    known = {cell.name: verdicts.get(cell.name) for cell in cells}
    outcomes = Counter(verdict.outcome if verdict else "not run" for verdict in known.values())
    content = {
        "cells": len(cells),
        "outcomes": dict(outcomes),
        "verdicts": [asdict(verdict) for verdict in known.values() if verdict],
        "not_run": [name for name, verdict in known.items() if not verdict],
    }
    durable.publish_file(output / "crash-matrix.json", json.dumps(content, indent=1).encode() + b"\n")
    durable.publish_file(output / "crash-matrix.svg", picture(cells, verdicts).encode())
    out.write(table(cells, verdicts))
    counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    out.write(f"{len(cells)} cells: {counted}; {output / 'crash-matrix.json'}, {output / 'crash-matrix.svg'}\n")
    return 0 if outcomes == {"held": len(cells)} else 1


def table(cells: Iterable[Cell], verdicts: Mapping[str, Verdict]) -> str:
    """Return one line for each first point: how many cells held, of how many, by victim."""
    lines = [f"{'':38}" + "".join(f"{victim:>11}" for victim in VICTIMS)]
    rows: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        verdict = verdicts.get(cell.name)
        row = rows.setdefault(f"{cell.kind:13} {cell.first}", {victim: [] for victim in VICTIMS})
        row[cell.victim].append(verdict.outcome if verdict else "not run")
    for name, row in rows.items():
        columns = (f"{outcomes.count('held')}/{len(outcomes)}" for outcomes in row.values())
        lines.append(f"{name:38}" + "".join(f"{column:>11}" for column in columns))
    return "\n".join(lines) + "\n"


def picture(cells: Iterable[Cell], verdicts: Mapping[str, Verdict]) -> str:
    """Return the matrix as SVG: a row for each first point, a square for each second point and victim."""
    columns: list[tuple[str, str | None]] = [("singly", None)]
    columns += [("save+restart", point) for point in RESTART] + [("save+restore", point) for point in IN_PLACE]
    rows = [*WORK, *SAVE, *RESTART]
    left, top, gap = 210, 150, 10
    width = left + len(columns) * (len(VICTIMS) * SIZE + gap) + 20
    height = top + len(rows) * (SIZE + 6) + 60
    found = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    places = {column: left + number * (len(VICTIMS) * SIZE + gap) for number, column in enumerate(columns)}
    for (kind, point), x in places.items():
        label = "one crash" if point is None else f"{point.partition('.')[2]} ({kind.partition('+')[2]})"
        found.append(f'<text transform="translate({x + 30},{top - 8}) rotate(-40)">{label}</text>')
    for number, name in enumerate(rows):
        found.append(f'<text x="10" y="{top + number * (SIZE + 6) + 11}">{name}</text>')
    for cell in cells:
        verdict = verdicts.get(cell.name)
        outcome = verdict.outcome if verdict else "not run"
        column = ("singly", None) if cell.second is None else (cell.kind, cell.second)
        x = places[column] + VICTIMS.index(cell.victim) * SIZE
        y = top + rows.index(cell.first) * (SIZE + 6)
        found.append(
            f'<rect x="{x}" y="{y}" width="{SIZE - 2}" height="{SIZE - 2}" fill="{COLOURS[outcome]}">'
            f"<title>{cell.name}: {outcome}</title></rect>"
        )
    bottom = height - 35
    found.append(f'<text x="10" y="{bottom}">Squares from left to right: {", ".join(VICTIMS)}.</text>')
    for number, (outcome, colour) in enumerate(COLOURS.items()):
        x = 10 + number * 110
        found.append(f'<rect x="{x}" y="{bottom + 10}" width="12" height="12" fill="{colour}"/>')
        found.append(f'<text x="{x + 17}" y="{bottom + 20}">{outcome}</text>')
    return "\n".join([*found, "</svg>"]) + "\n"
