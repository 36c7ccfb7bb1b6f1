# SPDX-License-Identifier: Apache-2.0
"""The report as one self-contained HTML page: no script from elsewhere, no font, no request; light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from conformance.report.facts import STATUS_ORDER

Json = Mapping[str, Any]

WORDS: Mapping[str, str] = {
    "passed": "passed",
    "failed": "failed",
    "flaky": "flaky",
    "not_run": "not run",
    "not_applicable": "not applicable",
    "planned": "planned",
    "excluded": "not observable",
    "fault": "suite fault",
    "conformant": "conformant",
    "partial": "nothing failed so far",
    "not_conformant": "failed",
    "incomplete": "incomplete",
    "not_offered": "not offered",
}
_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


def page(report: Json) -> str:
    """Return the page of a report."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Conformance of {escape(report['implementation']['name'])}</title>",
            f"<style>{_STYLE}</style></head><body><main>",
            _head(report),
            _profiles(report),
            _bar(report),
            _failures(report),
            _machine(report),
            _chapters(report),
            _checks(report),
            _foot(report),
            "</main></body></html>",
        ]
    )


def _badge(status: str) -> str:
    return f'<span class="badge {escape(status)}">{escape(WORDS.get(status, status))}</span>'


def _head(report: Json) -> str:
    found, suite = report["implementation"], report["suite"]
    people = "".join(
        f"<li><b>{escape(p['name'])}</b> owns {escape(', '.join(p['owns']))}, stage {p['stage']}</li>"
        for p in found["participants"]
    )
    tone = "good" if report["verdict"]["exit_code"] == 0 else "bad"
    return (
        f'<header><p class="eyebrow">Gym Checkpoint Protocol {escape(suite["specification"])} · conformance</p>'
        f"<h1>{escape(found['name'])} <small>{escape(found['version'])}</small></h1>"
        f'<p class="headline {tone}">{escape(report["headline"])}</p>'
        f'<ul class="people">{people}</ul></header>'
    )


def _profiles(report: Json) -> str:
    cards = "".join(
        f'<div class="card"><h3>{escape(name)}</h3>{_badge(verdict)}</div>'
        for name, verdict in report["verdict"]["profiles"].items()
    )
    return f'<section class="cards" aria-label="Verdict per profile">{cards}</section>'


def _bar(report: Json) -> str:
    counts = report["verdict"]["requirements"]
    total = sum(counts.values()) or 1
    parts = [(name, counts.get(name, 0)) for name in STATUS_ORDER if counts.get(name, 0)]
    bars = "".join(
        f'<i class="{name}" style="width:{100 * n / total:.3f}%" title="{n} {WORDS[name]}"></i>' for name, n in parts
    )
    legend = "".join(f'<li><i class="{name}"></i>{n} {WORDS[name]}</li>' for name, n in parts)
    return (
        f'<section><h2>{total} requirements</h2><div class="bar">{bars}</div><ul class="legend">{legend}</ul></section>'
    )


def _failures(report: Json) -> str:
    shown = [_failure(row, failure) for row in report["checks"] for failure in row["failures"]]
    faults = [
        f'<article class="failure"><h3>{escape(row["name"])} {_badge("fault")}</h3>'
        f"<pre>{escape(row['reason'])}</pre></article>"
        for row in report["checks"]
        if row["status"] == "fault"
    ]
    if not shown and not faults:
        return ""
    return f"<section><h2>What failed</h2>{''.join(shown + faults)}</section>"


def _failure(row: Json, failure: Json) -> str:
    ids = "".join(
        f'<p class="requirement"><a href="{escape(item["link"])}">{escape(item["id"])}</a> {escape(item["text"])}</p>'
        for item in failure["requirements"]
    )
    steps = "".join(f"<li>{escape(step)}</li>" for step in failure["steps"])
    exchanges = "".join(
        f"<li><code>{escape(item['curl'])}</code><code class=answer>{escape(item['answer'])}</code></li>"
        for item in failure["exchanges"]
    )
    where = f" at {escape(row['participant'])}" if row["participant"] else ""
    return (
        f'<article class="failure"><h3>{escape(row["name"])}{where} {_badge(row["status"])}</h3>'
        f"<p>{escape(row['sentence'])}</p>{ids}"
        f"<ol>{steps}</ol><dl><dt>judged</dt><dd>{escape(failure['what'])}</dd>"
        f"<dt>expected</dt><dd>{escape(failure['expected'])}</dd><dt>got</dt><dd>{escape(failure['got'])}</dd>"
        f"<dt>again</dt><dd><code>{escape(failure['replay'])}</code></dd></dl>"
        f"<details><summary>the exchanges at its end: {len(failure['exchanges'])}</summary>"
        f"<ul class=wire>{exchanges}</ul></details>"
        "</article>"
    )


def _machine(report: Json) -> str:
    machine = report.get("machine")
    if not machine:
        return ""
    visits = machine.get("visits", {})
    rows = "".join(f"<tr><td>{escape(cell)}</td><td>{n}</td></tr>" for cell, n in sorted(visits.items()))
    missed = machine.get("unvisited", [])
    note = ""
    if missed and report["suite"]["budget"] == "default":
        note = f"<p>{_badge('failed')} never visited: {escape(', '.join(missed))}</p>"
    elif missed:
        note = f"<p>{len(missed)} cells were not visited: only the default budget visits all of them.</p>"
    visited = sum(1 for n in visits.values() if n)
    return (
        f"<section><h2>State machine: {visited} of {len(visits)} cells visited, {sum(visits.values())} times</h2>"
        f"{note}<details><summary>visits per phase, operation and id</summary><table>{rows}</table></details></section>"
    )


def _chapters(report: Json) -> str:
    chapters: dict[str, list[Json]] = {}
    for row in report["requirements"]:
        chapters.setdefault(row["chapter"], []).append(row)
    return f"<section><h2>By chapter</h2>{''.join(_chapter(*item) for item in sorted(chapters.items()))}</section>"


def _chapter(name: str, rows: list[Json]) -> str:
    bad = sum(1 for row in rows if row["status"] in {"failed", "flaky"})
    good = sum(1 for row in rows if row["status"] == "passed")
    body = "".join(
        f'<tr id="{escape(row["id"])}"><td><code>{escape(row["id"])}</code></td><td>{_badge(row["status"])}</td>'
        f"<td>{escape(row['text'])}{_shown_by(row)}</td></tr>"
        for row in sorted(rows, key=lambda row: (STATUS_ORDER.index(row["status"]), row["id"]))
    )
    state = " open" if bad else ""
    return (
        f"<details{state}><summary>{escape(name)} <span>{good} of {len(rows)} passed</span></summary>"
        f"<table>{body}</table></details>"
    )


def _shown_by(row: Json) -> str:
    if row["checks"]:
        why = f": {row['not_applicable']}" if row["not_applicable"] else ""
        return f"<small>{escape(', '.join(row['checks']) + why)}</small>"
    return f"<small>{escape(row['planned'] or row['excluded'] or '')}</small>"


def _checks(report: Json) -> str:
    rows: Iterable[Json] = report["checks"]
    body = "".join(
        f"<tr><td><code>{escape(row['name'])}</code>{_at(row)}</td><td>{_badge(row['status'])}</td>"
        f"<td>{escape(row['sentence'])}<small>{escape(row['reason'][:300])}</small></td>"
        f'<td class="n">{row["seconds"]:.2f} s</td><td class="n">{row["exchanges"]}</td></tr>'
        for row in rows
    )
    return (
        "<section><h2>Checks</h2><details><summary>every check, its time and its number of exchanges</summary>"
        f"<table>{body}</table></details></section>"
    )


def _at(row: Json) -> str:
    return f" <small>at {escape(row['participant'])}</small>" if row["participant"] else ""


def _foot(report: Json) -> str:
    suite = report["suite"]
    return (
        f"<footer>budget {escape(suite['budget'])} · seed {suite['seed']} · level {suite['level']} · "
        f"{escape(suite['started'])} · {suite['seconds']} s</footer>"
    )
