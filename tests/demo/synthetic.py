# SPDX-License-Identifier: Apache-2.0
"""A made-up column: what the policy's log and the marks look like when everything goes as the example says."""

from __future__ import annotations

from typing import Any

from reference_rl.demo.calls import calls_of, count_siblings
from reference_rl.demo.scenario import Scenario
from reference_rl.demo.story import Column, Mark

GYM_STATE = {"pause_ms": 6, "total_ms": 40, "gyms": ["gym"], "bytes": 15_400}


def policy_events(
    scenario: Scenario, column: int, generation_s: float = 0.25
) -> tuple[list[dict[str, Any]], list[Mark]]:
    """The policy's log of one column and the marks of its story; time starts at 100 s."""
    events: list[dict[str, Any]] = []
    number = 0

    def ask(sibling: int, turn: int, t: float) -> dict[str, Any]:
        nonlocal number
        number += 1
        call = {"call": number, "sibling": sibling, "turn": turn}
        events.append({"t": t, "event": "asked", **call})
        return call

    def generate(sibling: int, first: int, last: int, t: float) -> float:
        for turn in range(first, last + 1):
            call = ask(sibling, turn, t)
            t += generation_s * (0.8 + 0.1 * ((turn * 7 + sibling * 3) % 5))
            events.append({"t": t, "event": "completed", "tokens": 30, **call})
            t += 0.02
        return t

    start, held = 103.0, []
    end = generate(0, 1, scenario.turns, start)
    for sibling, turn in scenario.held.items():
        t = generate(sibling, 1, turn - 1, start + 0.01)
        held.append(ask(sibling, turn, t))
        events.append({"t": t, "event": "held", **held[-1]})
        end = max(end, t)
    snapshot = end + 0.35
    kill = snapshot + 0.15
    events.extend({"t": kill + 0.01, "event": "dropped", **call} for call in held)
    back = kill + 3.7
    for sibling, turn in scenario.held.items():
        generate(sibling, turn if column == 3 else 1, scenario.turns, back)
    marks = [Mark(100.0, "start"), Mark(snapshot, "snapshot", "1-1"), Mark(kill, "kill"), Mark(back - 0.5, "restarted")]
    return events, marks


def made_up_column(scenario: Scenario, number: int) -> Column:
    """A column of which every number is as promised."""
    events, marks = policy_events(scenario, number)
    calls = calls_of(events)
    bodies = {
        s: {"outcome": "truncated", "turns": scenario.turns, "reward": -14.0 - s} for s in range(scenario.siblings)
    }
    return Column(
        column=number,
        scenario=scenario,
        calls=calls,
        counts=count_siblings(calls, scenario.siblings),
        marks=marks,
        bodies=bodies,
        yardstick=bodies,
        snapshot={"checkpoint_id": "1-1"} | (GYM_STATE if number == 3 else {}),
        urls=[["http://127.0.0.1:40001"], ["http://127.0.0.1:40002"]],
        seconds=9.1,
        directory=f"column-{number}",
    )
