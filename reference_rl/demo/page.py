# SPDX-License-Identifier: Apache-2.0
"""The demo's page: one self-contained file that works from disk, in light and dark, and loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from reference_rl.demo.scenario import COLUMN_NAMES, Scenario
from reference_rl.demo.story import Column
from reference_rl.demo.suite import Suite
from reference_rl.demo.timeline import KINDS, common_scale, draw

HERE = Path(__file__).parent
SAYS = {
    0: "RL saves its own ledger. The finished result is reused; every unfinished rollout starts again at turn 1.",
    1: "The Gym can be paused, but nothing of it is saved yet. Rollouts get a random ID per run.",
    2: "Fixed IDs, receipts and ACKs: no result is lost or trained twice. The snapshot still lacks the Gym's state.",
    3: "The snapshot also holds the Gym's state, of the same cut. A rollout continues after its last finished turn.",
}
CAPABILITIES = (
    (
        "RL can pause, save and resume every Gym server",
        "–",
        "built; discovery at setup",
        "built",
        "used by every snapshot",
    ),
    ("Fixed rollout ID and attempt number", "random ID per run", "random ID per run", "yes", "matched on restart"),
    ("A finished result gets a receipt, then an ACK", "–", "–", "yes, saved as “ACK owed”", "yes"),
    ("The snapshot also holds the Gym's state", "RL state only", "RL state only", "RL state only", "yes"),
    ("A restart continues from", "turn 1", "turn 1", "turn 1", "the turn after the last finished one"),
)


@dataclass(frozen=True)
class Facts:
    """What is known about the run as a whole.

    Args:
        command: the command line that repeats it.
        gym_form: `one` or `three` processes.
        seconds: part of the demo → seconds it took.
        machine: one phrase about where it ran.
    """

    command: str
    gym_form: str
    seconds: Mapping[str, float]
    machine: str


def render(columns: Sequence[Column], bodies: Mapping[int, Any], suite: Suite | None, facts: Facts) -> str:
    """The whole page as text.

    Args:
        columns: the columns that ran, in order.
        bodies: bodies of the uninterrupted run, by sibling.
        suite: outcome of the conformance run, or None if it was left out.
        facts: about the run.
    """
    scenario = columns[0].scenario
    scale = common_scale(columns)
    counts = " ".join(str(column.thrown_away) for column in columns)
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(
        title=f"One crash: {counts} turns thrown away",
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        headline=_headline(columns),
        lead=_lead(scenario),
        cards="\n".join(_card(column) for column in columns),
        checks=_checks(columns, suite),
        legend=_legend(),
        timelines="\n".join(_timeline(column, scale) for column in columns),
        capabilities=_capabilities(columns),
        example=_example(scenario),
        counts=_counts(columns),
        bodies=_bodies(columns, bodies),
        suite=_suite(suite),
        facts=_facts(facts),
    )


def _headline(columns: Sequence[Column]) -> str:
    worst, last = columns[0].thrown_away, columns[-1].thrown_away
    if len(columns) == 1:
        return f"Everything was killed. {_turns(last)} had to be paid for twice."
    return f"One crash: {_turns(worst).lower()} paid for twice, or {'none' if last == 0 else last}."


def _turns(number: int) -> str:
    return {0: "No turn", 1: "1 turn"}.get(number, f"{number} turns")


def _lead(scenario: Scenario) -> str:
    group = f"A prompt group of {scenario.siblings} rollouts on Taxi-v4, {scenario.turns} turns each."
    done = {sibling: turn - 1 for sibling, turn in scenario.held.items()}
    if scenario.siblings == 3:
        where = f"A had finished, B had completed {done[1]} turns and C {done[2]}"
    else:
        where = "One had finished, the others had completed " + f"{min(done.values())} to {max(done.values())} turns"
    return escape(
        f"{group} {where}, and the policy was generating the next ones, when a snapshot was taken and every Gym "
        "and RL process got SIGKILL. Everything was restarted on other ports and ran to its end. What had to be "
        "generated again?"
    )


def _card(column: Column) -> str:
    mood = "zero" if column.thrown_away == 0 else ""
    wrong = "" if column.as_promised else " wrong"
    unit = "turn thrown away" if column.thrown_away == 1 else "turns thrown away"
    return (
        f'<li class="card {mood}{wrong}">'
        f'<span class="where">Column {column.column}: {COLUMN_NAMES[column.column]}</span>'
        f'<span class="figure">{column.thrown_away}</span><span class="unit">{unit}</span>'
        f'<p class="what">{SAYS[column.column]}</p></li>'
    )


def _checks(columns: Sequence[Column], suite: Suite | None) -> str:
    equal = all(column.bodies_equal for column in columns)
    promised = all(column.thrown_away == column.scenario.expected(column.column) for column in columns)
    expected = " ".join(str(column.scenario.expected(column.column)) for column in columns)
    lines = [
        (promised, f"The counts are what the example promises ({expected}), read from the policy's log alone."),
        (equal, "Every result has the same body as in a run that nobody interrupted."),
    ]
    if suite is not None:
        link = f'<a href="{escape(suite.report)}">its {suite.what_is_linked}</a>'
        lines.append(
            (
                suite.passed,
                f"The conformance suite ran against a Gym of the same build: {escape(suite.verdict)} ({link}).",
            )
        )
    return "\n".join(f'<li class="{"yes" if good else "no"}">{text}</li>' for good, text in lines)


def _legend() -> str:
    items = []
    for kind, text in KINDS.items():
        rect = f'<rect class="block {kind}" x="1" y="1" width="26" height="14" rx="4"/>'
        items.append(f'<li><svg width="28" height="16" aria-hidden="true">{rect}</svg>{text}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _timeline(column: Column, scale: float) -> str:
    mood = "bad" if column.thrown_away else "good"
    says = _snapshot(column.snapshot)
    return (
        f'<figure><figcaption><span class="title">Column {column.column}: {COLUMN_NAMES[column.column]}</span>'
        f'<span class="says">{escape(says)}</span>'
        f'<span class="total {mood}">{column.thrown_away} thrown away</span></figcaption>'
        f'<div class="scroll">{draw(column, scale)}</div></figure>'
    )


def _snapshot(snapshot: Mapping[str, Any]) -> str:
    """What a snapshot held and cost, in the RL client's own words about it."""
    parts = [f"snapshot {snapshot['checkpoint_id']}"]
    if snapshot.get("gyms"):
        parts.append(f"gate closed for {snapshot['pause_ms']} ms, published after {snapshot['total_ms']} ms")
        parts.append(f"{snapshot['bytes'] / 1000:,.0f} kB of Gym state")
    else:
        parts.append("RL state only")
    return ", ".join(parts)


def _capabilities(columns: Sequence[Column]) -> str:
    numbers = [column.column for column in columns]
    head = "".join(f'<th class="words">{n}: {COLUMN_NAMES[n]}</th>' for n in numbers)
    rows = "".join(
        f"<tr><td>{row[0]}</td>" + "".join(f'<td class="words">{row[1 + n]}</td>' for n in numbers) + "</tr>"
        for row in CAPABILITIES
    )
    total = "".join(f'<td class="words">{column.thrown_away}</td>' for column in columns)
    last = f"<tr class='sum'><td>Turns thrown away in this run</td>{total}</tr>"
    return f"<table><tr><th></th>{head}</tr>{rows}{last}</table>"


def _example(scenario: Scenario) -> str:
    held = scenario.held
    total = sum(turn - 1 for turn in held.values())
    if scenario.siblings == 3:
        b, c = (turn - 1 for turn in held.values())
        return f"B had {b} completed turns and C {c}, so a restart at turn 1 throws {b} + {c} = {total} away."
    return f"The held siblings had {total} completed turns together; a restart at turn 1 throws all of them away."


def _counts(columns: Sequence[Column]) -> str:
    head = "<tr><th>Column</th><th>Sibling</th><th>calls asked</th><th>completed</th><th>different turns</th>"
    head += "<th>never completed</th><th>thrown away</th><th>tokens thrown away</th></tr>"
    rows = []
    for column in columns:
        for sibling, count in enumerate(column.counts):
            cells = (
                count.asked,
                count.completed,
                count.turns,
                count.cut_off,
                count.thrown_away,
                count.tokens_thrown_away,
            )
            rows.append(_row([str(column.column), column.scenario.name(sibling), *map(str, cells)]))
        sums = [
            sum(values)
            for values in zip(
                *(
                    (c.asked, c.completed, c.turns, c.cut_off, c.thrown_away, c.tokens_thrown_away)
                    for c in column.counts
                ),
                strict=True,
            )
        ]
        rows.append(_row([str(column.column), "all", *map(str, sums)], "sum"))
    return f"<table>{head}{''.join(rows)}</table>"


def _bodies(columns: Sequence[Column], bodies: Mapping[int, Any]) -> str:
    scenario = columns[0].scenario
    head = "<tr><th>Sibling</th><th>outcome</th><th>turns</th><th>reward</th>"
    head += "".join(f"<th>column {column.column}</th>" for column in columns) + "</tr>"
    rows = []
    for sibling in sorted(bodies)[:24]:
        body = bodies[sibling]
        equal = ["equal" if sibling in column.equal_bodies else "differs" for column in columns]
        rows.append(_row([scenario.name(sibling), body["outcome"], str(body["turns"]), f"{body['reward']:g}", *equal]))
    more = len(bodies) - len(rows)
    if more > 0:
        equal = [str(len(column.equal_bodies)) + " equal" for column in columns]
        rows.append(_row([f"{more} more", "", "", "", *equal], "sum"))
    return f"<table>{head}{''.join(rows)}</table>"


def _row(cells: Sequence[str], kind: str = "") -> str:
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _suite(suite: Suite | None) -> str:
    if suite is None:
        return "<p>The conformance run was left out of this demo.</p>"
    return (
        f"<p>A second Gym of the same build was started for conformance, and the suite judged it from outside for "
        f"{suite.seconds:.0f} seconds: <b>{escape(suite.verdict)}</b>. This is a short look, not a claim of "
        f'conformance. <a href="{escape(suite.report)}">Open its {suite.what_is_linked}</a></p>'
    )


def _facts(facts: Facts) -> str:
    parts = ", ".join(f"{escape(name)} {seconds:.1f} s" for name, seconds in facts.seconds.items())
    form = "one process" if facts.gym_form == "one" else "three processes (agent, model, resources)"
    return (
        f"<p>The Gym ran as {form} on {escape(facts.machine)}. {parts[:1].upper()}{parts[1:]}.</p>"
        f"<p>Repeat it with <code>{escape(facts.command)}</code>. Every number here comes from the logs of this run, "
        "which lie beside this file, one directory per column.</p>"
    )
