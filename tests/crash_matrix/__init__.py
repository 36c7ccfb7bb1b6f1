# SPDX-License-Identifier: Apache-2.0
"""Crash matrix: SIGKILL of RL, agent, model, resources or everything, at every named step, singly and in pairs.

Real processes: the RL client, the reference Gym in three processes. The policy lives on, and its log is the judge of
what was generated again. RL's named steps are the clock: it stops itself at one (SIGSTOP), the victims get SIGKILL,
and RL goes on if it is none of them.

    python -m tests.crash_matrix [--seed 1] [--part 1/4] [--jobs 2] [--minutes 60] [--only TEXT] [--fresh]
    python -m tests.crash_matrix.soak [--rollouts 2000] [--kills 20]

Cells that are done are not run again: the same command goes on where it was stopped.
"""
