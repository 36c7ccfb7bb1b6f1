# SPDX-License-Identifier: Apache-2.0
"""The worked example as a show: one prompt group, one crash, four columns of the capability table.

`python -m reference_rl.demo` starts a policy server, a Gym and an RL client as processes of their own, kills the
last two in the middle of the rollouts, restarts them, and counts in the policy's log what had to be paid twice.

    scenario.py    who is held where, and what each column is expected to cost
    policy.py      the policy server: deterministic, lives through everything, logs every call
    calls.py       the policy's log read back: calls, turns, what was thrown away
    processes.py   start, wait with a bound, SIGKILL by pid
    stage.py       one directory with one Gym and one RL client: settings, start, kill, events
    story.py       the order of events in one column, and the uninterrupted run
    suite.py       the short run of the conformance suite
    page.py        build/demo/index.html (timeline.py draws, page.css dresses it)
    show.py        progress on a terminal
    chaos.py       SIGKILL at seeded random moments instead of the scripted one
"""
