# SPDX-License-Identifier: Apache-2.0
"""Crash matrix: SIGKILL of RL, agent, model, resources or everything, at every named step, singly and in pairs.

Real processes: the RL client, the reference Gym in three processes or in one, without and with a boundary log. The
policy lives on, and its log is the judge of what was generated again. RL's named steps are a clock: it stops itself at
one (SIGSTOP), the victims get SIGKILL, and RL goes on if it is none of them. At a named point of the Gym the process
that passes it gets SIGKILL from itself. Without a log a Gym that lost a process is restored; with one it is adopted.

A cell counts only if its point was hit while an unfinished rollout held a turn. All single crashes are there, and all
pairs of two steps of RL without a log; of the other pairs a seed draws some. What no cell has, the report names.

    python -m tests.crash_matrix [--seed 1] [--part 1/4] [--jobs 3] [--minutes 58] [--only PATTERN] [--fresh]
    python -m tests.crash_matrix.soak [--rollouts 2000] [--kills 20] [--log]

Cells that are done are not run again: the same command goes on where it was stopped.
"""
